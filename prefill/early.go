package prefill

import (
	"context"
	"math"
	"slices"
	"time"

	"evenkeel/prefill/ledger"
)

// CalledBack records how long after the bind the decode engine said where the KV goes.
func (l *Lease) CalledBack(took time.Duration) {
	l.tier.mu.Lock()
	defer l.tier.mu.Unlock()
	l.way().CalledBack(took)
}

// Another waits for a prefiller that was not tried yet. It is for the request of a lease that has ended because its
// own prefiller took nothing of it. The caller makes the calls on the new lease.
func (l *Lease) Another(ctx context.Context, tried []string) (*Lease, error) {
	r := *l.request
	r.Exclude = tried
	return l.tier.Acquire(ctx, r)
}

// Sooner moves the charge of the lease to the candidate that is predicted to end the prefill first. It does so only
// if the end is sooner by at least `least`, the probe was not sent yet, and the candidate's instance is not in avoid.
// It returns the lease there, on which the caller makes the calls from now on; nil: nothing has changed.
func (l *Lease) Sooner(least time.Duration, avoid []string) *Lease {
	t := l.tier
	t.lock()
	defer t.unlock()
	if l.request == nil || l.predicted == 0 || l.charge.Phase() != ledger.Probing || !l.charge.Sent().IsZero() {
		return nil
	}
	next := t.choose.sooner(l, l.request, least, avoid)
	if next == nil {
		return nil
	}
	next.Policy, next.Wait, next.Trace = l.Policy, l.Wait, l.Trace
	l.charge.Settle()
	l.expected.Dropped()
	l.c.circuit.Neutral(l.number)
	l.release()
	return next
}

// sooner charges the request of lease l to the candidate that is predicted to end its prefill first, and returns the
// new lease; nil: no candidate that may take over the request ends it sooner by at least `least`.
func (d *chooser) sooner(l *Lease, r *Request, least time.Duration, avoid []string) *Lease {
	m := d.models[l.model]
	if m == nil {
		return nil
	}
	eligible, skipped := d.filterCircuit(r, m.servers)
	if skipped {
		return nil
	}
	eligible = slices.DeleteFunc(d.filterGate(eligible), func(c *candidate) bool {
		a := &c.account
		return c == l.c || c.Profile == nil || c.Board != l.Candidate.Board || c.Region != l.Candidate.Region ||
			c.Profile.Connector != l.Candidate.Profile.Connector || slices.Contains(avoid, c.Instance) ||
			!d.canStart(r, c) || a.Stale() || a.Stalled(d.now) || c.Limit > 0 && a.Leases[ledger.Probing] >= c.Limit
	})
	if len(eligible) == 0 || !d.look(m, r, eligible) {
		return nil
	}
	best, bestMs := 0, math.Inf(1)
	for i := range d.view {
		v := &d.view[i]
		line, _ := d.line(m.name, eligible[i])
		if endMs := v.BacklogMs + v.RTTMs + line.Ms(v.NewTokens, v.HitTokens); endMs < bestMs {
			best, bestMs = i, endMs
		}
	}
	if bestMs+float64(least)/float64(time.Millisecond) > d.endsMs(l) {
		return nil
	}
	return d.reserve(eligible[best], d.steer.Usual(), r, &d.view[best], d.now)
}

// endsMs is the predicted time, in ms, until the prefill of a lease ends if it is sent now; infinite if its candidate
// may begin none.
func (d *chooser) endsMs(l *Lease) float64 {
	if c := l.c; !c.Live || !c.configured || !c.circuit.Allows(d.now) || c.account.Stalled(d.now) {
		return math.Inf(1)
	}
	at, rest := l.foresee(d.now)
	return float64(rest+max(0, at.Sub(d.now))) / float64(time.Millisecond)
}
