package prefill

import (
	"context"
	"errors"
	"time"

	"evenkeel/prefill/policy"
)

// Served is the lease of a request that did not have to wait; nil: call Wait.
func (k *Ticket) Served() *Lease { return k.lease }

// Wait is Acquire for a request that has entered already. It must be called
// once, unless Served returned a lease.
func (k *Ticket) Wait(ctx context.Context) (*Lease, error) {
	if k.w == nil {
		return k.lease, nil
	}
	return k.tier.await(ctx, k.w)
}

// EnterAll lets the legs of one request enter together: all of them, or none and an error. They are of one model,
// key, priority and arrival. Each ticket must be waited for.
//
// Once one leg is served, the legs that still wait cannot be displaced, because the client may have part of the
// answer already, and they stay in this region. Until then, if the Elsewhere of one leg sends it to another region,
// all legs go there.
func (t *Tier) EnterAll(legs []Request) ([]Ticket, error) {
	tickets, err := t.enterAll(legs)
	if err == nil {
		return tickets, nil
	}
	for _, k := range tickets { // not under the lock: freed places wake the queues
		if k.lease != nil {
			k.lease.Release()
			if t.cfg.Places != nil {
				t.cfg.Places.Release()
			}
		}
	}
	return nil, err
}

// enterAll is EnterAll, but with an error it also returns the legs that were served before the error.
func (t *Tier) enterAll(legs []Request) (tickets []Ticket, err error) {
	t.lock()
	defer t.unlock()
	var m *model
	var p *policy.Policy
	for i := range legs {
		if m, p, err = t.arrivals.receive(&legs[i]); err != nil {
			return nil, err
		}
	}
	for i := range legs {
		lease, err := t.arrivals.atOnce(m, p, &legs[i])
		if err != nil { // only the first leg comes here: once it is served, the others stay and have no deadline
			return nil, err
		}
		if lease == nil {
			break
		}
		if i == 0 {
			stay(legs)
			for i := range legs { // the client's first token is that of this leg
				legs[i].Deadline = time.Time{}
			}
		}
		tickets = append(tickets, Ticket{tier: t, lease: lease})
	}
	served := len(tickets)
	waiting := legs[served:]
	if len(waiting) == 0 {
		return tickets, nil
	}
	if err := t.arrivals.mayWait(m, &waiting[0], len(waiting)); err != nil {
		return tickets, err
	}
	siblings, decision := make([]*waiter, len(waiting)), &regionDecision{done: make(chan struct{})}
	if served > 0 {
		decision.close()
	}
	for i := range waiting {
		w := t.arrivals.wait(m, p, waiting[i])
		w.siblings, siblings[i], w.decided = siblings, w, decision
		if served > 0 {
			w.entry.Fix()
		}
		tickets = append(tickets, Ticket{tier: t, w: w})
	}
	return tickets, nil
}

// Elsewhere waits until one leg of the ticket's request is served, which keeps all legs in this region, or until all
// legs have gone to another region. It reports whether they have gone. If ctx or the time for which the request may
// wait ends first, the legs stay.
func (k *Ticket) Elsewhere(ctx context.Context) bool {
	if k.w == nil {
		return false
	}
	timeout := time.NewTimer(time.Until(k.w.until))
	defer timeout.Stop()
	select {
	case <-k.w.decided.done:
	case <-timeout.C:
	case <-ctx.Done():
	}
	k.tier.lock()
	defer k.tier.unlock()
	if errors.Is(k.w.err, ErrElsewhere) {
		return true
	}
	for _, sibling := range k.w.siblings {
		sibling.stay()
	}
	return false
}

// stay tells each of the requests that it is served in this region.
func stay(legs []Request) {
	for i := range legs {
		legs[i].stay()
	}
}
