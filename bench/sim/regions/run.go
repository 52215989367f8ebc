package regions

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"evenkeel/bench/lab/reftext"
	"evenkeel/bench/lab/report"
)

// simulation is one run.
type simulation struct {
	clock
	scenario *Scenario
	arm      *arm
	probeMs  float64
	rng      *rand.Rand // of probes: clients have their own
	salt     uint64     // of the names of prompts and requests, so that no two seeds share any

	replicas    []*replica
	dispatchers []*dispatcher
	clients     []*client
	requests    int
	match       []int32
	meter       meter
	failed      error

	cut  map[[2]int]bool // pairs of regions between which nothing passes
	held []heldMessage
}

var replicaNames = func() (names [512]string) {
	for i := range names {
		names[i] = fmt.Sprintf("replica-%d", i)
	}
	return names
}()

func newSimulation(sc *Scenario, a *arm, seed uint64) (*simulation, error) {
	s := &simulation{scenario: sc, arm: a, probeMs: sc.ProbeMs, rng: rand.New(rand.NewPCG(seed, 77)), salt: reftext.Mix(seed),
		cut: map[[2]int]bool{}}
	if a.probeMs > 0 {
		s.probeMs = a.probeMs
	}
	s.meter.s = s
	byRegion := make([][]*replica, len(sc.Regions))
	add := func(region int) {
		r := newReplica(s, sc.Engine, len(s.replicas), region)
		s.replicas, byRegion[region] = append(s.replicas, r), append(byRegion[region], r)
	}
	if a.replicas > 0 {
		for i := range a.replicas {
			add(i % len(sc.Regions))
		}
	} else {
		for i := range sc.Regions {
			for range sc.Regions[i].Replicas {
				add(i)
			}
		}
	}
	if a.central {
		byRegion = [][]*replica{s.replicas}
	}
	for i, replicas := range byRegion {
		s.dispatchers = append(s.dispatchers, &dispatcher{s: s, id: fmt.Sprintf("region-%d", i), region: i, replicas: replicas})
	}
	for _, d := range s.dispatchers {
		if err := d.start(); err != nil {
			return nil, err
		}
		s.after(s.scenario.ScrapeMs*s.rng.Float64(), d.scrape)
	}
	for i := range sc.Regions {
		for n := range sc.Regions[i].Load.most() {
			rng := rand.New(rand.NewPCG(s.salt, uint64(i)<<32|uint64(n)))
			c := &client{s: s, region: i, number: n, rng: rng, user: rng.Uint64()}
			s.clients = append(s.clients, c)
			s.after(2000*c.rng.Float64(), c.nextProgram)
		}
	}
	for i := range sc.Faults {
		sc.Faults[i].plan(s)
	}
	s.after(1000, s.wake)
	s.after(0, s.meter.sample)
	return s, nil
}

// wake lets clients begin that sleep while the day has work for them.
func (s *simulation) wake() {
	for _, c := range s.clients {
		if c.asleep {
			c.nextProgram()
		}
	}
	s.after(1000, s.wake)
}

// named is the dispatcher of that id.
func (s *simulation) named(id string) *dispatcher {
	return s.dispatchers[slices.IndexFunc(s.dispatchers, func(d *dispatcher) bool { return d.id == id })]
}

// start has a dispatcher that died begin anew.
func (s *simulation) start(d *dispatcher) {
	if err := d.start(); err != nil && s.failed == nil { // the same configuration worked before
		s.failed = err
	}
}

// next lets happen what is due first: a planned call, or an arrival queue that time
// alone lets move on. It reports whether there was something before until.
func (s *simulation) next(until float64) bool {
	var wakes *dispatcher
	for _, d := range s.dispatchers {
		if at, ok := d.scheduler.NextWake(); ok && !d.dead {
			if ms := float64(at.Sub(start)) / float64(time.Millisecond); ms <= until && (len(s.queue) == 0 || ms < s.queue[0].at) {
				until, wakes = ms, d
			}
		}
	}
	if wakes != nil {
		s.now = max(s.now, until)
		wakes.scheduler.Wake()
	} else if !s.clock.next(until) {
		return false
	}
	for _, d := range s.dispatchers {
		d.settle()
	}
	return true
}

// run is over at the end of the measured part.
func (s *simulation) run(ctx context.Context) error {
	end := s.scenario.endMs()
	for n := 0; s.next(end); n++ {
		if n%4096 == 0 && ctx.Err() != nil {
			return ctx.Err()
		}
	}
	s.now = end
	s.audit()
	return s.failed
}

// audit compares what is with what was counted: no request vanishes.
func (s *simulation) audit() {
	live := 0
	for _, c := range s.clients {
		live += c.live
	}
	ended := 0
	for _, n := range s.meter.outcomes {
		ended += n
	}
	if s.meter.sent != live+ended {
		s.meter.violations++
	}
	for _, r := range s.replicas {
		tokens := 0
		for _, j := range r.batch {
			tokens += j.need()
		}
		if tokens != r.tokens || tokens > r.KVTokens {
			s.meter.violations++
		}
	}
}

// Plan is what is compared: arms on a scenario, over seeds.
type Plan struct {
	Scenario *Scenario
	Arms     []string
	Seeds    int
	Progress func(done, total int)
}

// Run runs all arms and sums up what each gave.
func (p *Plan) Run(ctx context.Context) ([]report.Run, error) {
	samples, err := p.Samples(ctx)
	if err != nil {
		return nil, err
	}
	names := make([]string, len(p.Arms))
	for i, text := range p.Arms {
		names[i] = strings.TrimSpace(text)
	}
	return report.RunsOf(names, samples), nil
}

// Samples runs all arms, each with the same seeds, on all processors. What each gave
// stands under its arm, in the order of the seeds.
func (p *Plan) Samples(ctx context.Context) ([][]report.Sample, error) {
	if p.Seeds < 1 {
		return nil, fmt.Errorf("%d seeds: at least 1", p.Seeds)
	}
	if len(p.Arms) == 0 {
		return nil, errors.New("no policy to compare")
	}
	arms := make([]*arm, len(p.Arms))
	for i, text := range p.Arms {
		var err error
		if arms[i], err = parseArm(text); err != nil {
			return nil, err
		}
	}
	return report.Trials(ctx, len(arms), p.Seeds, p.Progress, func(ctx context.Context, i int, seed uint64) (report.Sample, error) {
		return runOnce(ctx, p.Scenario, arms[i], seed)
	})
}

func runOnce(ctx context.Context, sc *Scenario, a *arm, seed uint64) (report.Sample, error) {
	s, err := newSimulation(sc, a, seed)
	if err != nil {
		return nil, err
	}
	if err := s.run(ctx); err != nil {
		return nil, err
	}
	return s.meter.result(), nil
}
