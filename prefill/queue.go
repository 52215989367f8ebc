package prefill

import (
	"context"
	"time"

	"evenkeel/prefill/cache"
	"evenkeel/prefill/policy"
	"evenkeel/prefill/queue"
)

// Request asks for a prefiller.
type Request struct {
	ID           string // breaks ties
	Model        string
	PromptTokens int                      // estimate
	Counted      bool                     // it is no estimate
	Prompt       Prompt                   // to find it in prefix caches
	Session      uint64                   // hash of its session's key, 0: none
	PromptBytes  int                      // for vllm-ascend's weight; 0: four a token
	Arrival      time.Time                // the request's first; zero: now
	Key          string                   // whose it is: keys of one priority take turns
	Priority     int                      // higher ones first
	Reserved     bool                     // it holds a place in the pool already, as a retry does
	Exclude      []string                 // IDs of the candidates tried before
	Policy       string                   // empty: the tier's
	Target       string                   // ID of the one candidate it may go to; empty: any
	May          func(region string) bool // whether it may go to an engine of another region; nil: to any
	Returned     bool                     // another region gave it back: a full queue takes it, at its first arrival
	Elsewhere    Elsewhere                // nil: it is served here
	Holder       *Holder                  // it is to give the lease back; nil: the audit does not ask

	seen struct { // what the tier remembers from one look to the next
		counted bool // by the hotspot detector
		weighed bool
		cache   cache.Lookup
	}
}

// waiter is a request in the arrival queue.
type waiter struct {
	Request
	entry  queue.Entry[*waiter]
	policy *policy.Policy
	since  time.Time
	until  time.Time
	done   chan struct{}       // closed with lease or err set
	tell   func(*Lease, error) // the same for who does not wait for it; nil: nobody
	lease  *Lease
	err    error

	siblings []*waiter // legs of the same request, itself among them
	decided  *decided  // of the same; nil: it is no leg
}

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

func (t *Tier) enter(r Request) (*waiter, *Lease, error) {
	t.lock()
	defer t.unlock()
	return t.arrivals.enter(r)
}

// giveUp takes a waiter out at its timeout; nil if it was served just now.
func (t *Tier) giveUp(w *waiter) error {
	t.lock()
	defer t.unlock()
	m := t.models[w.Model]
	if m == nil || !w.entry.Remove() {
		return nil
	}
	return t.arrivals.timeout(m)
}

// withdraw takes a waiter out whose client left, and gives back what it was
// served in the same moment.
func (t *Tier) withdraw(w *waiter) {
	t.lock()
	waited := w.entry.Remove()
	t.unlock()
	if waited || w.lease == nil {
		return
	}
	w.lease.Release()
	if !w.Reserved && t.cfg.Places != nil {
		t.cfg.Places.Release() // not under the lock: it may call Wake
	}
}

// conclude tells the caller that waits what became of its request.
func (w *waiter) conclude(lease *Lease, err error) {
	w.lease, w.err = lease, err
	close(w.done)
	if w.decided != nil {
		w.decided.close() // whoever was refused goes nowhere, and its siblings not without it
	}
	if w.tell != nil {
		w.tell(lease, err)
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
	w.tell = served
	return func() { t.withdraw(w) }
}
