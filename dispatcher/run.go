package dispatcher

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"evenkeel/dispatcher/board"
	"evenkeel/pool"
)

// newScheduler makes the scheduler, whose boards have no ranks yet. wake queues a function for the next turn of the scheduler.
func newScheduler(cfg Config, d *Dispatcher, wake func(func(*scheduler)) bool) (*scheduler, error) {
	boards, err := board.New(cfg.Config)
	if err != nil {
		return nil, err
	}
	publish := func(tables board.TablesBuilt) { wake(func(r *scheduler) { r.apply(tables) }) }
	r := &scheduler{
		boards: boards, cfg: cfg, d: d, wake: wake, log: cfg.Log, metrics: d.metrics, learner: newLearner(cfg.Log, d.metrics, publish),
		twins:   newTwins(cfg, d.metrics),
		waiting: map[*pool.Entry]waitingEntry{}, byModel: map[string]*boardState{}, detectors: map[board.GroupKey]*stepDetector{},
		labels: map[board.GroupKey]string{},
	}
	name := boards.Policy() // Dispatcher.Policy may be called before the first event
	d.policy.Store(&name)
	return r, nil
}

// start starts the goroutines of the learner, the twin and the decision log. The returned function waits until they have ended, because no
// goroutine may outlive the dispatcher.
func (r *scheduler) start(ctx context.Context) (wait func()) {
	var goroutines sync.WaitGroup
	goroutines.Go(func() { r.learner.run(ctx) })
	if r.twins != nil {
		goroutines.Go(func() { r.twins.run(ctx) })
	}
	if r.declog != nil {
		goroutines.Go(func() { r.declog.run(ctx) })
	}
	return goroutines.Wait
}

// advance makes one turn of the scheduler: it calls the queued functions, and then gives each board a Tick, so that a board that has
// something to decide does it now. It also ends the twin's segment if this is due.
func (r *scheduler) advance(queue []func(*scheduler), now time.Time) {
	r.now = now
	for _, f := range queue {
		f(r)
	}
	for _, b := range r.inOrder {
		if r.boards.NeedsCounts(b.model, now) { // the Tick reads how many tokens the requests have got
			r.readProgress(b)
		}
		r.apply(&b.tick)
	}
	if r.twins.segmentDue(now) {
		r.readAllProgress() // the twin's copy of the boards must have all tokens that the streams have brought until now
		r.twins.endSegment(now, r.boards)
	}
}

// apply gives the boards an event and carries out the effects. Then it runs the rounds of decisions that the event causes, one after the
// other: the event Decide runs a round, and the event Decided has the time that the round took.
func (r *scheduler) apply(e board.Event) {
	r.twins.record(e, r.now)
	r.carryOut(r.boards.Apply(e, r.now), 0)
	for r.boards.Deciding() {
		start := time.Now()
		effects := r.boards.Apply(board.Decide{}, r.now)
		r.decided.Took = time.Since(start)
		if r.decided.Took > r.boards.Config().TickLimit/2 {
			r.twins.pause() // the replays may have slowed down this round
		}
		r.carryOut(effects, r.decided.Took)
		r.carryOut(r.boards.Apply(&r.decided, r.now), 0)
	}
}

// applySettings applies an event that changes settings. It returns the boards' error if they reject the event.
func (r *scheduler) applySettings(e board.Event) error {
	r.rejected = nil
	r.apply(e)
	return r.rejected
}

// readProgress reads the progress of a board's slots and gives it to the board as Counts: in the next event, the board decides with all
// tokens that the streams have brought until now.
func (r *scheduler) readProgress(b *boardState) {
	counts := &b.counts
	if missing := len(b.slots) - len(counts.Tokens); missing > 0 {
		counts.Tokens = append(counts.Tokens, make([]int32, missing)...)
		counts.Started = append(counts.Started, make([]bool, missing)...)
		counts.FirstStep = append(counts.FirstStep, make([]uint32, missing)...)
		counts.MaxUnreported = append(counts.MaxUnreported, make([]int32, missing)...)
	}
	for i, s := range b.slots {
		if s == nil { // the slot is free
			counts.Tokens[i], counts.Started[i], counts.FirstStep[i], counts.MaxUnreported[i] = 0, false, 0, 0
			continue
		}
		counts.Tokens[i], counts.Started[i] = s.generated.Load(), s.started.Load()
		counts.FirstStep[i], counts.MaxUnreported[i] = s.firstStep.Load(), s.maxUnreported.Load()
	}
	r.boards.Apply(counts, r.now) // Counts have no effects, so there is nothing to carry out
}

// readAllProgress reads the progress of the slots of all boards, see readProgress.
func (r *scheduler) readAllProgress() {
	for _, b := range r.inOrder {
		r.readProgress(b)
	}
}

// enqueue gives the boards a new entry. Until the boards answer it, r.waiting has its slot and the channel of its caller.
func (r *scheduler) enqueue(w waitingEntry) {
	if b := r.byModel[w.Entry.Model]; b != nil && w.Local != nil { // EnqueueLocal: the policy decides at once, by the present progress
		r.readProgress(b)
	}
	r.waiting[w.Entry] = w
	r.arrival = w.Enqueue
	r.apply(&r.arrival)
	r.arrival = board.Enqueue{} // old references would keep the entry from being garbage collected
}

// releaseSlot takes a slot off the scheduler's list, and passes its outcome and its last progress to the boards as the event Release. Then
// another request may get the slot.
func (r *scheduler) releaseSlot(s *Slot, outcome board.Outcome) {
	b := s.board
	// Whether the engine now begins a request in its queue depends on the KV of the running requests, which grows with their tokens. So the
	// board needs their progress before the release.
	if b.inEngineQueue > 0 {
		r.readProgress(b)
	}
	if s.InEngineQueue {
		b.inEngineQueue--
	}
	b.slots[s.Slot] = nil
	r.release = board.Release{
		Model: b.model, Slot: s.Slot, Outcome: outcome, Generated: s.generated.Load(), Started: s.started.Load(),
		FirstStep: s.firstStep.Load(), LastStep: s.lastStep.Load(), MaxUnreported: s.maxUnreported.Load(),
	}
	r.apply(&r.release)
}

// correctPrompt corrects the prompt length, in tokens, that a slot is charged with. It does nothing if the slot has been given back.
func (r *scheduler) correctPrompt(s *Slot, prompt int) {
	if s.isHeld() {
		r.apply(board.Recount{Model: s.board.model, Slot: s.Slot, Prompt: prompt})
	}
}

// setWorkers replaces the ranks of all models. First the boards get the progress of all slots, because they need the tokens of requests
// that lose their ranks. The metrics of pairs whose engine is gone are dropped.
func (r *scheduler) setWorkers(ws []board.Worker) {
	r.readAllProgress()
	r.apply(board.SetWorkers{Workers: ws})
	r.metrics.dropGonePairs(ws)
}

// shutDown answers all entries that wait with ErrDraining, and calls the functions that are still queued.
func (r *scheduler) shutDown(queue []func(*scheduler), now time.Time) {
	r.now = now
	r.apply(board.Shutdown{})
	for _, f := range queue {
		f(r)
	}
}

// status returns the status of the boards. For each group, it adds the result of the twin, which replays the last minutes under other
// policies.
func (r *scheduler) status(now time.Time) board.Status {
	r.readAllProgress() // the boards do not know yet which tokens have come since their last event
	s := r.boards.Status(now)
	r.twins.addResults(&s, now)
	return s
}

// loads returns the present loads of all ranks.
func (r *scheduler) loads() board.Loads {
	r.readAllProgress()
	return r.boards.Loads()
}

// carryOut carries out effects. took is the duration of the round that caused them; 0: they were not caused by a round.
func (r *scheduler) carryOut(effects []board.Effect, took time.Duration) {
	for i := range effects {
		r.twins.recordEffect(&effects[i], r.now)
		r.carryOutOne(&effects[i], took)
	}
}

// carryOutOne carries out one effect: it answers a caller, updates a metric, writes a log line, or passes a value to another part of the
// dispatcher. took is the duration of the round that caused the effect; 0: no round.
func (r *scheduler) carryOutOne(e *board.Effect, took time.Duration) {
	m := r.metrics
	switch e.Kind {
	case board.EffectBind:
		r.bind(e, took)
	case board.EffectRefuse:
		r.answer(e.Entry, Result{Err: e.Err})
	case board.EffectLeftEngineQueue:
		r.byModel[e.Group.Model].slots[e.Slot].waitsInEngine.Store(false)
	case board.EffectRound:
		r.recordRound(e, took)
	case board.EffectInvalid:
		m.invalid.WithLabelValues(e.Label).Inc()
		r.log.Error("dispatcher: the policy made an assignment that cannot be bound", zap.String("policy", e.Policy),
			zap.String("fault", e.Label), zap.Uint64("entry", e.ID), zap.Int32("worker", e.Worker))
	case board.EffectNotOffered:
		r.log.Error("dispatcher: the policy took a rank that was not offered", zap.String("policy", e.Policy), zap.Int32("worker", e.Worker))
	case board.EffectFallback:
		r.recordFallback(e)
	case board.EffectSent:
		m.roundRanks.WithLabelValues(e.Label).Observe(float64(e.Count))
	case board.EffectInEngineQueue:
		m.boundBeyondSlots.Inc()
	case board.EffectQuarantine:
		m.countQuarantine(e.Pair)
		r.log.Warn("dispatcher: hand-offs of a prefill engine do not reach a decode engine, although both work with other engines; the pair is "+
			"avoided",
			zap.String("prefiller", e.Pair.Prefiller), zap.String("engine", e.Pair.Engine), zap.Int("failures", e.Count),
			zap.Duration("for", e.Duration))
	case board.EffectSpared:
		r.log.Warn("dispatcher: a rank has refused several requests in a row (429 or 503) and gets none for a moment, while others take any; "+
			"then one request tries it",
			zap.String("rank", e.Names[0]), zap.Duration("for", e.Duration))
	case board.EffectUnspared:
		r.log.Info("dispatcher: a rank that had refused requests takes them again", zap.String("rank", e.Names[0]))
	case board.EffectSteered:
		m.pairAssignments.WithLabelValues(e.Label).Inc()
	case board.EffectDuplicate:
		r.log.Warn("dispatcher: two workers have the same ID, and the second is ignored",
			zap.Int32("id", e.Worker), zap.String("kept", e.Names[0]), zap.String("ignored", e.Names[1]))
	case board.EffectPace:
		r.publishPaces(e)
	case board.EffectEstimate:
		m.estimateRatio.Observe(e.EstimatedTokens / float64(e.Count))
	case board.EffectNames:
		r.stateOrNew(e.Group.Model).setListedNames(e.Listed)
	case board.EffectWatchFirstEvents:
		r.stateOrNew(e.Group.Model).pace.watchedFirstEvents.Store(int32(e.Count))
	case board.EffectPolicy:
		name := e.Policy
		r.d.policy.Store(&name)
	case board.EffectNewPredictor:
		r.learner.addPredictor(e.Predictor, e.Fit)
	case board.EffectFit:
		r.learner.restart(e.Fit)
	case board.EffectOutputSample:
		r.learner.add(e.Sample)
	case board.EffectGroup:
		r.setLabel(e.Group, e.Label)
		m.tickSeconds.WithLabelValues(e.Policy, e.Label) // creates the series before the first round
		r.addDetector(e.Group)
	case board.EffectGroupIdle:
		if detector := r.detectors[e.Group]; detector != nil {
			detector.pause()
		}
	case board.EffectLeastStep:
		if detector := r.detectors[e.Group]; detector != nil {
			detector.minLength.Store(int64(e.Duration))
		}
	case board.EffectGroupGone:
		r.dropLabel(e.Group)
		delete(r.detectors, e.Group) // the last streams still report steps to the detector, but they are not read any more
	case board.EffectGone:
		r.dropState(e.Group.Model)
	case board.EffectRejected:
		r.rejected = e.Err
	}
}

// recordRound records a round of decisions: its duration, the error of a policy that failed, and its line of the decision log.
func (r *scheduler) recordRound(e *board.Effect, took time.Duration) {
	r.setLabel(e.Group, e.Round.Group)
	r.metrics.tickSeconds.WithLabelValues(e.Policy, e.Round.Group).Observe(took.Seconds())
	if e.Err != nil {
		r.log.Error("dispatcher: the policy failed", zap.String("policy", e.Policy), zap.Error(e.Err))
	}
	if r.declog != nil {
		r.declog.record(e.Round)
	}
}

// recordFallback counts that another policy decided in place of the policy in force. It logs the reason only if the policy was too slow:
// other effects have the other reasons.
func (r *scheduler) recordFallback(e *board.Effect) {
	r.metrics.fallbacks.WithLabelValues(e.Label).Inc()
	if e.Label == board.FallbackSlow {
		r.log.Warn("dispatcher: a tick took longer than dispatch.tick_limit, so "+board.FallbackSpec+" decides the next ticks",
			zap.String("policy", e.Policy), zap.Duration("took", e.Duration), zap.Duration("limit", r.boards.Config().TickLimit),
			zap.Int("ticks", board.SlowRounds))
	}
}

// publishPaces publishes the values of a board, and of the model names that only some of its ranks list, for Dispatcher.Room. It calls
// OnRoom if Room has become larger.
func (r *scheduler) publishPaces(e *board.Effect) {
	b := r.stateOrNew(e.Group.Model)
	moreRoom := b.pace.publish(&e.Pace)
	for i := range e.Named {
		moreRoom = b.listedPaces[i].publish(&e.Named[i]) || moreRoom // publish must be called in any case
	}
	if moreRoom && r.cfg.OnRoom != nil {
		r.cfg.OnRoom()
	}
}

// stateOrNew returns the scheduler's state for a board. If it is missing, stateOrNew creates it, and publishes its pace for
// Dispatcher.Room. The state has a function that reports the first event of a slot to the board, unless the slot has been given back
// meanwhile.
func (r *scheduler) stateOrNew(model string) *boardState {
	b := r.byModel[model]
	if b == nil {
		b = &boardState{model: model, pace: newPublicPace(), tick: board.Tick{Model: model}}
		b.counts = board.Counts{Model: model}
		b.reportStarted = func(s *Slot) {
			r.wake(func(r *scheduler) {
				if s.isHeld() {
					r.apply(board.FirstEvent{Model: model, Slot: s.Slot})
				}
			})
		}
		r.byModel[model] = b
		r.inOrder = slices.SortedFunc(maps.Values(r.byModel), func(x, y *boardState) int { return cmp.Compare(x.model, y.model) })
		r.d.paces.Store(model, b.pace)
	}
	return b
}

// dropState drops the scheduler's state for a board that is removed.
func (r *scheduler) dropState(model string) {
	r.inOrder = slices.DeleteFunc(slices.Clone(r.inOrder), func(b *boardState) bool { return b.model == model })
	delete(r.byModel, model)
	r.d.paces.Delete(model)
}

// setLabel records the label of a group in metrics. The label changes when a group of another model with the same name comes or goes. The
// series of the old label are then dropped.
func (r *scheduler) setLabel(key board.GroupKey, label string) {
	before, known := r.labels[key]
	if known && before == label {
		return
	}
	if known {
		r.dropLabel(key)
	}
	r.labels[key] = label
}

// dropLabel drops the series of a group, unless another group has them, too: all groups without a barrier share one label.
func (r *scheduler) dropLabel(key board.GroupKey) {
	label := r.labels[key]
	delete(r.labels, key)
	for _, other := range r.labels {
		if other == label {
			return
		}
	}
	r.metrics.dropGroup(label)
}

// addDetector gives a new barrier group its step detector.
func (r *scheduler) addDetector(key board.GroupKey) {
	r.stateOrNew(key.Model)
	if !key.Barrier { // its ranks have no common steps
		return
	}
	passSteps := func(r *scheduler) { r.passSteps(key) } // this function is made once, so that a step allocates nothing
	r.detectors[key] = newStepDetector(func() { r.wake(passSteps) })
}

// passSteps passes the steps that the step detector of a group has found to the board. Before, the board gets the progress of its slots, so
// that it knows how many tokens the steps have brought.
func (r *scheduler) passSteps(key board.GroupKey) {
	detector := r.detectors[key]
	if detector == nil {
		return // the group has no ranks any more
	}
	r.steps.Group, r.steps.List = key, detector.take(r.steps.List[:0])
	r.readProgress(r.byModel[key.Model])
	r.apply(&r.steps)
}

// bind completes the slot of an entry that was bound to a rank, and sends it to the caller of Enqueue. took is the duration of the round
// that chose the rank.
func (r *scheduler) bind(e *board.Effect, took time.Duration) {
	b, slot := r.stateOrNew(e.Group.Model), r.waiting[e.Entry].slot
	slot.Binding, slot.Decide = e.Bound, took
	slot.board, slot.detector = b, r.detectors[e.Group]
	slot.waitsInEngine.Store(slot.InEngineQueue)
	if e.Entry.Aggregated {
		r.metrics.roundHold.Observe(slot.Held.Seconds())
	}
	if slot.InEngineQueue {
		b.inEngineQueue++
	}
	if missing := int(slot.Slot) + 1 - len(b.slots); missing > 0 {
		b.slots = append(b.slots, make([]*Slot, missing)...)
	}
	b.slots[slot.Slot] = slot
	r.answer(e.Entry, Result{Slot: slot})
}

// answer sends the result of an entry to its caller.
func (r *scheduler) answer(e *pool.Entry, result Result) {
	w := r.waiting[e]
	delete(r.waiting, e)
	w.answer(r.cfg.Places, result)
}

// answer releases the entry's place in the pool, and then sends the result to the caller, which can rely on the place being free.
func (w waitingEntry) answer(places *pool.Semaphore, r Result) {
	if places != nil && !w.Entry.Discard && w.Local == nil {
		places.Release()
	}
	w.result <- r
}
