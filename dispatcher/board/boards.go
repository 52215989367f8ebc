package board

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

// FallbackSpec decides for a policy that failed.
const FallbackSpec = "pjsq-kv"

// Boards are the boards of all models: the mirror of their decode ranks, what these hold, and
// the pools of entries that wait for them. They have no goroutine, clock, log, metric or lock:
// whoever owns them tells events with the time, and carries out the effects that come back.
type Boards struct {
	*rules
	boards   map[string]*board // by model
	inOrder  []*board          // the same, by name
	round    *board            // whose round was decided, until it is told how long that took
	draining bool
}

// rules are the settings all boards share; only the owner changes them.
type rules struct {
	cfg    Config
	spec   string          // policy of barrier groups
	name   string          // of that policy
	shared map[string]bool // names of groups that several models have

	shadows []policy.Needs // what the shadows of a group want to know

	fit      *predictor.Fit     // what predictors start from; nil: from nothing
	subjects map[Subject]*known // outlive the boards

	effects []Effect  // to be carried out
	now     time.Time // of the last event
}

// New returns boards without ranks.
func New(cfg Config) (*Boards, error) {
	cfg = cfg.WithDefaults()
	if err := cfg.check(); err != nil {
		return nil, err
	}
	l := &Boards{
		rules:  &rules{cfg: cfg, fit: cfg.Predictor.Fit, subjects: map[Subject]*known{}},
		boards: map[string]*board{},
	}
	if err := l.usable(l.fit); err != nil {
		return nil, err
	}
	if _, err := cfg.Parse(FallbackSpec); err != nil {
		return nil, err
	}
	for _, spec := range slices.Concat(cfg.Shadow, cfg.Twin) {
		l.shadows = append(l.shadows, policy.NeedsOf(l.make(spec).Policy, nil))
	}
	return l, l.setPolicy(cfg.Policy)
}

// Apply changes the boards by one event and returns what must be done now. The effects are
// good until the next Apply. While Deciding says that a round is due, the next events are
// Decide and then Decided.
func (l *Boards) Apply(e Event, now time.Time) []Effect {
	clear(l.effects) // they hold callers
	l.effects, l.now = l.effects[:0], now
	e.apply(l)
	if _, told := e.(*Counts); !told {
		l.forgetCounts()
	}
	return l.effects
}

// forgetCounts ends what holds for one event, and for the rounds that follow from it.
func (l *Boards) forgetCounts() {
	for _, b := range l.inOrder {
		if b != l.round && !b.deciding() {
			b.counts = nil
		}
	}
}

// Deciding says whether a round is due.
func (l *Boards) Deciding() bool { return l.decides() != nil }

// decides is the board that has a round to decide; nil: none has.
func (l *Boards) decides() *board {
	for _, b := range l.inOrder {
		if b.deciding() {
			return b
		}
	}
	return nil
}

// Looks says whether a Tick now would look at what the ranks of a model hold: then Counts
// come first.
func (l *Boards) Looks(model string, now time.Time) bool {
	b := l.boards[model]
	return b != nil && b.looks(now)
}

// Config is what is in force.
func (l *Boards) Config() Config { return l.cfg }

// Policy is the canonical name of the barrier groups' policy.
func (l *Boards) Policy() string { return l.name }

// usable says whether what is configured, but for the policy of barrier groups,
// can work with a fit.
func (l *Boards) usable(fit *predictor.Fit) error {
	if err := l.cfg.Predictor.kindServes(l.cfg.Predictor.Kind, fit); err != nil {
		return fmt.Errorf("dispatcher: %w", err)
	}
	p, err := l.cfg.Parse(l.cfg.DensePolicy)
	if err != nil {
		return err
	}
	if err := l.cfg.Predictor.serves(p, fit); err != nil {
		return err
	}
	return checkShadows(l.cfg, fit)
}

// Next is when a Tick is due even without another event; zero: never.
func (l *Boards) Next() time.Time {
	var next time.Time
	for _, b := range l.inOrder {
		outage := b.downTo
		if b.pool.Len() == 0 {
			outage = time.Time{} // nobody waits for its end
		}
		held := b.heldUntil
		if !b.windowEnds.IsZero() {
			held = time.Time{} // the window ends soon, and held entries are not looked at before
		}
		for _, t := range [...]time.Time{b.windowEnds, held, b.wakeShy, b.pairs.checkAt, b.pool.NextDeadline(), outage} {
			if !t.IsZero() && (next.IsZero() || t.Before(next)) {
				next = t
			}
		}
	}
	return next
}

// answerAll answers everything that waits; what runs stays charged.
func (l *Boards) answerAll(err error) {
	for _, b := range l.inOrder {
		for len(b.pool.Entries()) > 0 {
			b.fail(b.pool.Entries()[0], err)
		}
	}
}

func (l *Boards) enqueue(w entrant) {
	b := l.boards[w.entry.Model]
	switch {
	case l.draining:
		l.emit(Effect{Kind: EffectRefuse, Entry: w.entry, Err: ErrDraining})
	case b == nil:
		l.emit(Effect{Kind: EffectRefuse, Entry: w.entry, Err: ErrNoWorkers})
	default:
		b.enqueue(w, l.now)
	}
}

func (l *Boards) withdraw(e *pool.Entry) {
	if b := l.boards[e.Model]; b != nil && b.waiting[e.ID].entry == e {
		b.fail(e, ErrWithdrawn)
	}
}

func (l *Boards) setWorkers(ws []Worker) {
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

func (l *Boards) setFit(fit *predictor.Fit) error {
	p, err := l.cfg.Parse(l.spec)
	if err != nil {
		return err
	}
	if err := errors.Join(l.cfg.Predictor.serves(p, fit), l.usable(fit)); err != nil {
		return err
	}
	l.fit = fit
	l.emit(Effect{Kind: EffectFit, Fit: l.fit})
	return nil
}

func (l *Boards) setPolicy(spec string) error {
	p, err := l.cfg.Parse(spec)
	if err != nil {
		return err
	}
	if err := l.cfg.Predictor.serves(p, l.fit); err != nil {
		return err
	}
	l.spec, l.name = spec, p.Name()
	l.emit(Effect{Kind: EffectPolicy, Policy: l.name})
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
	rules  *rules
	ahead  bool   // it sends requests ahead of the slots they will have
	source *known // of what it wants to know of the future; nil: nothing
}

// choose makes the decider of a barrier group, or of ranks without barrier.
func (b *board) choose(barrier bool) decider {
	spec := b.cfg.DensePolicy
	if barrier {
		spec = b.spec
	}
	if b.early {
		spec = HoldsNothing(spec)
	}
	p := b.make(spec)
	p.source = b.source(policy.NeedsOf(p.Policy, nil))
	return p
}

// key names a group in effects.
func (b *board) key(g *group) GroupKey { return GroupKey{b.model, g.name, g.barrier} }

// group is the one that a key names, and its board; nil: it is gone.
func (l *Boards) group(key GroupKey) (*board, *group) {
	if b := l.boards[key.Model]; b != nil {
		for _, g := range b.groups {
			if b.key(g) == key {
				return b, g
			}
		}
	}
	return nil, nil
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
	p, err := r.cfg.Parse(spec)
	if err != nil {
		panic("dispatcher: policy " + spec + " was accepted before and no longer parses: " + err.Error())
	}
	return decider{Policy: p, spec: spec, name: p.Name(), rules: r, ahead: policy.SendsAhead(p)}
}
