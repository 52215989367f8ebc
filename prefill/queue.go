package prefill

import (
	"context"
	"fmt"
	"slices"
	"time"
)

// Request asks for a prefiller.
type Request struct {
	ID           string // breaks ties
	Model        string
	PromptTokens int       // estimate
	PromptBytes  int       // for vllm-ascend's weight; 0: four a token
	Arrival      time.Time // the request's first; zero: now
	Reserved     bool      // it holds a place in the pool already, as a retry does
	Exclude      []string  // IDs of the candidates tried before
	Policy       string    // empty: the tier's
}

// waiter is a request in the arrival queue.
type waiter struct {
	Request
	policy policy
	number uint64 // breaks ties of arrival
	since  time.Time
	done   chan struct{} // closed with lease or err set
	lease  *Lease
	err    error
}

func (w *waiter) before(o *waiter) bool {
	if !w.Arrival.Equal(o.Arrival) {
		return w.Arrival.Before(o.Arrival)
	}
	return w.number < o.number
}

// queue is first come, first served. Retries stand in a line of their own:
// they hold a place in the pool, so they must not wait behind a request that
// waits for one.
type queue struct{ fresh, retries []*waiter }

func (q *queue) empty() bool { return len(q.fresh)+len(q.retries) == 0 }

func (q *queue) line(w *waiter) *[]*waiter {
	if w.Reserved {
		return &q.retries
	}
	return &q.fresh
}

func (q *queue) add(w *waiter) {
	line := q.line(w)
	i := len(*line)
	for i > 0 && w.before((*line)[i-1]) {
		i--
	}
	*line = slices.Insert(*line, i, w)
}

// remove reports whether the waiter was still there.
func (q *queue) remove(w *waiter) bool {
	line := q.line(w)
	i := slices.Index(*line, w)
	if i < 0 {
		return false
	}
	*line = slices.Delete(*line, i, i+1)
	return true
}

// next is who is served first; without a place in the pool only a retry.
func (q *queue) next(places bool) *waiter {
	var first *waiter
	if len(q.retries) > 0 {
		first = q.retries[0]
	}
	if places && len(q.fresh) > 0 && (first == nil || q.fresh[0].before(first)) {
		first = q.fresh[0]
	}
	return first
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
	w, lease, err := t.enter(r)
	if w == nil {
		return lease, err
	}
	timeout := time.NewTimer(time.Until(w.Arrival.Add(t.cfg.Queue.Timeout)))
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

// enter serves the request at once, refuses it, or returns its waiter.
func (t *Tier) enter(r Request) (*waiter, *Lease, error) {
	t.lock()
	defer t.unlock()
	p := t.policy
	if r.Policy != "" {
		var err error
		if p, err = parsePolicy(r.Policy); err != nil {
			return nil, nil, err
		}
	}
	if !r.Reserved && len(r.Exclude) == 0 {
		t.budget.request(t.now)
	}
	if err := t.servable(r.Model); err != nil {
		return nil, nil, err
	}
	if r.Arrival.IsZero() {
		r.Arrival = t.now
	}
	m := t.models[r.Model]
	if t.waiting > 0 {
		t.serveQueues() // so that nobody overtakes who could have passed
	}
	if m.queue.next(!r.Reserved) == nil {
		if lease, _ := t.tryServe(m, p, &r, t.now); lease != nil {
			return nil, lease, nil
		}
	}
	if !t.now.Before(r.Arrival.Add(t.cfg.Queue.Timeout)) {
		return nil, nil, t.timeout(m)
	}
	if !r.Reserved && len(m.queue.fresh) >= t.cfg.Queue.Max {
		return nil, nil, fmt.Errorf("%w: %d requests wait for model %q; send fewer, or raise prefill.queue.max", ErrQueueFull, t.cfg.Queue.Max, r.Model)
	}
	t.arrivals++
	w := &waiter{Request: r, policy: p, number: t.arrivals, since: t.now, done: make(chan struct{})}
	m.queue.add(w)
	t.waiting++
	return w, nil, nil
}

// giveUp takes a waiter out at its timeout; nil if it was served just now.
func (t *Tier) giveUp(w *waiter) error {
	t.lock()
	defer t.unlock()
	m := t.models[w.Model]
	if m == nil || !m.queue.remove(w) {
		return nil
	}
	t.waiting--
	return t.timeout(m)
}

// timeout says what a request waited for in vain.
func (t *Tier) timeout(m *model) error {
	for _, c := range m.servers {
		if c.Live && !c.gate.closed {
			return fmt.Errorf("%w: model %q found no place in the pool or no prefiller in service for %v; add decode slots, raise pool.size, or see /prefill", ErrQueueTimeout, m.name, t.cfg.Queue.Timeout)
		}
	}
	return fmt.Errorf("%w: model %q waited %v; add prefillers or look for hand-offs that are not fetched", ErrKVExhausted, m.name, t.cfg.Queue.Timeout)
}

// withdraw takes a waiter out whose client left, and gives back what it was
// served in the same moment.
func (t *Tier) withdraw(w *waiter) {
	t.lock()
	m := t.models[w.Model]
	waited := m != nil && m.queue.remove(w)
	if waited {
		t.waiting--
	}
	t.unlock()
	if waited || w.lease == nil {
		return
	}
	w.lease.Release()
	if !w.Reserved && t.cfg.Places != nil {
		t.cfg.Places.Release() // not under the lock: it may call Wake
	}
}

// serveQueues serves all waiters that can pass now, the oldest first over all
// models, and arms the timer for the others.
func (t *Tier) serveQueues() {
	if t.waiting == 0 {
		return
	}
	places := true
	shut := map[*model]bool{}
	for {
		m, w := t.oldest(shut, places)
		if w == nil {
			break
		}
		if err := t.servable(m.name); err != nil {
			t.answer(m, w, nil, err)
			continue
		}
		lease, why := t.tryServe(m, w.policy, &w.Request, w.since)
		switch {
		case lease != nil:
			t.answer(m, w, lease, nil)
		case why == noPlace:
			places = false
		default:
			shut[m] = true
		}
	}
	if t.waiting > 0 {
		t.armTimer()
	}
}

func (t *Tier) oldest(shut map[*model]bool, places bool) (from *model, first *waiter) {
	for _, m := range t.models {
		if shut[m] {
			continue
		}
		if w := m.queue.next(places); w != nil && (first == nil || w.before(first)) {
			from, first = m, w
		}
	}
	return from, first
}

func (t *Tier) answer(m *model, w *waiter, lease *Lease, err error) {
	m.queue.remove(w)
	t.waiting--
	w.lease, w.err = lease, err
	close(w.done)
	if len(m.servers) == 0 && m.queue.empty() {
		delete(t.models, m.name)
	}
}

// armTimer wakes the queues when a hold timeout, a canary or the end of an
// outage may let somebody pass.
func (t *Tier) armTimer() {
	var next time.Time
	sooner := func(at time.Time) {
		if at.After(t.now) && (next.IsZero() || at.Before(next)) {
			next = at
		}
	}
	if len(t.expiries) > 0 {
		sooner(t.expiries[0].expires)
	}
	for _, c := range t.candidates {
		sooner(c.circuit.Until())
		if at, ok := c.gate.canaryAt(); ok {
			sooner(at)
		}
	}
	if next.IsZero() {
		t.timer.Stop()
		return
	}
	t.timer.Reset(next.Sub(t.now))
}
