// Package prefill is a simulator of the prefill tier: the server's own tier
// in virtual time, in front of engines whose prefix caches have a size and whose
// prefills take what a line says. The same seed gives the same run to the bit.
package prefill

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/lab/trace"
	"evenkeel/prefill/policy"
)

// Plan is policies side by side on the same requests.
type Plan struct {
	Trace    *trace.Trace
	Requests int // the first of the trace; 0: all
	Engines  Engines
	Policies []string // as a user writes them

	// Seeds share what follows the first eighth of the trace: each measures a block that
	// no other has, and plays an eighth of the trace before it, to fill the caches.
	Seeds int

	// Load is the share of time in which engines prefill under the reference
	// policy: the trace is played so fast, or slowly. Pace is what an earlier result says of that; 0: it
	// is looked for.
	Load, Pace float64

	Definitions    map[string]policy.Definition // of the user
	Push           int                          // unanswered probes of an engine; 0: the server's default
	CapacityFactor float64                      // the tier is told so many times the engines' capacity; 0: the truth
	Burst          float64                      // share of one class in the second third of the trace
	NoHotspots     bool                         // without the detector
	Affinity       bool                         // sessions go back where they were

	// TellLine tells the tier what a prefill takes, which it learns otherwise as in the server.
	TellLine bool

	// Progress, if set, is told how many runs are done, one call at a time.
	Progress func(done, total int)
}

// reference is the policy whose utilisation is the load.
const reference = "lmetric"

// Policies are all that are built in, the reference first.
func Policies() []string {
	return append([]string{reference}, slices.DeleteFunc(policy.Names(), func(n string) bool { return n == reference })...)
}

func (p *Plan) capacityFactor() float64 { return cmp.Or(p.CapacityFactor, 1) }

// The longest steps that make sense here. With longer ones a run would outlast any patience.
const (
	mostC0 = 1000 * time.Second
	mostC1 = time.Second
)

// Validate says what of the plan cannot be run.
func (p *Plan) Validate() error {
	e := &p.Engines
	switch {
	case p.Trace == nil || len(p.Trace.Requests) < 16:
		return errors.New("the trace has fewer than 16 requests")
	case p.Trace.Requests[len(p.Trace.Requests)-1].At <= 0:
		return errors.New("all requests of the trace arrive at once")
	case p.Requests < 0 || p.Requests > 0 && p.Requests < 16:
		return fmt.Errorf("%d requests: take at least 16, or 0 for all", p.Requests)
	case e.Ranks < 1 || e.Ranks > 1024:
		return fmt.Errorf("%d prefill engines: from 1 to 1024", e.Ranks)
	case p.Seeds < 1 || p.Seeds > len(p.requests())/16:
		return fmt.Errorf("%d seeds: from 1 to one per 16 requests of the trace, for each has a block of its own", p.Seeds)
	case !(p.Load > 0 && p.Load < 1):
		return fmt.Errorf("a load of %v: want a share of time above 0 and below 1, like 0.7", p.Load)
	case !(p.Burst >= 0 && p.Burst <= 1):
		return fmt.Errorf("a burst of %v: want a share from 0 to 1, like 0.6", p.Burst)
	case !(p.capacityFactor() >= 1e-3 && p.capacityFactor() <= 1e3):
		return fmt.Errorf("a capacity told %v times too large: from 0.001 to 1000", p.CapacityFactor)
	case e.Line.TPMs <= 0 || e.Line.T0Ms < 0 || e.Line.Beta2 < 0:
		return fmt.Errorf("prefills that take %v + %v·N ms: the second number must be above 0, none below", e.Line.T0Ms, e.Line.TPMs)
	case !(cmp.Or(e.Slow, 1) >= 0.1 && cmp.Or(e.Slow, 1) <= 100):
		return fmt.Errorf("an engine that takes %v times as long as the others: from 0.1 to 100", e.Slow)
	case e.Hold < 0 || e.Hold > 24*time.Hour:
		return fmt.Errorf("a hold of %v: from 0 to a day", e.Hold)
	case e.Decode != nil && (e.Decode.C0 <= 0 || e.Decode.C1 < 0 || e.Decode.Chunk < 1):
		return fmt.Errorf("steps of %v + %v a token, chunks of %d tokens: c0 and chunk must be above 0", e.Decode.C0, e.Decode.C1, e.Decode.Chunk)
	case e.Decode != nil && (e.Decode.C0 > mostC0 || e.Decode.C1 > mostC1):
		return fmt.Errorf("steps of %v + %v a token: at most %v + %v", e.Decode.C0, e.Decode.C1, mostC0, mostC1)
	case p.Push < 0:
		return fmt.Errorf("%d unanswered probes: 1 or more, or 0 for the server's default", p.Push)
	case len(p.Policies) == 0:
		return errors.New("no policy")
	}
	longest := hotTokens + hotOwn
	for _, r := range p.requests() {
		longest = max(longest, r.Prompt)
	}
	if ms := e.Line.Ms(float64(longest), 0); !(ms <= millis(24*time.Hour)) {
		return fmt.Errorf("prefills that take %v + %v·N + %v·N·(H+N/2) ms: the longest prompt has %d tokens and would take %v ms; want a "+
			"day at most", e.Line.T0Ms, e.Line.TPMs, e.Line.Beta2, longest, ms)
	}
	if least := (int64(longest)/blockTokens + 1) * blockTokens; e.Capacity < least {
		return fmt.Errorf("a capacity of %d tokens, but a prompt of the trace has %d: give at least %d", e.Capacity, longest, least)
	}
	library, err := policy.NewLibrary(p.Definitions)
	if err != nil {
		return err
	}
	for _, spec := range p.Policies {
		if _, err := library.Parse(spec); err != nil {
			return err
		}
	}
	return nil
}

func (p *Plan) requests() []trace.Request {
	if p.Requests > 0 && p.Requests < len(p.Trace.Requests) {
		return p.Trace.Requests[:p.Requests]
	}
	return p.Trace.Requests
}

// Result is what a plan gave.
type Result struct {
	Runs    []report.Run      // one a policy, in the plan's order
	Seeds   [][]report.Sample // what each seed gave, a policy after the other
	PerHour float64           // requests, at the load
	Pace    float64           // how many times longer the trace was played
}

// Run finds the pace of the load and runs every policy on every seed, as many
// at once as there are processors.
func (p *Plan) Run(ctx context.Context) (*Result, error) {
	if err := p.Validate(); err != nil {
		return nil, err
	}
	pr := newPrompts(p.requests())
	stretch := p.Pace
	if stretch == 0 {
		var err error
		if stretch, err = p.pace(ctx, pr); err != nil {
			return nil, err
		}
	}
	samples, err := report.Trials(ctx, len(p.Policies), p.Seeds, p.Progress,
		func(ctx context.Context, i int, seed uint64) (report.Sample, error) {
			s, err := p.try(ctx, pr, p.Policies[i], pr.draw(pr.block(int(seed), p.Seeds), seed, stretch, p.Burst), pr.warmUp())
			if err != nil {
				return nil, fmt.Errorf("%s, seed %d: %w", p.Policies[i], seed, err)
			}
			return s, nil
		})
	if err != nil {
		return nil, err
	}
	return &Result{Runs: report.RunsOf(p.Policies, samples), Seeds: samples, Pace: stretch,
		PerHour: float64(len(pr.requests)) / (pr.span(stretch)).Hours()}, nil
}

func (p *prompts) span(stretch float64) time.Duration {
	return time.Duration(stretch * float64(p.requests[len(p.requests)-1].at+p.quantum))
}

func (p *Plan) try(ctx context.Context, pr *prompts, spec string, jobs []*job, warmUp int) (report.Sample, error) {
	r, err := newRun(p, spec, pr, jobs, warmUp)
	if err != nil {
		return nil, err
	}
	if err := r.all(ctx); err != nil {
		return nil, err
	}
	s := r.meter.sample()
	s[report.Load] = p.Load
	return s, nil
}

// pace is by how much the trace must be stretched for the load, before any
// burst: hits depend on it, so it is approached from below.
func (p *Plan) pace(ctx context.Context, pr *prompts) (float64, error) {
	total := 0.0 // ms, without a hit
	for _, r := range pr.requests {
		total += p.Engines.Line.Ms(float64(r.prompt), 0)
	}
	stretch := total / float64(p.Engines.Ranks) / p.Load / millis(pr.span(1))
	if p.Engines.Decode != nil {
		stretch *= 2 // a chunk shares its step
	}
	slow, fast := 0.0, 0.0 // the nearest that are known to be so; 0: none
	for range paceRounds {
		s, err := p.try(ctx, pr, reference, pr.draw(pr.block(1, 1), 1, stretch, 0), pr.warmUp())
		if err != nil {
			return 0, fmt.Errorf("%s: %w", reference, err)
		}
		off := s[report.Utilisation] / p.Load
		if math.Abs(off-1) < paceSlack {
			return stretch, nil
		}
		if off < 1 {
			slow = stretch
		} else {
			fast = stretch
		}
		if stretch *= off; slow > 0 && fast > 0 && (stretch >= slow || stretch <= fast) {
			stretch = math.Sqrt(slow * fast)
		}
	}
	if slow > 0 {
		return slow, nil // full engines that decode get slower: not every load has a pace
	}
	return stretch, nil
}

const (
	paceRounds = 12
	paceSlack  = 0.005
)
