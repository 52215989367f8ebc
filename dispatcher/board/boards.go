package board

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"evenkeel/dispatcher/policy"
	"evenkeel/pool"
	"evenkeel/predictor"
)

// FallbackSpec is the spec of the policy that decides when the chosen policy has failed or was too slow.
const FallbackSpec = "pjsq-kv"

// New returns boards without ranks.
func New(cfg Config) (*Boards, error) {
	cfg = cfg.WithDefaults()
	if err := cfg.check(); err != nil {
		return nil, err
	}
	l := &Boards{
		allBoards: &allBoards{cfg: cfg, fit: cfg.Predictor.Fit, subjects: map[PredictorKey]*known{}},
		boards:    map[string]*board{},
	}
	if err := l.checkConfig(); err != nil {
		return nil, err
	}
	if _, err := cfg.Parse(FallbackSpec); err != nil { // cfg.Parse may be a test's own
		return nil, err
	}
	for _, spec := range cfg.Twin { // the twin replays these policies with predictions that the boards make for them
		l.replayed = append(l.replayed, policy.NeedsOf(l.make(spec).Policy, 0)) // 0: the mean output is not known yet
	}
	return l, l.setPolicy(cfg.Policy)
}

// Config returns the settings in force.
func (l *Boards) Config() Config { return l.cfg }

// Policy returns the canonical name of the barrier groups' policy.
func (l *Boards) Policy() string { return l.name }

// checkConfig returns an error if the config cannot work. It does not check the policy of barrier groups: its callers do.
func (l *Boards) checkConfig() error {
	if err := l.cfg.Predictor.kindServes(l.cfg.Predictor.Kind); err != nil {
		return fmt.Errorf("dispatcher: %w", err)
	}
	p, err := l.cfg.Parse(l.cfg.DensePolicy)
	if err != nil {
		return err
	}
	if err := l.cfg.Predictor.serves(p); err != nil {
		return err
	}
	return checkTwin(l.cfg)
}

// Next returns the earliest time at which a board has to look at its entries again, so that a Tick is due even if no other event comes;
// zero: none has to.
func (l *Boards) Next() time.Time {
	var next time.Time
	for _, b := range l.inOrder {
		outage := b.graceEnds
		if b.pool.Len() == 0 {
			outage = time.Time{} // no entry waits for the end of the outage
		}
		for _, t := range [...]time.Time{
			b.windowEnds, b.heldUntil, b.wakeAvoiding, b.nameOutageEnds, b.wakeSpared, b.wakeTight, b.keptUntil, b.pairs.checkAt,
			b.pool.NextDeadline(), outage,
		} {
			if !t.IsZero() && (next.IsZero() || t.Before(next)) {
				next = t
			}
		}
	}
	return next
}

// answerAll answers all waiting entries with err. Requests that run stay charged.
func (l *Boards) answerAll(err error) {
	for _, b := range l.inOrder {
		for len(b.pool.Entries()) > 0 {
			b.fail(b.pool.Entries()[0], err)
		}
	}
}

// enqueue gives an entry to the board of its model. It refuses the entry if there is no such board, or after Shutdown (draining).
func (l *Boards) enqueue(w waitingEntry) {
	b := l.boards[w.Entry.Model]
	switch {
	case l.draining:
		l.emit(Effect{Kind: EffectRefuse, Entry: w.Entry, Err: ErrDraining})
	case b == nil:
		l.emit(Effect{Kind: EffectRefuse, Entry: w.Entry, Err: ErrNoWorkers})
	default:
		b.enqueue(w, l.now)
	}
}

// withdraw takes an entry out of the pool, unless it has left the pool already.
func (l *Boards) withdraw(e *pool.Entry) {
	if b := l.boards[e.Model]; b != nil && b.waiting[e.ID].Entry == e {
		b.fail(e, ErrWithdrawn)
	}
}

// setWorkers divides the workers of the fleet among the boards of their models, and creates a board for each new model. It also finds
// the group names that several models use.
func (l *Boards) setWorkers(ws []Worker) {
	fleet := make(map[string][]Worker, len(l.boards))
	for model := range l.boards {
		fleet[model] = nil // a board whose model is not in ws any more must still get an empty list, to lose its ranks
	}
	modelOf := map[string]string{} // by group name
	l.shared = map[string]bool{}
	for _, w := range ws {
		fleet[w.Model] = append(fleet[w.Model], w)
		if other, ok := modelOf[w.Group]; ok && other != w.Model {
			l.shared[w.Group] = true
		}
		modelOf[w.Group] = w.Model
	}
	for _, model := range slices.Sorted(maps.Keys(fleet)) {
		b := l.boards[model]
		if b == nil {
			b = newBoard(model, l.allBoards)
			l.add(b)
		}
		b.setWorkers(fleet[model])
	}
}

// setFit makes all present subjects (PredictorKey) start anew from the fit (EffectFit), and keeps it for those that come later.
func (l *Boards) setFit(fit *predictor.Fit) {
	l.fit = fit
	l.emit(Effect{Kind: EffectFit, Fit: l.fit})
}

// setPolicy changes the policy of the barrier groups of all boards. It returns an error, and changes nothing, if the spec is wrong or
// the predictor that the policy needs is not available.
func (l *Boards) setPolicy(spec string) error {
	p, err := l.cfg.Parse(spec)
	if err != nil {
		return err
	}
	if err := l.cfg.Predictor.serves(p); err != nil {
		return err
	}
	l.spec, l.name = spec, p.Name()
	l.emit(Effect{Kind: EffectPolicy, Policy: l.name})
	for _, b := range l.inOrder {
		b.setPolicy()
	}
	return nil
}

// choose builds the policy in use of a barrier group or, if barrier is false, of the ranks without a barrier.
func (b *board) choose(barrier bool) policyInUse {
	spec := b.cfg.DensePolicy
	if barrier {
		spec = b.spec
	}
	p := b.make(spec)
	p.source = b.source(policy.NeedsOf(p.Policy, 0))
	return p
}

// make builds a policy in use from a spec that was checked before.
func (a *allBoards) make(spec string) policyInUse {
	p, err := a.cfg.Parse(spec)
	if err != nil {
		panic("dispatcher: policy " + spec + " was accepted before and no longer parses: " + err.Error())
	}
	return policyInUse{Policy: p, spec: spec, name: p.Name(), all: a, ahead: policy.SendsAhead(p), hits: policy.NeedsOf(p, 0).Hits}
}
