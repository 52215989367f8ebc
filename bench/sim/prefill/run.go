package prefill

import (
	"cmp"
	"context"
	"fmt"
	"strconv"
	"time"

	"evenkeel/prefill"
)

// model is the name that all requests and engines have.
const model = "simulated"

// forever is longer than any run.
const forever = 100 * 365 * 24 * time.Hour

// run is one policy on one seed: a prefill.Scheduler in virtual time, engines, and what
// happens next.
type run struct {
	scheduler *prefill.Scheduler
	now       time.Duration
	engines   []*engine
	scrape    time.Duration
	jobs      []*job
	meter     *meter

	arrived  int
	chosen   []*job // that the tier let go and that engines have not got yet
	pinned   []*job // prefilled and not fetched, in order
	released int
	scraped  time.Duration // when next
}

// start of virtual time: not the zero time, which means never.
var start = time.Unix(1_000_000_000, 0)

// newRun makes a tier as the server does, but for its time. The first jobs warm it up.
func newRun(p *Plan, spec string, pr *prompts, jobs []*job, warmUp int) (*run, error) {
	r := &run{jobs: jobs, scrape: prefill.Default().Scrape.Interval}
	blocks := int(p.Engines.Capacity / blockTokens)
	told := int64(float64(p.Engines.Capacity) * p.capacityFactor())
	var candidates []prefill.Candidate
	for i := range p.Engines.Ranks {
		e := &engine{Engines: &p.Engines, cache: newCache(blocks, pr.blockNames()), slow: 1}
		if i == 0 {
			e.slow = cmp.Or(p.Engines.Slow, 1)
		}
		r.engines = append(r.engines, e)
		name := "p" + strconv.Itoa(i)
		candidates = append(candidates, prefill.Candidate{
			ID: name + "/0", Instance: name, Models: []string{model}, CapacityTokens: told, BlockTokens: blockTokens, Live: true,
			Decodes: p.Engines.Decode != nil,
		})
	}
	cfg := p.tier(spec)
	cfg.Clock = func() time.Time { return start.Add(r.now) }
	cfg.Queue.Max, cfg.Queue.Timeout = len(jobs), forever
	cfg.Scraper = func(_ context.Context, c prefill.Candidate) (prefill.Sample, error) {
		n, err := engineOf(c.ID)
		return r.engines[n].sample(), err
	}
	var err error
	if r.scheduler, err = prefill.New(cfg); err != nil {
		return nil, err
	}
	r.scheduler.SetCandidates(candidates)
	r.meter = newMeter(jobs, warmUp, p.Engines.Ranks)
	return r, nil
}

// engineOf is the number in a candidate's ID.
func engineOf(id string) (int, error) { return strconv.Atoi(id[1 : len(id)-len("/0")]) }

// all runs until every request was answered and its KV is free.
func (r *run) all(ctx context.Context) error {
	for events := 0; r.released < len(r.jobs); events++ {
		if events%1024 == 0 && ctx.Err() != nil {
			return ctx.Err()
		}
		if err := r.next(); err != nil {
			return err
		}
	}
	return nil
}

// next moves time on to whatever happens first. What ends goes before what
// begins.
func (r *run) next() error {
	at, engine := forever, -1
	for i, e := range r.engines {
		if e.running && e.ends < at {
			at, engine = e.ends, i
		}
	}
	what := func() error { return r.end(engine) }
	sooner := func(t time.Duration, f func() error) {
		if t < at {
			at, what = t, f
		}
	}
	if len(r.pinned) > 0 {
		sooner(r.pinned[0].first+r.engines[0].Hold, r.fetch)
	}
	if t, ok := r.scheduler.NextWake(); ok {
		sooner(t.Sub(start), r.wake)
	}
	sooner(r.scraped, r.scrapeAll)
	if r.arrived < len(r.jobs) {
		sooner(r.jobs[r.arrived].arrived, r.arrive)
	}
	r.now = max(r.now, at)
	return what()
}

func (r *run) arrive() error {
	j := r.jobs[r.arrived]
	r.arrived++
	r.scheduler.Offer(prefill.Request{
		ID: strconv.Itoa(j.number), Model: model, PromptTokens: j.prompt, Counted: true, Session: j.session,
		Prompt: prefill.Prompt{Keys: j.keys, BlockTokens: blockTokens},
	}, func(lease *prefill.Lease, err error) {
		j.lease, j.refused = lease, err
		r.chosen = append(r.chosen, j)
	})
	return r.send()
}

func (r *run) wake() error {
	r.scheduler.Wake()
	return r.send()
}

func (r *run) scrapeAll() error {
	r.scraped = r.now + r.scrape
	r.meter.look(r.now, r.engines)
	for i := range r.engines {
		r.scheduler.Scrape(context.Background(), "p"+strconv.Itoa(i)+"/0")
	}
	return r.send()
}

// send gives the engines what the tier let go.
func (r *run) send() error {
	for _, j := range r.chosen {
		if j.refused != nil {
			return fmt.Errorf("request %d: %w", j.number, j.refused)
		}
		n, err := engineOf(j.lease.Candidate.ID)
		if err != nil {
			return err
		}
		j.engine, j.expected = n, j.lease.HitTokens
		r.engines[n].admit(j, r.now)
	}
	r.chosen = r.chosen[:0]
	return nil
}

// end is the end of an engine's step.
func (r *run) end(n int) error {
	e := r.engines[n]
	prefilled, finished := e.end(r.now)
	if j := prefilled; j != nil {
		r.meter.prefilled(j)
		j.lease.Answered(prefill.Usage{PromptTokens: j.prompt, CachedTokens: j.cached}, start.Add(forever))
		if e.Decode == nil {
			r.pinned = append(r.pinned, j)
		}
	}
	for _, j := range finished {
		j.finished = r.now
		r.release(j)
	}
	e.start(r.now)
	return r.send()
}

// fetch ends the hold of the hand-off that is oldest.
func (r *run) fetch() error {
	j := r.pinned[0]
	r.pinned = r.pinned[1:]
	j.finished = r.now
	r.release(j)
	r.engines[j.engine].start(r.now)
	return r.send()
}

func (r *run) release(j *job) {
	r.released++
	r.engines[j.engine].free(j)
	j.lease.Release()
}

// tier is the configuration of a server, for a policy.
func (p *Plan) tier(spec string) prefill.Config {
	cfg := prefill.Default()
	cfg.Policy, cfg.Policies = spec, p.Definitions
	if p.Push > 0 {
		cfg.Push.MaxUnanswered = p.Push
	}
	c, latency := &cfg.Calibration, p.Engines.Line
	if c.TPMs, c.T0Ms = latency.TPMs/2, latency.T0Ms/2; p.TellLine { // else it learns, from far off
		c.TPMs, c.T0Ms, c.Beta2, c.Known = latency.TPMs, latency.T0Ms, latency.Beta2, true
	}
	cfg.Hotspot.Enabled, cfg.Affinity.Enabled = !p.NoHotspots, p.Affinity
	return cfg
}
