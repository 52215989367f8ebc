package dispatcher

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"evenkeel/dispatcher/policy"
	"evenkeel/pool"
	"evenkeel/predictor"
)

// fallbackSpec decides for a policy that failed.
const fallbackSpec = "pjsq-kv"

// loop holds the boards of all models. It reads no clock: now is the instant of the turn.
type loop struct {
	*rules
	boards   map[string]*board // by model
	inOrder  []*board          // the same, by name
	now      time.Time
	draining bool
}

// rules are the settings all boards share; only the owner changes them.
type rules struct {
	cfg    Config
	spec   string          // policy of barrier groups
	name   string          // of that policy
	shared map[string]bool // names of groups that several models have

	fit      *predictor.Fit          // what predictors start from; nil: from nothing
	subjects map[subjectKey]*subject // outlive the boards

	effects []effect // to be carried out
}

func newLoop(cfg Config) (*loop, error) {
	l := &loop{
		rules:  &rules{cfg: cfg, fit: cfg.Predictor.Fit, subjects: map[subjectKey]*subject{}},
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

// next is when a turn is due even without a command; zero: never.
func (l *loop) next() time.Time {
	var next time.Time
	for _, b := range l.inOrder {
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

// answerAll answers everything that waits; what runs stays charged.
func (l *loop) answerAll(err error) {
	for _, b := range l.inOrder {
		for len(b.pool.Entries()) > 0 {
			b.fail(b.pool.Entries()[0], err)
		}
	}
}

func (l *loop) enqueue(w entrant) {
	b := l.boards[w.entry.Model]
	switch {
	case l.draining:
		l.emit(effect{kind: effectRefuse, waits: w.entry, err: ErrDraining})
	case b == nil:
		l.emit(effect{kind: effectRefuse, waits: w.entry, err: ErrNoWorkers})
	default:
		b.enqueue(w, l.now)
	}
}

func (l *loop) withdraw(e *pool.Entry) {
	if b := l.boards[e.Model]; b != nil && b.waiting[e.ID].entry == e {
		b.fail(e, ErrWithdrawn)
	}
}

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
	for _, model := range slices.Sorted(maps.Keys(fleet)) {
		b := l.boards[model]
		if b == nil {
			b = newBoard(model, l.rules)
			l.add(b)
		}
		b.setWorkers(fleet[model])
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
	l.emit(effect{kind: effectFit})
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
	l.spec, l.name = spec, p.Name()
	l.emit(effect{kind: effectPolicy})
	for _, b := range l.inOrder {
		b.setPolicy()
	}
	return nil
}

// decider is a policy in use: a value of its own for each group, since it
// keeps scratch and turns.
type decider struct {
	policy.Policy
	spec   string
	name   string
	source *subject // of what it wants to know of the future; nil: nothing
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
	return decider{Policy: p, spec: spec, name: p.Name()}
}
