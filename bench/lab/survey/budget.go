package survey

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"math/rand/v2"

	"evenkeel/bench/lab/laws"
	"evenkeel/bench/lab/trace"
	"evenkeel/bench/sim/mixed"
)

// Budget is what another number of tokens in a step would change, by the nearest law of the table.
// An operator can have the first part with one flag and without a proxy.
type Budget struct {
	Now, Best   int     // tokens of a rank in a step; of the others, the Best has most tokens/s; 0: each makes first tokens much later
	Alone, With Outcome // of the engine by itself with the Best, and of evenkeel in front of it, beside the engine by itself Now
	flag        string  // that the engine is started with
}

// Outcome is how many times as much as with the engine by itself.
type Outcome struct{ Tokens, TTFT, TPOT95 float64 }

// budgets are those that are tried. Smaller ones run nearly all prompts in small steps outside of
// CUDA graphs, for which no law was measured.
var budgets = []int{2048, 4096, 8192, 16384}

// With so much longer a first token, a setting is none that an operator would want.
const longerTTFT = 1.2

// tryBudgets simulates the engine by itself and evenkeel with other budgets. It finds nothing (nil)
// if no law is near, or if too few requests ended to know how long they are.
func (f *Finding) tryBudgets(ctx context.Context, given Given) *Budget {
	if f.Nearest == nil || f.Nearest.Error > Far {
		return nil
	}
	e, err := laws.Find(f.Nearest.Name)
	if err != nil || e.Prompt.Fit.Steps == 0 {
		return nil
	}
	l, err := newTraffic(f, given)
	if err != nil {
		return nil
	}
	load := l.mixed(e)
	b := &Budget{Now: cmp.Or(given.Budget, assumedBudget), flag: "--max-num-batched-tokens"}
	if f.SGLang {
		b.flag = "--chunked-prefill-size"
	}
	serve := func(budget int, p mixed.Contender) (Outcome, error) {
		p.Budget = int32(budget)
		got, err := mixed.Serve(ctx, load, p)
		return Outcome{got.Tokens, got.TTFT, got.TPOT95}, err
	}
	own := mixed.Own(e.Engine)
	now, err := serve(b.Now, own)
	if err != nil {
		return nil
	}
	for _, budget := range budgets {
		if budget == b.Now || budget < l.slots {
			continue
		}
		got, err := serve(budget, own)
		if err != nil {
			return nil
		}
		if got = got.beside(now); got.TTFT <= longerTTFT && (b.Best == 0 || got.Tokens > b.Alone.Tokens) {
			b.Best, b.Alone = budget, got
		}
	}
	if b.Best == 0 {
		return b
	}
	with, err := serve(b.Best, mixed.Contender{Spec: "evenkeel", Learn: true})
	if err != nil {
		return nil
	}
	b.With = with.beside(now)
	return b
}

func (o Outcome) beside(now Outcome) Outcome {
	return Outcome{o.Tokens / now.Tokens, o.TTFT / now.TTFT, o.TPOT95 / now.TPOT95}
}

// mixed is the traffic for ranks that prefill and decode, by a law.
func (l *traffic) mixed(e *laws.Entry) *mixed.Load {
	slots := len(l.Ranks) * l.slots
	load := &mixed.Load{Texts: l.texts, Ranks: len(l.Ranks), Slots: l.slots, Law: e.Served(), Of: e.Name(), Seed: 1, Budget: assumedBudget}
	if !math.IsNaN(l.room) {
		load.Room = int64(l.room)
		for _, q := range load.Requests(mostJobs) {
			load.Room = max(load.Room, int64(1.1*float64(q.Prompt+q.Output)))
		}
	}
	if l.Closed {
		load.Full = l.InFlight / float64(slots)
		load.Measure(0)
	} else { // requests come as often as they ended
		load.Rho = 1
		load.Measure(0)
		load.Rho = min(1, load.Gap*l.outputs.total()/(1000*l.Seconds))
		load.Measure(0)
	}
	load.Stays *= min(1, mostJobs/(mixed.Lasts*float64(load.There)))
	return load
}

// Next draws a request, at whatever time.
func (t *texts) Next(r *rand.Rand, _ float64) trace.Request { return t.next(r) }

func (t *texts) String() string { return "lengths as they were seen" }

// words say what the Best budget brings.
func (b *Budget) words(ranks int, law string) string {
	if b.Alone.Tokens < 1+little {
		return fmt.Sprintf("no other number from %d to %d brings the engine %.0f %% more tokens per second without a mean TTFT that is over %.0f %% "+
			"longer, simulated by the law %s", budgets[0], budgets[len(budgets)-1], 100*little, 100*(longerTTFT-1), law)
	}
	value := b.Best
	if b.flag == "--chunked-prefill-size" { // of all ranks together
		value *= ranks
	}
	change := func(o Outcome) string {
		return fmt.Sprintf("%+.0f %% tokens per second (mean TTFT %+.0f %%, TPOT p95 %+.0f %%)", 100*(o.Tokens-1), 100*(o.TTFT-1), 100*(o.TPOT95-1))
	}
	return fmt.Sprintf("with %s %d, the engine alone would make %s, and with evenkeel in front of it %s, simulated by the law %s", b.flag,
		value, change(b.Alone), change(b.With), law)
}
