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
		allBoards: &allBoards{cfg: cfg, fit: cfg.Predictor.Fit, predictors: map[PredictorKey]*predictorState{}},
		boards:    map[string]*board{},
	}
	if err := cfg.checkPolicies(); err != nil {
		return nil, err
	}
	if _, err := cfg.Parse(FallbackSpec); err != nil { // cfg.Parse may be a test's own, which does not know the fallback
		return nil, err
	}
	for _, spec := range cfg.Twin { // the twin replays these policies with predictions that the boards make for them
		l.twinNeeds = append(l.twinNeeds, policy.RequirementsOf(l.buildPolicy(spec).Policy, meanUnknown))
	}
	return l, l.setPolicy(cfg.Policy)
}

// Config returns the settings in force.
func (l *Boards) Config() Config { return l.cfg }

// Policy returns the canonical name of the barrier groups' policy.
func (l *Boards) Policy() string { return l.policyName }

// checkPolicies returns an error if the configured kind of predictor is not available, or if the policy of ranks without a barrier or one
// of the twin cannot work. It does not check the policy of barrier groups: its callers do.
func (c *Config) checkPolicies() error {
	if err := c.Predictor.checkKindAvailable(c.Predictor.Kind); err != nil {
		return fmt.Errorf("dispatcher: %w", err)
	}
	p, err := c.Parse(c.DensePolicy)
	if err != nil {
		return err
	}
	if err := c.Predictor.checkAvailableFor(p); err != nil {
		return err
	}
	return c.checkTwin()
}

// Next returns the earliest time at which a board has to look at its entries again, so that a Tick is due even if no other event comes;
// zero: none has to.
func (l *Boards) Next() time.Time {
	var next time.Time
	for _, b := range l.inOrder {
		outage := b.outageGraceEnds
		if b.pool.Len() == 0 {
			outage = time.Time{} // no entry waits for the end of the outage
		}
		for _, t := range [...]time.Time{
			b.windowEnds, b.recheckHeldAt, b.retryAvoidedAt, b.nameOutageEnds, b.retrySparedAt, b.tightEndsAt, b.keptKVFreedAt,
			b.pairs.quarantineEndsAt, b.pool.NextDeadline(), outage,
		} {
			next = earlier(next, t)
		}
	}
	return next
}

// earlier returns the earlier of two times. A zero time stands for none, so the result is zero only if both are.
func earlier(x, y time.Time) time.Time {
	if x.IsZero() || !y.IsZero() && y.Before(x) {
		return y
	}
	return x
}

// hasCome says whether a time at which the board must do something has come; a zero time never comes.
func hasCome(at, now time.Time) bool { return !at.IsZero() && !now.Before(at) }

// refuseAll answers all waiting entries with err. Requests that run stay charged.
func (l *Boards) refuseAll(err error) {
	for _, b := range l.inOrder {
		for len(b.pool.Entries()) > 0 {
			b.removeAndRefuse(b.pool.Entries()[0], err)
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

// withdraw takes an entry out of the pool and refuses it, unless it has left the pool already.
func (l *Boards) withdraw(e *pool.Entry) {
	if b := l.boards[e.Model]; b != nil && b.waiting[e.ID].Entry == e { // another entry may have its ID by now
		b.removeAndRefuse(e, ErrWithdrawn)
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

// setFit emits the effect that makes all present predictors start anew from the fit, and keeps the fit for those that come later.
func (l *Boards) setFit(fit *predictor.Fit) {
	l.fit = fit
	l.emit(Effect{Kind: EffectFit, Fit: l.fit})
}

// setPolicy changes the policy of the barrier groups of all boards, which decide anew. It returns an error, and changes nothing, if the
// spec is wrong or the predictor that the policy needs is not available.
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

// policyFor builds the policy in use of a barrier group or, if barrier is false, of the ranks without a barrier. If the policy needs a
// predictor, this predictor begins to learn.
func (b *board) policyFor(barrier bool) policyInUse {
	spec := b.cfg.DensePolicy
	if barrier {
		spec = b.policySpec
	}
	p := b.buildPolicy(spec)
	p.predictor = b.predictorFor(policy.RequirementsOf(p.Policy, meanUnknown))
	return p
}

// buildPolicy builds a policy in use from a spec that was checked before.
func (a *allBoards) buildPolicy(spec string) policyInUse {
	p, err := a.cfg.Parse(spec)
	if err != nil {
		panic("dispatcher: policy " + spec + " was accepted before and no longer parses: " + err.Error())
	}
	return policyInUse{
		Policy: p, spec: spec, name: p.Name(), shared: a, sendsAhead: policy.SendsAhead(p), readsHits: policy.RequirementsOf(p, meanUnknown).Hits,
	}
}
