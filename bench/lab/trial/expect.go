package trial

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"evenkeel/bench/lab/laws"
	"evenkeel/bench/lab/report"
	"evenkeel/bench/sim/mixed"
	"evenkeel/dispatcher/step"
)

// Span is where a figure lies over all that was simulated.
type Span struct {
	Low    float64 `json:"low"`
	Middle float64 `json:"middle"`
	High   float64 `json:"high"`
}

func spanOf(values []float64) Span {
	values = slices.DeleteFunc(values, func(v float64) bool { return math.IsNaN(v) || math.IsInf(v, 0) })
	if len(values) == 0 {
		return Span{}
	}
	slices.Sort(values)
	return Span{values[0], values[len(values)/2], values[len(values)-1]}
}

// Expected is what the simulator makes of a load: by how many percent evenkeel is above the
// engine's own balancing.
type Expected struct {
	Tokens Span `json:"tokens_per_s_percent"`
	TTFT   Span `json:"ttft_mean_percent"`
	TPOT   Span `json:"tpot_p95_percent"`

	Rate   Span `json:"requests_per_s"` // with the engine's own balancing
	Output Span `json:"tokens_per_s"`
}

// Expectation is that of all loads.
type Expectation struct {
	Laws  []string   `json:"laws"`
	Loads []Expected `json:"-"` // each stands with its load
}

// Find returns the laws of the table by which the trial is simulated: the named one, or all with
// these ranks and this engine.
func Find(name string, e *Engine) (found []laws.Entry, err error) {
	if name != "" {
		one, err := laws.Find(name)
		if err != nil {
			return nil, fmt.Errorf("--law: %w", err)
		}
		return []laws.Entry{*one}, nil
	}
	for _, law := range laws.All() {
		if law.Ranks == e.Ranks && law.Engine == e.Kind {
			found = append(found, law)
		}
	}
	return found, nil
}

// seeds of the loads where one law is simulated: its interval is over these.
const seeds = 5

// own is who balances without evenkeel.
func own(e *Engine) mixed.Contender {
	c := mixed.Own(e.Kind)
	if e.Kind == sglang {
		switch e.Settings["load_balance_method"] {
		case "total_tokens":
			c.Spec, c.Route = "", mixed.LeastTokens
		case "total_requests":
			c.Spec, c.Route = "", mixed.VLLM
		}
	}
	c.Every, c.Rests = e.Interval, e.Kind == sglang
	return c
}

// Expect simulates the loads under each law, once with its prompts and once with those that were
// published, for so long each.
func Expect(ctx context.Context, e *Engine, loads []*Load, by []laws.Entry, each time.Duration, told func(done, of int),
) (x Expectation, err error) {
	type run struct {
		law  step.Law
		seed uint64
	}
	var runs []run
	for i := range by {
		law := by[i].Law()
		x.Laws = append(x.Laws, by[i].Name())
		for seed := range uint64(seeds) {
			if len(by) > 1 && seed > 0 {
				break
			}
			runs = append(runs, run{law, seed}, run{by[i].Served(), seed})
		}
	}
	all, err := report.Trials(ctx, len(runs), 1, told, func(ctx context.Context, i int, _ uint64) ([]pair, error) {
		return simulate(ctx, e, loads, runs[i].law, runs[i].seed, each)
	})
	if err != nil || len(runs) == 0 {
		return Expectation{}, err
	}
	for k := range loads {
		over := func(figure func(p *pair) float64) Span {
			values := make([]float64, len(runs))
			for i := range runs {
				values[i] = figure(&all[i][0][k])
			}
			return spanOf(values)
		}
		x.Loads = append(x.Loads, Expected{
			Tokens: over(func(p *pair) float64 { return percent(p.ours.Tokens, p.theirs.Tokens) }),
			TTFT:   over(func(p *pair) float64 { return percent(p.ours.TTFT, p.theirs.TTFT) }),
			TPOT:   over(func(p *pair) float64 { return percent(p.ours.TPOT95, p.theirs.TPOT95) }),
			Rate:   over(func(p *pair) float64 { return p.rate }),
			Output: over(func(p *pair) float64 { return p.theirs.Tokens }),
		})
	}
	return x, nil
}

// percent is by how much x is above y.
func percent(x, y float64) float64 { return 100 * (x/y - 1) }

// pair is what both make of a load, and how many requests per second the engine's own balancing is
// served.
type pair struct {
	theirs, ours mixed.Outcome
	rate         float64
}

// simulate plays all loads under a law.
func simulate(ctx context.Context, e *Engine, loads []*Load, law step.Law, seed uint64, each time.Duration) (all []pair, err error) {
	const usual = 8192 // vLLM's on large GPUs
	rate := 0.0
	for k, l := range loads {
		m := &mixed.Load{
			Number: k, Texts: l, Ranks: e.Ranks, Slots: e.Slots, Budget: int32(max(e.Slots, cmp.Or(e.Budget, usual))), Seed: 1 + seed,
			Full: float64(l.InFlight) / float64(e.Ranks*e.Slots), Rho: l.Share,
		}
		m.Law = step.Law{Model: law.Level()} // the form has no part in how long requests stay, about
		m.Measure(0)
		m.Law, m.Room = law, e.Room
		if l.Open() {
			m.Gap = 1000 / (rate * l.Share)
			m.There = max(1, int(m.Stays/m.Gap))
		}
		m = m.For(each)
		var p pair
		if p.theirs, err = mixed.Serve(ctx, m, own(e)); err != nil {
			return nil, err
		}
		ours := mixed.Contender{Name: "evenkeel", Spec: "evenkeel", Every: e.Interval, Rests: e.Kind == sglang, Learn: true}
		if p.ours, err = mixed.Serve(ctx, m, ours); err != nil {
			return nil, err
		}
		_, output := l.means()
		rate = p.theirs.Tokens / output
		p.rate = rate
		all = append(all, p)
	}
	return all, nil
}

// Cost is what the trial takes.
type Cost struct {
	Time, Most time.Duration // about, and if everything takes as long as it may
	Prompts    Span
	Input      Span // tokens of prompts
	Output     Span // tokens of answers
}

// Costs adds up what the loads take, by what is expected of them. Without an expectation it is what
// they take at least.
func Costs(loads []*Load, x *Expectation, each time.Duration, leastPairs int) (c Cost) {
	least, uncounted := 0.0, 0.0
	for k, l := range loads {
		if !l.Open() { // else the blocks are as large as those of the load before
			least, uncounted = float64(2*leastPairs*perPlace*l.InFlight), float64(2*perWarmUp*l.InFlight)
		} else {
			uncounted = 0
		}
		var rate Span
		if x != nil && k < len(x.Loads) {
			rate = x.Loads[k].Rate
		}
		sent := func(rate float64) float64 { return max(least, rate*2*each.Seconds()) + uncounted }
		lasting := 2 * each
		if rate.Middle > 0 {
			lasting = max(lasting, time.Duration(sent(rate.Middle)/rate.Middle*float64(time.Second)))
		}
		most := lasts(each, Patience)
		c.Time, c.Most = c.Time+min(lasting, most), c.Most+most
		prompt, output := l.means()
		for to, tokens := range map[*Span]float64{&c.Prompts: 1, &c.Input: prompt, &c.Output: output} {
			to.Low, to.Middle, to.High = to.Low+tokens*sent(rate.Low), to.Middle+tokens*sent(rate.Middle), to.High+tokens*sent(rate.High)
		}
	}
	return c
}
