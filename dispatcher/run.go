package dispatcher

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"evenkeel/dispatcher/policy"
	"evenkeel/pool"
)

// runner owns the boards. It reads the clock, applies the commands of others in their
// order, and carries out the effects that come back: it answers callers, counts, writes the
// log, and shows rounds to those who look at them afterwards.
type runner struct {
	*loop
	d        *Dispatcher
	wake     func(command) bool // has a command run in the next turn
	log      *zap.Logger
	metrics  *metrics
	learner  *learner
	shadows  *shadows     // nil: none
	declog   *decisionLog // nil: off
	waiting  map[*pool.Entry]waiting
	owned    map[*board]*owned
	students map[subjectKey]*student
	pulses   map[*group]*pulse
	shadowed map[*group]*shadowed
	told     []step // scratch
}

// waiting is an entry with what its caller is answered with. The caller makes the slot, so that
// the tick allocates nothing.
type waiting struct {
	entry  *pool.Entry
	slot   *Slot
	result chan Result // room for one, sent to once
	local  *Local      // it has no hand-off, and does not wait; nil: it has one
}

// owned is what the runner keeps of a board.
type owned struct {
	board   *board
	slots   []*Slot      // by index; nil: free
	counts  counts       // of these, as they were read last
	watched atomic.Int32 // suspected pairs: what arrives is of interest only while there are some
	arrive  func(*Slot)
	pace    *published
}

func newRunner(cfg Config, d *Dispatcher, wake func(command) bool) (*runner, error) {
	l, err := newLoop(cfg)
	if err != nil {
		return nil, err
	}
	built := func(key subjectKey, t *tables) { wake(func(r *runner) { r.learned(key, t) }) }
	r := &runner{
		loop: l, d: d, wake: wake, log: cfg.Log, metrics: d.metrics, learner: newLearner(cfg.Log, d.metrics, built), shadows: newShadows(cfg, d.metrics),
		waiting: map[*pool.Entry]waiting{}, owned: map[*board]*owned{}, students: map[subjectKey]*student{}, pulses: map[*group]*pulse{}, shadowed: map[*group]*shadowed{},
	}
	r.carryOut(0) // the policy has a name from the start
	return r, nil
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
		queue = d.inbox.take(queue)
		r.turn(queue, time.Now())
		clear(queue) // what a command closed over may go
		if next := r.next(); next.IsZero() {
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
			d.last.score()
			return
		}
	}
}

// start runs those who work beside the loop; the function it returns waits for
// them, so that nothing of a dispatcher outlives it.
func (r *runner) start(ctx context.Context) (wait func()) {
	var beside sync.WaitGroup
	beside.Go(func() { r.learner.run(ctx) })
	if r.shadows != nil {
		beside.Go(func() { r.shadows.run(ctx) })
	}
	if r.declog != nil {
		beside.Go(func() { r.declog.run(ctx) })
	}
	return beside.Wait
}

// turn runs the commands and then decides where something changed.
func (r *runner) turn(queue []command, now time.Time) {
	r.now = now
	for _, c := range queue {
		r.run(c)
	}
	for _, b := range r.inOrder {
		if b.looks(now) {
			r.count(b)
		}
		b.turn(now)
		r.drive(b)
		r.carryOut(0)
		b.counts = nil
		if b.empty() {
			r.remove(b)
			delete(r.owned, b)
			r.d.paces.Delete(b.model)
		}
	}
}

func (r *runner) run(c command) {
	c(r)
	for _, b := range r.inOrder {
		r.drive(b)
		b.counts = nil
	}
	r.carryOut(0)
}

// drive has a board decide until no group is left that has yet to.
func (r *runner) drive(b *board) {
	for b.deciding() {
		r.carryOut(0)
		start := time.Now()
		b.decide(r.now)
		took := time.Since(start)
		r.carryOut(took)
		b.decided(took, r.now)
	}
}

// count reads how far the slots of a board are and tells it with the event that follows: the
// board's mirror is as fresh as the last event that its streams saw.
func (r *runner) count(b *board) {
	o := r.owned[b]
	if o == nil {
		return
	}
	c := &o.counts
	if grow := len(o.slots) - len(c.tokens); grow > 0 {
		c.tokens, c.began, c.joined = append(c.tokens, make([]int32, grow)...), append(c.began, make([]bool, grow)...), append(c.joined, make([]uint32, grow)...)
	}
	for i, s := range o.slots {
		if s != nil {
			c.tokens[i], c.began[i], c.joined[i] = s.generated.Load(), s.started.Load(), s.voice.first.Load()
		} else {
			c.tokens[i], c.began[i], c.joined[i] = 0, false, 0
		}
	}
	b.counts = c
}

// enqueue takes an entry in.
func (r *runner) enqueue(w waiting) {
	if w.local != nil && r.boards[w.entry.Model] != nil {
		r.count(r.boards[w.entry.Model])
	}
	r.waiting[w.entry] = w
	r.loop.enqueue(entrant{entry: w.entry, local: w.local, grounds: w.slot.Grounds})
}

// release gives a slot back.
func (r *runner) release(s *Slot, o Outcome) {
	b := s.owner.board
	if b.ledger.table[s.index].rank.queued > 0 { // who is next in the queue depends on the others
		r.count(b)
	}
	s.owner.slots[s.index] = nil
	b.depart(s.index, s.generated.Load(), s.voice.first.Load(), s.voice.last.Load())
	b.release(s.index, o, s.generated.Load(), s.started.Load(), r.now)
}

// recount corrects what a slot is charged with, unless it has been given back.
func (r *runner) recount(s *Slot, prompt int32) {
	if s.owner.slots[s.index] == s {
		s.owner.board.recount(s.index, prompt)
	}
}

// setWorkers replaces the fleet.
func (r *runner) setWorkers(ws []Worker) {
	for b := range r.owned {
		r.count(b)
	}
	r.loop.setWorkers(ws)
}

// shutDown answers everything that waits.
func (r *runner) shutDown(queue []command, now time.Time) {
	r.now, r.draining = now, true
	for _, c := range queue {
		r.run(c)
	}
	r.answerAll(ErrDraining)
	r.carryOut(0)
}

// status is that of the boards, and what the shadows found.
func (r *runner) status(now time.Time) Status {
	for b := range r.owned {
		r.count(b)
	}
	s := r.loop.status(now)
	for i := range s.Models {
		m := &s.Models[i]
		for j, g := range r.boards[m.Model].groups {
			m.Groups[j].Compared = r.shadows.compared(r.shadowed[g])
		}
	}
	return s
}

func (r *runner) loads() Loads {
	for b := range r.owned {
		r.count(b)
	}
	all := r.loop.loads()
	for b := range r.owned {
		for _, g := range b.groups {
			if c := r.shadows.compared(r.shadowed[g]); len(c) > 0 {
				all.Compared = append(all.Compared, GroupCompared{b.model, g.name, c})
			}
		}
	}
	return all
}

// carryOut does what the boards want done. took is how long the round took that these
// effects come from.
func (r *runner) carryOut(took time.Duration) {
	for i := 0; i < len(r.effects); i++ { // some cause others
		r.do(&r.effects[i], took)
	}
	clear(r.effects) // they hold callers
	r.effects = r.effects[:0]
}

func (r *runner) do(e *effect, took time.Duration) {
	m := r.metrics
	switch e.kind {
	case effectBind:
		r.bind(e, took)
	case effectRefuse:
		r.answer(e.waits, Result{Err: e.err})
	case effectBegins:
		r.owned[e.board].slots[e.slot].waits.Store(false)
	case effectRound:
		m.tick(e.policy).Observe(took.Seconds())
		if e.err != nil {
			r.log.Error("dispatcher: the policy failed", zap.String("policy", e.policy), zap.Error(e.err))
		}
		r.show(e)
	case effectInvalid:
		m.invalid.WithLabelValues(e.label).Inc()
		r.log.Error("dispatcher: the policy made an assignment that cannot be bound", zap.String("policy", e.policy),
			zap.String("fault", e.label), zap.Uint64("entry", e.entry), zap.Int32("worker", e.worker))
	case effectNotOffered:
		r.log.Error("dispatcher: the policy took a rank that was not offered", zap.String("policy", e.policy), zap.Int32("worker", e.worker))
	case effectFallback:
		m.fallbacks.WithLabelValues(e.label).Inc()
		if e.label == fallbackSlow {
			r.log.Warn("dispatcher: a tick was over dispatch.tick_limit, "+fallbackSpec+" decides the next ones",
				zap.String("policy", e.policy), zap.Duration("took", e.lasts), zap.Duration("limit", r.cfg.TickLimit), zap.Int("ticks", slowRounds))
		}
	case effectBudget:
		m.budgetChanges.WithLabelValues(e.label).Inc()
	case effectBeyond:
		m.beyond.Inc()
	case effectQuarantine:
		m.quarantines.WithLabelValues(e.pair.prefiller, e.pair.engine).Inc()
		r.log.Warn("dispatcher: hand-offs of a prefiller do not reach a decode engine, though both serve others; the pair is avoided",
			zap.String("prefiller", e.pair.prefiller), zap.String("engine", e.pair.engine), zap.Int("failures", e.count), zap.Duration("for", e.lasts))
	case effectSteered:
		m.steered.WithLabelValues(e.label).Inc()
	case effectDuplicate:
		r.log.Warn("dispatcher: two workers with one ID, the second is ignored",
			zap.Int32("id", e.worker), zap.String("kept", e.names[0]), zap.String("ignored", e.names[1]))
	case effectPace:
		if r.own(e.board).pace.publish(&e.board.pace) && r.cfg.OnRoom != nil {
			r.cfg.OnRoom()
		}
	case effectWatch:
		r.own(e.board).watched.Store(int32(e.count))
	case effectPolicy:
		name := r.name
		r.d.policy.Store(&name)
	case effectSubject:
		r.student(e.subject)
	case effectFit:
		r.learner.load(r.fit)
	case effectEnding:
		r.learner.hear(e.ending)
	case effectGroup:
		r.follow(e.board, e.group)
	case effectRest:
		if p := r.pulses[e.group]; p != nil {
			p.pause()
		}
	case effectLeastStep:
		if p := r.pulses[e.group]; p != nil {
			p.least.Store(int64(e.lasts))
		}
	case effectGroupGone:
		r.shadows.leave(r.shadowed[e.group])
		delete(r.shadowed, e.group)
		delete(r.pulses, e.group) // its last streams still beat it, and nobody hears
	}
}

// show shows a round to those who look at it afterwards. They copy it.
func (r *runner) show(e *effect) {
	if r.declog != nil {
		r.declog.record(e.round)
	}
	if s := r.shadowed[e.group]; s != nil {
		r.shadows.show(s, e.round)
	}
}

// own is what is kept of a board.
func (r *runner) own(b *board) *owned {
	o := r.owned[b]
	if o == nil {
		o = &owned{board: b, pace: newPublished()}
		o.arrive = func(s *Slot) {
			r.wake(func(r *runner) {
				if o.slots[s.index] == s { // else it has been given back
					b.reached(b.ledger.table[s.index].pair(), r.now)
				}
			})
		}
		r.owned[b] = o
		r.d.paces.Store(b.model, o.pace)
	}
	return o
}

// follow listens to a group from its beginning.
func (r *runner) follow(b *board, g *group) {
	r.own(b)
	if !g.barrier {
		return
	}
	heard := func(r *runner) { r.hear(b, g) } // made once: telling a step allocates nothing
	r.pulses[g] = newPulse(func() { r.wake(heard) })
	if r.shadows != nil {
		r.shadowed[g] = r.shadows.follow(func(n policy.Needs) *student {
			if s := b.source(n); s != nil {
				return r.student(s.subjectKey)
			}
			return nil
		})
	}
}

// student is who learns a subject.
func (r *runner) student(key subjectKey) *student {
	s := r.students[key]
	if s == nil {
		s = r.learner.follow(key, r.fit)
		r.students[key] = s
	}
	return s
}

// hear tells a board the steps that the streams of a group told of.
func (r *runner) hear(b *board, g *group) {
	p := r.pulses[g]
	if p == nil {
		return // the group is gone
	}
	r.told = p.read(r.told[:0])
	r.count(b)
	b.hear(g, r.told)
}

// bind hands a caller its slot.
func (r *runner) bind(e *effect, took time.Duration) {
	o, how := r.own(e.board), &e.bound
	s := r.waiting[e.waits].slot
	s.Worker, s.WorkerName, s.Group, s.Policy = how.Rank.ID, how.Rank.Name, how.Rank.Group, how.Policy
	s.Stage, s.Score, s.Wait, s.Decide, s.Beyond, s.NewTokens = how.Stage, how.Score, how.Wait, took, how.Beyond, int(how.New)
	s.waits.Store(how.Beyond)
	s.owner, s.index, s.pulse = o, how.Slot, r.pulses[how.Rank.group]
	if grow := int(how.Slot) + 1 - len(o.slots); grow > 0 {
		o.slots = append(o.slots, make([]*Slot, grow)...)
	}
	o.slots[how.Slot] = s
	r.answer(e.waits, Result{Slot: s})
}

// answer answers a caller of Enqueue.
func (r *runner) answer(e *pool.Entry, result Result) {
	w := r.waiting[e]
	delete(r.waiting, e)
	w.leave(r.cfg.Places, result)
}

// leave answers the caller and frees the entry's place.
func (w waiting) leave(places *pool.Places, r Result) {
	w.result <- r
	if places != nil && !w.entry.Drain && w.local == nil {
		places.Release()
	}
}
