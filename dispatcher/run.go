package dispatcher

import (
	"cmp"
	"context"
	"maps"
	"runtime"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"evenkeel/dispatcher/board"
	"evenkeel/pool"
)

// newScheduler makes a scheduler whose boards have no ranks yet. wake queues a function for its
// next turn.
func newScheduler(cfg Config, d *Dispatcher, wake func(func(*scheduler)) bool) (*scheduler, error) {
	boards, err := board.New(cfg.Config)
	if err != nil {
		return nil, err
	}
	publish := func(tables board.TablesBuilt) { wake(func(r *scheduler) { r.apply(tables) }) }
	r := &scheduler{
		boards: boards, cfg: cfg, d: d, wake: wake, log: cfg.Log, metrics: d.metrics, learner: newLearner(cfg.Log, d.metrics, publish),
		waiting: map[*pool.Entry]waitingEntry{}, byModel: map[string]*boardState{}, detectors: map[board.GroupKey]*stepDetector{},
		labels: map[board.GroupKey]string{},
	}
	name := boards.Policy() // Dispatcher.Policy may be called before the first event
	d.policy.Store(&name)
	return r, nil
}

// start starts the goroutines of the learner and the decision log, which end when ctx ends. wait
// returns when both have ended, because no goroutine may outlive the dispatcher.
func (r *scheduler) start(ctx context.Context) (wait func()) {
	var goroutines sync.WaitGroup
	goroutines.Go(func() { r.learner.run(ctx) })
	if r.declog != nil {
		goroutines.Go(func() { r.declog.run(ctx) })
	}
	return goroutines.Wait
}

// advance makes one turn of the scheduler: the queued functions, then a Tick for each board.
func (r *scheduler) advance(queue []func(*scheduler), now time.Time) {
	r.now = now
	for _, f := range queue {
		f(r)
	}
	for _, b := range r.inOrder {
		if r.boards.NeedsCounts(b.model, now) {
			r.readProgress(b)
		}
		r.apply(&b.tick)
	}
}

// apply gives the boards an event, carries out the effects, and runs the rounds of decisions that
// follow.
func (r *scheduler) apply(e board.Event) {
	r.carryOut(r.boards.Apply(e, r.now), 0) // 0: no round caused these effects
	for r.boards.Deciding() {
		// On a machine whose other processes take the CPU, a round may take long although its policy
		// computes for little. The policy is judged by what its thread computed, so it must not change
		// threads meanwhile.
		runtime.LockOSThread()
		start, computed := time.Now(), threadTime()
		effects := r.boards.Apply(board.Decide{}, r.now)
		r.decided = board.Decided{Took: time.Since(start), Computed: threadTime() - computed}
		runtime.UnlockOSThread()
		if !hasThreadTime {
			r.decided.Computed = r.decided.Took
		}
		r.carryOut(effects, r.decided.Took)
		r.carryOut(r.boards.Apply(&r.decided, r.now), 0)
	}
}

// applySettings returns the boards' error if they reject the event.
func (r *scheduler) applySettings(e board.Event) error {
	r.rejected = nil
	r.apply(e)
	return r.rejected
}

// readProgress gives a board the progress of its slots as Counts, which it uses in the next event.
func (r *scheduler) readProgress(b *boardState) {
	counts := &b.counts
	if missing := len(b.slots) - len(counts.Tokens); missing > 0 {
		counts.Tokens = append(counts.Tokens, make([]int32, missing)...)
		counts.Started = append(counts.Started, make([]bool, missing)...)
		counts.FirstStep = append(counts.FirstStep, make([]uint32, missing)...)
		counts.MaxUnreported = append(counts.MaxUnreported, make([]int32, missing)...)
	}
	for i, s := range b.slots {
		if s == nil {
			counts.Tokens[i], counts.Started[i], counts.FirstStep[i], counts.MaxUnreported[i] = 0, false, 0, 0
			continue
		}
		counts.Tokens[i], counts.Started[i] = s.generated.Load(), s.started.Load()
		counts.FirstStep[i], counts.MaxUnreported[i] = s.firstStep.Load(), s.maxUnreported.Load()
	}
	r.boards.Apply(counts, r.now) // Counts cause no effects
}

func (r *scheduler) readAllProgress() {
	for _, b := range r.inOrder {
		r.readProgress(b)
	}
}

// enqueue gives the boards a new entry. Until they answer, r.waiting has its slot and the channel
// of its caller.
func (r *scheduler) enqueue(w waitingEntry) {
	// A prompt that a decode rank may compute itself (Local) is decided about at once.
	if b := r.byModel[w.Entry.Model]; b != nil && w.Local != nil {
		r.readProgress(b)
	}
	r.waiting[w.Entry] = w
	r.arrival = w.Enqueue // a field, because the address of a local variable would make it allocate
	r.apply(&r.arrival)
	r.arrival = board.Enqueue{} // lets the garbage collector free the entry
}

// releaseSlot gives a slot number back: from then on, another request may get it.
func (r *scheduler) releaseSlot(s *Slot, outcome board.Outcome) {
	state := s.board
	// The board decides whether the engine now begins a request of its own queue, which depends on the
	// tokens of the running requests.
	if state.inEngineQueue > 0 {
		r.readProgress(state)
	}
	if s.InEngineQueue {
		state.inEngineQueue--
	}
	state.slots[s.Slot] = nil
	r.release = board.Release{
		Model: state.model, Slot: s.Slot, Outcome: outcome, Generated: s.generated.Load(), Started: s.started.Load(),
		FirstStep: s.firstStep.Load(), LastStep: s.lastStep.Load(),
		// Above 0 only for an answer whose engine reports its tokens at the end, if at all: the most that
		// it may have. The board has estimated its tokens, and compares the estimate with Generated.
		MaxUnreported: s.maxUnreported.Load(),
	}
	r.apply(&r.release)
}

// correctPrompt does nothing if the slot has been given back.
func (r *scheduler) correctPrompt(s *Slot, prompt int) {
	if s.isHeld() {
		r.apply(board.Recount{Model: s.board.model, Slot: s.Slot, Prompt: prompt})
	}
}

// setWorkers replaces the ranks of all models. The boards first get the progress of all slots,
// because they need the tokens of the requests whose ranks leave.
func (r *scheduler) setWorkers(ws []board.Worker) {
	r.readAllProgress()
	r.apply(board.SetWorkers{Workers: ws})
	r.metrics.dropGonePairs(ws)
}

// shutDown also calls the functions that are still queued, because their callers wait for them.
func (r *scheduler) shutDown(queue []func(*scheduler), now time.Time) {
	r.now = now
	r.apply(board.Shutdown{})
	for _, f := range queue {
		f(r)
	}
}

func (r *scheduler) status(now time.Time) board.Status {
	r.readAllProgress() // the boards know only the tokens that had come by their last event
	return r.boards.Status(now)
}

func (r *scheduler) loads() board.Loads {
	r.readAllProgress()
	return r.boards.Loads()
}

// took is the duration of the round that caused the effects; 0: no round did.
func (r *scheduler) carryOut(effects []board.Effect, took time.Duration) {
	for i := range effects {
		r.carryOutOne(&effects[i], took)
	}
}

// carryOutOne carries out one effect. Only barrier groups have a step detector.
func (r *scheduler) carryOutOne(e *board.Effect, took time.Duration) {
	m := r.metrics
	switch e.Kind {
	case board.EffectBind:
		r.bind(e, took)
	case board.EffectRefuse:
		r.answer(e.Entry, Result{Err: e.Err})
	case board.EffectRound:
		r.recordRound(e, took)
	case board.EffectInvalid: // Label is the hard limit that the assignment breaks
		m.invalid.WithLabelValues(e.Label).Inc()
		r.log.Error("dispatcher: the policy made an assignment that cannot be bound", zap.String("policy", e.Policy),
			zap.String("fault", e.Label), zap.Uint64("entry", e.ID), zap.Int32("worker", e.Worker))
	case board.EffectNotOffered: // a policy chose a rank that may not compute the prompt of an entry without a hand-off
		r.log.Error("dispatcher: the policy took a rank that was not offered", zap.String("policy", e.Policy), zap.Int32("worker", e.Worker))
	case board.EffectFallback:
		r.recordFallback(e)
	case board.EffectSent: // held-back requests went out together; Count is how many ranks now have prompts to compute
		m.roundRanks.WithLabelValues(e.Label).Observe(float64(e.Count))
	case board.EffectQuarantine:
		r.recordQuarantine(e)
	case board.EffectSpared:
		r.log.Warn("dispatcher: a rank has refused several requests in a row (429 or 503) and gets none for a moment, while others take any; "+
			"then one request tries it",
			zap.String("rank", e.Names[0]), zap.Duration("for", e.Duration))
	case board.EffectUnspared:
		r.log.Info("dispatcher: a rank that had refused requests takes them again", zap.String("rank", e.Names[0]))
	case board.EffectSteered: // Label says what became of the assignment to an avoided pair of engines
		m.pairAssignments.WithLabelValues(e.Label).Inc()
	case board.EffectDuplicate:
		r.log.Warn("dispatcher: two workers have the same ID, and the second is ignored",
			zap.Int32("id", e.Worker), zap.String("kept", e.Names[0]), zap.String("ignored", e.Names[1]))
	case board.EffectPace: // a tick has counted the free slots anew
		r.publishPaces(e)
	case board.EffectEstimate: // the board had estimated the tokens of an answer that does not stream; Count is how many it has
		m.estimateRatio.Observe(e.EstimatedTokens / float64(e.Count))
	case board.EffectNames: // model names that only some ranks list
		r.stateOrNew(e.Group.Model).setListedNames(e.Listed)
	case board.EffectWatchFirstEvents:
		// Count is the number of suspected pairs of engines and of ranks that refuse requests. While it
		// is above 0, Slot.ReportStarted sends each first event to the board.
		r.stateOrNew(e.Group.Model).pace.suspectedPairsAndRefusingRanks.Store(int32(e.Count))
	case board.EffectPolicy:
		name := e.Policy
		r.d.policy.Store(&name)
	case board.EffectNewPredictor: // a policy needs output lengths that are not learned yet
		r.learner.addPredictor(e.Predictor, e.Fit)
	case board.EffectFit: // all predictors start anew
		r.learner.restart(e.Fit)
	case board.EffectOutputSample:
		r.learner.add(e.Sample)
	case board.EffectGroup:
		r.setLabel(e.Group, e.Label)
		m.tickSeconds.WithLabelValues(e.Policy, e.Label) // creates the metric series before the first round
		r.addDetector(e.Group)
	case board.EffectGroupIdle: // the time until the next step is no length of a step
		if detector := r.detectors[e.Group]; detector != nil {
			detector.pause()
		}
	case board.EffectLeastStep:
		if detector := r.detectors[e.Group]; detector != nil {
			detector.minLength.Store(int64(e.Duration))
		}
	case board.EffectGroupGone:
		r.dropLabel(e.Group)
		delete(r.detectors, e.Group) // the last streams still report to it, but no code reads the steps
	case board.EffectGone:
		r.dropState(e.Group.Model)
	case board.EffectRejected:
		r.rejected = e.Err // applySettings returns it
	}
}

// setListedNames sets the model names that only some ranks of the board list. Each has values of
// its own, which count only the slots of these ranks. A name that was listed before keeps them.
func (b *boardState) setListedNames(names []string) {
	byName := make(map[string]*publicPace, len(names))
	b.listedPaces = b.listedPaces[:0]
	for _, name := range names {
		p, listedBefore := b.pace.ofModel(name)
		if !listedBefore {
			p = newPublicPace()
		}
		byName[name] = p
		b.listedPaces = append(b.listedPaces, p)
	}
	b.pace.byName.Store(&byName)
}

// recordQuarantine records that hand-offs avoid an engine or a pair of engines, or no longer.
func (r *scheduler) recordQuarantine(e *board.Effect) {
	prefiller, engine := e.Pair.Prefiller, e.Pair.Engine
	if engine == "" && r.d.cfg.OnLosses != nil {
		r.d.cfg.OnLosses(prefiller, e.Duration)
	}
	names := zap.Dict("lost_by", zap.String("prefiller", prefiller), zap.String("engine", engine))
	if e.Duration == 0 {
		r.log.Info("dispatcher: hand-offs arrive again", names)
		return
	}
	r.metrics.countQuarantine(e.Pair)
	message := "dispatcher: hand-offs of a prefill engine do not reach a decode engine, although both work with others; the pair is " +
		"avoided"
	switch {
	case engine == "":
		message = "dispatcher: hand-offs of a prefill engine are lost at decode engines that work with other prefill engines; it gets no prompts"
	case prefiller == "":
		message = "dispatcher: a decode engine loses hand-offs of prefill engines that work with other decode engines; it gets no requests"
	}
	r.log.Warn(message+" for a while, and then one as a trial", names, zap.Int("failures", e.Count), zap.Duration("for", e.Duration))
}

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

// recordFallback logs only that the chosen policy was too slow. The other reasons are logged with
// other effects.
func (r *scheduler) recordFallback(e *board.Effect) {
	r.metrics.fallbacks.WithLabelValues(e.Label).Inc()
	switch e.Label {
	case board.FallbackSlow:
		r.log.Warn("dispatcher: in a tick the policy computed for longer than dispatch.tick_limit, so "+board.FallbackSpec+" decides the next ticks",
			zap.String("policy", e.Policy), zap.Duration("computed", e.Duration), zap.Duration("limit", r.boards.Config().TickLimit),
			zap.Int("ticks", board.SlowRounds))
	case board.FallbackBlocked:
		r.log.Warn("dispatcher: a tick took more than a second, in which the policy hardly computed, so "+board.FallbackSpec+
			" decides the next ticks; the machine has too little CPU, or the policy waits for something",
			zap.String("policy", e.Policy), zap.Duration("took", e.Duration), zap.Int("ticks", board.SlowRounds))
	}
}

// publishPaces publishes for Dispatcher.Room how many slots are free and how soon others come free.
// If Room may now return more than before, it calls OnRoom, once.
func (r *scheduler) publishPaces(e *board.Effect) {
	b := r.stateOrNew(e.Group.Model)
	moreRoom := b.pace.publish(&e.Pace)
	// Both lists have one value per name, in the order of the last EffectNames.
	for i := range e.Named {
		moreRoom = b.listedPaces[i].publish(&e.Named[i]) || moreRoom // publish comes first, because it must run for each name
	}
	if moreRoom && r.cfg.OnRoom != nil {
		r.cfg.OnRoom()
	}
}

// stateOrNew also stores the pace of a new state in Dispatcher.paces, which Dispatcher.Room reads
// on any goroutine. reportStarted does nothing if the slot has been given back meanwhile.
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

// dropState makes a new list, because advance may be iterating over the present one.
func (r *scheduler) dropState(model string) {
	r.inOrder = slices.DeleteFunc(slices.Clone(r.inOrder), func(b *boardState) bool { return b.model == model })
	delete(r.byModel, model)
	r.d.paces.Delete(model)
}

// setLabel records the label of a group in metrics. It changes when a group of another model with
// the same name comes or goes.
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

// dropLabel keeps the series if another group has the same label: all groups without a barrier
// share one.
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

// addDetector gives a new barrier group its step detector. For any group, it makes sure that the
// scheduler has a state for its board, because advance gives Ticks only to these.
func (r *scheduler) addDetector(key board.GroupKey) {
	r.stateOrNew(key.Model)
	if !key.Barrier { // ranks without a barrier have no common steps
		return
	}
	passSteps := func(r *scheduler) { r.passSteps(key) } // made once, so that a step allocates nothing
	r.detectors[key] = newStepDetector(func() { r.wake(passSteps) })
}

// passSteps passes the steps of a group to its board, after the tokens that they have brought.
func (r *scheduler) passSteps(key board.GroupKey) {
	detector := r.detectors[key]
	if detector == nil {
		return // the group lost its last rank
	}
	r.steps.Group, r.steps.List = key, detector.take(r.steps.List[:0])
	r.readProgress(r.byModel[key.Model])
	r.apply(&r.steps)
}

// bind completes the slot of an entry that was bound, and answers its caller.
func (r *scheduler) bind(e *board.Effect, took time.Duration) {
	b, slot := r.stateOrNew(e.Group.Model), r.waiting[e.Entry].slot
	slot.Binding, slot.Decide = e.Bound, took
	slot.board, slot.detector = b, r.detectors[e.Group]
	if e.Entry.Aggregated { // only entries for ranks that prefill are held back for rounds
		r.metrics.roundHold.Observe(slot.Held.Seconds())
	}
	if slot.InEngineQueue { // the request will wait in the queue of the engine
		b.inEngineQueue++
	}
	if missing := int(slot.Slot) + 1 - len(b.slots); missing > 0 {
		b.slots = append(b.slots, make([]*Slot, missing)...)
	}
	b.slots[slot.Slot] = slot
	r.answer(e.Entry, Result{Slot: slot})
}

func (r *scheduler) answer(e *pool.Entry, result Result) {
	w := r.waiting[e]
	delete(r.waiting, e)
	w.answer(r.cfg.Places, result)
}

// answer first releases the entry's place in the bounded pool (Config.Places), so that the caller
// can rely on it.
func (w waitingEntry) answer(places *pool.Semaphore, r Result) {
	// Discarded hand-offs and entries of EnqueueLocal never have a place.
	if places != nil && !w.Entry.Discard && w.Local == nil {
		places.Release()
	}
	w.result <- r
}
