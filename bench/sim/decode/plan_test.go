package decode

import (
	"context"
	"math"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/lab/trace"
	"evenkeel/dispatcher/board"
	"evenkeel/internal/race"
	"evenkeel/predictor"
)

var azureTrace = sync.OnceValue(trace.Azure)

// azure is the beginning of a real trace.
func azure(requests int) *trace.Trace {
	t := *azureTrace()
	t.Requests = t.Requests[:requests]
	return &t
}

// plan is a small run.
func plan(policies ...string) *Plan {
	return &Plan{
		Source: Source{Trace: azure(6000)}, Requests: 1200, Fleet: Uniform(4, 8, 0), Load: Load{Pool: 16},
		Policies: policies, Seeds: 2,
	}
}

func TestASeedGivesTheSameToTheBit(t *testing.T) {
	get := func(processors int, policies ...string) *Result {
		defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(processors))
		p := plan(policies...)
		p.Source.Trace = azure(900) // predictors learn from 225
		p.Requests, p.Steps = 300, true
		r, err := p.Run(context.Background())
		require.NoError(t, err)
		return r
	}
	a, b := get(1, forms()...), get(4, forms()...)
	for i := range a.Runs {
		require.Equal(t, Repeatable(a.Runs[i].Metrics), Repeatable(b.Runs[i].Metrics), a.Runs[i].Policy)
		require.Equal(t, a.Runs[i].Steps, b.Runs[i].Steps)
		require.NotEmpty(t, a.Runs[i].Steps)
		require.NotZero(t, a.Runs[i].Metrics[report.Imbalance].SD, "another seed is another run")
	}
	require.Equal(t, a.Bound, b.Bound)
}

func TestResult(t *testing.T) {
	p := plan("jsq", "br0")
	p.Seeds = 1
	var told []int
	p.Progress = func(done, total int) {
		require.Equal(t, 2400, total)
		told = append(told, done)
	}
	r, err := p.Run(context.Background())
	require.NoError(t, err)
	require.Equal(t, 1200, r.Requests)
	require.Equal(t, 1500, r.History)
	require.IsIncreasing(t, told)
	require.Equal(t, 2400, told[len(told)-1])
	for _, run := range r.Runs {
		require.Equal(t, 1, run.Seeds)
		require.Nil(t, run.Steps)
		for _, name := range []report.Metric{
			report.Imbalance, report.MaxMinusMin, report.IdleShare, report.TokensPerS, report.TPOTP50, report.TPOTP95,
			report.TTFTP50, report.TTFTP99, report.TickP99, report.WaitMax, report.StepMean,
		} {
			require.Positive(t, run.Metrics[name].Mean, "%s of %s", name, run.Policy)
		}
		require.EqualValues(t, 1200, run.Metrics[report.OK].Mean)
		require.Contains(t, run.Metrics, report.Failed)
		require.Contains(t, run.Metrics, report.PoolWaitMax)
		require.Less(t, r.Bound[report.StepMean].Mean, run.Metrics[report.StepMean].Mean)
	}
	require.Equal(t, []string{"jsq", "br0"}, []string{r.Runs[0].Policy, r.Runs[1].Policy})
}

func TestWhatIsToldStandsInTheTable(t *testing.T) {
	p := plan("br0", "brh", "brh:predictor=none")
	p.Predictor.Kind, p.TellLaw, p.Seeds = "oracle", true, 1
	r, err := p.Run(context.Background())
	require.NoError(t, err)
	require.Equal(t, "br0 (lengths told) (law told)", r.Runs[0].Policy)
	require.Equal(t, "brh:predictor=none (law told)", r.Runs[2].Policy)
}

// A run is told the law of its groups only if it asks for it.
func TestPoliciesLearnWhatAStepTakes(t *testing.T) {
	for _, told := range []bool{false, true} {
		f := Uniform(4, 8, 0)
		w := drawn(t, Source{Trace: azure(2000)}, 1200)
		r, err := newRun(&f, Load{Pool: 16}, w, by("evenkeel"))
		require.NoError(t, err)
		r.law = told
		first := ""
		r.round = func(round *board.Round) {
			if first == "" {
				first = "known"
				if round.Snapshot.C1Ms == 0 {
					first = "unknown"
				}
			}
		}
		require.NoError(t, r.all(context.Background()))
		step := r.Boards.Status(instant(r.Now)).Models[0].Groups[0].Step
		require.InEpsilon(t, DefaultC0Ms, step.C0Ms, 0.05)
		require.InEpsilon(t, DefaultC1Ms, step.C1Ms, 0.2)
		require.Equal(t, map[bool]string{false: "unknown", true: "known"}[told], first)
		require.Equal(t, map[bool]string{false: "learned", true: "told"}[told], step.Source)
	}
}

func TestAPlanThatCannotBeRun(t *testing.T) {
	tr := azure(6000)
	for _, c := range []struct {
		name   string
		change func(*Plan)
		want   string
	}{
		{"no trace", func(p *Plan) { p.Source = Source{} }, "want a trace"},
		{"two", func(p *Plan) { p.Source.Synth = "mix" }, "want a trace or a synthetic one"},
		{"an empty trace", func(p *Plan) { p.Source.Trace = &trace.Trace{} }, "the trace is empty"},
		{"more requests than there are", func(p *Plan) { p.Requests = 4501 }, "4501 requests: the trace has 6000"},
		{"too few to measure", func(p *Plan) { p.Requests = 79 }, "take at least 80"},
		{"no seeds", func(p *Plan) { p.Seeds = 0 }, "0 seeds"},
		{"more seeds than blocks of a request", func(p *Plan) { p.Seeds = 6001 }, "6001 seeds: each replays a block of the trace"},
		{"no policies", func(p *Plan) { p.Policies = nil }, "no policy"},
		{"a policy without a name", func(p *Plan) { p.Policies = []string{"jsq", ""} }, "a policy without a name"},
		{"a policy nobody knows", func(p *Plan) { p.Policies = []string{"jsqq"} }, "unknown policy"},
		{"a predictor nobody knows", func(p *Plan) { p.Predictor.Kind, p.Policies = "psychic", []string{"brh"} }, "predictor"},
		{"a load that is no number", func(p *Plan) { p.Load.Rho = math.NaN() }, "a load of NaN"},
		{"less than no pool", func(p *Plan) { p.Load.Pool = -1 }, "a pool of -1"},
		{"no ranks", func(p *Plan) { p.Fleet = Fleet{} }, "no ranks"},
		{"the past before the past", func(p *Plan) { p.Fleet.Stale = -1 }, "stale -1"},
		{"a trace that is not drawn", func(p *Plan) { p.Source = Source{Synth: "none"} }, "no synthetic trace"},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := plan("jsq")
			p.Source.Trace = tr
			c.change(p)
			_, err := p.Run(context.Background())
			require.ErrorContains(t, err, c.want)
		})
	}
}

func TestARunCanBeEnded(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	p := plan("jsq", "br0")
	p.Progress = func(int, int) { cancel() }
	_, err := p.Run(ctx)
	require.ErrorIs(t, err, context.Canceled)
}

func TestPredictorsComeFromTheHistoryOrAFile(t *testing.T) {
	race.Alone(t)
	samples := make([]predictor.Sample, 400)
	for i := range samples {
		samples[i] = predictor.Sample{At: time.Duration(i) * time.Second, Prompt: 100, Output: int32(10 + i%7)}
	}
	fit, err := predictor.Train("survival", samples, predictor.Options{})
	require.NoError(t, err)
	run := func(change func(*Plan)) float64 {
		p := plan("brh:horizon=40")
		p.Source.Trace, p.Requests, p.Seeds = azure(1200), 900, 1
		change(p)
		r, err := p.Run(context.Background())
		require.NoError(t, err)
		return r.Runs[0].Metrics[report.Imbalance].Mean
	}
	got := map[float64]string{}
	for name, change := range map[string]func(*Plan){
		"history": func(*Plan) {},
		"file":    func(p *Plan) { p.Predictor.Fit = fit },
		"none":    func(p *Plan) { p.Predictor.Kind = "none" },
		"oracle":  func(p *Plan) { p.Predictor.Kind = "oracle" },
		"exact":   func(p *Plan) { p.Predictor.Kind = "exact" },
	} {
		x := run(change)
		require.Empty(t, got[x], "%s and %s decide alike", name, got[x])
		got[x] = name
	}
}

// What balance is worth, where a small run shows it without doubt.
func TestWhatBalanceIsWorth(t *testing.T) {
	race.Alone(t)
	imbalance := func(p *Plan) map[string]float64 {
		r, err := p.Run(context.Background())
		require.NoError(t, err)
		out := map[string]float64{}
		for _, run := range r.Runs {
			out[run.Policy] = run.Metrics[report.Imbalance].Mean
			out[run.Policy+" idle"] = run.Metrics[report.IdleShare].Mean
		}
		return out
	}
	slice := func(ranks int, policies ...string) *Plan {
		return &Plan{Source: Source{Trace: azure(6000)}, Requests: 3000, Fleet: Uniform(ranks, 16, 0), Load: Load{Pool: 4 * ranks},
			Policies: policies, Seeds: 2}
	}
	synth := func(name string, policies ...string) *Plan {
		return &Plan{Source: Source{Synth: name}, Requests: 2000, Fleet: Uniform(8, 16, 0), Load: Load{Pool: 32}, Policies: policies, Seeds: 2}
	}
	t.Run("br0 against jsq in a closed loop, on every trace", func(t *testing.T) {
		plans := []*Plan{slice(8, "jsq", "br0")}
		for _, name := range trace.SynthNames() {
			plans = append(plans, synth(strings.TrimPrefix(name, trace.SynthPrefix), "jsq", "br0"))
		}
		for _, p := range plans {
			got := imbalance(p)
			require.Less(t, got["br0"], 0.75*got["jsq"], "%s", p.Source.Synth)
		}
	})
	t.Run("imbalance grows with the ranks", func(t *testing.T) {
		policies := []string{"jsq-kv", "br0", "evenkeel"}
		small, large := imbalance(slice(4, policies...)), imbalance(slice(12, policies...))
		for _, name := range policies {
			require.Greater(t, large[name], 1.5*small[name], name)
		}
	})
	t.Run("the default idles less than jsq-kv", func(t *testing.T) {
		got := imbalance(slice(8, "jsq-kv", "evenkeel"))
		require.Less(t, got["evenkeel idle"], 0.7*got["jsq-kv idle"])
		p := synth("code", "jsq-kv", "evenkeel") // answers of 28 tokens
		got = imbalance(p)
		require.Less(t, got["evenkeel idle"], 0.7*got["jsq-kv idle"])
	})
}

func BenchmarkRun(b *testing.B) {
	for _, spec := range []string{"jsq", "br0", "brh", "evenkeel"} {
		b.Run(spec, func(b *testing.B) {
			f := Uniform(8, 16, 0)
			w := drawn(b, Source{Trace: trace.Azure()}, 0)
			b.ReportAllocs()
			for b.Loop() {
				r, err := newRun(&f, Load{Pool: 32}, w, by(spec))
				require.NoError(b, err)
				require.NoError(b, r.all(context.Background()))
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*len(w.jobs)), "ns/request")
		})
	}
}
