package sim

import (
	"cmp"
	"fmt"
	"math"
	"math/bits"
	"time"

	"evenkeel/bench/trace"
)

// Source is where the requests of a run come from.
type Source struct {
	Trace *trace.Trace // a real trace, or
	Synth string       // the name of a synthetic one
}

// Load is how requests arrive.
type Load struct {
	Rho  float64 // open loop: share of what a level fleet could serve; 0: closed loop
	Pool int     // closed loop: requests in the system beyond the slots
}

// Prefill time of a request.
const (
	prefillMs         = 50
	prefillPerTokenMs = 0.05
)

// synthRequests are replayed of a synthetic trace where nobody says how many.
const synthRequests = 12_000

// most requests that predictors learn from before a run
const mostHistory = 2000

// workload is what one seed replays.
type workload struct {
	past    []trace.Request // what predictors learn from first, oldest first
	history []arrival       // the same
	jobs    []arrival
}

type arrival struct {
	at             float64 // ms; of history: unused
	prompt, output int32
	key            uint64
}

// size is how many requests are replayed, and how many before those are history.
func (s *Source) size(want int) (replay, history int, err error) {
	if s.Synth != "" {
		want = cmp.Or(want, synthRequests)
		return want, min(mostHistory, want/4), nil
	}
	n := len(s.Trace.Requests)
	history = min(mostHistory, n/4)
	want = cmp.Or(want, n-history)
	if want > n-history {
		return 0, 0, fmt.Errorf("%d requests: the trace has %d, of which predictors learn from the %d before those replayed", want, n, history)
	}
	return want, history, nil
}

// draw makes the requests of a seed: it rotates a real trace and draws a
// synthetic one anew.
func (s *Source) draw(seed uint64, want int) (*workload, error) {
	replay, before, err := s.size(want)
	if err != nil {
		return nil, err
	}
	var all []trace.Request
	if s.Synth != "" {
		t, err := trace.Synth(s.Synth, before+replay, seed)
		if err != nil {
			return nil, err
		}
		all = t.Requests
	} else {
		all = rotate(s.Trace, startOf(seed, len(s.Trace.Requests)), before+replay)
	}
	w := &workload{past: all[:before]}
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
	return w, nil
}

// startOf is where in n requests a seed begins. Steps of the golden ratio spread
// even a few seeds evenly over a trace whose traffic changes from hour to hour.
func startOf(seed uint64, n int) int {
	const golden = 0x9e3779b97f4a7c15 // of 2^64
	high, _ := bits.Mul64(seed*golden, uint64(n))
	return int(high)
}

// mooncakeTick is what Mooncake's times are rounded to.
const mooncakeTick = 3 * time.Second

// rotate returns n requests of the trace from one on, the beginning after the
// end. Requests that Mooncake's clock shows at one time are spread over its tick.
func rotate(t *trace.Trace, first, n int) []trace.Request {
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
	period := times[len(times)-1] // and the mean gap, from the last to the first
	period += period / time.Duration(max(1, len(times)-1))
	out := make([]trace.Request, n)
	for i := range out {
		at := (first + i) % len(all)
		out[i] = all[at]
		out[i].At = times[at] - times[first] + period*time.Duration((first+i)/len(all))
	}
	return out
}

// pace sets arrival times so that a level fleet would be busy to the share rho.
func (w *workload) pace(rho float64, f *Fleet) {
	outputs, held := 0.0, 0.0 // tokens; KV tokens over steps
	for i := range w.jobs {
		s, o := float64(w.jobs[i].prompt), float64(w.jobs[i].output)
		outputs += o
		held += o*s + o*(o-1)/2
	}
	perMs := 0.0
	for i := range f.Groups {
		perMs += f.Groups[i].tokensPerMs(held / outputs)
	}
	gaps := float64(max(1, len(w.jobs)-1))
	gap := outputs / float64(len(w.jobs)) / (rho * perMs) // ms, in the mean
	first := w.jobs[0].at
	span := w.jobs[len(w.jobs)-1].at - first
	for i := range w.jobs {
		if span >= 1 {
			w.jobs[i].at = (w.jobs[i].at - first) / span * gaps * gap
		} else { // all at once in the trace
			w.jobs[i].at = gap * float64(i)
		}
	}
}
