package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

const (
	none        = "none"
	scrapeEvery = 15 * time.Second // as Prometheus reads the metric
	toldWithin  = time.Minute
)

// errToldWrongly says that the metric or the alerts were not those that the outage wants.
var errToldWrongly = errors.New("the pager was told wrongly")

// series is the metric evenkeel_incident as Prometheus would have read it: for each reading, the
// values by their labels. Values are in seconds since the first reading.
type series struct {
	began    time.Time
	readings []map[string]float64
}

// record reads the metric of the proxy. at is the time since the outage began.
func (o *outage) record(s *stage, now time.Time, at time.Duration) {
	all, err := s.proxy.Series()
	if err != nil { // as when Prometheus cannot read it
		all = nil
	}
	if o.recorded.began.IsZero() {
		o.recorded.began = now
	}
	reading := map[string]float64{}
	for name, value := range all {
		if !strings.HasPrefix(name, "evenkeel_incident{") {
			continue
		}
		reading[name] = value - float64(o.recorded.began.Unix())
		kind, subject := o.wanted(s)
		if at >= 0 && o.told < 0 && strings.Contains(name, `kind="`+kind+`"`) && strings.Contains(name, `subject="`+subject) {
			o.told = at
		}
	}
	o.recorded.readings = append(o.recorded.readings, reading)
}

// wanted is the kind of the metric, and the begin of its subject.
func (o *outage) wanted(s *stage) (kind, subject string) {
	kind, subject, _ = strings.Cut(o.labels, " ")
	if e := s.engines[subject]; e != nil {
		subject = strings.TrimPrefix(e.url(0), "http://")
		if e.ranks > 1 { // any rank of the engine
			subject = e.host + ":"
		}
	}
	return kind, subject
}

// pager says what the pager was told.
func (o *outage) pager() string {
	switch {
	case o.labels == "":
		return ""
	case o.labels == none:
		return "No alert fires. "
	case o.pages:
		return fmt.Sprintf("The metric had it after %.0f s, and the alert EvenkeelIncident fires. ", o.told.Seconds())
	}
	return fmt.Sprintf("The metric had it after %.0f s, and no alert fires before it is mended. ", o.told.Seconds())
}

// tryAlerts writes a test of the alerts over the metric of this outage, and has promtool run it.
func (o *outage) tryAlerts(ctx context.Context, s *stage) error {
	if o.labels == "" {
		return nil
	}
	if o.labels != none && (o.told < 0 || o.told > toldWithin+scrapeEvery) {
		return fmt.Errorf("%w: the metric had %s after %v; readings: %v", errToldWrongly, o.labels, o.told,
			o.recorded.readings)
	}
	folder, err := filepath.Abs(o.alerts)
	if err != nil || o.alerts == "" {
		return err
	}
	file := filepath.Join(folder, fmt.Sprintf("%02d.yaml", o.number))
	rules, err := filepath.Abs("configs/prometheus/rules.yaml")
	if err == nil {
		rules, err = filepath.Rel(folder, rules)
	}
	if err != nil {
		return err
	}
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	kind, subject := o.wanted(s)
	if err := os.WriteFile(file, []byte(o.recorded.test(o.title, rules, kind, subject, o.pages)), 0o600); err != nil {
		return err
	}
	if out, err := exec.CommandContext(ctx, "promtool", "test", "rules", file).CombinedOutput(); err != nil {
		return fmt.Errorf("%w: promtool test rules %s: %w: %s", errToldWrongly, file, err, out)
	}
	return nil
}

// test is a test of promtool: over these series the alert of this kind fires, or none does.
func (r *series) test(title, rules, kind, subject string, pages bool) string {
	names := map[string]bool{}
	for _, reading := range r.readings {
		for name := range reading {
			names[name] = true
		}
	}
	var b strings.Builder
	fmt.Fprintf(&b, "# Written by `make claim NAME=outages`: the metric as it was read while this was staged.\n"+
		"rule_files: [%s]\n"+
		"evaluation_interval: 15s\ntests:\n  - name: %q\n    interval: 15s\n    input_series:\n", rules, title)
	for _, name := range slices.Sorted(maps.Keys(names)) {
		values, there := make([]string, len(r.readings)), false
		for i, reading := range r.readings {
			value, ok := reading[name]
			switch {
			case ok:
				values[i] = fmt.Sprintf("%.1f", value)
			case there: // Prometheus marks the end of a series
				values[i] = "stale"
			default:
				values[i] = "_"
			}
			there = ok
		}
		fmt.Fprintf(&b, "      - series: '%s'\n        values: '%s'\n", name, strings.Join(values, " "))
	}
	if len(names) == 0 {
		b.WriteString("      - {series: 'up{job=\"evenkeel\"}', values: '1x30'}\n")
	}
	end := time.Duration(len(r.readings)) * scrapeEvery
	const firing = `ALERTS{alertname="EvenkeelIncident",alertstate="firing"`
	fmt.Fprintf(&b, "    promql_expr_test:\n      - expr: 'max by (kind) (max_over_time(%s}[%s]))'\n"+
		"        eval_time: %s\n        exp_samples: [", firing, end, end)
	if pages {
		fmt.Fprintf(&b, "{labels: '{kind=%q}', value: 1}", kind)
	}
	b.WriteString("]\n")
	if pages {
		fmt.Fprintf(&b, "      - expr: 'max(max_over_time(%s,subject!~\"%s.*\"}[%s]))'\n"+
			"        eval_time: %s\n        exp_samples: []\n", firing, subject, end, end)
	}
	return b.String()
}
