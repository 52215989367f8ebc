package dispatcher

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"evenkeel/pool"
)

// runner owns the boards. It reads the clock, applies the commands of others in their
// order, and carries out the effects that come back: it answers callers, counts, writes the
// log, and shows rounds to those who look at them afterwards.
type runner struct {
	*loop
	metrics  *metrics
	log      *zap.Logger
	learner  *learner
	shadows  *shadows     // nil: none
	declog   *decisionLog // nil: off
	shadowed map[*group]*shadowed
}

func newRunner(cfg Config, m *metrics, name *atomic.Pointer[string], paces *sync.Map, wake func(command) bool) (*runner, error) {
	l, err := newLoop(cfg, name, paces, wake)
	if err != nil {
		return nil, err
	}
	return &runner{
		loop: l, metrics: m, log: cfg.Log, learner: newLearner(cfg.Log, m), shadows: newShadows(cfg, m), shadowed: map[*group]*shadowed{},
	}, nil
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
	for model, b := range r.boards {
		b.turn(now)
		r.drive(b)
		r.carryOut(0)
		if b.empty() {
			delete(r.boards, model)
			r.paces.Delete(model)
		}
	}
}

func (r *runner) run(c command) {
	c(r)
	for _, b := range r.boards {
		r.drive(b)
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
	all := r.loop.loads()
	for g, s := range r.shadowed {
		if c := r.shadows.compared(s); len(c) > 0 {
			all.Compared = append(all.Compared, GroupCompared{g.board.model, g.name, c})
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
	case effectAnswer:
		if e.result.Slot != nil {
			e.result.Slot.Decide = took
		}
		e.waiting.leave(r.cfg.Places, e.result)
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
	case effectRoom:
		if r.cfg.OnRoom != nil {
			r.cfg.OnRoom()
		}
	case effectSubject:
		r.learner.follow(e.subject, r.fit)
	case effectFit:
		r.learner.load(r.fit)
	case effectEnding:
		r.learner.hear(e.ending)
	case effectGroup:
		if e.group.barrier && r.shadows != nil {
			r.shadowed[e.group] = r.shadows.follow(e.group.board)
		}
	case effectGroupGone:
		r.shadows.leave(r.shadowed[e.group])
		delete(r.shadowed, e.group)
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

// leave answers the caller of Enqueue and frees the entry's place.
func (w waiting) leave(places *pool.Places, r Result) {
	w.result <- r
	if places != nil && !w.entry.Drain && w.local == nil {
		places.Release()
	}
}
