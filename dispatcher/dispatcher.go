// Package dispatcher decides which decode rank gets a request whose prefill has finished, and when.
//
// One goroutine, the scheduler, owns a board for each model, which mirrors its decode ranks with
// their requests, and has the pool of waiting requests (entries). Other goroutines use the methods
// of Dispatcher.
package dispatcher

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/delivery"
	"evenkeel/pool"
	"evenkeel/predictor"
)

// Start runs a dispatcher until ctx is cancelled. Then every waiting entry gets the error
// ErrDraining. Release may still be called afterwards. After an error, no file is open and no
// metric is registered.
func Start(ctx context.Context, cfg Config) (*Dispatcher, error) {
	cfg = cfg.withDefaults()
	d := &Dispatcher{cfg: cfg, inbox: newInbox(), done: make(chan struct{})}
	d.metrics = newMetrics()
	r, err := newScheduler(cfg, d, d.inbox.push)
	if err != nil {
		return nil, err
	}
	if r.declog, err = openDecisionLog(cfg.DecisionLog, cfg.Log, d.metrics); err != nil {
		return nil, err
	}
	if err := d.metrics.register(cfg.Registerer, d); err != nil {
		r.declog.close()
		return nil, err
	}
	go d.run(ctx, r)
	return d, nil
}

// Enqueue adds e to the pool. Exactly one answer comes on the channel, which has room for it. A
// caller that no longer wants a slot must call Withdraw and then still read the channel, because e
// may have got a slot before.
func (d *Dispatcher) Enqueue(e *pool.Entry) <-chan Result { return d.enqueue(board.Enqueue{Entry: e}) }

// EnqueueAggregated is Enqueue for ranks that prefill and decode. Entries for the same ranks keep
// the order of these calls.
func (d *Dispatcher) EnqueueAggregated(e *pool.Entry, hits []board.Hit) <-chan Result {
	e.Aggregated = true
	return d.enqueue(board.Enqueue{Entry: e, Hits: hits})
}

func (d *Dispatcher) enqueue(e board.Enqueue) <-chan Result {
	if e.Entry.Entered.IsZero() {
		e.Entry.Entered = time.Now()
	}
	slot := newSlot(e.Entry, d.cfg.Explain) // the scheduler fills in the rank
	e.Trace = slot.Trace                    // the board writes here why the rank was chosen; nil unless cfg.Explain is set
	w := waitingEntry{Enqueue: e, slot: slot, result: make(chan Result, 1)}
	if !d.inbox.push(func(r *scheduler) { r.enqueue(w) }) {
		w.answer(d.cfg.Places, Result{Err: board.ErrDraining})
	}
	return w.result
}

// Withdraw takes e out of the pool because its client has left. The channel of Enqueue then yields
// ErrWithdrawn, or the slot that e got before, which the caller must release.
func (d *Dispatcher) Withdraw(e *pool.Entry) {
	d.inbox.push(func(r *scheduler) { r.apply(board.Withdraw{Entry: e}) })
}

// Release gives a slot back. A second call for the same slot changes nothing, and is counted in
// evenkeel_double_releases_total, because it is a bug of the caller.
func (d *Dispatcher) Release(s *Slot, o board.Outcome) {
	if !s.released.CompareAndSwap(false, true) {
		d.metrics.doubleReleases.Inc()
		return
	}
	if o.Kind == board.Finished { // the first event may have come together with the end
		s.ReportStarted()
	}
	d.inbox.push(func(r *scheduler) { r.releaseSlot(s, o) })
}

// SetWorkers replaces the ranks of all models. A worker whose ID was there before keeps its
// requests. The slots of a worker that has left stay charged until they are released, and count
// again if it comes back. When SetWorkers returns, a rank that is no longer up gets no more
// requests.
func (d *Dispatcher) SetWorkers(ws []board.Worker) {
	ws = slices.Clone(ws)
	_ = d.ask(func(r *scheduler) error { // an error only means that the dispatcher has ended
		r.setWorkers(ws)
		return nil
	})
}

// SetPolicy changes the policy of the groups whose ranks step together, from the next tick on.
// After an error, nothing has changed.
func (d *Dispatcher) SetPolicy(spec string) error {
	return d.ask(func(r *scheduler) error { return r.applySettings(board.SetPolicy{Spec: spec}) })
}

// SetFit makes all predictors start anew from a fit. A predictor that cannot use it stays as it
// was, and this is logged.
func (d *Dispatcher) SetFit(fit *predictor.Fit) error {
	return d.ask(func(r *scheduler) error { return r.applySettings(board.SetFit{Fit: fit}) })
}

// Policy returns the canonical name of the policy of the groups whose ranks step together.
func (d *Dispatcher) Policy() string { return *d.policy.Load() }

// Loads returns the present loads; ok is false if ctx ends first, or if the dispatcher has ended
// already.
func (d *Dispatcher) Loads(ctx context.Context) (l board.Loads, ok bool) {
	reply := make(chan board.Loads, 1)
	if !d.inbox.push(func(r *scheduler) { reply <- r.loads() }) {
		return board.Loads{}, false
	}
	select {
	case l = <-reply:
		return l, true
	case <-ctx.Done():
		return board.Loads{}, false
	}
}

// Status returns the status of all boards, or the last one before the dispatcher ended; empty if
// ctx ends first.
func (d *Dispatcher) Status(ctx context.Context) board.Status {
	reply := make(chan board.Status, 1)
	if !d.inbox.push(func(r *scheduler) { reply <- r.status(time.Now()) }) {
		<-d.done // d.last is written before done is closed
		return d.last
	}
	select {
	case s := <-reply:
		s.Score() // takes too long for the scheduler's goroutine
		return s
	case <-ctx.Done():
		return board.Status{}
	}
}

// EnqueueLocal offers a prompt without a hand-off to the decode ranks that may compute it
// themselves. The policy decides at once. The answer is always an error while entries wait in the
// pool: prefill engines hold KV for these, so they come first.
func (d *Dispatcher) EnqueueLocal(e *pool.Entry, l *board.Local) <-chan Result {
	return d.enqueue(board.Enqueue{Entry: e, Local: l})
}

// CorrectPrompt corrects the prompt length that a slot is charged with, when the rank's engine has
// counted the tokens.
func (d *Dispatcher) CorrectPrompt(s *Slot, prompt int) {
	d.inbox.push(func(r *scheduler) { r.correctPrompt(s, prompt) })
}

// BlamesRequest is delivery.Table.BlamesRequest. since is when the first attempt failed, and s the
// slot of the second.
func (d *Dispatcher) BlamesRequest(s *Slot, first, second delivery.Link, since time.Time) (blames bool) {
	blames = true // without an answer, the dispatcher has ended, and nothing is tried again
	_ = d.ask(func(r *scheduler) error {
		blames = r.boards.BlamesRequest(s.board.model, first, second, since)
		return nil
	})
	return blames
}

// Excuse takes a lost hand-off back, because the request was at fault. s may be given back already.
func (d *Dispatcher) Excuse(s *Slot, l delivery.Link) {
	d.inbox.push(func(r *scheduler) { r.apply(board.Excused{Model: s.board.model, Link: l}) })
}

// Quarantined returns the prefill engines from which no KV should go to a slot's rank now. It asks
// the scheduler only if a pair of engines may be quarantined, which is rare.
func (d *Dispatcher) Quarantined(s *Slot) (prefillers []string) {
	if !s.board.pace.mayHaveQuarantinedPair() {
		return nil
	}
	_ = d.ask(func(r *scheduler) error { // after the end, nothing is quarantined
		if s.isHeld() { // otherwise the slot number may belong to another request
			prefillers = r.boards.Quarantined(s.board.model, s.Slot, time.Now())
		}
		return nil
	})
	return prefillers
}

// Blocked returns the prefill engines from which no KV should go now to at least one decode rank of
// a board.
func (d *Dispatcher) Blocked(board string) (prefillers []string) {
	pace, exists := d.paces.Load(board)
	if !exists || !pace.(*publicPace).mayHaveQuarantinedPair() {
		return nil
	}
	_ = d.ask(func(r *scheduler) error {
		prefillers = r.boards.Quarantined(board, -1, time.Now()) // slot -1 asks about all ranks
		return nil
	})
	return prefillers
}

// Rerouted records that the KV of a slot that was bound before its prefill comes from another
// prefill engine than planned.
func (d *Dispatcher) Rerouted(s *Slot, prefiller string) {
	d.inbox.push(func(r *scheduler) {
		if s.isHeld() { // otherwise the slot number may belong to another request
			r.apply(board.Rerouted{Model: s.board.model, Slot: s.Slot, Prefiller: prefiller})
		}
	})
}

// Preempted records that the engine of a worker preempted a request, because KV room was short.
func (d *Dispatcher) Preempted(worker int32) {
	d.inbox.push(func(r *scheduler) {
		r.readAllProgress() // a mixed rank computes the generated tokens of the preempted request again
		r.apply(board.Preempted{Worker: worker})
	})
}

// Gauged records how many KV tokens an engine had in use. The boards use this only for ranks whose
// engines may still hold KV of ended requests (see board.Boards.MayHoldEndedKV).
func (d *Dispatcher) Gauged(worker int32, kvTokens int64, at time.Time) {
	g := board.Gauged{Worker: worker, KVTokens: kvTokens, At: at}
	d.inbox.push(func(r *scheduler) {
		if r.boards.MayHoldEndedKV(worker) {
			r.readAllProgress() // the board compares the gauge with the tokens of the running requests
			r.apply(g)
		}
	})
}

// Configure changes the settings, from the next round on. After an error, nothing has changed.
func (d *Dispatcher) Configure(s board.Settings) error {
	return d.ask(func(r *scheduler) error { return r.applySettings(s) })
}

// CheckSettings returns the error that Configure would return.
func (d *Dispatcher) CheckSettings(s board.Settings) error {
	return d.ask(func(r *scheduler) error { return r.boards.CheckSettings(s) })
}

// ask makes the scheduler's goroutine call f; ErrDraining: the dispatcher has ended.
func (d *Dispatcher) ask(f func(r *scheduler) error) error {
	reply := make(chan error, 1)
	if !d.inbox.push(func(r *scheduler) { reply <- f(r) }) {
		return board.ErrDraining
	}
	return <-reply // a function that the inbox accepts is always called
}

// run is the scheduler's goroutine. It calls all queued functions before the boards decide, so that
// a burst of requests leads to one round of decisions.
func (d *Dispatcher) run(ctx context.Context, r *scheduler) {
	defer close(d.done)
	waitForHelpers := r.start(ctx)
	defer waitForHelpers()
	timer := time.NewTimer(0)
	defer timer.Stop()
	var queue []func(*scheduler)
	for {
		queue = d.inbox.swap(queue)
		r.advance(queue, time.Now())
		clear(queue) // lets the garbage collector free what the functions refer to
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
			d.last.Score() // slow, but no decision waits for this goroutine any more
			return
		}
	}
}

// Room estimates how many more hand-offs for a model would get a slot within the given time; below
// 0: more wait than slots will come free. While none waits, it is at least 1, because prefills must
// never stop. ownRanks says that only some ranks of the board list the model, so that n counts only
// these.
func (d *Dispatcher) Room(board, model string, within time.Duration) (n int, ownRanks bool) {
	v, ok := d.paces.Load(board)
	if !ok {
		return math.MaxInt, false // no board: missing slots are not the problem
	}
	p, ownRanks := v.(*publicPace).ofModel(model)
	slots := p.slots.Load()
	if slots == 0 { // a shortage of slots is not the reason to hold prefills back
		return math.MaxInt, ownRanks
	}
	// Each slot comes free once per meanSlotSeconds. A mean below 1 ms counts as 1 ms, so that the
	// division is safe.
	freed := within.Seconds() * float64(slots) / max(math.Float64frombits(p.meanSlotSeconds.Load()), 1e-3)
	// At most MaxInt32, because a larger float64 may not fit an int.
	free := max(1, int(min(float64(p.free.Load())+freed, math.MaxInt32)))
	return free - int(p.waiting.Load()), ownRanks
}

// Free returns how many slots for a model were free after the last turn of the scheduler; MaxInt32
// for a board that never had a rank. ownRanks is that of Room.
func (d *Dispatcher) Free(board, model string) (n int, ownRanks bool) {
	v, ok := d.paces.Load(board)
	if !ok {
		return math.MaxInt32, false
	}
	p, ownRanks := v.(*publicPace).ofModel(model)
	return int(p.free.Load()), ownRanks
}

// register does nothing if r is nil. The gauges read the status of d at each scrape.
func (m *metrics) register(r prometheus.Registerer, d *Dispatcher) error {
	if r == nil {
		return nil
	}
	m.registry.MustRegister(gauges{d})
	if err := r.Register(m.registry); err != nil {
		return fmt.Errorf("dispatcher: %w; give every dispatcher a registerer of its own", err)
	}
	return nil
}
