// Package dispatcher decides which decode rank gets a request whose prefill has finished, and when.
//
// One goroutine, the scheduler, owns a board for each model. A board mirrors the model's decode ranks with their requests, and has the pool
// of waiting requests (entries). Other goroutines use the methods of Dispatcher.
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

// Start runs a dispatcher until ctx is cancelled. Then every waiting entry gets the error ErrDraining. Release may still be called
// afterwards. After an error, no file is open and no metric is registered.
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

// Enqueue adds e to the pool. Exactly one answer comes on the returned channel, which has room for it. A caller that no longer wants a slot
// must call Withdraw and then still read the channel, because e may have got a slot before.
func (d *Dispatcher) Enqueue(e *pool.Entry) <-chan Result { return d.enqueue(board.Enqueue{Entry: e}) }

// EnqueueAggregated is Enqueue for ranks that prefill and decode. hits say how much of the prompt of e each rank has in its prefix cache.
// Entries for the same ranks keep the order of these calls.
func (d *Dispatcher) EnqueueAggregated(e *pool.Entry, hits []board.Hit) <-chan Result {
	e.Aggregated = true
	return d.enqueue(board.Enqueue{Entry: e, Hits: hits})
}

// enqueue passes an entry to the scheduler's goroutine, and returns the channel for its answer. If the dispatcher has ended, the answer
// comes at once: it is ErrDraining, and w.answer releases the entry's place in the bounded pool (Config.Places), if it has one. An entry
// without a time of entry gets the present time.
func (d *Dispatcher) enqueue(e board.Enqueue) <-chan Result {
	if e.Entry.Entered.IsZero() {
		e.Entry.Entered = time.Now()
	}
	slot := newSlot(e.Entry, d.cfg.Explain) // still without a rank: the scheduler fills it in when the entry is bound
	e.Trace = slot.Trace                    // the board writes here why the rank was chosen; nil unless cfg.Explain is set
	w := waitingEntry{Enqueue: e, slot: slot, result: make(chan Result, 1)}
	if !d.inbox.push(func(r *scheduler) { r.enqueue(w) }) {
		w.answer(d.cfg.Places, Result{Err: board.ErrDraining})
	}
	return w.result
}

// Withdraw takes e out of the pool because its client has left. The channel of Enqueue then yields ErrWithdrawn. If e got a slot before,
// the channel yields the slot, and the caller must release it.
func (d *Dispatcher) Withdraw(e *pool.Entry) {
	d.inbox.push(func(r *scheduler) { r.apply(board.Withdraw{Entry: e}) })
}

// Release gives a slot back, with the outcome of its request. A second call for the same slot changes nothing. It is counted in
// evenkeel_double_releases_total, because it is a bug of the caller.
func (d *Dispatcher) Release(s *Slot, o board.Outcome) {
	if !s.released.CompareAndSwap(false, true) {
		d.metrics.doubleReleases.Inc()
		return
	}
	if o.Kind == board.Finished { // the first event of the answer may have come together with its end, and was not reported yet
		s.ReportStarted()
	}
	d.inbox.push(func(r *scheduler) { r.releaseSlot(s, o) })
}

// SetWorkers replaces the ranks of all models by the workers ws. A worker whose ID was there before keeps its requests. If a worker has
// left the fleet, its slots stay charged until they are released, and count again if the worker comes back. When SetWorkers returns, no
// round works with the old ranks any more, so a rank that is no longer up gets no more requests.
func (d *Dispatcher) SetWorkers(ws []board.Worker) {
	ws = slices.Clone(ws)
	_ = d.ask(func(r *scheduler) error { // an error only means that the dispatcher has ended, and then it binds no more requests
		r.setWorkers(ws)
		return nil
	})
}

// SetPolicy changes the policy of the groups whose ranks step together, from the next tick on. If the policy cannot be used, SetPolicy
// returns an error and changes nothing.
func (d *Dispatcher) SetPolicy(spec string) error {
	return d.ask(func(r *scheduler) error { return r.applySettings(board.SetPolicy{Spec: spec}) })
}

// SetFit makes all predictors forget what they learned, start from a fit, and go on learning from there. A predictor that cannot use the
// fit stays as it was, and this is logged.
func (d *Dispatcher) SetFit(fit *predictor.Fit) error {
	return d.ask(func(r *scheduler) error { return r.applySettings(board.SetFit{Fit: fit}) })
}

// Policy returns the canonical name of the policy of the groups whose ranks step together.
func (d *Dispatcher) Policy() string { return *d.policy.Load() }

// Loads returns the present loads of all ranks; ok is false if ctx ends first, or if the dispatcher has ended already. If the dispatcher
// ends while Loads waits, the loads still come: before the end, the scheduler calls every function that the inbox has accepted.
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

// Status returns the status of all boards. After the dispatcher has ended, it returns the last status before the end. If ctx ends before
// the status comes, the result is empty.
func (d *Dispatcher) Status(ctx context.Context) board.Status {
	reply := make(chan board.Status, 1)
	if !d.inbox.push(func(r *scheduler) { reply <- r.status(time.Now()) }) {
		<-d.done // the dispatcher is ending, and writes its last status before it closes done
		return d.last
	}
	select {
	case s := <-reply:
		s.Score() // runs in the goroutine of the caller, because it takes too long for the scheduler
		return s
	case <-ctx.Done():
		return board.Status{}
	}
}

// EnqueueLocal offers a prompt without a hand-off to the decode ranks that may compute it themselves. The policy decides at once, within
// the free slots and KV room of the ranks. The answer is a slot, charged with the whole prompt, or an error. It is always an error while
// entries wait in the pool: prefill engines hold KV for these, so they come first.
func (d *Dispatcher) EnqueueLocal(e *pool.Entry, l *board.Local) <-chan Result {
	return d.enqueue(board.Enqueue{Entry: e, Local: l})
}

// CorrectPrompt corrects the prompt length, in tokens, that a slot is charged with. The proxy had estimated the length, and now the rank's
// engine has counted the tokens.
func (d *Dispatcher) CorrectPrompt(s *Slot, prompt int) {
	d.inbox.push(func(r *scheduler) { r.correctPrompt(s, prompt) })
}

// BlamesRequest says whether the lost hand-offs of two attempts show that the request itself is at fault, and not the engines. since is
// when the first attempt failed, and s the slot of the second.
func (d *Dispatcher) BlamesRequest(s *Slot, first, second delivery.Link, since time.Time) (blames bool) {
	blames = true // if the dispatcher does not answer, it has ended, and then nothing is tried again anyway
	_ = d.ask(func(r *scheduler) error {
		blames = r.boards.BlamesRequest(s.board.model, first, second, since)
		return nil
	})
	return blames
}

// Excuse takes a lost hand-off back, because the request was at fault. s is its slot, given back or not.
func (d *Dispatcher) Excuse(s *Slot, l delivery.Link) {
	d.inbox.push(func(r *scheduler) { r.apply(board.Excused{Model: s.board.model, Link: l}) })
}

// Quarantined returns the prefill engines from which no KV should go to a slot's rank now, because recent hand-offs from them to this
// rank's engine failed. It asks the scheduler only if a pair of engines may be quarantined, which is rare.
func (d *Dispatcher) Quarantined(s *Slot) (prefillers []string) {
	if !s.board.pace.mayHaveQuarantinedPair() {
		return nil
	}
	_ = d.ask(func(r *scheduler) error { // an error only means that the dispatcher has ended, and then nothing is quarantined
		if s.isHeld() { // otherwise the slot was given back, and its number may belong to another request
			prefillers = r.boards.Quarantined(s.board.model, s.Slot, time.Now())
		}
		return nil
	})
	return prefillers
}

// Blocked returns the prefill engines from which no KV should go now to at least one decode rank of a board, because recent hand-offs
// failed. It asks the scheduler only if a pair of engines may be quarantined, which is rare.
func (d *Dispatcher) Blocked(board string) (prefillers []string) {
	pace, exists := d.paces.Load(board)
	if !exists || !pace.(*publicPace).mayHaveQuarantinedPair() {
		return nil
	}
	_ = d.ask(func(r *scheduler) error { // an error only means that the dispatcher has ended, and then nothing is quarantined
		prefillers = r.boards.Quarantined(board, -1, time.Now()) // slot -1 asks about all ranks of the board
		return nil
	})
	return prefillers
}

// Rerouted records that the KV of a slot comes from another prefill engine than was planned. The slot was bound before its prefill.
func (d *Dispatcher) Rerouted(s *Slot, prefiller string) {
	d.inbox.push(func(r *scheduler) {
		if s.isHeld() { // otherwise the slot was given back, and its number may belong to another request
			r.apply(board.Rerouted{Model: s.board.model, Slot: s.Slot, Prefiller: prefiller})
		}
	})
}

// Preempted records that the engine of a worker ran out of KV room and preempted a request.
func (d *Dispatcher) Preempted(worker int32) {
	d.inbox.push(func(r *scheduler) {
		r.readAllProgress() // the board needs the generated tokens of the preempted request, which a mixed rank computes again
		r.apply(board.Preempted{Worker: worker})
	})
}

// Gauged records how many KV tokens were in use on a worker at a given time, by the gauges of its engine. The boards use the number only
// for ranks whose engines may still hold KV of ended requests (see board.Boards.MayHoldEndedKV).
func (d *Dispatcher) Gauged(worker int32, kvTokens int64, at time.Time) {
	g := board.Gauged{Worker: worker, KVTokens: kvTokens, At: at}
	d.inbox.push(func(r *scheduler) {
		if r.boards.MayHoldEndedKV(worker) {
			r.readAllProgress() // the board compares the gauge with the tokens that the running requests have now
			r.apply(g)
		}
	})
}

// Configure changes the settings, in effect for the next round of decisions. If a setting cannot work, alone or together with the others,
// Configure returns an error and changes nothing.
func (d *Dispatcher) Configure(s board.Settings) error {
	return d.ask(func(r *scheduler) error { return r.applySettings(s) })
}

// CheckSettings returns the error that Configure would return, and changes nothing.
func (d *Dispatcher) CheckSettings(s board.Settings) error {
	return d.ask(func(r *scheduler) error { return r.boards.CheckSettings(s) })
}

// ask makes the scheduler's goroutine call f, and waits for the result. It returns ErrDraining if the dispatcher has ended.
func (d *Dispatcher) ask(f func(r *scheduler) error) error {
	reply := make(chan error, 1)
	if !d.inbox.push(func(r *scheduler) { reply <- f(r) }) {
		return board.ErrDraining
	}
	return <-reply // a function that the inbox accepts is always called
}

// run is the scheduler's goroutine. In each turn, it calls all queued functions before it lets the boards decide, so that a burst of
// requests leads to one round of decisions. When ctx ends, it answers all waiting entries with ErrDraining, stores the last status, waits
// for the goroutines of the learner and the decision log, and closes d.done.
func (d *Dispatcher) run(ctx context.Context, r *scheduler) {
	defer close(d.done)
	waitForHelpers := r.start(ctx) // the helpers are the goroutines of the learner and the decision log
	defer waitForHelpers()
	timer := time.NewTimer(0)
	defer timer.Stop()
	var queue []func(*scheduler)
	for {
		queue = d.inbox.swap(queue)
		r.advance(queue, time.Now())
		clear(queue) // the functions would keep the memory that they refer to from being garbage collected
		if next := r.boards.Next(); next.IsZero() {
			timer.Stop() // the boards have nothing to do before the next call
		} else {
			timer.Reset(time.Until(next))
		}
		select {
		case <-d.inbox.wake:
		case <-timer.C:
		case <-ctx.Done():
			r.shutDown(d.inbox.close(), time.Now())
			d.last = r.status(r.now)
			d.last.Score() // computes the predictors' scores in the status; slow, but no decision waits for this goroutine any more
			return
		}
	}
}

// Room estimates how many more hand-offs for a model, beside those that wait in the pool, would get a slot within the given time. It is
// below 0 if more hand-offs wait than slots will come free. While no hand-off waits, it is at least 1, because prefills must never stop.
// ownRanks says that only some ranks of the board list the model, so that n counts only these ranks and the hand-offs for this model.
func (d *Dispatcher) Room(board, model string, within time.Duration) (n int, ownRanks bool) {
	v, ok := d.paces.Load(board)
	if !ok {
		return math.MaxInt, false // the board never had a rank, so missing slots are not the problem
	}
	p, ownRanks := v.(*publicPace).ofModel(model)
	slots := p.slots.Load()
	if slots == 0 { // no rank takes requests now: a shortage of slots is not the reason to hold prefills back
		return math.MaxInt, ownRanks
	}
	// Number of slots that come free in this time: each does so once per meanSlotSeconds, the mean time for which a request has its
	// slot. A mean below 1 ms counts as 1 ms, so that the division is safe.
	freed := within.Seconds() * float64(slots) / max(math.Float64frombits(p.meanSlotSeconds.Load()), 1e-3)
	// At least 1, so that prefills never stop, and at most MaxInt32, because a larger float64 may not fit an int.
	free := max(1, int(min(float64(p.free.Load())+freed, math.MaxInt32)))
	return free - int(p.waiting.Load()), ownRanks
}

// Free returns how many slots for a model were free on a board after the last turn of the scheduler. ownRanks is true if only some ranks of
// the board list the model: n then counts only their slots. For a board that never had a rank, n is MaxInt32.
func (d *Dispatcher) Free(board, model string) (n int, ownRanks bool) {
	v, ok := d.paces.Load(board)
	if !ok {
		return math.MaxInt32, false // the board never had a rank, so prefills need not be held back until slots come free
	}
	p, ownRanks := v.(*publicPace).ofModel(model)
	return int(p.free.Load()), ownRanks
}

// register registers the metrics with r, together with the gauges, which read the status of d at each scrape. r nil: nothing is registered.
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
