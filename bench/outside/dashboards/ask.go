package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	v1 "github.com/prometheus/client_golang/api/prometheus/v1"
	"github.com/prometheus/common/model"
)

// ask evaluates an expression of a panel over the run.
func (w *site) ask(ctx context.Context, expr string) (model.Matrix, error) {
	const rate = "15s" // of a scrape a second
	expr = strings.ReplaceAll(selected(expr, `job="evenkeel",instance=~".+"`), "$rate]", rate+"]")
	got, _, _, err := w.prometheus.QueryRange(ctx, expr, v1.Range{Start: w.began, End: w.ended, Step: time.Second})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", expr, err)
	}
	return got.(model.Matrix), nil
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
					if all := strings.TrimSuffix(l.expr, " > 0"); err == nil && len(got) == 0 && len(p.lines) > 1 && all != l.expr {
						got, err = w.ask(ctx, all) // beside other lines it may hide all that it has
					}
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
	rules, err := w.prometheus.Rules(ctx, nil)
	if err != nil {
		return err
	}
	evaluated := 0
	healthy := func(name string, health v1.RuleHealth, lastError string) {
		evaluated++
		if health != v1.RuleHealthGood {
			wrong = append(wrong, fmt.Errorf("rule %s: %s %s", name, health, lastError))
		}
	}
	for _, g := range rules.Groups {
		for _, r := range g.Rules {
			switch r := r.(type) {
			case v1.RecordingRule:
				healthy(r.Name, r.Health, r.LastError)
			case v1.AlertingRule:
				healthy(r.Name, r.Health, r.LastError)
				if r.State == string(v1.AlertStateFiring) {
					wrong = append(wrong, fmt.Errorf("alert %s fires though all is well", r.Name))
				}
			}
		}
	}
	if evaluated == 0 {
		wrong = append(wrong, errors.New("prometheus has no rules"))
	}
	fmt.Fprintf(out, "%d dashboards, %d panels, %d expressions (%d with nothing to show, as they may), %d rules\n", len(dashboards), panels,
		lines, idle, evaluated)
	return errors.Join(wrong...)
}
