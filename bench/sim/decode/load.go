package decode

import (
	"cmp"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"time"

	"evenkeel/bench/lab/trace"
	"evenkeel/dispatcher/board"
)

// Source is where the requests of a run come from.
type Source struct {
	Trace *trace.Trace // a real trace, or
	Synth string       // the name of a synthetic one, or
	Drawn *Drawn       // requests that somebody else drew
}

// Drawn are the same requests for every seed.
type Drawn struct {
	Before   []trace.Request // predictors learn from them first
	Requests []trace.Request
	Ages     []int // tokens that the first requests have generated when the run begins; they wait from then on
	Warm     int   // requests to be done before anything is measured
}

// Load is how requests arrive.
type Load struct {
	Rho  float64 // open loop: share of what a level fleet could serve; 0: closed loop
	Pool int     // closed loop: requests in the system beyond the slots

	Prefill *Prefill // nil: DefaultPrefill. In a closed loop only what is prefilled again takes it, unless AtArrival

	// AtArrival: a request gets its rank when it arrives, with a slot and room for its KV, and is
	// prefilled then.
	AtArrival bool
	Ahead     int // requests a rank may have beyond its slots then, or board.AheadAuto
}

func (l *Load) validate() error {
	switch {
	case !(l.Rho >= 0 && l.Rho <= 100):
		return fmt.Errorf("a load of %v; want closed, or a share of what the fleet can serve, like 0.9", l.Rho)
	case l.Pool < 0:
		return fmt.Errorf("a pool of %d requests", l.Pool)
	case l.Ahead < board.AheadAuto || l.Ahead > mostSlots:
		return fmt.Errorf("%d requests ahead of the slots", l.Ahead)
	case l.Prefill != nil:
		return l.Prefill.validate()
	}
	return nil
}

// synthRequests are replayed of a synthetic trace where nobody says how many.
const synthRequests = 12_000

// most requests that predictors learn from before a run
const mostHistory = 2000

// workload is what one seed replays.
type workload struct {
	history []arrival // what predictors learn from first, oldest first
	jobs    []arrival
	running int // the first jobs that are there from the start
	warm    int // jobs to be done before anything is measured; 0: an eighth, and as many as there are slots
}

type arrival struct {
	at             float64 // ms; of history: unused
	prompt, output int32
	key            uint64
	age            int32 // generated before the run
}

// enough is how often a run replaces all that is in the system once it is measured, unless the
// trace is too short for that. Where a policy cannot keep up with the arrivals, its queue is long
// only after a while.
const enough = 30

// size is how many requests a seed replays, and how many before those are history. Of a trace it
// replays its block, and where that is too little for the fleet, more, but no more than a seed that
// is alone.
func (p *Plan) size() (replay, history int, err error) {
	if d := p.Source.Drawn; d != nil {
		return len(d.Requests), len(d.Before), nil
	}
	if p.Source.Synth != "" {
		replay = cmp.Or(p.Requests, synthRequests)
		return replay, min(mostHistory, replay/4), nil
	}
	n := len(p.Source.Trace.Requests)
	if p.Seeds > n {
		return 0, 0, fmt.Errorf("%d seeds: each replays a block of the trace, which has %d requests", p.Seeds, n)
	}
	history = min(mostHistory, n/4)
	from, to := blockOf(1, p.Seeds, n, history)
	replay = cmp.Or(p.Requests, min(max(to-from, p.least()), n-history))
	if replay > n-history {
		return 0, 0, fmt.Errorf("%d requests: the trace has %d, of which predictors learn from the %d before those replayed", replay, n, history)
	}
	return replay, history, nil
}

// inSystem is how many requests are in the system at least when none is lacking.
func (p *Plan) inSystem() int {
	if p.Load.Rho > 0 {
		return p.Fleet.slots()
	}
	return p.Fleet.slots() + p.Load.Pool
}

// least is how many requests make a run long enough for its fleet, the warm-up counted.
func (p *Plan) least() int {
	measured := enough * p.inSystem()
	return measured + max(p.Fleet.slots(), measured/(warmShare-1)+1)
}

// draw makes the requests of a seed: its block of a real trace, or a synthetic trace of its own.
func (p *Plan) draw(seed int) (*workload, error) {
	replay, before, err := p.size()
	if err != nil {
		return nil, err
	}
	var all []trace.Request
	if d := p.Source.Drawn; d != nil {
		all = slices.Concat(d.Before, d.Requests)
	} else if p.Source.Synth != "" {
		t, err := trace.Synth(p.Source.Synth, before+replay, uint64(seed))
		if err != nil {
			return nil, err
		}
		all = t.Requests
	} else {
		from, to := blockOf(seed, p.Seeds, len(p.Source.Trace.Requests), before)
		all = unroll(p.Source.Trace, from, to, before, replay)
	}
	w := &workload{}
	for i := range all {
		q := &all[i]
		a := arrival{
			at:     float64(q.At-all[before].At) / float64(time.Millisecond),
			prompt: int32(min(q.Prompt, math.MaxInt32/4)), output: int32(min(q.Output, math.MaxInt32/4)),
			key: q.PromptKey(),
		}
		if i < before {
			w.history = append(w.history, a)
		} else {
			w.jobs = append(w.jobs, a)
		}
	}
	if d := p.Source.Drawn; d != nil {
		w.running, w.warm = len(d.Ages), d.Warm
		for i, age := range d.Ages {
			w.jobs[i].age = int32(age)
		}
	}
	return w, nil
}

// blockOf is the part of n requests that is a seed's, the first of which is 1: seeds have equal
// parts, in order, and no request is of two. A seed that is alone has all but what predictors learn
// from.
func blockOf(seed, seeds, n, history int) (from, to int) {
	from, to = n*(seed-1)/seeds, n*seed/seeds
	return max(from, to-(n-history)), to
}

// mooncakeTick is what Mooncake's times are rounded to.
const mooncakeTick = 3 * time.Second

// unroll returns the requests before a block of the trace, the end before the beginning, and then n
// of the block, over and over; the first of all arrives at 0. When a block comes again its prompts
// are others of the same lengths, so that no predictor has seen them before.
func unroll(t *trace.Trace, from, to, before, n int) []trace.Request {
	all, times := t.Requests, spread(t)
	period, again := lasts(times), lasts(times[from:to])
	out := make([]trace.Request, 0, before+n)
	add := func(i int, later time.Duration) {
		q := all[i]
		q.At = times[i] + later
		out = append(out, q)
	}
	for i := from - before; i < from; i++ {
		if i < 0 {
			add(i+len(all), -period)
		} else {
			add(i, 0)
		}
	}
	for i := range n {
		turn := i / (to - from)
		add(from+i%(to-from), again*time.Duration(turn))
		if q := &out[before+i]; turn > 0 && q.PromptKey() != 0 {
			q.Key = bits.RotateLeft64(q.PromptKey(), turn)
			q.HashIDs = slices.Clone(q.HashIDs)
			for k := range q.HashIDs {
				q.HashIDs[k] = bits.RotateLeft64(^q.HashIDs[k], turn)
			}
		}
	}
	first := out[0].At
	for i := range out {
		out[i].At -= first
	}
	return out
}

// lasts is how long it is from the first of some times until they could come again: to the last,
// and a mean gap.
func lasts(times []time.Duration) time.Duration {
	span := times[len(times)-1] - times[0]
	return span + span/time.Duration(max(1, len(times)-1))
}

// spread returns when requests arrive. Those that Mooncake's clock shows at one time are spread
// over its tick.
func spread(t *trace.Trace) []time.Duration {
	all := t.Requests
	times := make([]time.Duration, len(all))
	for i := 0; i < len(all); {
		same := i + 1
		for same < len(all) && all[same].At == all[i].At {
			same++
		}
		width := time.Duration(0)
		if t.Format == trace.MooncakeJSONL {
			width = mooncakeTick
			if same < len(all) {
				width = min(width, all[same].At-all[i].At)
			}
		}
		for k := i; k < same; k++ {
			times[k] = all[i].At + width*time.Duration(k-i)/time.Duration(same-i)
		}
		i = same
	}
	return times
}

// pace sets arrival times so that a level fleet would be busy to the share rho.
func (w *workload) pace(rho float64, f *Fleet) {
	coming := w.jobs[w.running:]
	outputs, held := 0.0, 0.0 // tokens; KV tokens over steps
	for i := range coming {
		outputs, held = add(outputs, held, float64(coming[i].prompt), float64(coming[i].output))
	}
	gaps := float64(max(1, len(coming)-1))
	gap := f.gap(rho, outputs, held, len(coming))
	first := coming[0].at
	span := coming[len(coming)-1].at - first
	for i := range coming {
		if span >= 1 {
			coming[i].at = (coming[i].at - first) / span * gaps * gap
		} else { // all at once in the trace
			coming[i].at = gap * float64(i)
		}
	}
}

// add counts a request: its tokens, and its KV tokens over the steps that it runs for.
func add(outputs, held, prompt, output float64) (float64, float64) {
	return outputs + output, held + output*prompt + output*(output-1)/2
}

// gap is the mean time between requests, in ms, at which a level fleet is busy to the share rho.
func (f *Fleet) gap(rho, outputs, held float64, requests int) float64 {
	perMs := 0.0
	for i := range f.Groups {
		perMs += f.Groups[i].tokensPerMs(held / outputs)
	}
	return outputs / float64(requests) / (rho * perMs)
}

// Rate is how many such requests a second keep a level fleet busy to the share rho.
func (f *Fleet) Rate(rho float64, requests []trace.Request) float64 {
	outputs, held := 0.0, 0.0
	for i := range requests {
		outputs, held = add(outputs, held, float64(requests[i].Prompt), float64(requests[i].Output))
	}
	return 1000 / f.gap(rho, outputs, held, len(requests))
}
