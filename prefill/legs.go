package prefill

import (
	"context"
	"errors"
	"time"

	"evenkeel/prefill/policy"
)

// ImmediateLease is the lease of a request that did not have to wait; nil: the request waits, and the caller must call Wait.
func (k *Ticket) ImmediateLease() *Lease { return k.lease }

// Wait waits for the lease of a request that has entered the queue, as Acquire does. It must be called once, unless ImmediateLease
// returned a lease.
func (k *Ticket) Wait(ctx context.Context) (*Lease, error) {
	if k.waiter == nil {
		return k.lease, nil
	}
	return k.scheduler.await(ctx, k.waiter)
}

// EnterAll enters all prompts of one request, its legs, into the queue. If one leg cannot be entered, EnterAll enters none and
// returns an error. All legs have the same model, key, priority and arrival. The caller must wait for each ticket.
//
// After one leg is served, the other legs cannot be displaced any more, because the client may already have a part of the
// answer. They also stay in this region. Before that, if the RemoteRegions of one leg sends it to another region, all legs go
// there.
func (s *Scheduler) EnterAll(legs []Request) ([]Ticket, error) {
	tickets, err := s.enterAll(legs)
	if err == nil {
		return tickets, nil
	}
	// The legs that were served before the error give back their leases, and their places in the pool (Places; nil: it has no bound).
	// This is done without the scheduler's lock, because Lease.Release and Places.Release may take it.
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

// enterAll serves as many of the legs as can be served now, in their order, and enters the others into the queue. Together with an error it
// also returns the tickets of the legs that were served before the error, so that EnterAll can give back their leases.
func (s *Scheduler) enterAll(legs []Request) (tickets []Ticket, err error) {
	s.lock()
	defer s.unlock()
	var m *model         // the model that all legs name
	var p *policy.Policy // the policy that all legs name
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
	first := &waiting[0] // stands for all legs, which have the same priority and key
	if err := s.manager.makeRoomOrRefuse(m, first, len(waiting)); err != nil {
		return tickets, err
	}
	oneServed := len(tickets) > 0 // the client may get a part of the answer before the other legs are served
	for _, w := range s.manager.addLegs(m, p, waiting, oneServed) {
		tickets = append(tickets, Ticket{scheduler: s, waiter: w})
	}
	return tickets, nil
}

// serveFirstLegs serves the first legs of a request, up to the first one that must wait, and returns their tickets. An error says that the
// request goes to another region, or that its deadline cannot be met. The tickets of the legs before are then returned, too. The
// scheduler's lock is held.
func (s *Scheduler) serveFirstLegs(m *model, p *policy.Policy, legs []Request) (tickets []Ticket, err error) {
	for i := range legs {
		lease, err := s.manager.tryAtOnce(m, p, &legs[i])
		if err != nil {
			return tickets, err
		}
		if lease == nil { // this leg waits, and so do the legs behind it
			break
		}
		if i == 0 { // the answer begins in this region now, and one region must serve all legs of a request
			keepLegsHere(legs)
		}
		tickets = append(tickets, Ticket{scheduler: s, lease: lease})
	}
	return tickets, nil
}

// addLegs adds the waiting legs of one request to their model's queue. oneServed says that another leg is served already:
// the waiting legs then stay in this region and cannot be displaced.
func (qm *queueManager) addLegs(m *model, p *policy.Policy, legs []Request, oneServed bool) []*waiter {
	siblings := make([]*waiter, len(legs))
	decision := &regionDecision{done: make(chan struct{})}
	if oneServed { // the legs stay in this region
		decision.announce()
	}
	for i := range legs {
		w := qm.addWaiter(m, p, legs[i])
		siblings[i] = w
		w.siblings = siblings
		w.regionDecision = decision
		if oneServed { // the client may already have a part of the answer, so that the leg must not be displaced
			w.item.Pin()
		}
	}
	return siblings
}

// AwaitRegionDecision waits until one leg (prompt) of the ticket's request is served, which keeps all legs in this region, or until all
// legs have gone to another region. It reports whether they have gone. If ctx or the request's time in the queue ends first, the
// legs stay. The ticket must be one of EnterAll.
func (k *Ticket) AwaitRegionDecision(ctx context.Context) bool {
	if k.waiter == nil { // the leg was served at once, in this region
		return false
	}
	timeout := time.NewTimer(time.Until(k.waiter.timesOutAt))
	defer timeout.Stop()
	select {
	case <-k.waiter.regionDecision.done: // shared by all legs
	case <-timeout.C:
	case <-ctx.Done():
	}
	return k.settleRegion()
}

// settleRegion reports whether the legs of the ticket's request have gone to another region. If not, they stay here from now on: either one
// of them is served here already, or the wait for the decision has ended without one.
func (k *Ticket) settleRegion() (elsewhere bool) {
	k.scheduler.lock()
	defer k.scheduler.unlock()
	if errors.Is(k.waiter.err, ErrElsewhere) { // the legs go together, so that the error of this one stands for all
		return true
	}
	for _, leg := range k.waiter.siblings { // all legs that had to wait, this one included
		leg.keepHere() // its RemoteRegions must not send it to another region any more
	}
	return false
}

// keepLegsHere keeps all legs of a request in this region, because the first one is served here. It also drops their deadline, which is
// for the client's first token: the first leg sends this token.
func keepLegsHere(legs []Request) {
	for i := range legs {
		legs[i].keepHere()
		legs[i].Deadline = time.Time{}
	}
}
