package prefill

import (
	"context"
	"errors"
	"time"

	"evenkeel/prefill/policy"
)

// ImmediateLease is nil if the request waits; the caller must then call Wait.
func (k *Ticket) ImmediateLease() *Lease { return k.lease }

// Wait waits as Acquire does. It must be called once, unless ImmediateLease returned a lease.
func (k *Ticket) Wait(ctx context.Context) (*Lease, error) {
	if k.waiter == nil {
		return k.lease, nil
	}
	return k.scheduler.await(ctx, k.waiter)
}

// EnterAll enters all prompts of one request, its legs, into the queue, or none. All legs have the
// same model, key, priority and arrival. The caller must wait for each ticket.
//
// After one leg is served, the others stay in this region and cannot be displaced, because the
// client may already have a part of the answer. Before that, if the RemoteRegions of one leg sends
// it to another region, all legs go there.
func (s *Scheduler) EnterAll(legs []Request) ([]Ticket, error) {
	tickets, err := s.enterAll(legs)
	if err == nil {
		return tickets, nil
	}
	// The served legs give back their leases and places, without the scheduler's lock, which
	// Lease.Release and Places.Release may take.
	for _, served := range tickets {
		if served.lease != nil {
			served.lease.Release()
			if s.cfg.Places != nil {
				s.cfg.Places.Release()
			}
		}
	}
	return nil, err
}

// enterAll, together with an error, also returns the tickets of the legs that were served before
// it.
func (s *Scheduler) enterAll(legs []Request) (tickets []Ticket, err error) {
	s.lock()
	defer s.unlock()
	var m *model
	var p *policy.Policy
	for i := range legs {
		if m, p, err = s.manager.acceptNew(&legs[i]); err != nil {
			return nil, err
		}
	}
	tickets, err = s.serveFirstLegs(m, p, legs)
	waiting := legs[len(tickets):]
	if err != nil || len(waiting) == 0 {
		return tickets, err
	}
	first := &waiting[0] // all legs have the same priority and key
	if err := s.manager.makeRoomOrRefuse(m, first, len(waiting)); err != nil {
		return tickets, err
	}
	oneServed := len(tickets) > 0 // the client may get a part of the answer before the other legs are served
	for _, w := range s.manager.addLegs(m, p, waiting, oneServed) {
		tickets = append(tickets, Ticket{scheduler: s, waiter: w})
	}
	return tickets, nil
}

// serveFirstLegs serves the first legs, up to the first one that must wait. The scheduler's lock is
// held. With an error, the tickets of the legs before it are returned, too.
func (s *Scheduler) serveFirstLegs(m *model, p *policy.Policy, legs []Request) (tickets []Ticket, err error) {
	for i := range legs {
		lease, err := s.manager.tryAtOnce(m, p, &legs[i])
		if err != nil {
			return tickets, err
		}
		if lease == nil { // and so do the legs behind it
			break
		}
		if i == 0 { // one region must serve all legs
			keepLegsHere(legs)
		}
		tickets = append(tickets, Ticket{scheduler: s, lease: lease})
	}
	return tickets, nil
}

// addLegs queues the waiting legs. If one is served already (oneServed), they stay in this region
// and cannot be displaced.
func (qm *queueManager) addLegs(m *model, p *policy.Policy, legs []Request, oneServed bool) []*waiter {
	siblings := make([]*waiter, len(legs))
	decision := &regionDecision{done: make(chan struct{})}
	if oneServed {
		decision.announce()
	}
	for i := range legs {
		w := qm.addWaiter(m, p, legs[i])
		siblings[i] = w
		w.siblings = siblings
		w.regionDecision = decision
		if oneServed {
			w.item.Pin()
		}
	}
	return siblings
}

// AwaitRegionDecision waits until one leg of the ticket's request is served, which keeps all legs
// here, or until all have gone to another region, and reports the latter. If ctx or the time in the
// queue ends first, the legs stay. The ticket must be one of EnterAll.
func (k *Ticket) AwaitRegionDecision(ctx context.Context) bool {
	if k.waiter == nil { // it was served at once
		return false
	}
	timeout := time.NewTimer(time.Until(k.waiter.timesOutAt))
	defer timeout.Stop()
	select {
	case <-k.waiter.regionDecision.done:
	case <-timeout.C:
	case <-ctx.Done():
	}
	return k.settleRegion()
}

// settleRegion reports whether the legs have gone to another region. If not, they stay here from
// now on.
func (k *Ticket) settleRegion() (elsewhere bool) {
	k.scheduler.lock()
	defer k.scheduler.unlock()
	if errors.Is(k.waiter.err, ErrElsewhere) { // the legs go together
		return true
	}
	for _, leg := range k.waiter.siblings { // this one included
		leg.keepHere()
	}
	return false
}

// keepLegsHere also drops the deadline: it is for the client's first token, which the first leg
// sends.
func keepLegsHere(legs []Request) {
	for i := range legs {
		legs[i].keepHere()
		legs[i].Deadline = time.Time{}
	}
}
