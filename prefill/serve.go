package prefill

import (
	"slices"
	"time"

	"evenkeel/prefill/ledger"
	"evenkeel/prefill/policy"
	"evenkeel/prefill/steer"
)

// tryServe chooses a candidate and charges the request to it, in one step under the scheduler's lock, so that no two requests are
// decided by the same state. applyFilters applies the filters in their order. All filters except liveness and the gate are skipped
// if they would leave no candidate.
//
// The policy scores all remaining candidates, busy ones included. If the best candidate is busy, the request waits for it,
// because a worse candidate would probably end the prefill later, even if it is free.
//
// If the request cannot be served, the reason that tryServe returns decides which requests behind it must wait, too. A reason
// that concerns all of them, such as noneCanStart, is returned only for a request that may go to every candidate of the model and to no
// other region.
func (d *chooser) tryServe(m *model, p *policy.Policy, r *Request, since time.Time) (*Lease, waitReason) {
	start := time.Now()
	if r.deadlinePassed(d.now) {
		return nil, deadlineMissed
	}
	if reason := regionWaitReason(d.askRegions(m, r, since)); reason != canServe {
		return nil, reason
	}
	lease, reason := d.serveHere(m, p, r, since, start)
	if reason == canServe || reason == deadlineMissed {
		return lease, reason
	}
	return nil, m.reasonForOthers(r, reason)
}

// regionWaitReason returns the reason for which a request is not served in this region now, by the decision of its RemoteRegions;
// canServe: it may be served here.
func regionWaitReason(decision Where) waitReason {
	switch decision {
	case ToHere:
	case ToThere:
		return goesElsewhere
	case WaitsAlone:
		return waitsAlone
	case ModelWaits: // the first attempts of the model wait, too, but not its retries
		return onlyRetries
	}
	return canServe
}

// reasonForOthers returns the reason that tryServe reports for a request that cannot be served now. For this reason the caller also lets
// other requests of the model wait, without trying them. The request's own reason is therefore returned only if the request may go to every
// candidate of the model and to no other region.
func (m *model) reasonForOthers(r *Request, ownReason waitReason) waitReason {
	if r.Remote != nil { // the request may go to another region, so that its reason says nothing about other requests
		return waitsAlone
	}
	forbidden := func(c *candidate) bool { return !r.mayUse(c) }
	// targetForbidden finds a target that this request may not use, although other requests that name it may.
	targetForbidden := func(c *candidate) bool { return c.ID == r.Target && forbidden(c) }
	if r.Target != "" && !slices.ContainsFunc(m.candidates, targetForbidden) {
		return targetBusy // also if the target is no candidate any more
	}
	if slices.ContainsFunc(m.candidates, forbidden) { // requests behind this one may go to other candidates, and must not wait for it
		return waitsAlone
	}
	return ownReason
}

// serveHere is tryServe for a request that does not go to another region: it filters the candidates, lets session affinity or the policy
// choose one, admits the request to it, and books the lease. start is when the decision began, for its metric.
func (d *chooser) serveHere(m *model, p *policy.Policy, r *Request, since, start time.Time) (*Lease, waitReason) {
	eligible, why := d.applyFilters(m, p, r)
	if why != canServe {
		return nil, why
	}
	timesKnown := d.fillView(m, r, eligible)
	if d.allMissDeadline(r, eligible) {
		return nil, deadlineMissed
	}
	if !timesKnown { // a policy that predicts the ends of prefills cannot choose without learned times
		p = d.overrides.WithoutLatency(p)
	}
	query := policy.Query{ID: r.ID, Key: r.Session, Cursor: m.cursor}
	eligible, hotspot := d.filterHot(p, &query, r, m, eligible) // keeps a hot class off the engines that hold its prefix
	keptAt, affinity := d.overrides.Affinity.Keep(r.Session, d.view, d.now)
	choice := policy.Choice{Index: keptAt}
	if affinity != steer.Kept { // the session does not stay with the engine of its last request
		choice = p.Choose(&query, d.view)
	}
	c, indicators := eligible[choice.Index], &d.view[choice.Index]
	if why := d.admit(r, c, indicators); why != canServe {
		return nil, why
	}
	if p.TakesTurns() { // round-robin continues after this candidate
		m.cursor = c.order
	}
	lease := d.makeLease(c, p, r, indicators, since)
	if affinity != "" { // "": there is no session, or affinity is off
		d.rememberSession(r, c)
	}
	d.recordWait(r, lease)
	reason := d.recordChoice(lease, choice, affinity, hotspot, len(eligible))
	if d.cfg.Explain {
		lease.Trace = d.trace(p, choice.Index, reason, affinity != steer.Kept)
	}
	d.metrics.decisionSeconds.Observe(time.Since(start).Seconds())
	return lease, canServe
}

// rememberSession records the candidate of a session's last request, for session affinity. It drops a session that has no further request.
func (d *chooser) rememberSession(r *Request, c *candidate) {
	if r.EndsSession {
		d.overrides.Affinity.EndSession(r.Session)
	} else {
		d.overrides.Affinity.Record(r.Session, c.ID, d.now)
	}
}

// applyFilters returns the candidates among which the policy chooses; without any, the reason why the request cannot be served now.
func (d *chooser) applyFilters(m *model, p *policy.Policy, r *Request) ([]*candidate, waitReason) {
	eligible, circuitsIgnored := d.filterCircuit(r, m.candidates)
	eligible = d.filterGate(eligible)
	if len(eligible) == 0 {
		return nil, gatesClosed
	}
	eligible = d.filterAtProbeLimit(eligible)
	if r.Batch && !r.HasPlace { // a retry need not wait for free capacity again
		eligible = slices.DeleteFunc(eligible, func(c *candidate) bool { return !d.hasCapacityForBatch(r, c) })
		if len(eligible) == 0 {
			return nil, onlyRetries // batch requests come last in a queue, so that all first attempts behind this one are batch, too
		}
	}
	if !slices.ContainsFunc(eligible, func(c *candidate) bool { return d.canStart(r, c) }) {
		// A request that would miss its deadline on every candidate is refused now, because to wait would be useless. fillView measures the
		// candidates for allMissDeadline; it is false while prefill times are not known.
		if !r.Deadline.IsZero() && d.fillView(m, r, eligible) && d.allMissDeadline(r, eligible) {
			return nil, deadlineMissed
		}
		return nil, noneCanStart
	}
	if circuitsIgnored {
		d.metrics.filterSkipped.WithLabelValues(filterCircuit).Inc()
	}
	if len(r.Exclude) > 0 {
		eligible = d.filterTried(eligible, r.Exclude)
	}
	eligible = d.filterWithoutDecodeSlot(m, r, eligible)
	eligible = d.filterStale(r, eligible)
	return d.filterBusy(p, r, eligible), canServe
}

// admit reserves a place in the pool of hand-offs if the chosen candidate can take the request now, and returns canServe; otherwise it
// returns the reason why not. If the candidate is busy, the request waits for it, and its prompt counts on it for the rest of the round.
func (d *chooser) admit(r *Request, c *candidate, indicators *policy.Engine) waitReason {
	if !d.canStart(r, c) {
		if c.load.Waiting == (ledger.Sums{}) { // the first request of the round that waits for this candidate
			d.waitedFor = append(d.waitedFor, c)
		}
		c.load.AddWaiting(ledger.WeightOf(indicators, r.promptBytes()))
		return waitsAlone
	}
	if r.HasPlace { // a retry has its place in the pool already
		return canServe
	}
	if d.handoffWouldExpire(c, r.Model) { // the engine would drop the KV before a decode rank is free
		return waitsAlone
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
