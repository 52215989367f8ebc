package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"evenkeel/bench/world"
)

// series is one line of an answer.
type series struct {
	Metric map[string]string `json:"metric"`
	Values []sample          `json:"values"`
}

// sample is [seconds, "value"].
type sample struct{ at, value float64 }

// UnmarshalJSON implements json.Unmarshaler.
func (s *sample) UnmarshalJSON(b []byte) error {
	var text string
	if err := json.Unmarshal(b, &[]any{&s.at, &text}); err != nil {
		return err
	}
	var err error
	s.value, err = strconv.ParseFloat(text, 64)
	return err
}

// ask evaluates an expression of a panel over the run.
func (w *site) ask(ctx context.Context, expr string) ([]series, error) {
	const rate = "15s" // of a scrape a second
	expr = strings.ReplaceAll(selected(expr, `job="evenkeel",instance=~".+"`), "$rate]", rate+"]")
	q := url.Values{
		"query": {expr}, "step": {"1"}, "start": {seconds(w.began)}, "end": {seconds(w.ended)},
	}
	var data struct {
		Result []series `json:"result"`
	}
	if err := w.get(ctx, "/api/v1/query_range?"+q.Encode(), &data); err != nil {
		return nil, fmt.Errorf("%s: %w", expr, err)
	}
	return data.Result, nil
}

func seconds(t time.Time) string { return strconv.FormatFloat(float64(t.UnixMilli())/1000, 'f', 3, 64) }

// get reads what Prometheus's API answers.
func (w *site) get(ctx context.Context, path string, into any) error {
	got, err := world.Do(ctx, w.HTTP, http.MethodGet, "http://"+w.prometheus.Address+path, nil)
	if err != nil {
		return err
	}
	answer := struct {
		Error string          `json:"error"`
		Data  json.RawMessage `json:"data"`
	}{}
	if err := json.Unmarshal(got.Body, &answer); err != nil {
		return fmt.Errorf("prometheus answered %d: %w", got.Status, err)
	}
	if answer.Error != "" {
		return errors.New(answer.Error)
	}
	return json.Unmarshal(answer.Data, into)
}

// check holds that every panel shows something and every rule is evaluated.
func (w *site) check(ctx context.Context, out io.Writer) error {
	var wrong []error
	panels, lines, idle := 0, 0, 0
	for _, d := range dashboards {
		for _, r := range d.rows {
			for _, p := range r.panels {
				panels++
				for _, l := range p.lines {
					lines++
					got, err := w.ask(ctx, l.expr)
					switch {
					case err != nil:
						wrong = append(wrong, fmt.Errorf("%s, %q: %w", d.title, p.title, err))
					case len(got) == 0 && p.idle == "":
						wrong = append(wrong, fmt.Errorf("%s, %q: nothing to show for %s", d.title, p.title, l.expr))
					case len(got) == 0:
						idle++
					}
				}
			}
		}
	}
	var rules struct {
		Groups []struct {
			Rules []struct {
				Name, Health, LastError, State string
				Labels                         map[string]string
			} `json:"rules"`
		} `json:"groups"`
	}
	if err := w.get(ctx, "/api/v1/rules", &rules); err != nil {
		return err
	}
	evaluated := 0
	for _, g := range rules.Groups {
		for _, r := range g.Rules {
			evaluated++
			if r.Health != "ok" {
				wrong = append(wrong, fmt.Errorf("rule %s: %s %s", r.Name, r.Health, r.LastError))
			}
			if r.State == "firing" {
				wrong = append(wrong, fmt.Errorf("alert %s fires though all is well", r.Name))
			}
		}
	}
	if evaluated == 0 {
		wrong = append(wrong, errors.New("prometheus has no rules"))
	}
	fmt.Fprintf(out, "%d dashboards, %d panels, %d expressions (%d with nothing to show, as they may), %d rules\n", len(dashboards), panels, lines, idle, evaluated)
	return errors.Join(wrong...)
}
