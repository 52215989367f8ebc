package prefill

import (
	"context"
	"time"
)

// Acquire waits until a candidate can take the request, and charges the request to it.
//
// Together with the lease the caller gets a place in the pool, which it must release. After an error the caller has the
// same as before the call: a retry still has its place, a first attempt has none.
func (t *Scheduler) Acquire(ctx context.Context, r Request) (*Lease, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	k, err := t.Enter(r)
	if err != nil {
		return nil, err
	}
	return k.Wait(ctx)
}

// Enter is the first half of Acquire: it enters the request into the queue, without waiting. The caller must use the ticket.
func (t *Scheduler) Enter(r Request) (Ticket, error) {
	w, lease, err := t.enter(r)
	return Ticket{tier: t, lease: lease, w: w}, err
}

// await waits until a request in the arrival queue is served or refused, until its time in the queue is over, or until ctx
// ends. In the last two cases it removes the request from the queue.
func (t *Scheduler) await(ctx context.Context, w *waiter) (*Lease, error) {
	timeout := time.NewTimer(time.Until(w.until))
	defer timeout.Stop()
	select {
	case <-w.done:
		return w.lease, w.err
	case <-timeout.C:
		if err := t.giveUp(w); err != nil {
			return nil, err
		}
		return w.lease, w.err // served or refused at the same time
	case <-ctx.Done():
		t.withdraw(w)
		return nil, ctx.Err()
	}
}

// enter is arrivals.enter under the tier's lock.
func (t *Scheduler) enter(r Request) (*waiter, *Lease, error) {
	t.lock()
	defer t.unlock()
	return t.arrivals.enter(r)
}

// giveUp removes a waiter from the queue at its timeout, and returns the error for its client; nil: the waiter was served or
// refused just before.
func (t *Scheduler) giveUp(w *waiter) error {
	t.lock()
	defer t.unlock()
	m := t.models[w.Model]
	if m == nil || !w.item.Remove() {
		return nil
	}
	t.arrivals.reportQueued(m, &w.Request, false)
	return t.arrivals.timeoutError(m, &w.Request)
}

// withdraw removes a waiter from the queue because its client left. If the waiter was served just before, withdraw releases
// the lease and the place in the pool.
func (t *Scheduler) withdraw(w *waiter) {
	t.lock()
	stillWaited := w.item.Remove()
	if m := t.models[w.Model]; stillWaited && m != nil {
		t.arrivals.reportQueued(m, &w.Request, false)
	}
	t.unlock()
	if stillWaited || w.lease == nil {
		return
	}
	w.lease.Release()
	if !w.Reserved && t.cfg.Places != nil {
		t.cfg.Places.Release() // without the tier's lock, because it may call Wake
	}
}

// Offer enters a request into the arrival queue and does not wait. It calls served once, with the result that Acquire would
// have returned: before Offer returns, or during a later call of the tier. served is called under the tier's lock, and must
// not call the tier. An offered request has no timeout. withdraw removes it from the queue if served was not called yet.
//
// With Config.Clock set, a simulation only needs Offer, the methods of Lease, and Wake at NextWake. No goroutine runs then,
// and no call waits.
func (t *Scheduler) Offer(r Request, served func(*Lease, error)) (withdraw func()) {
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
