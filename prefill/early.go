package prefill

import (
	"context"
	"math"
	"slices"
	"time"

	"evenkeel/prefill/ledger"
)

// What is foreseen of requests whose decode rank is bound before their prefill: the first event of the decode engine
// comes so long after a time at which something else ends, or after the present if that is late.

// Follow has tell told, now and whenever that changes, what is foreseen of the request, whose decode leg is sent now:
// the first event comes rest after at, or after the present once at is over. tell is called under the tier's lock, and
// must not block.
func (l *Lease) Follow(tell func(at time.Time, rest time.Duration)) {
	t := l.tier
	t.mu.Lock()
	defer t.mu.Unlock()
	t.now = t.clock()
	if l.predicted == 0 || l.charge.Phase() != ledger.Probing {
		return
	}
	l.follower = follower{tell, t.now.Add(l.way().Callback())}
	l.c.followed = append(l.c.followed, l)
	t.foresee(l.c)
}

// CalledBack says how long after the bind the decode engine said where the KV goes.
func (l *Lease) CalledBack(took time.Duration) {
	l.tier.mu.Lock()
	defer l.tier.mu.Unlock()
	l.way().CalledBack(took)
}

// Moved says how long the first event of the decode engine came after the answer to the probe, of a prompt of so many
// tokens. The last call on the lease may have been made.
func (l *Lease) Moved(tokens int, took time.Duration) {
	l.tier.mu.Lock()
	defer l.tier.mu.Unlock()
	l.way().Moved(tokens, took)
}

// Another waits for a prefiller that was not tried yet, for the request of a lease that has ended because its own took
// nothing. Who gets the lease makes its calls.
func (l *Lease) Another(ctx context.Context, tried []string) (*Lease, error) {
	r := *l.asked
	r.Exclude = tried
	return l.tier.Acquire(ctx, r)
}

// Sooner moves what the lease is charged with to the candidate that is predicted to end the prefill first, if that is
// so much sooner at least, its probe was not sent yet, and its instance is none to avoid. It returns the lease there, of
// which the caller makes the calls from now on; nil: all stays as it is.
func (l *Lease) Sooner(least time.Duration, avoid []string) *Lease {
	t := l.tier
	t.lock()
	defer t.unlock()
	if l.asked == nil || l.predicted == 0 || l.charge.Phase() != ledger.Probing || !l.charge.Sent().IsZero() {
		return nil
	}
	next := t.choose.sooner(l, l.asked, least, avoid)
	if next == nil {
		return nil
	}
	next.Policy, next.Wait, next.Grounds = l.Policy, l.Wait, l.Grounds
	l.charge.Settle()
	l.expected.Dropped()
	l.c.circuit.Neutral(l.number)
	l.release()
	return next
}

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
		return c == l.c || c.Profile == nil || c.Board != l.Candidate.Board || c.Region != l.Candidate.Region || c.Profile.Connector != l.Candidate.Profile.Connector || slices.Contains(avoid, c.Instance) ||
			!d.canStart(r, c) || a.Stale() || a.Stalled(d.now) || c.Limit > 0 && a.Leases[ledger.Probing] >= c.Limit
	})
	if len(eligible) == 0 || !d.look(m, r, eligible) {
		return nil
	}
	best, ends := 0, math.Inf(1)
	for i := range d.view {
		v := &d.view[i]
		line, _ := d.line(m.name, eligible[i])
		if at := v.BacklogMs + v.RTTMs + line.Ms(v.NewTokens, v.HitTokens); at < ends {
			best, ends = i, at
		}
	}
	if ends+float64(least)/float64(time.Millisecond) > d.endsMs(l) {
		return nil
	}
	return d.reserve(eligible[best], d.steer.Usual(), r, &d.view[best], d.now)
}

// endsMs is in how long the prefill of a lease is predicted to end if it is sent now; infinite where none may begin.
func (d *chooser) endsMs(l *Lease) float64 {
	if c := l.c; !c.Live || !c.configured || !c.circuit.Allows(d.now) || c.account.Stalled(d.now) {
		return math.Inf(1)
	}
	at, rest := l.foresee(d.now, d.now)
	rest += max(0, at.Sub(d.now)) - l.way().Transfer(int(l.charge.Weight.Tokens))
	return float64(rest) / float64(time.Millisecond)
}
