package prefill

import (
	"slices"
	"time"

	"evenkeel/prefill/ledger"
	"evenkeel/prefill/policy"
	"evenkeel/prefill/steer"
)

// tryServe chooses a candidate and charges the request to it, in one step: two
// requests at once never see the same state. The filters stand in serve, in their
// order. All but liveness and the gate give way when they would leave no candidate.
//
// All that are left are scored, the busy ones too. If the best cannot start the
// request, it waits for that one rather than go to a worse one that is free.
func (d *chooser) tryServe(m *model, p *policy.Policy, r *Request, since time.Time) (*Lease, blocked) {
	start := time.Now()
	if r.late(d.now) {
		return nil, missed
	}
	switch d.elsewhere(m, r, since) {
	case ToHere:
	case ToThere:
		return nil, away
	case Waits:
		return nil, held
	case AllWait:
		return nil, nobody
	}
	lease, reason := d.serve(m, p, r, since, start)
	if reason != 0 && reason != missed && (r.Elsewhere != nil || r.Target != "") {
		reason = held // requests behind it may go to other candidates or regions, so they must not wait for it
	}
	return lease, reason
}

// serve is tryServe for a request that is served here if at all.
func (d *chooser) serve(m *model, p *policy.Policy, r *Request, since, start time.Time) (*Lease, blocked) {
	eligible, skipped := d.filterCircuit(r, m.servers)
	eligible = d.filterGate(eligible)
	if len(eligible) == 0 {
		return nil, noGate
	}
	eligible = d.filterFresh(eligible)
	if r.Batch && !r.Reserved { // a retry has had its turn
		eligible = slices.DeleteFunc(eligible, func(c *candidate) bool { return !d.leftForBatch(r, c) })
		if len(eligible) == 0 {
			return nil, nobody // batch comes last, so that all requests behind this one are batch too
		}
	}
	if !slices.ContainsFunc(eligible, func(c *candidate) bool { return d.canStart(r, c) }) {
		if !r.Deadline.IsZero() && d.look(m, r, eligible) && d.misses(r, eligible) {
			return nil, missed
		}
		return nil, noRoom
	}
	if skipped {
		d.metrics.filterSkipped.WithLabelValues(filterCircuit).Inc()
	}
	if len(r.Exclude) > 0 {
		eligible = d.filterTried(eligible, r.Exclude)
	}
	eligible = d.filterCrowded(m, r, eligible)
	eligible = d.filterStale(r, eligible)
	eligible = d.filterFull(p, r, eligible)
	known := d.look(m, r, eligible)
	if d.misses(r, eligible) {
		return nil, missed
	}
	if !known {
		p = d.steer.WithoutLine(p)
	}
	query := policy.Query{ID: r.ID, Key: r.Session, Cursor: m.cursor}
	eligible, hotspot := d.filterHot(p, &query, r, m, eligible)
	keptAt, affinity := d.steer.Affinity.Keep(r.Session, d.view, d.now)
	choice := policy.Choice{Index: keptAt}
	if affinity != steer.Kept {
		choice = p.Choose(&query, d.view)
	}
	c, indicators := eligible[choice.Index], &d.view[choice.Index]
	if !d.canStart(r, c) {
		if c.account.Waiting == (ledger.Sums{}) {
			d.heldAt = append(d.heldAt, c)
		}
		c.account.Wait(ledger.WeightOf(indicators, r.promptBytes()))
		return nil, held
	}
	if !r.Reserved && d.hopeless(c, r.Model) {
		return nil, held
	}
	if !r.Reserved && d.cfg.Places != nil && !d.cfg.Places.TryReserve() {
		return nil, noPlace
	}
	if p.Rounds() {
		m.cursor = c.order
	}
	lease := d.reserve(c, p, r, indicators, since)
	if affinity != "" && r.Ends {
		d.steer.Affinity.Left(r.Session)
	} else if affinity != "" {
		d.steer.Affinity.Went(r.Session, c.ID, d.now)
	}
	d.recordWait(r, lease)
	reason := d.count(lease, choice, affinity, hotspot, len(eligible))
	if d.cfg.Explain {
		lease.Trace = d.trace(p, choice.Index, reason, affinity != steer.Kept)
	}
	d.metrics.decisionSeconds.Observe(time.Since(start).Seconds())
	return lease, 0
}

// endRound ends a round of decisions: requests that were held are no longer charged to their candidates.
func (d *chooser) endRound() {
	for _, c := range d.heldAt {
		c.account.Waiting = ledger.Sums{}
	}
	d.heldAt = d.heldAt[:0]
}
