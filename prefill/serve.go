package prefill

import (
	"slices"
	"time"

	"evenkeel/prefill/ledger"
	"evenkeel/prefill/policy"
	"evenkeel/prefill/steer"
)

// tryServe serves a request if it can be served now. This is one step under the scheduler's lock,
// so that no two requests are decided by the same state. waitingSince is when the request entered
// the arrival queue.
//
// Without a lease, the reason says whether the request waits. By it the caller also decides which
// other requests of the model it need not try now. tryServe therefore returns a reason that
// concerns all of them, such as noneCanStart, only for a request that may go to every candidate of
// the model and to no other region.
func (d *chooser) tryServe(m *model, p *policy.Policy, r *Request, waitingSince time.Time) (*Lease, waitReason) {
	decisionStart := time.Now()
	if r.deadlinePassed(d.now) {
		return nil, deadlineMissed
	}
	where := d.askRegions(m, r, waitingSince)
	if reason := regionWaitReason(where); reason != canServe {
		return nil, reason
	}
	lease, reason := d.serveHere(m, p, r, waitingSince, decisionStart)
	if reason == canServe || reason == deadlineMissed { // deadlineMissed: the request is refused
		return lease, reason
	}
	return nil, m.whoElseWaits(r, reason)
}

func regionWaitReason(decision Where) waitReason {
	switch decision {
	case ToHere:
	case ToThere:
		return goesElsewhere
	case WaitsAlone: // those behind it need not wait
		return onlyThisWaits
	case ModelWaits: // retries need not wait
		return firstAttemptsWait
	}
	return canServe
}

// whoElseWaits returns the reason that tryServe reports: the request's own one only if what stops
// it stops others of the model, too.
func (m *model) whoElseWaits(r *Request, ownReason waitReason) waitReason {
	if r.Remote != nil { // its reason says nothing about other requests
		return onlyThisWaits
	}
	forbidden := func(c *candidate) bool { return !r.mayUse(c) }
	if r.Target != "" {
		targetForbidden := func(c *candidate) bool { return c.ID == r.Target && forbidden(c) }
		if slices.ContainsFunc(m.candidates, targetForbidden) { // others may be allowed in its region
			return onlyThisWaits
		}
		return sameTargetWaits // also if the target is no candidate any more
	}
	if slices.ContainsFunc(m.candidates, forbidden) { // others may go where this one may not
		return onlyThisWaits
	}
	return ownReason
}

// serveHere is tryServe for a request that stays in this region. The policy scores all candidates
// that the filters leave, busy ones included. If the best one is busy, the request waits for it,
// because a worse one would probably end the prefill later, even if it is free.
func (d *chooser) serveHere(m *model, p *policy.Policy, r *Request, waitingSince, decisionStart time.Time) (*Lease, waitReason) {
	eligible, why := d.applyFilters(m, p, r)
	if why != canServe {
		return nil, why
	}
	timesKnown := d.fillView(m, r, eligible)
	if d.allMissDeadline(r, eligible) {
		return nil, deadlineMissed
	}
	if !timesKnown { // a policy that predicts ends needs learned times
		p = d.steering.WithoutLatency(p)
	}
	query := policy.Query{ID: r.ID, Key: r.Session, Cursor: m.cursor}
	// A hot class is kept off its holders, even off the engine of the session: filterHot removes them
	// from eligible and from d.view.
	eligible, hotspot := d.filterHot(p, &query, r, m, eligible)
	choice, affinity := d.chooseFromView(p, &query) // steer.Kept: no policy was asked
	c, indicators := eligible[choice.Index], &d.view[choice.Index]
	if why := d.admit(r, c, indicators); why != canServe {
		return nil, why
	}

	// From here on, the result is only booked and recorded.
	if p.TakesTurns() {
		m.cursor = c.order
	}
	lease := d.makeLease(c, p, r, indicators, waitingSince)
	if affinity != "" { // a session, with affinity on
		d.rememberSession(r, c)
	}
	d.recordWait(r, lease)
	reason := d.recordChoice(lease, choice, affinity, hotspot, len(eligible))
	if d.cfg.Explain {
		byPolicy := affinity != steer.Kept // only then are there scores
		lease.Trace = d.trace(p, choice.Index, reason, byPolicy)
	}
	d.metrics.decisionSeconds.Observe(time.Since(decisionStart).Seconds())
	return lease, canServe
}

// chooseFromView chooses one of d.view: by the session if it may stay, else by the policy. affinity
// is the outcome of Affinity.Keep.
func (d *chooser) chooseFromView(p *policy.Policy, q *policy.Query) (choice policy.Choice, affinity string) {
	keptAt, affinity := d.steering.Affinity.Keep(q.Key, d.view, d.now)
	if affinity == steer.Kept {
		return policy.Choice{Index: keptAt}, affinity
	}
	return p.Choose(q, d.view), affinity
}

func (d *chooser) rememberSession(r *Request, c *candidate) {
	if r.EndsSession {
		d.steering.Affinity.EndSession(r.Session)
	} else {
		d.steering.Affinity.Record(r.Session, c.ID, d.now)
	}
}

// applyFilters returns the candidates among which the policy chooses; without any, the reason.
// preferGood then removes candidates that are worse than others, and always leaves one.
func (d *chooser) applyFilters(m *model, p *policy.Policy, r *Request) ([]*candidate, waitReason) {
	eligible, circuitsIgnored := d.filterCircuit(r, m.candidates)
	eligible = d.filterGate(eligible)
	if len(eligible) == 0 {
		return nil, gatesClosed
	}
	eligible = d.filterAtProbeLimit(eligible)
	isRetry := r.HasPlace
	if r.Batch && !isRetry { // a retry need not wait for free capacity again
		eligible = slices.DeleteFunc(eligible, func(c *candidate) bool { return !d.hasCapacityForBatch(r, c) })
		if len(eligible) == 0 {
			return nil, firstAttemptsWait // batch comes last in a queue, so that all first attempts behind are batch, too
		}
	}
	if !slices.ContainsFunc(eligible, func(c *candidate) bool { return d.canStart(r, c) }) {
		if d.wouldMissDeadline(m, r, eligible) { // to wait would be useless
			return nil, deadlineMissed
		}
		return nil, noneCanStart
	}
	if circuitsIgnored { // counted only here, once a candidate can start the request
		d.metrics.filterSkipped.WithLabelValues(circuitFilter).Inc()
	}
	return d.preferGood(m, p, r, eligible), canServe
}

func (d *chooser) wouldMissDeadline(m *model, r *Request, eligible []*candidate) bool {
	if r.Deadline.IsZero() {
		return false
	}
	timesKnown := d.fillView(m, r, eligible)
	return timesKnown && d.allMissDeadline(r, eligible)
}

// preferGood removes, in place, the candidates that are worse than others for a reason that the
// policy does not weigh. Each filter removes none if it would leave no candidate.
func (d *chooser) preferGood(m *model, p *policy.Policy, r *Request, eligible []*candidate) []*candidate {
	if len(r.Exclude) > 0 {
		eligible = d.filterTried(eligible, r.Exclude)
	}
	eligible = d.filterWithoutDecodeSlot(m, r, eligible)
	eligible = d.filterStale(r, eligible)
	return d.filterBusy(p, r, eligible)
}

// admit reserves a place in the pool if the chosen candidate can take the request now. If it is
// busy, the prompt counts on it for the rest of the round, so that the requests behind it go to
// other candidates if these are better for them.
func (d *chooser) admit(r *Request, c *candidate, indicators *policy.Engine) waitReason {
	if !d.canStart(r, c) {
		if c.load.Waiting == (ledger.Sums{}) { // the first one that waits for it
			d.waitedFor = append(d.waitedFor, c)
		}
		c.load.AddWaiting(ledger.WeightOf(indicators, r.promptBytes()))
		return onlyThisWaits
	}
	if r.HasPlace {
		return canServe
	}
	if d.handoffWouldExpire(c, r.Model) { // another engine may keep the KV longer
		return onlyThisWaits
	}
	if d.cfg.Places != nil && !d.cfg.Places.TryAcquire() { // nil: no bound
		return poolFull
	}
	return canServe
}

func (d *chooser) endRound() {
	for _, c := range d.waitedFor {
		c.load.Waiting = ledger.Sums{}
	}
	d.waitedFor = d.waitedFor[:0]
}
