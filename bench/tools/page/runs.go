package page

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"time"

	"evenkeel/bench/lab/report"
	"evenkeel/internal/stats"
)

// Outcome is what policies did in a scenario.
type Outcome struct {
	Metrics map[string]report.Metrics  // by policy
	Seeds   map[string][]report.Sample // by policy, where the scenario has them
	Pace    float64                    // of a prefill scenario, once it is known
	Refused string                     // why it cannot be simulated, such as a trace that is too short for the fleet
}

// Of is what a policy gave.
func (o *Outcome) Of(policy string, m report.Metric) report.Value { return o.Metrics[policy][m] }

// Refuse says why policies cannot be run in the scenario. That is no error: tables say it.
func (o *Outcome) Refuse(why error) error {
	o.Refused = why.Error()
	return nil
}

// Ratio is a metric's mean under one policy over that under another, as it is written. Verdicts are
// on these, too.
func (o *Outcome) Ratio(policy, other string, m report.Metric) float64 {
	return Rounded(o.Of(policy, m).Mean/o.Of(other, m).Mean, 2)
}

// Interval is where such a ratio lies at 95 %, over the seeds, which share nothing.
func (o *Outcome) Interval(policy, other string, m report.Metric) (low, high float64) {
	mine, theirs := o.Seeds[policy], o.Seeds[other]
	low, high = stats.Bootstrap(len(mine), 0.95, func(drawn []int) float64 {
		var x, y float64
		for _, i := range drawn {
			x, y = x+mine[i][m], y+theirs[i][m]
		}
		return x / y
	})
	return Rounded(low, 2), Rounded(high, 2)
}

// Columns are the cells of columns, without the deviation where alone is true.
func (o *Outcome) Columns(prefix string, alone bool, columns ...Column) (all []Cells[string]) {
	for _, c := range columns {
		show := c.Show
		if alone {
			show = c.Alone
		}
		all = append(all, Cells[string]{prefix + c.Title, func(policy string) string { return show(o.Of(policy, c.Metric)) }})
	}
	return all
}

// Runs runs each policy in each scenario once, for all tables that show it. It goes on after an
// error, with tables that no page gets.
type Runs struct {
	Ctx      context.Context
	Seeds    int
	Progress io.Writer
	Done     map[string]*Outcome // by scenario
	Failed   error               // the first; nothing is run after it
}

// Err is Book's.
func (r *Runs) Err() error { return r.Failed }

// Fail keeps an error.
func (r *Runs) Fail(err error) { r.Failed = cmp.Or(r.Failed, err) }

// In is what the policies did in a scenario. Those that were not run there yet are run now: run
// puts into the outcome what they did, or why they cannot be run there. Two scenarios with one text
// are the same.
func (r *Runs) In(sc fmt.Stringer, policies []string, run func(o *Outcome, lacking []string) error) *Outcome {
	o := r.Done[sc.String()]
	if o == nil {
		o = &Outcome{Metrics: map[string]report.Metrics{}, Seeds: map[string][]report.Sample{}}
		r.Done[sc.String()] = o
	}
	var lacking []string
	for _, p := range policies {
		if _, ok := o.Metrics[p]; !ok {
			lacking = append(lacking, p)
		}
	}
	if lacking == nil || o.Refused != "" {
		return o
	}
	began := time.Now()
	err := r.Failed
	if err == nil {
		err = run(o, lacking)
	}
	if err != nil {
		r.Fail(fmt.Errorf("%s: %w", sc, err))
		o.Refused = err.Error()
	}
	if o.Refused != "" {
		fmt.Fprintf(r.Progress, "%s: left out, %s\n", sc, o.Refused)
		return o
	}
	fmt.Fprintf(r.Progress, "%s: %d policies, %d seeds, %.1f s\n", sc, len(lacking), r.Seeds, time.Since(began).Seconds())
	return o
}

// Sampled puts what each policy gave by seed.
func (o *Outcome) Sampled(policies []string, samples [][]report.Sample) {
	for i, p := range policies {
		o.Metrics[p], o.Seeds[p] = report.Summarize(samples[i]...), samples[i]
	}
}
