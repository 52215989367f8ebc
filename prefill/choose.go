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
	noPlace blocked = iota + 1 // the pool has none left
	noGate                     // all gates closed
	noRoom                     // no prefiller can start it
	held                       // it waits, and others may pass; if its best prefiller is busy, it is charged there in this round
	away                       // it goes to another region
	nobody                     // neither this request nor any other first attempt of its line can pass in this round
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

// misses reports whether every prefill in the view is predicted to end after the request's deadline. It is false if a
// candidate has no prediction; ranks that also decode never have one.
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

// tokensOf is the prompt's length in tokens: counted, or estimated by the learned ratio of bytes to tokens.
func (d *chooser) tokensOf(r *Request) int {
	if r.Counted {
		return max(1, r.PromptTokens)
	}
	return d.cache.Length(&r.Prompt, r.Model, r.PromptTokens)
}

// mostAlternatives bounds the candidates that a trace lists.
const mostAlternatives = 8

// trace explains the choice from the present view. asked is false if no policy was asked, because the session's
// engine was kept; the trace then has no scores.
func (d *chooser) trace(p *policy.Policy, chosen int, reason string, asked bool) *Trace {
	g := &Trace{Reason: reason, Eligible: len(d.view)}
	if asked {
		g.Best = p.Explain(d.view, chosen, mostAlternatives)
	} else {
		g.Best = []policy.Row{{Candidate: d.view[chosen].ID, Chosen: true}}
	}
	return g
}

// count records a choice in the metrics, and returns its reason.
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

// canStart says whether the candidate's engine would begin with one more probe soon. An engine gets as many probes as
// it needs so that it never waits for the next one. It gets no more, because a probe that was sent cannot go to
// another engine any more. For a request that could have gone to another region, the rule that kept it here decides.
// A request that is bound before its prefill may be sent a little earlier, because its decode engine needs time to
// find room for it.
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

// mayPool says whether one more request may wait for the ranks of a group that prefills and decodes: as many may wait
// as slots are free, and half as many again, so that there is a choice when slots become free.
func (d *chooser) mayPool(c *candidate, model string) bool {
	if d.cfg.Free == nil {
		return true
	}
	free, own := d.cfg.Free(c.Board, model)
	_, unsent := c.before(model, own)
	return unsent < max(1, free+free/2)
}

// before counts the unanswered charges that one more request for a model would come behind: probing counts all,
// unsent those whose probe was not sent yet. own says that the model has ranks of its own. The charges of such a
// model are counted apart, because they take no slot that other requests wait for.
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

// countApart also counts a charge among those of its model alone, if the model has ranks of its own.
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

// leadsAt is the time from which a candidate may get a prompt that is bound before its prefill, although its engine
// cannot begin it yet; false: the end of the engine's work is not known, or it gets no such prompts. Where decode
// engines call back, the prefill engine cannot begin before the callback, so the lead is at least as long as a
// callback usually takes.
func (s *state) leadsAt(c *candidate) (at time.Time, known bool) {
	if c.Profile == nil || !c.Profile.Early() || c.account.Stalled(s.now) {
		return at, false
	}
	lead := max(s.cfg.Push.Lead, s.fit.Way(c.Profile.Name).Callback())
	at, known = c.account.Ends()
	return at.Add(-lead), known && lead > 0
}

// drop drops the unwanted candidates, in place, if enough is true of one of the others. Else it drops none, and
// counts that the filter was skipped.
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

// filterFull drops the candidates that cannot start a request and are not worth waiting for: stalled engines, and
// every busy one if the policy does not look at load, because it would wait for the same candidate for ever. At least
// one candidate can start the request.
func (d *chooser) filterFull(p *policy.Policy, r *Request, candidates []*candidate) []*candidate {
	return d.drop(filterStalled, candidates, func(c *candidate) bool {
		return !d.canStart(r, c) && (p.LoadBlind() || !c.Mixed && c.account.Stalled(d.now))
	}, anyOne)
}

// reaches reports whether the request may go to the candidate at all: it names this candidate or none, and may go to
// the candidate's region.
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

// filterCircuit keeps the live candidates that a request reaches and whose circuit lets it pass. If no circuit does,
// it keeps all: a request that may fail is better than one that must.
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

// first drops, in place, the candidates that come second. It keeps them if there are no others, if each of the others
// was tried, or if the request names a candidate. A second candidate whose KV no rank would fetch is dropped even
// after the others were tried.
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

// promptBytes is the prompt's length in bytes; four for each token where the bytes were not counted.
func (r *Request) promptBytes() int {
	return cmp.Or(r.PromptBytes, 4*r.PromptTokens)
}

// again is the request as it may be charged to another candidate later, after its turn.
func (r *Request) again() *Request {
	again := *r
	again.Reserved, again.Returned, again.Exclude, again.Elsewhere, again.Holder = true, true, nil, nil, nil
	again.Deadline = time.Time{} // it has a decode rank already
	return &again
}

// prefiller returns the numbers that decide how many probes a candidate may have.
func (d *chooser) prefiller(c *candidate) Prefiller {
	ran, answered := c.account.SinceIdle()
	p := Prefiller{
		Region: c.Region, Unanswered: c.account.Leases[ledger.Probing], Held: c.account.Live(),
		Ran: int(math.Ceil(ran)), Answered: answered,
	}
	if c.Mixed { // requests that its ranks run already do not keep others waiting: only unsent ones count
		p.Unanswered, p.Held = c.account.Unsent(), c.account.Unsent()
	}
	if c.Profile != nil {
		p.MaxSeqs = c.Profile.MaxNumSeqs
	}
	if c.Limit > 0 {
		p.Foreign = max(0, d.cfg.Push.MaxUnanswered-c.Limit) // fresh in service: the probes that it may not have yet count as taken
	}
	if foreign, all, ok := c.account.Strangers(d.now); ok {
		p.Foreign, p.Pending = max(p.Foreign, int(math.Ceil(foreign))), int(math.Ceil(all))
	}
	p.Foreign = max(p.Foreign, c.account.Shared.Unanswered)
	return p
}
