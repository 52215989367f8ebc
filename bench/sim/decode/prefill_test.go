package decode

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/report"
	"evenkeel/internal/race"
)

func TestBoundAtArrivalStepByStep(t *testing.T) {
	bound := func(p Prefill, pool, ahead int) Load {
		return Load{Pool: pool, Ahead: ahead, AtArrival: true, Prefill: &p}
	}
	slow := simple(1, 1, 0)
	slow.Transfer = 1
	for _, c := range []struct {
		name  string
		fleet Fleet
		load  Load
		jobs  *workload
		want  []stepSeen
	}{
		{
			"ranks stand still until the first prompt is prefilled",
			simple(1, 2, 0), bound(Prefill{Ms: 15}, 0, 0), of([2]int32{100, 3}, [2]int32{200, 2}),
			[]stepSeen{{15, []int{300}}, {28, []int{302}}, {41.02, []int{102}}},
		},
		{
			"a request joins the first step after its prefill, and its slot is taken meanwhile",
			simple(1, 2, 0), bound(Prefill{PerTokenMs: 0.1}, 0, 0), of([2]int32{100, 4}, [2]int32{200, 1}, [2]int32{300, 1}),
			[]stepSeen{{10, []int{100}}, {21, []int{301}}, {34.01, []int{102}}, {45.03, []int{103}}, {64.01, []int{300}}},
		},
		{
			"and the steps of the transfer come on top",
			slow, bound(Prefill{Ms: 15}, 0, 0), of([2]int32{100, 2}),
			[]stepSeen{{15, []int{0}}, {25, []int{100}}, {36, []int{101}}},
		},
		{
			"a rank is bound when an engine can begin with the prompt",
			simple(1, 2, 0), bound(Prefill{Ms: 20, Engines: 1}, 0, 0), of([2]int32{100, 1}, [2]int32{200, 1}),
			[]stepSeen{{20, []int{100}}, {40, []int{200}}},
		},
		{
			"slots stand empty while their requests are prefilled",
			simple(1, 1, 0), bound(Prefill{Ms: 12}, 1, 0), of([2]int32{100, 2}, [2]int32{200, 1}),
			[]stepSeen{{12, []int{100}}, {23, []int{101}}, {46.01, []int{200}}},
		},
		{
			"unless a rank may have more than its slots",
			simple(1, 1, 0), bound(Prefill{Ms: 12}, 1, 1), of([2]int32{100, 2}, [2]int32{200, 1}),
			[]stepSeen{{12, []int{100}}, {23, []int{101}}, {34.01, []int{200}}},
		},
		{
			"who is prefilled first is served first",
			simple(1, 1, 0), bound(Prefill{PerTokenMs: 0.1}, 1, 1), of([2]int32{500, 1}, [2]int32{100, 1}),
			[]stepSeen{{10, []int{100}}, {50, []int{500}}},
		},
		{
			"late, prompts wait for an engine before they wait for a rank",
			simple(1, 2, 0), Load{Rho: 1, Prefill: &Prefill{Ms: 20, Engines: 1}}, of([2]int32{100, 1}, [2]int32{200, 1}),
			[]stepSeen{{20, []int{100}}, {40, []int{200}}},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, got := follow(t, c.fleet, c.load, c.jobs, "pjsq")
			require.Equal(t, c.want, got)
		})
	}
}

// Where a prefill takes no time, it does not matter when ranks are bound.
func TestBoundAtArrivalIsBoundLateWithoutPrefills(t *testing.T) {
	race.Alone(t)
	for _, load := range []Load{{Pool: 12}, {Rho: 0.9}} {
		get := func(atArrival bool) *Result {
			p := plan(forms()...)
			p.Source.Trace, p.Requests, p.Steps = azure(900), 300, true
			p.Fleet.Groups[0].Ranks[0].Capacity = 12_000 // some are preempted
			p.Load = load
			p.Load.Prefill, p.Load.AtArrival = &Prefill{}, atArrival
			r, err := p.Run(context.Background())
			require.NoError(t, err)
			return r
		}
		late, early := get(false), get(true)
		for i := range late.Runs {
			require.Equal(t, Repeatable(late.Runs[i].Metrics), Repeatable(early.Runs[i].Metrics), late.Runs[i].Policy)
			require.Equal(t, late.Runs[i].Steps, early.Runs[i].Steps)
		}
	}
}

// The run above does without early ranks altogether. Ranks that are early decide the same, by every
// policy.
func TestEarlyRanksDecideTheSameWithoutPrefills(t *testing.T) {
	race.Alone(t)
	for _, load := range []Load{{Pool: 12}, {Rho: 0.9}} {
		for _, spec := range forms() {
			p := plan(spec)
			p.Source.Trace, p.Requests = azure(900), 300
			p.Fleet.Groups[0].Ranks[0].Capacity = 12_000 // some are preempted
			get := func(early bool, prefill Prefill) ([]report.Step, report.Metrics) {
				w, err := p.draw(1)
				require.NoError(t, err)
				if load.Rho > 0 {
					w.pace(load.Rho, &p.Fleet)
				}
				load.AtArrival, load.Prefill = early, &prefill
				r, err := newRun(&p.Fleet, load, w, p.config(spec, 1))
				require.NoError(t, err)
				r.early, r.meter.keep = early, true
				require.NoError(t, r.all(context.Background()))
				sample, _ := r.meter.sample()
				return r.meter.kept, Repeatable(report.Summarize(sample))
			}
			late, lateMetrics := get(false, Prefill{})
			early, earlyMetrics := get(true, Prefill{})
			require.Equal(t, lateMetrics, earlyMetrics, spec)
			require.Equal(t, late, early, spec)
			other, _ := get(true, Prefill{Ms: 200})
			require.NotEqual(t, late, other, "%s: a prefill that takes time should show", spec)
		}
	}
}

// In a closed loop, slots that stand empty for longer bring fewer tokens.
func TestLongerPrefillsBringNoTokens(t *testing.T) {
	race.Alone(t)
	p := plan("jsq-kv", "pjsq-kv", "br0", "evenkeel")
	p.Seeds, p.Load.AtArrival = 3, true
	var before *Result
	for _, ms := range []float64{0, 500, 5000} {
		p.Load.Prefill = &Prefill{Ms: ms}
		r, err := p.Run(context.Background())
		require.NoError(t, err)
		if before != nil {
			for i := range r.Runs {
				x, y := before.Runs[i].Metrics[report.TokensPerS], r.Runs[i].Metrics[report.TokensPerS]
				require.LessOrEqual(t, y.Mean, x.Mean+x.SD+y.SD, "%s at %v ms", r.Runs[i].Policy, ms)
			}
		}
		before = r
	}
}
