package survey

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"time"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/lab/trace"
	"evenkeel/bench/sim/decode"
)

// Given is what no page tells. What is 0 is assumed.
type Given struct {
	Slots  int // requests that run on a rank at once
	Budget int // tokens of a rank in a step, where it prefills
}

// MostSlots of a rank are simulated.
const MostSlots = 4096

// assumedBudget of engines whose --max-num-batched-tokens nobody told.
const assumedBudget = 8192

// traffic is what the simulator is asked about: a group as its pages show it.
type traffic struct {
	*Finding
	texts *texts
	slots int
}

// newTraffic says why nothing can be simulated.
func newTraffic(f *Finding, given Given) (*traffic, error) {
	t, ok := newTexts(f.prompts, f.outputs)
	switch {
	case f.SGLang && (len(f.prompts.Bounds) == 0 || len(f.outputs.Bounds) == 0):
		return nil, fmt.Errorf("the pages lack %s and %s: no request has ended, or a version of SGLang that has --collect-tokens-histogram "+
			"was started without it; start it with that, or watch for longer", promptLengths[1], outputLengths[1])
	case !ok:
		return nil, fmt.Errorf("%.0f requests ended meanwhile, and %d are needed to know how long prompts and answers are; "+
			"watch for longer", f.outputs.total(), leastRequests)
	}
	slots := cmp.Or(given.Slots, int(math.Ceil(f.mostRunning)))
	if slots > MostSlots {
		return nil, fmt.Errorf("a rank ran %d requests at once, and no rank with more than %d is simulated; give fewer --slots",
			slots, MostSlots)
	}
	return &traffic{Finding: f, texts: t, slots: slots}, nil
}

// atMost is how many requests could run, if none waited for a slot or for KV room while another
// rank has some.
func (l *traffic) atMost() float64 {
	most := min(l.ready(), float64(len(l.Ranks)*l.slots))
	if !math.IsNaN(l.KVFull) {
		most = min(most, l.Running*nearlyFull/l.KVFull)
	}
	return max(l.Running, most)
}

// nearlyFull is what share of their KV room ranks use at most, about.
const nearlyFull = 0.95

// steady is the variance of the number of requests in flight, as a share of its mean, below which
// it is taken to be held. Where requests come by themselves it is about 1.
const steady = 0.25

// others are how other routers choose decode ranks; the last policy is what they are held against.
var others = []string{"rr", "jsq", "jsq-kv", "evenkeel"}

// levels is what a simulation of ranks that decode makes of a policy: how much more than the mean
// the fullest rank has, as a share of the mean, and how many requests run.
type levels struct {
	kv       float64 // tokens
	requests float64
	load     float64 // ms of KV and requests together
	running  float64
}

// decodeLevels simulates the policies on ranks that decode, with lengths like those that were seen.
func (l *traffic) decodeLevels(ctx context.Context, seed uint64) ([]levels, error) {
	fleet := decode.Uniform(len(l.Ranks), l.slots, 0)
	g := &fleet.Groups[0]
	g.C0Ms, g.C1Ms, g.RequestMs = l.Law.C0Ms, l.Law.C1Ms, l.Law.RequestMs
	g.C1Ms = max(g.C1Ms, leastC1Ms)
	slots := float64(len(l.Ranks) * l.slots)
	p := decode.Plan{Fleet: fleet, Policies: others, Seeds: 1, TellLaw: true}
	r := rand.New(rand.NewPCG(seed, 3))
	n := int(min(mostJobs, max(40*slots, 4000)))
	all := make([]trace.Request, n+1000)
	longest, at := 0, time.Duration(0)
	for i := range all {
		all[i] = l.texts.next(r)
		longest = max(longest, all[i].Prompt+all[i].Output)
		at += time.Duration(float64(time.Second) * r.ExpFloat64())
		all[i].At = at
	}
	if l.saturated() {
		p.Load.Pool = max(1, int(l.InFlight-slots))
	} else { // as many tokens a second as were seen, of what full and level ranks would make
		full := 1000 * slots / (g.C0Ms + float64(l.slots)*(g.RequestMs+g.C1Ms*trace.Resident(all[1000:])))
		p.Load.Rho = max(0.05, min(1, l.Tokens/full))
	}
	if !math.IsNaN(l.room) {
		for i := range g.Ranks {
			g.Ranks[i].Capacity = int64(max(l.room, 1.06*float64(longest)))
		}
	}
	if l.ComingMs > 0 { // as bench/claims/bind divides it between prompts
		usual := decode.DefaultPrefill
		scale := l.ComingMs / (usual.Ms + usual.PerTokenMs*l.prompts.mean())
		p.Load.AtArrival, p.Load.Prefill = true, &decode.Prefill{Ms: scale * usual.Ms, PerTokenMs: scale * usual.PerTokenMs}
	}
	p.Source = decode.Source{Drawn: &decode.Drawn{Before: all[:1000], Requests: all[1000:], Warm: n / 8}}
	result, err := p.Run(ctx)
	if err != nil {
		return nil, err
	}
	out := make([]levels, len(others))
	for i := range others {
		m := result.Runs[i].Metrics
		out[i] = levels{kv: m[report.KVExcess].Mean, requests: m[report.RequestExcess].Mean, running: m[report.Running].Mean}
		level := (g.C1Ms*m[report.KVTokens].Mean + g.RequestMs*m[report.Running].Mean) / float64(len(l.Ranks))
		out[i].load = max(0, m[report.StepMean].Mean-g.C0Ms-level) / level
	}
	return out, nil
}

// unlike says how differently ranks are filled, as far as gauges show it, but never 0.
func (a levels) unlike(kv, requests float64) float64 {
	of := func(x, y float64) float64 { return math.Abs(math.Log((x + hardlyUneven) / (y + hardlyUneven))) }
	return of(a.kv, kv) + of(a.requests, requests) + hardlyUneven
}

// hardlyUneven is an excess below which differences tell little.
const hardlyUneven = 0.01

// leastC1Ms is used where KV costs nothing, because policies express the cost of a request in KV
// tokens.
const leastC1Ms = 1e-9

// mostJobs bounds how long a simulation takes.
const mostJobs = 60_000

// saturated says whether requests wait for slots all the time.
func (l *traffic) saturated() bool {
	return l.Closed && l.InFlight >= 0.97*float64(len(l.Ranks)*l.slots)
}
