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
	"evenkeel/dispatcher/twin"
	"evenkeel/pool"
)

// newRunner makes the runner, whose boards have no ranks yet. wake queues a command for the next turn of the runner.
func newRunner(cfg Config, d *Dispatcher, wake func(command) bool) (*runner, error) {
	boards, err := board.New(cfg.Config)
	if err != nil {
		return nil, err
	}
	publish := func(t board.Learned) { wake(func(r *runner) { r.apply(t) }) }
	r := &runner{
		boards: boards, cfg: cfg, d: d, wake: wake, log: cfg.Log, metrics: d.metrics, learner: newLearner(cfg.Log, d.metrics, publish),
		twins:   newTwins(cfg, d.metrics),
		waiting: map[*pool.Entry]waiting{}, owned: map[string]*owned{}, detectors: map[board.GroupKey]*stepDetector{},
	}
	name := boards.Policy() // Dispatcher.Policy may be called before the first event
	d.policy.Store(&name)
	return r, nil
}

// start starts the goroutines of the learner, the twin and the decision log. The returned function waits until they have ended, because no
// goroutine may outlive the dispatcher.
func (r *runner) start(ctx context.Context) (wait func()) {
	var goroutines sync.WaitGroup
	goroutines.Go(func() { r.learner.run(ctx) })
	if r.twins != nil {
		goroutines.Go(func() { r.twins.run(ctx, r.cfg.Twin) })
	}
	if r.declog != nil {
		goroutines.Go(func() { r.declog.run(ctx) })
	}
	return goroutines.Wait
}

// advance runs the queued commands, and then lets each board decide that has something to decide.
func (r *runner) advance(queue []command, now time.Time) {
	r.now = now
	for _, c := range queue {
		c(r)
	}
	for _, o := range r.inOrder {
		if r.boards.Looks(o.model, now) {
			r.count(o)
		}
		r.apply(&o.tick)
	}
	r.record()
}

// apply gives the boards an event and carries out the effects. Then it runs the rounds that the event causes, one after the other: the
// event Decide runs a round, and the event Decided has the time that the round took.
func (r *runner) apply(e board.Event) {
	if r.twins != nil {
		r.twins.tape.Record(e, r.now)
	}
	r.carryOut(r.boards.Apply(e, r.now), 0)
	for r.boards.Deciding() {
		start := time.Now()
		effects := r.boards.Apply(board.Decide{}, r.now)
		r.decided.Took = time.Since(start)
		if r.twins != nil && r.decided.Took > r.boards.Config().TickLimit/2 {
			// The twin may have slowed down this round, so it rests for a moment, see restAfterLate.
			r.twins.lateRound.Store(int64(time.Since(r.twins.began)))
		}
		r.carryOut(effects, r.decided.Took)
		r.carryOut(r.boards.Apply(&r.decided, r.now), 0)
	}
}

// set applies an event that changes settings. It returns the boards' error if they reject the event.
func (r *runner) set(e board.Event) error {
	r.rejected = nil
	r.apply(e)
	return r.rejected
}

// count reads the progress of a board's slots and gives it to the board as Counts, which are valid for the next event. So the board decides
// with all tokens that the streams have brought until now.
func (r *runner) count(o *owned) {
	counts := &o.counts
	if missing := len(o.slots) - len(counts.Tokens); missing > 0 {
		counts.Tokens = append(counts.Tokens, make([]int32, missing)...)
		counts.Began = append(counts.Began, make([]bool, missing)...)
		counts.Joined = append(counts.Joined, make([]uint32, missing)...)
		counts.Unheard = append(counts.Unheard, make([]int32, missing)...)
	}
	for i, s := range o.slots {
		if s == nil {
			counts.Tokens[i], counts.Began[i], counts.Joined[i], counts.Unheard[i] = 0, false, 0, 0
			continue
		}
		counts.Tokens[i], counts.Began[i] = s.generated.Load(), s.started.Load()
		counts.Joined[i], counts.Unheard[i] = s.stream.first.Load(), s.unheard.Load()
	}
	r.boards.Apply(counts, r.now) // has no effects
}

// countAll reads the progress of the slots of all boards, see count.
func (r *runner) countAll() {
	for _, o := range r.inOrder {
		r.count(o)
	}
}

// enqueue gives the boards a new entry. Until the boards answer it, r.waiting has its slot and the channel of its caller.
func (r *runner) enqueue(w waiting) {
	if o := r.owned[w.entry.Model]; o != nil && w.local != nil { // the policy decides about the entry at once, by the present progress
		r.count(o)
	}
	r.waiting[w.entry] = w
	r.arrival = board.Enqueue{Entry: w.entry, Local: w.local, Hits: w.hits, Trace: w.slot.Trace}
	r.apply(&r.arrival)
	r.arrival = board.Enqueue{} // old references would keep the entry from being garbage collected
}

// giveBack handles Dispatcher.Release.
func (r *runner) giveBack(s *Slot, outcome board.Outcome) {
	o := s.owner
	if o.beyond > 0 { // whether the engine begins with a queued request now depends on the KV, and so on the progress, of the others
		r.count(o)
	}
	if s.Beyond {
		o.beyond--
	}
	o.slots[s.Slot] = nil
	r.release = board.Release{
		Model: o.model, Slot: s.Slot, Outcome: outcome, Generated: s.generated.Load(), Started: s.started.Load(),
		First: s.stream.first.Load(), Last: s.stream.last.Load(), Unheard: s.unheard.Load(),
	}
	r.apply(&r.release)
}

// recount corrects the prompt length, in tokens, that a slot is charged with, unless the slot has been given back.
func (r *runner) recount(s *Slot, prompt int) {
	if s.held() {
		r.apply(board.Recount{Model: s.owner.model, Slot: s.Slot, Prompt: prompt})
	}
}

func (r *runner) setWorkers(ws []board.Worker) {
	r.countAll()
	r.apply(board.SetWorkers{Workers: ws})
}

// shutDown answers all entries that wait with ErrDraining, and runs the commands that are still queued.
func (r *runner) shutDown(queue []command, now time.Time) {
	r.now = now
	r.apply(board.Shutdown{})
	for _, c := range queue {
		c(r)
	}
}

// status returns the status of the boards. For each group, it adds the result of the twin, which replays the last minutes under other
// policies.
func (r *runner) status(now time.Time) board.Status {
	r.countAll() // the boards do not know yet which tokens have come since their last event
	s := r.boards.Status(now)
	for i := range s.Models {
		m := &s.Models[i]
		for j := range m.Groups {
			g := &m.Groups[j]
			g.Twin = r.twins.status(board.GroupKey{Model: m.Model, Name: g.Name, Barrier: g.Barrier}, r.boards.Policy(), now)
		}
	}
	return s
}

func (r *runner) loads() board.Loads {
	r.countAll()
	return r.boards.Loads()
}

// carryOut carries out effects. took is the duration of the round that caused them; 0: they were not caused by a round.
func (r *runner) carryOut(effects []board.Effect, took time.Duration) {
	for i := range effects {
		if r.twins != nil {
			r.twins.tape.Done(&effects[i], r.now)
		}
		r.do(&effects[i], took)
	}
}

// do carries out one effect: it answers a caller, updates a metric, writes a log line, or passes a value to another part of the dispatcher.
// took is the duration of the round that caused the effect; 0: no round.
func (r *runner) do(e *board.Effect, took time.Duration) {
	m := r.metrics
	switch e.Kind {
	case board.EffectBind:
		r.bind(e, took)
	case board.EffectRefuse:
		r.answer(e.Entry, Result{Err: e.Err})
	case board.EffectBegins:
		r.owned[e.Group.Model].slots[e.Slot].waits.Store(false)
	case board.EffectRound:
		m.tickSeconds.WithLabelValues(e.Policy, e.Round.Group).Observe(took.Seconds())
		if e.Err != nil {
			r.log.Error("dispatcher: the policy failed", zap.String("policy", e.Policy), zap.Error(e.Err))
		}
		if r.declog != nil {
			r.declog.record(e.Round)
		}
	case board.EffectInvalid:
		m.invalid.WithLabelValues(e.Label).Inc()
		r.log.Error("dispatcher: the policy made an assignment that cannot be bound", zap.String("policy", e.Policy),
			zap.String("fault", e.Label), zap.Uint64("entry", e.ID), zap.Int32("worker", e.Worker))
	case board.EffectNotOffered:
		r.log.Error("dispatcher: the policy took a rank that was not offered", zap.String("policy", e.Policy), zap.Int32("worker", e.Worker))
	case board.EffectFallback:
		m.fallbacks.WithLabelValues(e.Label).Inc()
		if e.Label == board.FallbackSlow {
			r.log.Warn("dispatcher: a tick took longer than dispatch.tick_limit, so "+board.FallbackSpec+" decides the next ticks",
				zap.String("policy", e.Policy), zap.Duration("took", e.Lasts), zap.Duration("limit", r.boards.Config().TickLimit),
				zap.Int("ticks", board.SlowRounds))
		}
	case board.EffectSent:
		m.roundRanks.WithLabelValues(e.Label).Observe(float64(e.Count))
	case board.EffectBeyond:
		m.beyond.Inc()
	case board.EffectQuarantine:
		m.quarantines.WithLabelValues(e.Pair.Prefiller, e.Pair.Engine).Inc()
		r.log.Warn("dispatcher: hand-offs of a prefill engine do not reach a decode engine, although both work with other engines; the pair is "+
			"avoided",
			zap.String("prefiller", e.Pair.Prefiller), zap.String("engine", e.Pair.Engine), zap.Int("failures", e.Count),
			zap.Duration("for", e.Lasts))
	case board.EffectSpared:
		r.log.Warn("dispatcher: a rank has refused several requests in a row (429 or 503) and gets none for a moment, while others take any; "+
			"then one request tries it",
			zap.String("rank", e.Names[0]), zap.Duration("for", e.Lasts))
	case board.EffectUnspared:
		r.log.Info("dispatcher: a rank that had refused requests takes them again", zap.String("rank", e.Names[0]))
	case board.EffectSteered:
		m.steered.WithLabelValues(e.Label).Inc()
	case board.EffectDuplicate:
		r.log.Warn("dispatcher: two workers have the same ID, and the second is ignored",
			zap.Int32("id", e.Worker), zap.String("kept", e.Names[0]), zap.String("ignored", e.Names[1]))
	case board.EffectPace:
		o := r.own(e.Group.Model)
		more := o.pace.publish(&e.Pace)
		for i := range e.Named {
			more = o.named[i].publish(&e.Named[i]) || more
		}
		if more && r.cfg.OnRoom != nil {
			r.cfg.OnRoom()
		}
	case board.EffectThought:
		m.thought.Observe(e.Thought / float64(e.Count))
	case board.EffectNames:
		r.own(e.Group.Model).list(e.Listed)
	case board.EffectWatch:
		r.own(e.Group.Model).pace.watched.Store(int32(e.Count))
	case board.EffectPolicy:
		name := e.Policy
		r.d.policy.Store(&name)
	case board.EffectSubject:
		r.learner.follow(e.Subject, e.Fit)
	case board.EffectFit:
		r.learner.load(e.Fit)
	case board.EffectEnding:
		r.learner.add(e.Ending)
	case board.EffectGroup:
		m.tickSeconds.WithLabelValues(e.Policy, e.Label) // creates the series before the first round
		r.detectSteps(e.Group)
	case board.EffectRest:
		if detector := r.detectors[e.Group]; detector != nil {
			detector.pause()
		}
	case board.EffectLeastStep:
		if detector := r.detectors[e.Group]; detector != nil {
			detector.least.Store(int64(e.Lasts))
		}
	case board.EffectGroupGone:
		m.forget(e.Label)
		r.twins.gone(e.Group)
		delete(r.detectors, e.Group) // the last streams still report steps to the detector, but they are not read any more
	case board.EffectGone:
		r.disown(e.Group.Model)
	case board.EffectRejected:
		r.rejected = e.Err
	}
}

// own returns the runner's state for a board, and creates it if it is missing.
func (r *runner) own(model string) *owned {
	o := r.owned[model]
	if o == nil {
		o = &owned{model: model, pace: newPublished(), tick: board.Tick{Model: model}}
		o.counts = board.Counts{Model: model}
		o.reportStarted = func(s *Slot) {
			r.wake(func(r *runner) {
				if s.held() {
					r.apply(board.Reached{Model: model, Slot: s.Slot})
				}
			})
		}
		r.owned[model] = o
		r.inOrder = slices.SortedFunc(maps.Values(r.owned), func(x, y *owned) int { return cmp.Compare(x.model, y.model) })
		r.d.paces.Store(model, o.pace)
	}
	return o
}

// disown drops the runner's state for a board that is removed.
func (r *runner) disown(model string) {
	r.inOrder = slices.DeleteFunc(slices.Clone(r.inOrder), func(o *owned) bool { return o.model == model })
	delete(r.owned, model)
	r.d.paces.Delete(model)
}

// detectSteps gives a new barrier group its step detector.
func (r *runner) detectSteps(key board.GroupKey) {
	r.own(key.Model)
	if !key.Barrier {
		return
	}
	takeSteps := func(r *runner) { r.takeSteps(key) } // this function is made once, so that a step allocates nothing
	r.detectors[key] = newStepDetector(func() { r.wake(takeSteps) })
}

// takeSteps passes the steps that the step detector of a group has found to the board, after the progress of the board's slots.
func (r *runner) takeSteps(key board.GroupKey) {
	detector := r.detectors[key]
	if detector == nil {
		return // the group has no ranks any more
	}
	r.steps.Group, r.steps.List = key, detector.read(r.steps.List[:0])
	r.count(r.owned[key.Model])
	r.apply(&r.steps)
}

// bind completes the slot of an entry that was bound to a rank, and sends it to the caller of Enqueue.
func (r *runner) bind(e *board.Effect, took time.Duration) {
	owner, slot := r.own(e.Group.Model), r.waiting[e.Entry].slot
	slot.Bound, slot.Decide = e.Bound, took
	slot.owner, slot.detector = owner, r.detectors[e.Group]
	slot.waits.Store(slot.Beyond)
	if e.Entry.Mixed {
		r.metrics.roundHold.Observe(slot.Held.Seconds())
	}
	if slot.Beyond {
		owner.beyond++
	}
	if missing := int(slot.Slot) + 1 - len(owner.slots); missing > 0 {
		owner.slots = append(owner.slots, make([]*Slot, missing)...)
	}
	owner.slots[slot.Slot] = slot
	r.answer(e.Entry, Result{Slot: slot})
}

// answer sends the result of an entry to its caller.
func (r *runner) answer(e *pool.Entry, result Result) {
	w := r.waiting[e]
	delete(r.waiting, e)
	w.answer(r.cfg.Places, result)
}

// answer releases the entry's place in the pool, and then sends the result to the caller, which can rely on the place being free.
func (w waiting) answer(places *pool.Places, r Result) {
	if places != nil && !w.entry.Discard && w.local == nil {
		places.Release()
	}
	w.result <- r
}

// record ends the current stretch of the twin's tape if it is due: the recorded events of some time. It queues the stretch for the twin,
// together with a copy of the boards, with which the next stretch begins.
func (r *runner) record() {
	t := r.twins
	if t == nil || !t.tape.Due(r.now, t.leastStretch) {
		return
	}
	r.countAll() // the copy must have all tokens that the streams have brought until now
	boards := r.boards.Clone()
	t.leastStretch = twin.LeastStretch(boards.Held())
	if stretch := t.tape.Cut(r.now, boards); stretch != nil {
		t.mu.Lock()
		if len(t.untaken) >= mostUntaken { // the twin cannot keep up: drop the queued stretches, so that there is a gap before this one
			t.untaken, stretch.AfterGap = nil, true
		}
		t.untaken = append(t.untaken, recorded{stretch, boards})
		t.mu.Unlock()
		t.wake.ring()
	}
}
