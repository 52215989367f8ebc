package prefill

import (
	"fmt"
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
)

// tryServe chooses a candidate and charges the request to it, in one step: two
// requests at once never see the same state. The order of the
// filters is live, circuit, KV gate, tried before, stale, stalled; all but
// liveness and the gate give way when they would leave no candidate.
//
// All that are left are scored, the busy ones too. If the best cannot start the
// request, it waits for that one rather than go to a worse one that is free.
func (t *Tier) tryServe(m *model, p *policy.Policy, r *Request, since time.Time) (*Lease, blocked) {
	start := time.Now()
	switch t.elsewhere(m, r, since) {
	case ToHere:
	case ToThere:
		return nil, away
	case Waits:
		return nil, held
	case AllWait:
		return nil, nobody
	}
	lease, why := t.serve(m, p, r, since, start)
	if why != 0 && (r.Elsewhere != nil || r.Target != "") {
		why = held // who may go elsewhere must not wait behind it
	}
	return lease, why
}

// serve is tryServe for a request that is served here if at all.
func (t *Tier) serve(m *model, p *policy.Policy, r *Request, since, start time.Time) (*Lease, blocked) {
	eligible, skipped := t.filterCircuit(t.allowed(r, m.reachable(r)))
	eligible = t.filterGate(eligible)
	if len(eligible) == 0 {
		return nil, noGate
	}
	eligible = t.filterFresh(eligible)
	if !slices.ContainsFunc(eligible, func(c *candidate) bool { return t.canStart(r, c) }) {
		return nil, noRoom
	}
	if skipped {
		t.metrics.filterSkipped.WithLabelValues(filterCircuit).Inc()
	}
	if len(r.Exclude) > 0 {
		eligible = t.filterTried(eligible, r.Exclude)
	}
	eligible = t.filterCrowded(m, r, eligible)
	eligible = t.filterStale(r, eligible)
	eligible = t.filterFull(p, r, eligible)
	known := t.look(m, r, eligible)
	if !known {
		p = t.steer.WithoutLine(p)
	}
	query := policy.Query{ID: r.ID, Key: r.Session, Cursor: m.cursor}
	eligible, watch := t.filterHot(p, &query, r, m, eligible)
	at, kept := t.steer.Affinity.Keep(r.Session, t.view, t.now)
	choice := policy.Choice{Index: at}
	if kept != steer.Kept {
		choice = p.Choose(&query, t.view)
	}
	c, v := eligible[choice.Index], &t.view[choice.Index]
	if !t.canStart(r, c) {
		if c.account.Waiting == (ledger.Sums{}) {
			t.holding = append(t.holding, c)
		}
		c.account.Wait(ledger.WeightOf(v, r.promptBytes()))
		return nil, held
	}
	if !r.Reserved && t.hopeless(c) {
		return nil, held
	}
	if !r.Reserved && t.cfg.Places != nil && !t.cfg.Places.TryReserve() {
		return nil, noPlace
	}
	if p.Rounds() {
		m.cursor = c.order
	}
	lease := t.reserve(c, p, r, v, since)
	if kept != "" {
		t.steer.Affinity.Went(r.Session, c.ID, t.now)
	}
	t.metrics.shadow(t.steer.Shadow(&query, t.view, choice.Index))
	reason := t.count(lease, choice, kept, watch, len(eligible))
	if t.cfg.Explain {
		lease.Grounds = t.grounds(p, choice.Index, reason, kept != steer.Kept)
	}
	t.metrics.decisionSeconds.Observe(time.Since(start).Seconds())
	return lease, 0
}

// look measures the eligible candidates for a request, into t.view, and says
// whether a line of prefill times is known for all.
func (t *Tier) look(m *model, r *Request, eligible []*candidate) (known bool) {
	t.view = slices.Grow(t.view[:0], len(eligible))[:len(eligible)]
	known = true
	tokens := t.tokensOf(r)
	block := r.Prompt.BlockSize(tokens)
	t.found = t.cache.Match(&r.Prompt, &r.seen.cache, t.now)
	for i, c := range eligible {
		line, fitted := t.fit.Line(m.name, c.Hardware)
		known = known && fitted
		t.measure(&t.view[i], c, line)
		t.view[i].Fit(float64(tokens), math.Floor(block*float64(c.cache.Blocks(t.found, &r.Prompt))))
	}
	policy.Aggregate(t.view)
	return known
}

// tokensOf is the prompt's length: counted, or by the learned ratio.
func (t *Tier) tokensOf(r *Request) int {
	if r.Counted {
		return max(1, r.PromptTokens)
	}
	return t.cache.Length(&r.Prompt, r.Model, r.PromptTokens)
}

// Grounds are what a candidate was chosen on.
type Grounds struct {
	Reason   string       // policy, or only, canary, affinity, fallback
	Eligible int          // candidates
	Best     []policy.Row // the chosen first, then by score; without scores where none were asked for
}

// mostGrounds are the candidates that grounds name.
const mostGrounds = 8

// grounds explains the choice from the present view.
func (t *Tier) grounds(p *policy.Policy, chosen int, reason string, asked bool) *Grounds {
	g := &Grounds{Reason: reason, Eligible: len(t.view)}
	if asked {
		g.Best = p.Explain(t.view, chosen, mostGrounds)
	} else {
		g.Best = []policy.Row{{Candidate: t.view[chosen].ID, Chosen: true}}
	}
	return g
}

// count tells the metrics of a choice, and returns its reason.
func (t *Tier) count(l *Lease, choice policy.Choice, kept string, watch steer.State, eligible int) (reason string) {
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
		t.metrics.policyErrors.WithLabelValues(l.Policy).Add(float64(choice.Bad))
	}
	if choice.FilterSkipped {
		t.metrics.filterSkipped.WithLabelValues(filterPolicy).Inc()
	}
	if kept != "" {
		t.metrics.affinity.WithLabelValues(kept).Inc()
	}
	if watch == steer.Filter {
		t.metrics.hotFiltered.Inc()
	}
	t.metrics.decisions.WithLabelValues(l.Policy, reason).Inc()
	t.metrics.queueWait.Observe(l.Wait.Seconds())
	return reason
}

// canStart says whether a probe would be taken up soon: an engine gets so many
// that it never waits for the next, and no more, for what it has been given
// cannot go elsewhere any more. A request that could have gone to
// another region is told by the same rule that kept it here.
func (t *Tier) canStart(r *Request, c *candidate) bool {
	if r.Elsewhere != nil {
		p := t.prefiller(c)
		return r.Elsewhere.Takes(&p)
	}
	return c.account.Ahead(t.now) < float64(t.cfg.Push.MaxUnanswered)
}

// filterStale drops, in place, the candidates whose gauges are stale while
// another can start the request. The work of such an engine is not known, so it
// comes last, but no request waits because an engine is slow to tell its gauges.
func (t *Tier) filterStale(r *Request, candidates []*candidate) []*candidate {
	stale := func(c *candidate) bool { return c.account.Stale() }
	if !slices.ContainsFunc(candidates, stale) {
		return candidates
	}
	if !slices.ContainsFunc(candidates, func(c *candidate) bool { return !stale(c) && t.canStart(r, c) && !c.account.Stalled(t.now) }) {
		t.metrics.filterSkipped.WithLabelValues(filterStale).Inc()
		return candidates
	}
	return slices.DeleteFunc(candidates, stale)
}

// filterFull drops, in place, the candidates that cannot start a request and
// are not worth waiting for: stuck ones, and all for a policy that does not
// look at load and would wait for ever for the same. One at least can start it.
func (t *Tier) filterFull(p *policy.Policy, r *Request, candidates []*candidate) []*candidate {
	keep := func(c *candidate) bool { return t.canStart(r, c) || !p.LoadBlind() && !c.account.Stalled(t.now) }
	if !slices.ContainsFunc(candidates, keep) {
		t.metrics.filterSkipped.WithLabelValues(filterStalled).Inc()
		return candidates
	}
	kept := candidates[:0]
	for _, c := range candidates {
		if keep(c) {
			kept = append(kept, c)
		}
	}
	return kept
}

// reachable are the candidates that a request may go to at all.
func (m *model) reachable(r *Request) []*candidate {
	if r.Target == "" {
		return m.servers
	}
	for i, c := range m.servers {
		if c.ID == r.Target {
			return m.servers[i : i+1]
		}
	}
	return nil
}

// allowed keeps the candidates in regions that the request may go to.
func (t *Tier) allowed(r *Request, servers []*candidate) []*candidate {
	if r.May == nil {
		return servers
	}
	t.near = t.near[:0]
	for _, c := range servers {
		if c.Region == "" || r.May(c.Region) {
			t.near = append(t.near, c)
		}
	}
	return t.near
}

// CheckTarget says what is wrong with a candidate that a request for the model
// names.
func (t *Tier) CheckTarget(model, id string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if m := t.models[model]; m != nil && len(m.reachable(&Request{Target: id})) > 0 {
		return nil
	}
	return fmt.Errorf("%w: %q is no prefill candidate for model %q; GET /prefill lists them", ErrBadTarget, id, model)
}

// filterCircuit keeps the live candidates that are not out. If all are out,
// they are all tried: a request that may fail beats one that must.
func (t *Tier) filterCircuit(servers []*candidate) (kept []*candidate, skipped bool) {
	t.eligible = t.eligible[:0]
	for _, c := range servers {
		if c.Live && c.circuit.Allows(t.now) {
			t.eligible = append(t.eligible, c)
		}
	}
	if len(t.eligible) > 0 {
		return t.eligible, false
	}
	for _, c := range servers {
		if c.Live {
			t.eligible = append(t.eligible, c)
		}
	}
	return t.eligible, true
}

// filterGate keeps, in place, the candidates whose KV gate lets a probe pass.
func (t *Tier) filterGate(candidates []*candidate) []*candidate {
	open := candidates[:0]
	for _, c := range candidates {
		if ok, _ := c.account.Passes(t.now); ok {
			open = append(open, c)
		}
	}
	return open
}

// filterFresh keeps, in place, the candidates that are not fresh in service or
// may have one more probe nevertheless; all where that leaves nobody.
func (t *Tier) filterFresh(candidates []*candidate) []*candidate {
	full := func(c *candidate) bool { return c.Limit > 0 && c.account.Leases[ledger.Probing] >= c.Limit }
	others := slices.ContainsFunc(candidates, func(c *candidate) bool { return !full(c) })
	if !others {
		t.metrics.filterSkipped.WithLabelValues(filterFresh).Inc()
		return candidates
	}
	return slices.DeleteFunc(candidates, full)
}

// filterTried keeps the candidates on instances that were not tried, else
// those that were not tried themselves, else all.
func (t *Tier) filterTried(candidates []*candidate, exclude []string) []*candidate {
	elsewhere, others := 0, 0
	for _, c := range candidates {
		here, instance := t.tried(c, exclude)
		if !instance {
			elsewhere++
		}
		if !here {
			others++
		}
	}
	if elsewhere == 0 {
		t.metrics.filterSkipped.WithLabelValues(filterInstance).Inc()
	}
	if others == 0 {
		t.metrics.filterSkipped.WithLabelValues(filterExcluded).Inc()
		return candidates
	}
	t.untried = t.untried[:0]
	for _, c := range candidates {
		here, instance := t.tried(c, exclude)
		if elsewhere > 0 && !instance || elsewhere == 0 && !here {
			t.untried = append(t.untried, c)
		}
	}
	return t.untried
}

// tried says whether a request that names these candidates was there before,
// and whether it was on the same instance.
func (t *Tier) tried(c *candidate, exclude []string) (here, instance bool) {
	here = slices.Contains(exclude, c.ID)
	for _, id := range exclude {
		if o := t.candidates[id]; o != nil && o.Instance == c.Instance {
			return here, true
		}
	}
	return here, here
}

// reserve books the choice: charge, circuit, canary, and what its prefill will
// leave in the cache.
func (t *Tier) reserve(c *candidate, p *policy.Policy, r *Request, v *policy.Candidate, since time.Time) *Lease {
	_, canary := c.account.Passes(t.now)
	weight := ledger.WeightOf(v, r.promptBytes())
	t.lastLease++
	l := &Lease{
		Candidate: c.Candidate,
		Policy:    p.Name(),
		Wait:      t.now.Sub(since),
		HitTokens: int(v.HitTokens),
		Others:    c.account.Leases[ledger.Probing],
		tier:      t,
		c:         c,
		number:    t.lastLease,
		canary:    canary,
		model:     r.Model,
		alone:     c.account.Batch(t.now) == 0,
	}
	c.circuit.Send(l.number, t.now)
	t.fit.Computes(weight.NewTokens)
	c.account.Charge(&l.charge, weight, r.Holder, t.now)
	c.cache.Expect(&l.expected, &r.Prompt, r.Model, int(v.PromptTokens), l.HitTokens, t.found, c.account.Capacity(), t.now)
	return l
}

// promptBytes is how long the prompt is, four a token where nobody counted.
func (r *Request) promptBytes() int {
	if r.PromptBytes > 0 {
		return r.PromptBytes
	}
	return 4 * r.PromptTokens
}
