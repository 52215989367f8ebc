// Package dispatcher admits finished prefills to decode ranks.
//
// One goroutine owns a board for each model: the mirror of its decode ranks,
// what they hold, and the pool of entries that wait for them. Other goroutines use
// the methods of Dispatcher.
package dispatcher

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"evenkeel/dispatcher/board"
	"evenkeel/pool"
	"evenkeel/predictor"
)

// Start runs a dispatcher until ctx is cancelled. Then every waiting entry
// gets ErrDraining; slots may still be released.
func Start(ctx context.Context, cfg Config) (*Dispatcher, error) {
	cfg = cfg.withDefaults()
	d := &Dispatcher{cfg: cfg, inbox: newInbox(), done: make(chan struct{})}
	d.metrics = newMetrics()
	r, err := newRunner(cfg, d, d.inbox.push)
	if err != nil {
		return nil, err
	}
	if err := d.metrics.register(cfg.Registerer, d); err != nil {
		return nil, err
	}
	if r.declog, err = openDecisionLog(cfg.DecisionLog, cfg.Log, d.metrics); err != nil {
		return nil, err
	}
	go d.run(ctx, r)
	return d, nil
}

// Enqueue adds e to the pool and sends exactly one answer on the channel, which has room
// for it. A caller that no longer wants the slot must call Withdraw and then still read the
// channel, because the assignment may have come first. hits are the ranks that hold a part
// of the prompt, and need not pull that part.
func (d *Dispatcher) Enqueue(e *pool.Entry, hits ...board.Hit) <-chan Result {
	return d.enqueue(waiting{entry: e, hits: hits})
}

// EnqueueMixed is Enqueue for ranks that prefill and decode. hits say how much of the entry's prompt each rank holds. Entries
// for the same ranks keep the order in which they come here.
func (d *Dispatcher) EnqueueMixed(e *pool.Entry, hits []board.Hit) <-chan Result {
	e.Mixed = true
	return d.enqueue(waiting{entry: e, hits: hits})
}

// enqueue hands an entry to the goroutine that owns the boards, and returns the channel of its answer. If the dispatcher has ended, the
// answer is ErrDraining at once.
func (d *Dispatcher) enqueue(w waiting) <-chan Result {
	if w.entry.Entered.IsZero() {
		w.entry.Entered = time.Now()
	}
	w.slot, w.result = newSlot(w.entry, d.cfg.Explain), make(chan Result, 1)
	if !d.inbox.push(func(r *runner) { r.enqueue(w) }) {
		w.answer(d.cfg.Places, Result{Err: board.ErrDraining})
	}
	return w.result
}

// Withdraw takes e out of the pool because its client has left. The channel of Enqueue
// then yields ErrWithdrawn. If the assignment came first, the channel yields the slot, and the
// caller must release it.
func (d *Dispatcher) Withdraw(e *pool.Entry) {
	d.inbox.push(func(r *runner) { r.apply(board.Withdraw{Entry: e}) })
}

// Release gives a slot back. A second call for the same slot is a bug of the caller: it is
// counted and changes nothing.
func (d *Dispatcher) Release(s *Slot, o board.Outcome) {
	if !s.released.CompareAndSwap(false, true) {
		d.metrics.doubleReleases.Inc()
		return
	}
	d.inbox.push(func(r *runner) { r.giveBack(s, o) })
}

// SetWorkers replaces the fleet of all models. A worker with a known ID keeps
// its load. The slots of a worker that is gone stay charged until they are released, and
// count again when the worker comes back. When SetWorkers returns, all rounds that used the
// old fleet are over: a rank that is no longer up has then got the last request
// that it will get.
func (d *Dispatcher) SetWorkers(ws []board.Worker) {
	ws = slices.Clone(ws)
	_ = d.ask(func(r *runner) error { // the error is that the dispatcher has ended, and then nothing is bound any more
		r.setWorkers(ws)
		return nil
	})
}

// SetPolicy changes the policy of the barrier groups from the next tick on.
func (d *Dispatcher) SetPolicy(spec string) error {
	return d.ask(func(r *runner) error { return r.set(board.SetPolicy{Spec: spec}) })
}

// SetFit makes the predictors start anew from a fit, and go on learning from there.
func (d *Dispatcher) SetFit(fit *predictor.Fit) error {
	return d.ask(func(r *runner) error { return r.set(board.SetFit{Fit: fit}) })
}

// Policy is the canonical name of the barrier groups' policy.
func (d *Dispatcher) Policy() string { return *d.policy.Load() }

// Loads returns a sample of the boards' loads; ok is false if ctx or the dispatcher ends first.
func (d *Dispatcher) Loads(ctx context.Context) (l board.Loads, ok bool) {
	reply := make(chan board.Loads, 1)
	if !d.inbox.push(func(r *runner) { reply <- r.loads() }) {
		return board.Loads{}, false
	}
	select {
	case l = <-reply:
		return l, true
	case <-ctx.Done():
		return board.Loads{}, false
	}
}

// Status returns a copy of what the boards hold. After the dispatcher has ended, it returns what
// the boards held at the end. If ctx ends first, the status is empty.
func (d *Dispatcher) Status(ctx context.Context) board.Status {
	reply := make(chan board.Status, 1)
	if !d.inbox.push(func(r *runner) { reply <- r.status(time.Now()) }) {
		<-d.done
		return d.last
	}
	select {
	case s := <-reply:
		s.Score()
		return s
	case <-ctx.Done():
		return board.Status{}
	}
}

// EnqueueLocal offers a prompt without a hand-off to the decode ranks that may compute
// it. The policy decides at once, within the limits of every admission. But if any entry waits
// in the pool, the answer is an error: prefill engines already hold KV for those entries. The
// answer is a slot, charged with the whole prompt, or an error.
func (d *Dispatcher) EnqueueLocal(e *pool.Entry, l *board.Local) <-chan Result {
	return d.enqueue(waiting{entry: e, local: l})
}

// Counted corrects the prompt length that a slot is charged with. The proxy had only
// estimated it, and now the rank's engine has counted the tokens.
func (d *Dispatcher) Counted(s *Slot, prompt int) {
	d.inbox.push(func(r *runner) { r.recount(s, prompt) })
}

// Shunned returns the prefill engines from which no KV should go to a slot's rank now, because KV from them lately did not arrive there.
func (d *Dispatcher) Shunned(s *Slot) (prefillers []string) {
	if s.owner.pace.watched.Load() == 0 {
		return nil
	}
	_ = d.ask(func(r *runner) error { // the error is that the dispatcher has ended, and then no pair is avoided any more
		if s.held() {
			prefillers = r.boards.Shunned(s.owner.model, s.Slot, time.Now())
		}
		return nil
	})
	return prefillers
}

// Blocked returns the prefill engines from which no KV should go to at least one rank of a board now.
func (d *Dispatcher) Blocked(board string) (prefillers []string) {
	if p, ok := d.paces.Load(board); !ok || p.(*published).watched.Load() == 0 {
		return nil
	}
	_ = d.ask(func(r *runner) error { // the error is that the dispatcher has ended, and then no pair is avoided any more
		prefillers = r.boards.Shunned(board, -1, time.Now())
		return nil
	})
	return prefillers
}

// Rerouted records that the KV of a slot, which was bound before its prefill, comes from another prefill engine.
func (d *Dispatcher) Rerouted(s *Slot, prefiller string) {
	d.inbox.push(func(r *runner) {
		if s.held() {
			r.apply(board.Rerouted{Model: s.owner.model, Slot: s.Slot, Prefiller: prefiller})
		}
	})
}

// Preempted records that the engine of a worker ran out of KV room and preempted a
// request.
func (d *Dispatcher) Preempted(worker int32) {
	d.inbox.push(func(r *runner) {
		r.countAll() // a mixed rank also computes again the tokens that the request had generated
		r.apply(board.Preempted{Worker: worker})
	})
}

// Gauged records how many KV tokens were in use on a worker at an instant, by its engine's gauges.
// The boards use this only for ranks with orphans, or whose engines keep the KV of answers.
func (d *Dispatcher) Gauged(worker int32, kvTokens int64, at time.Time) {
	g := board.Gauged{Worker: worker, KVTokens: kvTokens, At: at}
	d.inbox.push(func(r *runner) {
		if r.boards.Keeps(worker) {
			r.countAll()
			r.apply(g)
		}
	})
}

// Configure changes the settings between two rounds. If a setting cannot work, or not
// together with the others, Configure returns an error and changes nothing.
func (d *Dispatcher) Configure(s board.Settings) error {
	return d.ask(func(r *runner) error { return r.set(s) })
}

// Accepts returns the error that Configure would return, and changes nothing.
func (d *Dispatcher) Accepts(s board.Settings) error {
	return d.ask(func(r *runner) error { return r.boards.Accepts(s) })
}

// ask makes the loop run a command and waits for its result.
func (d *Dispatcher) ask(command func(r *runner) error) error {
	reply := make(chan error, 1)
	if !d.inbox.push(func(r *runner) { reply <- command(r) }) {
		return board.ErrDraining
	}
	return <-reply // an accepted command is always run
}

// run is the goroutine that owns the boards. A turn takes every command that
// is queued and only then decides, so that a burst is one round.
func (d *Dispatcher) run(ctx context.Context, r *runner) {
	defer close(d.done)
	defer r.start(ctx)()
	timer := time.NewTimer(0)
	defer timer.Stop()
	var queue []command
	for {
		queue = d.inbox.swap(queue)
		r.advance(queue, time.Now())
		clear(queue) // so that the garbage collector can free what the commands refer to
		if next := r.boards.Next(); next.IsZero() {
			timer.Stop()
		} else {
			timer.Reset(time.Until(next))
		}
		select {
		case <-d.inbox.wake:
		case <-timer.C:
		case <-ctx.Done():
			r.shutDown(d.inbox.close(), time.Now())
			d.last = r.status(r.now)
			d.last.Score()
			return
		}
	}
}

// Room returns how many more hand-offs for a model, besides those that wait in the pool of the board,
// would get a slot within the given time. If none waits, Room returns at least 1, so that prefills
// never stop. own says that only some ranks of the board list the model, so that n counts these ranks
// and this model's hand-offs alone.
func (d *Dispatcher) Room(board, model string, within time.Duration) (n int, own bool) {
	v, ok := d.paces.Load(board)
	if !ok {
		return math.MaxInt, false // the board never had a rank, so missing slots are not the problem
	}
	p, own := v.(*published).of(model)
	slots := p.slots.Load()
	if slots == 0 { // no rank takes requests now, so missing slots are not the problem
		return math.MaxInt, own
	}
	// Within the mean time that a request has its slot, each slot comes free once.
	freed := within.Seconds() * float64(slots) / max(math.Float64frombits(p.seconds.Load()), 1e-3)
	return max(1, int(min(float64(p.free.Load())+freed, math.MaxInt32))) - int(p.waiting.Load()), own
}

// Free returns how many slots of a board were free for a model after the last turn. own means the same as for Room.
func (d *Dispatcher) Free(board, model string) (n int, own bool) {
	v, ok := d.paces.Load(board)
	if !ok {
		return math.MaxInt32, false // the board never had a rank, so missing slots are not the problem
	}
	p, own := v.(*published).of(model)
	return int(p.free.Load()), own
}

// register registers the metrics, and the gauges that read the status of d at each scrape. r nil: nothing is registered.
func (m *metrics) register(r prometheus.Registerer, d *Dispatcher) error {
	if r == nil {
		return nil
	}
	m.all.MustRegister(gauges{d})
	if err := r.Register(m.all); err != nil {
		return fmt.Errorf("dispatcher: %w; give every dispatcher a registerer of its own", err)
	}
	return nil
}
