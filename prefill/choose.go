package prefill

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"evenkeel/prefill/ledger"
	"evenkeel/prefill/policy"
	"evenkeel/prefill/steer"
)

// blocked is why a request cannot be served now.
type blocked uint8

const (
	noPlace blocked = iota + 1 // in the pool
	noGate                     // all gates closed
	noRoom                     // no prefiller can start it
	held                       // its best one cannot; it is charged there for those behind it
	away                       // it goes to another region
	nobody                     // nor can any other that has no lease yet
	missed                     // no prefill would end before its deadline
)

// look measures the eligible candidates for a request, into d.view, and says
// whether a line of prefill times is known for all.
func (d *chooser) look(m *model, r *Request, eligible []*candidate) (known bool) {
	d.view = slices.Grow(d.view[:0], len(eligible))[:len(eligible)]
	known = true
	tokens := d.tokensOf(r)
	block := r.Prompt.BlockSize(tokens)
	d.found = d.cache.Match(&r.Prompt, &r.seen.cache, d.now)
	for i, c := range eligible {
		line, fitted := d.line(m.name, c)
		known = known && fitted
		d.measure(&d.view[i], c, line)
		d.view[i].Fit(float64(tokens), math.Floor(block*float64(c.cache.Blocks(d.found, &r.Prompt))))
	}
	policy.Aggregate(d.view)
	return known
}

// misses says of the view that no prefill in it is predicted to end before the request's deadline. Nobody predicts
// the prefills of ranks that decode beside them.
func (d *chooser) misses(r *Request, eligible []*candidate) bool {
	if r.Deadline.IsZero() {
		return false
	}
	left := float64(r.Deadline.Sub(d.now)) / float64(time.Millisecond)
	for i, c := range eligible {
		line, known := d.line(r.Model, c)
		if v := &d.view[i]; c.Mixed || !known || v.BacklogMs+v.RTTMs+line.Ms(v.NewTokens, v.HitTokens) <= left {
			return false
		}
	}
	return true
}

// tokensOf is the prompt's length: counted, or by the learned ratio.
func (d *chooser) tokensOf(r *Request) int {
	if r.Counted {
		return max(1, r.PromptTokens)
	}
	return d.cache.Length(&r.Prompt, r.Model, r.PromptTokens)
}

// mostGrounds are the candidates that grounds name.
const mostAlternatives = 8

// trace explains the choice from the present view.
func (d *chooser) trace(p *policy.Policy, chosen int, reason string, asked bool) *Trace {
	g := &Trace{Reason: reason, Eligible: len(d.view)}
	if asked {
		g.Best = p.Explain(d.view, chosen, mostAlternatives)
	} else {
		g.Best = []policy.Row{{Candidate: d.view[chosen].ID, Chosen: true}}
	}
	return g
}

// count tells the metrics of a choice, and returns its reason.
func (d *chooser) count(l *Lease, choice policy.Choice, kept string, watch steer.State, eligible int) (reason string) {
	reason = "policy"
	switch {
	case l.canary:
		reason = "canary"
	case kept == steer.Kept:
		reason = "affinity"
	case eligible == 1:
		reason = "only"
	case choice.Fallback:
		reason = "fallback"
	}
	if choice.Bad > 0 {
		d.metrics.policyErrors.WithLabelValues(l.Policy).Add(float64(choice.Bad))
	}
	if choice.FilterSkipped {
		d.metrics.filterSkipped.WithLabelValues(filterPolicy).Inc()
	}
	if kept != "" {
		d.metrics.affinity.WithLabelValues(kept).Inc()
	}
	if watch == steer.Filter {
		d.metrics.hotFiltered.Inc()
	}
	d.metrics.decided(l.Policy, reason)
	return reason
}

// canStart says whether a probe would be taken up soon: an engine gets so many
// that it never waits for the next, and no more, for what it has been given
// cannot go elsewhere any more. A request that could have gone to
// another region is told by the same rule that kept it here. One that is bound before its
// prefill may come a little earlier, for its decode engine needs time to find room for it.
func (d *chooser) canStart(r *Request, c *candidate) bool {
	if c.Mixed {
		return d.mayPool(c, r.Model)
	}
	if r.Elsewhere != nil {
		p := d.prefiller(c)
		return r.Elsewhere.Takes(&p)
	}
	if c.account.Ahead(d.now) < float64(d.cfg.Push.MaxUnanswered) {
		return true
	}
	_, known := d.fit.Law(r.Model, c.Hardware)
	at, leads := d.leadsAt(c)
	return known && leads && !at.After(d.now)
}

// mayPool says whether one more request may wait for the ranks of a group that prefills and decodes: as many may as
// have a slot, and half as many again, so that there is something to choose from when slots become free.
func (d *chooser) mayPool(c *candidate, model string) bool {
	if d.cfg.Free == nil {
		return true
	}
	free, own := d.cfg.Free(c.Board, model)
	_, unsent := c.before(model, own)
	return unsent < max(1, free+free/2)
}

// before counts the charges that one more for a model would come behind, of those that are not answered: all, and those that were not
// sent. Those of a model that has ranks of its own are counted apart, because they take no slot that the others wait for.
func (c *candidate) before(model string, own bool) (probing, unsent int) {
	if own {
		if a := c.apart[model]; a != nil {
			return a.Probing, a.Unsent
		}
		return 0, 0
	}
	probing, unsent = c.account.Leases[ledger.Probing], c.account.Unsent()
	for _, a := range c.apart {
		probing, unsent = probing-a.Probing, unsent-a.Unsent
	}
	return probing, unsent
}

// countApart counts a charge apart, if its model has ranks of its own.
func (d *chooser) countApart(c *candidate, l *Lease) {
	own := false
	if d.cfg.Free != nil {
		_, own = d.cfg.Free(c.Board, l.model)
	}
	maps.DeleteFunc(c.apart, func(_ string, a *ledger.Apart) bool { return a.Probing == 0 })
	if !own {
		return
	}
	if c.apart == nil {
		c.apart = map[string]*ledger.Apart{}
	}
	if c.apart[l.model] == nil {
		c.apart[l.model] = &ledger.Apart{}
	}
	l.charge.CountApart(c.apart[l.model])
}

// leadsAt is from when on a candidate may be given a prompt that is bound before its prefill, although it cannot
// begin yet; false: nobody knows, or it has no such prompts. Where decode engines call back, it would stand idle until
// one has, so it is given one so much earlier at least.
func (s *state) leadsAt(c *candidate) (at time.Time, known bool) {
	if c.Profile == nil || !c.Profile.Early() || c.account.Stalled(s.now) {
		return at, false
	}
	lead := max(s.cfg.Push.Lead, s.fit.Way(c.Profile.Name).Callback())
	at, known = c.account.Ends()
	return at.Add(-lead), known && lead > 0
}

// drop drops, in place, the candidates that are unwanted while enough says that one of
// the others will do; else it counts a filter that gave way.
func (d *chooser) drop(filter string, candidates []*candidate, unwanted, enough func(*candidate) bool) []*candidate {
	if !slices.ContainsFunc(candidates, func(c *candidate) bool { return !unwanted(c) && enough(c) }) {
		d.metrics.filterSkipped.WithLabelValues(filter).Inc()
		return candidates
	}
	return slices.DeleteFunc(candidates, unwanted)
}

func anyOne(*candidate) bool { return true }

// filterStale drops the candidates whose gauges are stale while another can start
// the request. The work of such an engine is not known, so it comes last, but no
// request waits because an engine is slow to tell its gauges.
func (d *chooser) filterStale(r *Request, candidates []*candidate) []*candidate {
	stale := func(c *candidate) bool { return c.account.Stale() && !c.Mixed }
	if !slices.ContainsFunc(candidates, stale) {
		return candidates
	}
	return d.drop(filterStale, candidates, stale, func(c *candidate) bool { return d.canStart(r, c) && !c.account.Stalled(d.now) })
}

// filterFull drops the candidates that cannot start a request and are not worth
// waiting for: stuck ones, and all for a policy that does not look at load and would
// wait for ever for the same. One at least can start it.
func (d *chooser) filterFull(p *policy.Policy, r *Request, candidates []*candidate) []*candidate {
	return d.drop(filterStalled, candidates, func(c *candidate) bool {
		return !d.canStart(r, c) && (p.LoadBlind() || !c.Mixed && c.account.Stalled(d.now))
	}, anyOne)
}

// reaches reports whether the request may go to the candidate at all: it names it, or
// none, and may go to its region.
func (r *Request) reaches(c *candidate) bool {
	return (r.Target == "" || c.ID == r.Target) && (r.May == nil || c.Region == "" || r.May(c.Region))
}

// CheckTarget says what is wrong with a candidate that a request for the model
// names.
func (t *Tier) CheckTarget(model, id string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if m := t.models[model]; m != nil && slices.ContainsFunc(m.servers, func(c *candidate) bool { return c.ID == id }) {
		return nil
	}
	return fmt.Errorf("%w: %q is no prefill engine for model %q; GET /prefill lists them", ErrBadTarget, id, model)
}

// filterCircuit keeps the live candidates that a request reaches and that are not out.
// If all are out, they are all tried: a request that may fail beats one that must.
func (d *chooser) filterCircuit(r *Request, servers []*candidate) (kept []*candidate, skipped bool) {
	d.eligible = d.eligible[:0]
	for _, c := range servers {
		if c.Live && c.circuit.Allows(d.now) && r.reaches(c) {
			d.eligible = append(d.eligible, c)
		}
	}
	if len(d.eligible) > 0 {
		return r.first(d.eligible), false
	}
	for _, c := range servers {
		if c.Live && r.reaches(c) {
			d.eligible = append(d.eligible, c)
		}
	}
	return d.eligible, true
}

// first drops, in place, the candidates that come after others, unless only these are left, each of the others was tried, or one is
// named. Those whose KV no rank would fetch are of no use after the others either.
func (r *Request) first(candidates []*candidate) []*candidate {
	second := func(c *candidate) bool { return c.Second || slices.Contains(c.Behind, r.Model) }
	fresh := func(c *candidate) bool { return !second(c) && !slices.Contains(r.Exclude, c.ID) }
	useful := func(c *candidate) bool { return second(c) && !c.Idle }
	switch {
	case r.Target != "" || !slices.ContainsFunc(candidates, func(c *candidate) bool { return !second(c) }):
		return candidates
	case slices.ContainsFunc(candidates, fresh) || !slices.ContainsFunc(candidates, useful):
		return slices.DeleteFunc(candidates, second)
	}
	return slices.DeleteFunc(candidates, func(c *candidate) bool { return c.Idle })
}

// filterGate drops, in place, the candidates whose KV gate lets no probe pass.
func (d *chooser) filterGate(candidates []*candidate) []*candidate {
	return slices.DeleteFunc(candidates, func(c *candidate) bool {
		open, _ := c.account.Passes(d.now)
		return !open
	})
}

// filterFresh drops the candidates that are fresh in service and may have no more
// probes.
func (d *chooser) filterFresh(candidates []*candidate) []*candidate {
	full := func(c *candidate) bool { return c.Limit > 0 && c.account.Leases[ledger.Probing] >= c.Limit }
	return d.drop(filterFresh, candidates, full, anyOne)
}

// filterTried keeps the candidates on instances that were not tried, else those that
// were not tried themselves, else all.
func (d *chooser) filterTried(candidates []*candidate, exclude []string) []*candidate {
	tried := func(c *candidate) bool { return slices.Contains(exclude, c.ID) }
	instance := func(c *candidate) bool {
		return tried(c) || slices.ContainsFunc(exclude, func(id string) bool {
			o := d.candidates[id]
			return o != nil && o.Instance == c.Instance
		})
	}
	if slices.ContainsFunc(candidates, func(c *candidate) bool { return !instance(c) }) {
		return slices.DeleteFunc(candidates, instance)
	}
	d.metrics.filterSkipped.WithLabelValues(filterInstance).Inc()
	return d.drop(filterExcluded, candidates, tried, anyOne)
}

// reserve books the choice: charge, circuit, canary, and what its prefill will
// leave in the cache.
func (d *chooser) reserve(c *candidate, p *policy.Policy, r *Request, v *policy.Candidate, since time.Time) *Lease {
	_, canary := c.account.Passes(d.now)
	weight := ledger.WeightOf(v, r.promptBytes())
	d.lastLease++
	l := &Lease{
		Candidate: c.Candidate,
		Policy:    p.Name(),
		Wait:      d.now.Sub(since),
		Prompt:    int(v.PromptTokens), HitTokens: int(v.HitTokens),
		Others:  c.account.Leases[ledger.Probing],
		tier:    d.tier,
		c:       c,
		number:  d.lastLease,
		canary:  canary,
		model:   r.Model,
		crowded: c.account.Crowded(c.Decodes, d.now),
	}
	if _, known := d.fit.Law(r.Model, c.Hardware); known {
		l.predicted = float64(weight.PredictedUs) / 1000
	}
	c.circuit.Send(l.number, d.now)
	d.fit.Computes(weight.NewTokens)
	if c.Profile != nil && c.Profile.Early() { // its probe goes out once a decode rank is bound
		l.asked = r.again()
		c.account.Reserve(&l.charge, weight, r.Holder, d.now)
	} else {
		c.account.Charge(&l.charge, weight, r.Holder, d.now)
	}
	d.countApart(c, l)
	c.cache.Expect(&l.expected, &r.Prompt, r.Model, int(v.PromptTokens), l.HitTokens, d.found, c.account.Capacity(), d.now)
	return l
}

// promptBytes is how long the prompt is, four a token where nobody counted.
func (r *Request) promptBytes() int {
	return cmp.Or(r.PromptBytes, 4*r.PromptTokens)
}

// again is the request as it is charged to another candidate when its turn is over.
func (r *Request) again() *Request {
	again := *r
	again.Reserved, again.Returned, again.Exclude, again.Elsewhere, again.Holder = true, true, nil, nil, nil
	again.Deadline = time.Time{} // it has a decode rank already
	return &again
}

// prefiller is what decides how many probes a candidate may have.
func (d *chooser) prefiller(c *candidate) Prefiller {
	ran, answered := c.account.SinceIdle()
	p := Prefiller{
		Region: c.Region, Unanswered: c.account.Leases[ledger.Probing], Held: c.account.Live(),
		Ran: int(math.Ceil(ran)), Answered: answered,
	}
	if c.Mixed { // what its ranks compute keeps no other request from them
		p.Unanswered, p.Held = c.account.Unsent(), c.account.Unsent()
	}
	if c.Profile != nil {
		p.MaxSeqs = c.Profile.MaxNumSeqs
	}
	if c.Limit > 0 {
		p.Foreign = max(0, d.cfg.Push.MaxUnanswered-c.Limit) // fresh in service: so many fewer
	}
	if foreign, all, ok := c.account.Strangers(d.now); ok {
		p.Foreign, p.Pending = max(p.Foreign, int(math.Ceil(foreign))), int(math.Ceil(all))
	}
	p.Foreign = max(p.Foreign, c.account.Shared.Unanswered)
	return p
}
