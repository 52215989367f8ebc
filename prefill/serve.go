package prefill

import (
	"slices"
	"time"

	"evenkeel/prefill/ledger"
	"evenkeel/prefill/policy"
	"evenkeel/prefill/steer"
)

// tryServe serves a request if it can be served now: it asks the request's RemoteRegions for the region, and in this region serveHere
// chooses a candidate and charges the request to it. All this is one step under the scheduler's lock, so that no two requests are decided
// by the same state. waitingSince is when the request entered the arrival queue.
//
// If the request cannot be served, the lease is nil, and the reason says whether the request waits. By it the caller, which tries the
// waiting requests of a model one after the other, also decides which of them it need not try now. tryServe therefore returns a reason that
// concerns all of them, such as noneCanStart, only for a request that may go to every candidate of the model and to no other region.
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
	if reason == canServe || reason == deadlineMissed { // deadlineMissed: the request does not wait, because it is refused
		return lease, reason
	}
	return nil, m.whoElseWaits(r, reason) // becomes onlyThisWaits or sameTargetWaits if the others need not wait for the same reason
}

// regionWaitReason turns the decision of a request's RemoteRegions, which choose the region that serves it, into the reason why the request
// is not served in this region now; canServe: it may be served here.
func regionWaitReason(decision Where) waitReason {
	switch decision {
	case ToHere: // it may be served here
	case ToThere: // another region serves it
		return goesElsewhere
	case WaitsAlone: // the request waits, but those behind it need not
		return onlyThisWaits
	case ModelWaits: // the other first attempts of the model wait, too, but its retries need not
		return firstAttemptsWait
	}
	return canServe
}

// whoElseWaits returns the reason that tryServe reports for a request that cannot be served now. By this reason the caller also lets other
// requests of the model wait, without trying them:
//   - onlyThisWaits, if others may go where this request may not, or if it may still go to another region;
//   - sameTargetWaits, if the request names its only candidate: then the others that name it wait, too;
//   - the request's own reason, if it may go to every candidate of the model and to no other region: what stops it stops others, too.
func (m *model) whoElseWaits(r *Request, ownReason waitReason) waitReason {
	if r.Remote != nil { // the request may go to another region, so that its reason says nothing about other requests
		return onlyThisWaits
	}
	forbidden := func(c *candidate) bool { return !r.mayUse(c) }
	if r.Target != "" {
		targetForbidden := func(c *candidate) bool { return c.ID == r.Target && forbidden(c) }
		if slices.ContainsFunc(m.candidates, targetForbidden) { // other requests may be allowed in its region
			return onlyThisWaits
		}
		return sameTargetWaits // also if the target is no candidate any more
	}
	if slices.ContainsFunc(m.candidates, forbidden) { // requests behind this one may go to other candidates, and must not wait for it
		return onlyThisWaits
	}
	return ownReason
}

// serveHere is tryServe for a request that does not go to another region. It filters the candidates, lets session affinity or the policy
// choose one, admits the request to it, and books the lease. The policy scores all candidates that the filters leave, busy ones included.
// If the best one is busy, the request waits for it, because a worse one would probably end the prefill later, even if it is free.
// waitingSince is when the request entered the arrival queue, and decisionStart is when the decision began, for its metric.
func (d *chooser) serveHere(m *model, p *policy.Policy, r *Request, waitingSince, decisionStart time.Time) (*Lease, waitReason) {
	eligible, why := d.applyFilters(m, p, r)
	if why != canServe {
		return nil, why
	}
	timesKnown := d.fillView(m, r, eligible) // d.view[i] now has the indicators of eligible[i]
	if d.allMissDeadline(r, eligible) {
		return nil, deadlineMissed
	}
	if !timesKnown { // a policy that predicts the ends of prefills cannot choose without learned times
		p = d.steering.WithoutLatency(p)
	}
	query := policy.Query{ID: r.ID, Key: r.Session, Cursor: m.cursor}
	// A request of a hot class is kept off the engines that hold its prefix, even off the engine of its session: filterHot removes them
	// from eligible and from d.view.
	eligible, hotspot := d.filterHot(p, &query, r, m, eligible) // hotspot is the state of the class: steer.OK, Alarm or Filter
	choice, affinity := d.chooseFromView(p, &query)             // steer.Kept: the session stays, so that no policy was asked
	c, indicators := eligible[choice.Index], &d.view[choice.Index]
	if why := d.admit(r, c, indicators); why != canServe {
		return nil, why
	}

	// The request is served: from here on, this is only booked and recorded.
	if p.TakesTurns() { // round-robin continues after this candidate
		m.cursor = c.order
	}
	lease := d.makeLease(c, p, r, indicators, waitingSince)
	if affinity != "" { // the request is of a session, and affinity is on
		d.rememberSession(r, c)
	}
	d.recordWait(r, lease)
	reason := d.recordChoice(lease, choice, affinity, hotspot, len(eligible)) // counts the choice, and returns its reason in one word
	if d.cfg.Explain {
		byPolicy := affinity != steer.Kept // only then are there scores that the trace can show
		lease.Trace = d.trace(p, choice.Index, reason, byPolicy)
	}
	d.metrics.decisionSeconds.Observe(time.Since(decisionStart).Seconds())
	return lease, canServe
}

// chooseFromView chooses one of the candidates in d.view: the one of the session's last request if the session may stay with it, otherwise
// the one that the policy chooses. affinity says what became of the session: steer.Kept, Overloaded, Gone or New; empty: there is no
// session (the query's Key), or affinity is off.
func (d *chooser) chooseFromView(p *policy.Policy, q *policy.Query) (choice policy.Choice, affinity string) {
	keptAt, affinity := d.steering.Affinity.Keep(q.Key, d.view, d.now)
	if affinity == steer.Kept {
		return policy.Choice{Index: keptAt}, affinity
	}
	return p.Choose(q, d.view), affinity
}

// rememberSession records the candidate of a session's last request, for session affinity. It drops a session that has no further request.
func (d *chooser) rememberSession(r *Request, c *candidate) {
	if r.EndsSession {
		d.steering.Affinity.EndSession(r.Session)
	} else {
		d.steering.Affinity.Record(r.Session, c.ID, d.now)
	}
}

// applyFilters returns the candidates among which the policy chooses; without any, the reason why the request cannot be served now. By this
// reason the queue decides which other requests of the model need not be tried (see waitReason). The first filters remove candidates that
// cannot take the request, or not in this round. preferGood then removes candidates that could, but are worse than others; it always leaves
// one.
func (d *chooser) applyFilters(m *model, p *policy.Policy, r *Request) ([]*candidate, waitReason) {
	// If no circuit allows the request, filterCircuit keeps all live candidates that the request may go to: circuitsIgnored is then
	// true.
	eligible, circuitsIgnored := d.filterCircuit(r, m.candidates)
	eligible = d.filterGate(eligible) // the KV gate of an engine is closed while its KV cache is full
	if len(eligible) == 0 {
		return nil, gatesClosed
	}
	eligible = d.filterAtProbeLimit(eligible)
	isRetry := r.HasPlace
	if r.Batch && !isRetry { // a retry need not wait for free capacity again
		eligible = slices.DeleteFunc(eligible, func(c *candidate) bool { return !d.hasCapacityForBatch(r, c) })
		if len(eligible) == 0 {
			return nil, firstAttemptsWait // batch requests come last in a queue, so that all first attempts behind this one are batch, too
		}
	}
	if !slices.ContainsFunc(eligible, func(c *candidate) bool { return d.canStart(r, c) }) {
		if d.wouldMissDeadline(m, r, eligible) { // to wait would be useless, so the request is refused now
			return nil, deadlineMissed
		}
		return nil, noneCanStart
	}
	if circuitsIgnored { // the skipped filter is counted only here, once a candidate can start the request
		d.metrics.filterSkipped.WithLabelValues(circuitFilter).Inc()
	}
	return d.preferGood(m, p, r, eligible), canServe
}

// wouldMissDeadline reports whether the request has a deadline that it is predicted to miss on all eligible candidates. It is false while
// the prefill time of one of them is not learned.
func (d *chooser) wouldMissDeadline(m *model, r *Request, eligible []*candidate) bool {
	if r.Deadline.IsZero() {
		return false
	}
	timesKnown := d.fillView(m, r, eligible) // stores the indicators that allMissDeadline reads
	return timesKnown && d.allMissDeadline(r, eligible)
}

// preferGood removes, in place, the candidates that are worse than others for a reason that the policy does not weigh: the request has
// failed there, no decode slot would be free, the engine does not report its gauges, or it is busy and not worth waiting for. Each of these
// filters removes none if it would leave no candidate.
func (d *chooser) preferGood(m *model, p *policy.Policy, r *Request, eligible []*candidate) []*candidate {
	if len(r.Exclude) > 0 {
		eligible = d.filterTried(eligible, r.Exclude)
	}
	eligible = d.filterWithoutDecodeSlot(m, r, eligible)
	eligible = d.filterStale(r, eligible)
	return d.filterBusy(p, r, eligible)
}

// admit reserves a place in the pool of hand-offs if the chosen candidate can take the request now, and returns canServe. It returns
// poolFull if only a place is missing. In all other cases it returns onlyThisWaits: the caller lets this request wait, and tries those
// behind it. If the candidate is busy, the request waits for it, and its prompt counts on it for the rest of the round, so that
// the requests behind it go to other candidates if these are better for them.
func (d *chooser) admit(r *Request, c *candidate, indicators *policy.Engine) waitReason {
	if !d.canStart(r, c) { // the candidate is busy
		if c.load.Waiting == (ledger.Sums{}) { // the first request of the round that waits for this candidate
			d.waitedFor = append(d.waitedFor, c)
		}
		c.load.AddWaiting(ledger.WeightOf(indicators, r.promptBytes()))
		return onlyThisWaits
	}
	if r.HasPlace { // a retry has its place in the pool already
		return canServe
	}
	if d.handoffWouldExpire(c, r.Model) { // the engine would drop the KV before a decode rank is free, but another engine may keep it longer
		return onlyThisWaits
	}
	if d.cfg.Places != nil && !d.cfg.Places.TryAcquire() { // nil: the pool has no bound
		return poolFull
	}
	return canServe
}

// endRound ends a round of decisions: the requests that wait no longer count on the candidates for which they wait.
func (d *chooser) endRound() {
	for _, c := range d.waitedFor {
		c.load.Waiting = ledger.Sums{}
	}
	d.waitedFor = d.waitedFor[:0]
}
