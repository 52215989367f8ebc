package prefill

import "time"

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
	m, p, err := t.receive(&r)
	if err != nil {
		served(nil, err)
		return func() {}
	}
	if lease, err := t.atOnce(m, p, &r); lease != nil || err != nil {
		served(lease, err)
		return func() {}
	}
	if err := t.mayWait(m, &r, 1); err != nil {
		served(nil, err)
		return func() {}
	}
	w := t.wait(m, p, r)
	w.tell = served
	return func() { t.withdraw(w) }
}

// NextWake is when time alone may let somebody pass who waits; false: never.
func (t *Tier) NextWake() (time.Time, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.wakeAt, t.queue.Len() > 0 && !t.wakeAt.IsZero()
}

// wake has the queues looked at again at a time, zero: only after events.
func (t *Tier) wake(at time.Time) {
	t.wakeAt = at
	switch {
	case t.timer == nil: // a simulation asks
	case at.IsZero():
		t.timer.Stop()
	default:
		t.timer.Reset(at.Sub(t.now))
	}
}
