package prefill

import (
	"context"
	"time"
)

// Acquire waits until a prefiller may take the request and charges it there.
//
// The place in the pool that goes with the lease is the caller's from then on.
// After an error the caller holds what it held before the call: a retry its
// place, a first attempt nothing.
func (t *Tier) Acquire(ctx context.Context, r Request) (*Lease, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	k, err := t.Enter(r)
	if err != nil {
		return nil, err
	}
	return k.Wait(ctx)
}

// Enter is the first half of Acquire: the ticket has been served, or must be waited for.
func (t *Tier) Enter(r Request) (Ticket, error) {
	w, lease, err := t.enter(r)
	return Ticket{tier: t, lease: lease, w: w}, err
}

// await waits until a request in the arrival queue is served or refused, until its time in the queue is over, or until
// ctx ends. In the last two cases it takes the request out of the queue.
func (t *Tier) await(ctx context.Context, w *waiter) (*Lease, error) {
	timeout := time.NewTimer(time.Until(w.until))
	defer timeout.Stop()
	select {
	case <-w.done:
		return w.lease, w.err
	case <-timeout.C:
		if err := t.giveUp(w); err != nil {
			return nil, err
		}
		return w.lease, w.err // served at that very moment
	case <-ctx.Done():
		t.withdraw(w)
		return nil, ctx.Err()
	}
}

// enter is arrivals.enter with the lock.
func (t *Tier) enter(r Request) (*waiter, *Lease, error) {
	t.lock()
	defer t.unlock()
	return t.arrivals.enter(r)
}

// giveUp takes a waiter out of the queue at its timeout, and returns the error for its client; nil: the waiter was
// served or refused just now.
func (t *Tier) giveUp(w *waiter) error {
	t.lock()
	defer t.unlock()
	m := t.models[w.Model]
	if m == nil || !w.entry.Remove() {
		return nil
	}
	t.arrivals.reportQueued(m, &w.Request, false)
	return t.arrivals.timeoutError(m, &w.Request)
}

// withdraw takes a waiter out of the queue whose client left. If the waiter was served at that very moment, it gives
// back the lease and the place.
func (t *Tier) withdraw(w *waiter) {
	t.lock()
	stillWaited := w.entry.Remove()
	if m := t.models[w.Model]; stillWaited && m != nil {
		t.arrivals.reportQueued(m, &w.Request, false)
	}
	t.unlock()
	if stillWaited || w.lease == nil {
		return
	}
	w.lease.Release()
	if !w.Reserved && t.cfg.Places != nil {
		t.cfg.Places.Release() // not under the lock: it may call Wake
	}
}

// Offer lets a request enter the arrival queue and does not wait. served is
// called once with what Acquire would have returned, before Offer returns or
// from within a later call of the tier: with its lock held, so it must not call
// the tier. An offered request has no timeout; withdraw takes one out of the queue
// for which served was not called yet.
//
// With Config.Clock set, a simulation needs no more than this, the methods of
// Lease, and Wake at NextWake: no goroutine runs and nothing waits.
func (t *Tier) Offer(r Request, served func(*Lease, error)) (withdraw func()) {
	t.lock()
	defer t.unlock()
	w, lease, err := t.arrivals.enter(r)
	if w == nil {
		served(lease, err)
		return func() {}
	}
	w.onResult = served
	return func() { t.withdraw(w) }
}
