package dispatcher

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"evenkeel/dispatcher/policy"
	"evenkeel/pool"
	"evenkeel/predictor"
)

// fallbackSpec decides for a policy that failed (algorithm 8).
const fallbackSpec = "pjsq-kv"

// run is the goroutine that owns the boards. A turn takes every command that
// is queued and only then decides, so that a burst is one round.
func (d *Dispatcher) run(ctx context.Context, l *loop) {
	defer close(d.done)
	defer l.start(ctx)()
	timer := time.NewTimer(0)
	defer timer.Stop()
	var queue []command
	for {
		queue = d.inbox.take(queue)
		l.turn(queue, time.Now())
		clear(queue) // what a command closed over may go
		if next := l.next(); next.IsZero() {
			timer.Stop()
		} else {
			timer.Reset(time.Until(next))
		}
		select {
		case <-d.inbox.wake:
		case <-timer.C:
		case <-ctx.Done():
			l.drain(d.inbox.close(), time.Now())
			d.last = l.status(l.now)
			d.last.score()
			return
		}
	}
}

// start runs those who work beside the loop; the function it returns waits for
// them, so that nothing of a dispatcher outlives it.
func (l *loop) start(ctx context.Context) (wait func()) {
	var beside sync.WaitGroup
	beside.Go(func() { l.learner.run(ctx) })
	if l.shadows != nil {
		beside.Go(func() { l.shadows.run(ctx) })
	}
	if l.declog != nil {
		beside.Go(func() { l.declog.run(ctx) })
	}
	return beside.Wait
}

// loop is what the goroutine owns. Its methods read no clock but to time a
// decision: now is the instant of the turn.
type loop struct {
	*rules
	boards   map[string]*board // by model
	now      time.Time
	draining bool
}

// rules are the settings all boards share; only the owner changes them.
type rules struct {
	cfg     Config
	metrics *metrics
	spec    string // policy of barrier groups
	name    *atomic.Pointer[string]
	wake    func(command) bool // runs a command in the next turn
	shared  map[string]bool    // names of groups that several models have
	paces   *sync.Map          // of *pace, by board

	fit      *predictor.Fit // what predictors start from; nil: from nothing
	learner  *learner
	subjects map[subjectKey]*subject // outlive the boards
	shadows  *shadows                // nil: none
	declog   *decisionLog            // nil: off
}

func newLoop(cfg Config, m *metrics, name *atomic.Pointer[string], paces *sync.Map, wake func(command) bool) (*loop, error) {
	l := &loop{
		rules: &rules{
			cfg: cfg, metrics: m, name: name, paces: paces, wake: wake, fit: cfg.Predictor.Fit,
			learner: newLearner(cfg.Log, m), subjects: map[subjectKey]*subject{}, shadows: newShadows(cfg, m),
		},
		boards: map[string]*board{},
	}
	if err := l.usable(l.fit); err != nil {
		return nil, err
	}
	if _, err := cfg.parse(fallbackSpec); err != nil {
		return nil, err
	}
	return l, l.setPolicy(cfg.Policy)
}

// usable says whether what is configured, but for the policy of barrier groups,
// can work with a fit.
func (l *loop) usable(fit *predictor.Fit) error {
	if err := kindServes(l.cfg.Predictor.Kind, fit); err != nil {
		return fmt.Errorf("dispatcher: %w", err)
	}
	p, err := l.cfg.parse(l.cfg.DensePolicy)
	if err != nil {
		return err
	}
	if err := serves(p, fit); err != nil {
		return err
	}
	return checkShadows(l.cfg, fit)
}

// turn runs the commands and then decides where something changed.
func (l *loop) turn(queue []command, now time.Time) {
	l.now = now
	for _, c := range queue {
		c(l)
	}
	for model, b := range l.boards {
		b.turn(now)
		if b.empty() {
			delete(l.boards, model)
			l.paces.Delete(model)
		}
	}
}

// next is when a turn is due even without a command; zero: never.
func (l *loop) next() time.Time {
	var next time.Time
	for _, b := range l.boards {
		outage := b.downTo
		if b.pool.Len() == 0 {
			outage = time.Time{} // nobody waits for its end
		}
		for _, t := range [...]time.Time{b.windowEnds, b.heldUntil, b.wakeShy, b.pairs.checkAt, b.pool.NextDeadline(), outage} {
			if !t.IsZero() && (next.IsZero() || t.Before(next)) {
				next = t
			}
		}
	}
	return next
}

// drain answers everything that waits; what runs stays charged.
func (l *loop) drain(queue []command, now time.Time) {
	l.now, l.draining = now, true
	for _, c := range queue {
		c(l)
	}
	for _, b := range l.boards {
		for len(b.pool.Entries()) > 0 {
			b.fail(b.pool.Entries()[0], ErrDraining)
		}
	}
}

func (l *loop) enqueue(w waiting) {
	b := l.boards[w.entry.Model]
	switch {
	case l.draining:
		w.leave(l.cfg.Places, Result{Err: ErrDraining})
	case b == nil:
		w.leave(l.cfg.Places, Result{Err: ErrNoWorkers})
	default:
		b.enqueue(w, l.now)
	}
}

func (l *loop) withdraw(e *pool.Entry) {
	if b := l.boards[e.Model]; b != nil && b.waiting[e.ID].entry == e {
		b.fail(e, ErrWithdrawn)
	}
}

func (l *loop) release(s *Slot, o Outcome) { s.rank.board.release(s, o, l.now) }

func (l *loop) setWorkers(ws []Worker) {
	fleet := make(map[string][]Worker, len(l.boards))
	for model := range l.boards {
		fleet[model] = nil // a model that is gone loses its ranks too
	}
	models := map[string]string{}
	l.shared = map[string]bool{}
	for _, w := range ws {
		fleet[w.Model] = append(fleet[w.Model], w)
		if first, ok := models[w.Group]; ok && first != w.Model {
			l.shared[w.Group] = true
		}
		models[w.Group] = w.Model
	}
	for model, ws := range fleet {
		b := l.boards[model]
		if b == nil {
			b = newBoard(model, l.rules)
			l.boards[model] = b
		}
		b.setWorkers(ws)
	}
}

func (l *loop) setFit(fit *predictor.Fit) error {
	p, err := l.cfg.parse(l.spec)
	if err != nil {
		return err
	}
	if err := errors.Join(serves(p, fit), l.usable(fit)); err != nil {
		return err
	}
	l.fit = fit
	l.learner.load(fit)
	return nil
}

func (l *loop) setPolicy(spec string) error {
	p, err := l.cfg.parse(spec)
	if err != nil {
		return err
	}
	if err := serves(p, l.fit); err != nil {
		return err
	}
	name := p.Name()
	l.spec = spec
	l.name.Store(&name)
	for _, b := range l.boards {
		b.setPolicy()
	}
	return nil
}

// decider is a policy in use: a value of its own for each group, since it
// keeps scratch and turns.
type decider struct {
	policy.Policy
	name    string
	seconds observer
	source  *subject // of what it wants to know of the future; nil: nothing
}

// choose makes the decider of a barrier group, or of ranks without barrier.
func (b *board) choose(barrier bool) decider {
	spec := b.cfg.DensePolicy
	if barrier {
		spec = b.spec
	}
	p := b.make(spec)
	p.source = b.source(policy.NeedsOf(p.Policy, nil))
	return p
}

// label names a group in metrics and in the decision log.
func (b *board) label(g *group) string {
	switch {
	case !g.barrier:
		return "dense"
	case b.shared[g.name]:
		return b.model + "/" + g.name
	}
	return g.name
}

func (r *rules) make(spec string) decider {
	p, err := r.cfg.parse(spec)
	if err != nil {
		panic("dispatcher: policy " + spec + " was accepted before and no longer parses: " + err.Error())
	}
	return decider{Policy: p, name: p.Name(), seconds: r.metrics.tick(p.Name())}
}
