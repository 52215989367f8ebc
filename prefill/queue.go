package prefill

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"evenkeel/prefill/cache"
	"evenkeel/prefill/ledger"
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
	w, lease, err := t.enter(r)
	if w == nil {
		return lease, err
	}
	return t.await(ctx, w)
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

// enter serves the request at once, refuses it, or returns its waiter.
func (t *Tier) enter(r Request) (*waiter, *Lease, error) {
	t.lock()
	defer t.unlock()
	m, p, err := t.receive(&r)
	if err != nil {
		return nil, nil, err
	}
	if lease, err := t.atOnce(m, p, &r); lease != nil || err != nil {
		return nil, lease, err
	}
	if err := t.mayWait(m, &r, 1); err != nil {
		return nil, nil, err
	}
	return t.wait(m, p, r), nil, nil
}

// receive checks a request and serves first who could have passed before it.
func (t *Tier) receive(r *Request) (*model, *policy.Policy, error) {
	p, err := t.steer.Named(r.Policy)
	if err != nil {
		return nil, nil, badPolicy(err)
	}
	if !r.Reserved && len(r.Exclude) == 0 {
		t.budget.request(t.now)
	}
	if err := t.servable(r.Model); err != nil && !r.offered() {
		return nil, p, err
	}
	if r.Arrival.IsZero() {
		r.Arrival = t.now
	}
	if t.queue.Len() > 0 {
		t.serveQueues()
	}
	m := t.modelOf(r.Model)
	if !r.Reserved && len(r.Exclude) == 0 {
		m.pace.Arrived(t.now)
	}
	return m, p, nil
}

// atOnce serves a request that nobody is ahead of. Any other may still pass
// those in front, from the queue.
func (t *Tier) atOnce(m *model, p *policy.Policy, r *Request) (*Lease, error) {
	if m.line.Waits(!r.Reserved) {
		return nil, nil
	}
	t.queue.StartRound()
	lease, why := t.tryServe(m, p, r, t.now)
	t.letGo()
	if why == away {
		t.forgetEmpty(m)
		return nil, ErrElsewhere
	}
	return lease, nil
}

// mayWait makes room in the queue for n requests like this one.
func (t *Tier) mayWait(m *model, r *Request, n int) error {
	if !t.now.Before(r.Arrival.Add(t.cfg.Queue.Timeout)) {
		return t.timeout(m)
	}
	if !r.Reserved && !r.Returned && !t.makeRoom(m, r, n) {
		return t.full(r.Model)
	}
	return nil
}

func (t *Tier) full(model string) error {
	return fmt.Errorf("%w: %d requests wait for model %q; send fewer, or raise prefill.queue.max", ErrQueueFull, t.cfg.Queue.Max, model)
}

// makeRoom displaces those that yield to n requests like this one, none unless
// there is room for all then.
func (t *Tier) makeRoom(m *model, r *Request, n int) bool {
	displaced, ok := m.line.MakeRoom(r.Priority, r.Key, n, t.cfg.Queue.Max)
	for _, e := range displaced {
		t.metrics.displaced.Inc()
		e.Of.conclude(nil, t.full(r.Model))
	}
	return ok
}

func (t *Tier) wait(m *model, p *policy.Policy, r Request) *waiter {
	w := &waiter{Request: r, policy: p, since: t.now, until: r.Arrival.Add(t.cfg.Queue.Timeout), done: make(chan struct{})}
	w.entry = queue.Entry[*waiter]{Of: w, Key: r.Key, Priority: r.Priority, Tokens: r.PromptTokens, Arrival: r.Arrival, Reserved: r.Reserved}
	m.line.Add(&w.entry)
	t.moved(m, &w.Request, true)
	return w
}

// giveUp takes a waiter out at its timeout; nil if it was served just now.
func (t *Tier) giveUp(w *waiter) error {
	t.lock()
	defer t.unlock()
	m := t.models[w.Model]
	if m == nil || !w.entry.Remove() {
		return nil
	}
	return t.timeout(m)
}

// timeout says what a request waited for in vain.
func (t *Tier) timeout(m *model) error {
	if len(m.servers) == 0 {
		return fmt.Errorf("%w: no region took model %q for %v", ErrQueueTimeout, m.name, t.cfg.Queue.Timeout)
	}
	if !slices.ContainsFunc(m.servers, func(c *candidate) bool { return c.Live }) {
		return fmt.Errorf("%w for model %q: all %d take connections and answer nothing, for %v now; check their /health", ErrUnavailable, m.name, len(m.servers), t.cfg.Queue.Timeout)
	}
	for _, c := range m.servers {
		if c.Live && !c.account.Closed() {
			return fmt.Errorf("%w: model %q found no place in the pool or no prefiller that could start it for %v; add decode slots or prefillers, raise pool.size, or see /prefill", ErrQueueTimeout, m.name, t.cfg.Queue.Timeout)
		}
	}
	return fmt.Errorf("%w: model %q waited %v; add prefillers or look for hand-offs that are not fetched", ErrKVExhausted, m.name, t.cfg.Queue.Timeout)
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

// serveQueues serves all waiters that can pass now, in one order over all
// models, and arms the timer for the others. One whose best prefiller can take
// no more is held for it, its tokens charged there for those behind it; they
// pass where their best is another.
func (t *Tier) serveQueues() {
	if t.queue.Len() == 0 {
		return
	}
	t.queue.StartRound()
	for e := t.queue.Next(); e != nil; e = t.queue.Next() {
		w := e.Of
		m := t.models[w.Model]
		if err := t.servable(m.name); err != nil && !w.offered() {
			t.answer(m, w, nil, err)
			continue
		}
		lease, why := t.tryServe(m, w.policy, &w.Request, w.since)
		switch why {
		case 0:
			t.answer(m, w, lease, nil)
		case nobody:
			m.line.Settle()
		case away:
			t.answer(m, w, nil, ErrElsewhere)
			t.takeAlong(m, w)
		case noPlace:
			t.queue.NoPlaces()
		case held:
			e.Hold()
		default:
			m.line.Shut()
		}
	}
	t.letGo()
	if t.queue.Len() > 0 {
		t.armTimer()
	}
}

// letGo ends a round: what was held is charged nowhere.
func (t *Tier) letGo() {
	for _, c := range t.holding {
		c.account.Waiting = ledger.Sums{}
	}
	t.holding = t.holding[:0]
}

// answer takes a waiter out of its queue with what became of it.
func (t *Tier) answer(m *model, w *waiter, lease *Lease, err error) {
	if lease != nil || errors.Is(err, ErrElsewhere) {
		w.entry.Served()
	}
	if lease != nil {
		keepHere(w.siblings)
	}
	w.entry.Remove()
	t.moved(m, &w.Request, false)
	w.conclude(lease, err)
	t.forgetEmpty(m)
}

// forgetEmpty drops a model that nobody serves here and nobody waits for.
func (t *Tier) forgetEmpty(m *model) {
	if len(m.servers) == 0 && m.line.Empty() {
		delete(t.models, m.name)
		t.queue.Drop(m.name)
	}
}

// conclude tells the caller that waits what became of its request.
func (w *waiter) conclude(lease *Lease, err error) {
	w.lease, w.err = lease, err
	close(w.done)
	if w.tell != nil {
		w.tell(lease, err)
	}
}

// armTimer wakes the queues when a hold timeout, a canary, the end of an outage
// or of patience may let somebody pass.
func (t *Tier) armTimer() {
	var next time.Time
	sooner := func(at time.Time) {
		if at.After(t.now) && (next.IsZero() || at.Before(next)) {
			next = at
		}
	}
	if at, ok := t.ledger.NextExpiry(); ok {
		sooner(at)
	}
	for _, c := range t.candidates {
		sooner(c.circuit.Until())
		if at, ok := c.account.CanaryAt(); ok {
			sooner(at)
		}
		if at, ok := c.account.StallsAt(); ok {
			sooner(at)
		}
	}
	t.wake(next)
}
