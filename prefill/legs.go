package prefill

import (
	"context"

	"evenkeel/prefill/policy"
)

// Ticket is the turn of one leg of a request, or what it was served at once.
type Ticket struct {
	tier  *Tier
	lease *Lease
	w     *waiter // nil: served
}

// Wait is Acquire for a request that has entered already. It must be called
// once.
func (k *Ticket) Wait(ctx context.Context) (*Lease, error) {
	if k.w == nil {
		return k.lease, nil
	}
	return k.tier.await(ctx, k.w)
}

// EnterAll lets the legs of one request enter together: all of them, or none
// and an error. They are of one model, key, priority and arrival. Each ticket
// must be waited for.
//
// Legs that wait while another has been served are not displaced any more: the
// client may have part of the answer already.
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

// enterAll returns, with an error, those that were served before it.
func (t *Tier) enterAll(legs []Request) (tickets []Ticket, err error) {
	t.lock()
	defer t.unlock()
	var m *model
	var p *policy.Policy
	for i := range legs {
		if m, p, err = t.receive(&legs[i]); err != nil {
			return nil, err
		}
	}
	for i := range legs {
		lease, _ := t.atOnce(m, p, &legs[i]) // the legs of a request stay together, here
		if lease == nil {
			break
		}
		tickets = append(tickets, Ticket{tier: t, lease: lease})
	}
	served := len(tickets)
	rest := legs[served:]
	if len(rest) == 0 {
		return tickets, nil
	}
	if err := t.mayWait(m, &rest[0], len(rest)); err != nil {
		return tickets, err
	}
	siblings := make([]*waiter, len(rest))
	for i := range rest {
		w := t.wait(m, p, rest[i])
		w.siblings, siblings[i] = siblings, w
		if served > 0 {
			m.queue.fix(w)
		}
		tickets = append(tickets, Ticket{tier: t, w: w})
	}
	return tickets, nil
}
