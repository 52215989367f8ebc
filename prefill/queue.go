package prefill

import (
	"context"
	"time"
)

// Acquire waits until a candidate can take the request, and charges the request to it.
//
// Together with the lease the caller gets a place in the pool, which it must release. After an
// error it has the same as before the call: a retry still has its place, a first attempt has none.
func (s *Scheduler) Acquire(ctx context.Context, r Request) (*Lease, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	ticket, err := s.Enter(r)
	if err != nil {
		return nil, err
	}
	return ticket.Wait(ctx)
}

// Enter enters the request into the queue, and does not wait. The caller must then call Wait on the
// ticket, or take over the lease of its ImmediateLease.
func (s *Scheduler) Enter(r Request) (Ticket, error) {
	w, lease, err := s.enter(r)
	return Ticket{scheduler: s, lease: lease, waiter: w}, err
}

// await still returns the lease after a timeout if the request was served just before. If ctx has
// ended, it gives the lease back, because its client has left.
func (s *Scheduler) await(ctx context.Context, w *waiter) (*Lease, error) {
	timeout := time.NewTimer(time.Until(w.timesOutAt))
	defer timeout.Stop()
	select {
	case <-w.done:
		return w.lease, w.err
	case <-timeout.C:
		if err := s.giveUp(w); err != nil {
			return nil, err
		}
		return w.lease, w.err // served or refused just before the timeout
	case <-ctx.Done():
		s.withdraw(w) // also releases a lease that the waiter got just before
		return nil, ctx.Err()
	}
}

func (s *Scheduler) enter(r Request) (*waiter, *Lease, error) {
	s.lock()
	defer s.unlock()
	return s.manager.enter(r)
}

// giveUp returns nil if the waiter was served or refused just before its timeout.
func (s *Scheduler) giveUp(w *waiter) error {
	s.lock()
	defer s.unlock()
	m := s.models[w.Model]
	if m == nil || !w.item.Remove() {
		return nil
	}
	s.manager.reportQueued(m, &w.Request, leftQueue)
	return s.manager.timeoutError(m, &w.Request)
}

// withdraw releases a lease and a place that the waiter got just before its client left.
func (s *Scheduler) withdraw(w *waiter) {
	s.lock()
	stillWaited := w.item.Remove()
	if m := s.models[w.Model]; stillWaited && m != nil {
		s.manager.reportQueued(m, &w.Request, leftQueue)
	}
	s.unlock()
	if stillWaited || w.lease == nil {
		return
	}
	w.lease.Release()
	if !w.HasPlace && s.cfg.Places != nil { // a retry keeps the place that it had before
		s.cfg.Places.Release() // without the scheduler's lock, because Places.Release may call Wake
	}
}

// Offer enters a request into the arrival queue and does not wait. It calls served once, with the
// result of Acquire, before Offer returns or during a later call of the scheduler. served is called
// under the scheduler's lock, and must not call the scheduler. An offered request has no timeout;
// withdraw removes it from the queue.
//
// With Config.Clock, a simulation only needs Offer, the methods of Lease, and Wake at NextWake. No
// goroutine runs then, and no call waits.
func (s *Scheduler) Offer(r Request, served func(*Lease, error)) (withdraw func()) {
	s.lock()
	defer s.unlock()
	w, lease, err := s.manager.enter(r)
	if w == nil {
		served(lease, err)
		return func() {}
	}
	w.onResult = served
	return func() { s.withdraw(w) }
}
