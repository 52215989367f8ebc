package board

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"evenkeel/dispatcher/policy"
	"evenkeel/pool"
	"evenkeel/predictor"
)

// FallbackSpec is the fallback policy, which decides after the chosen one has failed or was too
// slow.
const FallbackSpec = "pjsq-kv"

// New returns boards without ranks.
func New(cfg Config) (*Boards, error) {
	cfg = cfg.WithDefaults()
	if err := cfg.check(); err != nil {
		return nil, err
	}
	if err := cfg.checkPolicies(); err != nil {
		return nil, err
	}
	if _, err := cfg.Parse(FallbackSpec); err != nil { // a Parse of a test may not know it
		return nil, err
	}
	l := &Boards{
		allBoards: &allBoards{cfg: cfg, fit: cfg.Predictor.Fit, predictors: map[PredictorKey]*predictorState{}},
		boards:    map[string]*board{},
	}
	return l, l.setPolicy(cfg.Policy) // checks the policy that checkPolicies leaves out
}

// Config has the settings in force, with defaults.
func (l *Boards) Config() Config { return l.cfg }

// Policy is the canonical name of the policy of barrier groups.
func (l *Boards) Policy() string { return l.policyName }

// checkPolicies leaves out the policy of barrier groups.
func (c *Config) checkPolicies() error {
	if err := c.Predictor.checkKindAvailable(c.Predictor.Kind); err != nil {
		return fmt.Errorf("dispatcher: %w", err)
	}
	p, err := c.Parse(c.DensePolicy)
	if err != nil {
		return err
	}
	return c.Predictor.checkAvailableFor(p)
}

// Next is when the caller must send a Tick even without another event; zero: at no set time.
func (l *Boards) Next() time.Time {
	var next time.Time
	for _, b := range l.inOrder {
		refuseAllAt := b.outageGraceEnds // while all ranks are down
		if b.pool.Len() == 0 {
			refuseAllAt = time.Time{}
		}
		for _, t := range [...]time.Time{ // zero: the board does not wait for this
			b.windowEnds,
			b.recheckHeldAt,
			b.retryAvoidedAt,
			b.retrySparedAt,
			b.pairs.quarantineEndsAt,
			b.keptEmptierUntil,
			b.keptKVFreedAt,
			b.pool.NextDeadline(),
			b.nameOutageEnds,
			refuseAllAt,
		} {
			next = earlier(next, t)
		}
	}
	return next
}

// A zero time stands for no time, here and in hasCome.
func earlier(x, y time.Time) time.Time {
	if x.IsZero() || !y.IsZero() && y.Before(x) {
		return y
	}
	return x
}

func hasCome(at, now time.Time) bool { return !at.IsZero() && !now.Before(at) }

func (l *Boards) refuseAll(err error) {
	for _, b := range l.inOrder {
		for len(b.pool.Entries()) > 0 {
			b.removeAndRefuse(b.pool.Entries()[0], err)
		}
	}
}

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

func (l *Boards) withdraw(e *pool.Entry) {
	// Another entry may have the same ID by now.
	if b := l.boards[e.Model]; b != nil && b.waiting[e.ID].Entry == e {
		b.removeAndRefuse(e, ErrWithdrawn)
	}
}

// setWorkers also finds sharedGroupNames.
func (l *Boards) setWorkers(ws []Worker) {
	fleet := make(map[string][]Worker, len(l.boards))
	for model := range l.boards {
		// A model without workers must get an empty list, so that its board loses its ranks.
		fleet[model] = nil
	}
	modelOf := map[string]string{} // of the last worker with each group name
	l.sharedGroupNames = map[string]bool{}
	for _, w := range ws {
		fleet[w.Model] = append(fleet[w.Model], w)
		if other, ok := modelOf[w.Group]; ok && other != w.Model {
			l.sharedGroupNames[w.Group] = true
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

// setFit: predictors that are added later start from the same fit.
func (l *Boards) setFit(fit *predictor.Fit) {
	l.fit = fit
	l.emit(Effect{Kind: EffectFit, Fit: l.fit})
}

// setPolicy changes nothing if it returns an error.
func (l *Boards) setPolicy(spec string) error {
	p, err := l.cfg.Parse(spec)
	if err != nil {
		return err
	}
	if err := l.cfg.Predictor.checkAvailableFor(p); err != nil {
		return err
	}
	l.policySpec, l.policyName = spec, p.Name()
	l.emit(Effect{Kind: EffectPolicy, Policy: l.policyName})
	for _, b := range l.inOrder {
		b.setPolicy()
	}
	return nil
}

// policyFor makes the predictor that the policy needs begin to learn.
func (b *board) policyFor(barrier bool) policyInUse {
	spec := b.cfg.DensePolicy // called dense because dense models need no barrier
	if barrier {
		spec = b.policySpec
	}
	p := b.buildPolicy(spec)
	p.predictor = b.findOrStartPredictor(needsOf(p.Policy))
	return p
}

// buildPolicy needs a spec that was checked before.
func (a *allBoards) buildPolicy(spec string) policyInUse {
	p, err := a.cfg.Parse(spec)
	if err != nil {
		panic("dispatcher: policy " + spec + " was accepted before and no longer parses: " + err.Error())
	}
	return policyInUse{Policy: p, name: p.Name(), shared: a, sendsAhead: policy.SendsAhead(p)}
}

func (l *Boards) add(b *board) {
	l.boards[b.model] = b
	l.inOrder = slices.SortedFunc(maps.Values(l.boards), func(x, y *board) int { return cmp.Compare(x.model, y.model) })
}

func (l *Boards) remove(b *board) {
	delete(l.boards, b.model)
	l.inOrder = slices.DeleteFunc(slices.Clone(l.inOrder), func(o *board) bool { return o == b })
}
