package survey

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"time"

	"evenkeel/bench/report"
	"evenkeel/bench/sim"
	"evenkeel/bench/trace"
)

// Given is what no page tells. What is 0 is assumed.
type Given struct {
	Slots  int // requests that run on a rank at once
	Budget int // tokens of a rank in a step, where it prefills
}

// assumedBudget of engines whose --max-num-batched-tokens nobody told.
const assumedBudget = 8192

// traffic is what the simulator is asked about: the group as its pages show it.
type traffic struct {
	*Group
	texts    *texts
	law      fitted
	slots    int
	inFlight float64 // requests in the engines, in the mean
	running  float64 // of those, that do not wait
	closed   bool    // their number hardly moves: a request follows each that ends
	tokens   float64 // of answers, a second
}

// newLoad sums up the windows of a group.
func newLoad(g *Group, given Given, law fitted) (l *traffic, why error) {
	t, ok := newTexts(g.prompts, g.outputs)
	if !ok {
		return nil, fmt.Errorf("%.0f requests ended meanwhile, and %d are needed to know how long prompts and answers are", g.outputs.total(), leastRequests)
	}
	l = &traffic{Group: g, texts: t, law: law, slots: given.Slots}
	var seconds, output, squares float64
	most := 0.0
	for i := range g.windows {
		w := &g.windows[i]
		seconds, output = seconds+w.seconds, output+w.output
		in := 0.0
		for k := range w.ranks {
			r := &w.ranks[k]
			in += r.running + r.waiting
			most = max(most, r.running)
			l.running += r.running * w.seconds
		}
		l.inFlight += in * w.seconds
		squares += in * in * w.seconds
	}
	l.inFlight, l.running = l.inFlight/seconds, l.running/seconds
	l.closed = squares/seconds-l.inFlight*l.inFlight < steady*l.inFlight
	l.tokens = output / seconds
	if l.slots == 0 {
		l.slots = int(math.Ceil(most))
	}
	return l, nil
}

// steady is the variance of the number of requests in flight, as a share of its mean, below which it is taken to be held. Where requests
// come by themselves it is about 1.
const steady = 0.25

// others are how other routers choose decode ranks; the last policy is what they are held against.
var others = []string{"rr", "jsq", "jsq-kv", "evenkeel"}

// levels is what a simulation of ranks that decode makes of a policy: how much more KV than the mean the fullest rank has, as a share of the mean, and
// how many requests run.
type levels struct{ kv, running float64 }

// decodeLevels simulates the policies on ranks that decode, with lengths like those that were seen.
func (l *traffic) decodeLevels(ctx context.Context, seed uint64) ([]levels, error) {
	fleet := sim.Uniform(len(l.Ranks), l.slots, 0)
	g := &fleet.Groups[0]
	g.C0Ms, g.C1Ms, g.RequestMs = l.law.C0Ms, l.law.C1Ms, l.law.RequestMs
	if g.C1Ms == 0 {
		g.RequestMs = 0
	}
	slots := float64(len(l.Ranks) * l.slots)
	p := sim.Plan{Fleet: fleet, Policies: others, Seeds: 1, TellLaw: true}
	r := rand.New(rand.NewPCG(seed, 3))
	n := int(min(mostJobs, max(40*slots, 4000)))
	all := make([]trace.Request, n+1000)
	longest, at := 0, time.Duration(0)
	for i := range all {
		all[i] = l.texts.Next(r, 0)
		longest = max(longest, all[i].Prompt+all[i].Output)
		at += time.Duration(float64(time.Second) * r.ExpFloat64())
		all[i].At = at
	}
	if l.saturated() {
		p.Load.Pool = max(1, int(l.inFlight-slots))
	} else { // as many tokens a second as were seen, of what full and level ranks would make
		full := 1000 * slots / (g.C0Ms + float64(l.slots)*(g.RequestMs+g.C1Ms*trace.Resident(all[1000:])))
		p.Load.Rho = max(0.05, min(1, l.tokens/full))
	}
	if !math.IsNaN(l.room) {
		for i := range g.Ranks {
			g.Ranks[i].Capacity = int64(max(l.room, 1.06*float64(longest)))
		}
	}
	p.Source = sim.Source{Drawn: &sim.Drawn{Before: all[:1000], Requests: all[1000:], Warm: n / 8}}
	result, err := p.Run(ctx)
	if err != nil {
		return nil, err
	}
	out := make([]levels, len(others))
	for i := range others {
		m := result.Runs[i].Metrics
		out[i] = levels{kv: m[report.Imbalance].Mean / m[report.KVTokens].Mean, running: m[report.Running].Mean}
	}
	return out, nil
}

// mostJobs bounds how long a simulation takes.
const mostJobs = 60_000

// saturated says whether requests wait for slots all the time.
func (l *traffic) saturated() bool {
	return l.closed && l.inFlight >= 0.97*float64(len(l.Ranks)*l.slots)
}
