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

// FallbackSpec is the spec of the fallback policy, which decides for a while after the chosen policy has failed or was too slow.
const FallbackSpec = "pjsq-kv"

// New returns boards without ranks. It returns an error if a setting of cfg cannot work.
func New(cfg Config) (*Boards, error) {
	cfg = cfg.WithDefaults()
	if err := cfg.check(); err != nil {
		return nil, err
	}
	if err := cfg.checkPolicies(); err != nil {
		return nil, err
	}
	if _, err := cfg.Parse(FallbackSpec); err != nil { // a test may give a Parse that does not know the fallback policy
		return nil, err
	}
	l := &Boards{
		allBoards: &allBoards{cfg: cfg, fit: cfg.Predictor.Fit, predictors: map[PredictorKey]*predictorState{}},
		boards:    map[string]*board{},
	}
	return l, l.setPolicy(cfg.Policy) // setPolicy checks the policy of barrier groups, which checkPolicies leaves out
}

// Config returns the settings in force, with defaults filled in.
func (l *Boards) Config() Config { return l.cfg }

// Policy returns the canonical name of the policy of the groups whose ranks step together.
func (l *Boards) Policy() string { return l.policyName }

// checkPolicies returns an error if the configured kind of predictor is not available, or if the policy of ranks
// without a barrier cannot work. Its callers check the policy of barrier groups themselves.
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

// Next returns the earliest time at which a board must look at its entries again, so that the caller must send a Tick even if no other
// event comes; zero: at no set time.
func (l *Boards) Next() time.Time {
	var next time.Time
	for _, b := range l.inOrder {
		refuseAllAt := b.outageGraceEnds // while all ranks are down
		if b.pool.Len() == 0 {
			refuseAllAt = time.Time{} // no entry waits that could be refused
		}
		for _, t := range [...]time.Time{ // zero: the board does not wait for this
			b.windowEnds,             // the board decides about the slots that came free in a burst
			b.recheckHeldAt,          // a policy wants to decide again about entries that it holds back
			b.retryAvoidedAt,         // an entry may go to the ranks that failed it before
			b.retrySparedAt,          // a rank that is spared after refusals may get a request as its trial
			b.pairs.quarantineEndsAt, // a quarantined pair of engines may get a hand-off as its trial
			b.keptEmptierUntil,       // a rank that is kept emptier after preemptions may be filled as usual
			b.keptKVFreedAt,          // an engine frees the KV that it keeps of an ended answer
			b.pool.NextDeadline(),    // an entry has waited for as long as it may
			b.nameOutageEnds,         // an entry is refused, because all ranks that list its model name are down
			refuseAllAt,
		} {
			next = earlier(next, t)
		}
	}
	return next
}

// earlier returns the earlier of two times. A zero time stands for no time, so the result is zero only if both are zero.
func earlier(x, y time.Time) time.Time {
	if x.IsZero() || !y.IsZero() && y.Before(x) {
		return y
	}
	return x
}

// hasCome says whether a time (at) has come. A zero time stands for no time, and never comes.
func hasCome(at, now time.Time) bool { return !at.IsZero() && !now.Before(at) }

// refuseAll answers all waiting entries with err. Running requests keep their slots.
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

// withdraw takes an entry out of the pool and answers it with ErrWithdrawn, unless it has left the pool already.
func (l *Boards) withdraw(e *pool.Entry) {
	// The entries are compared because another entry may have the same ID by now.
	if b := l.boards[e.Model]; b != nil && b.waiting[e.ID].Entry == e {
		b.removeAndRefuse(e, ErrWithdrawn)
	}
}

// setWorkers gives each board the workers of its model, and creates a board for each new model. It also finds the group names that groups
// of several models have.
func (l *Boards) setWorkers(ws []Worker) {
	fleet := make(map[string][]Worker, len(l.boards))
	for model := range l.boards {
		// A board whose model has no worker any more must get an empty list, so that it loses its ranks.
		fleet[model] = nil
	}
	modelOf := map[string]string{} // model of the last worker with each group name
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

// setFit emits the effect that makes all predictors start anew from the fit. Predictors that are added later start from the same fit.
func (l *Boards) setFit(fit *predictor.Fit) {
	l.fit = fit
	l.emit(Effect{Kind: EffectFit, Fit: l.fit})
}

// setPolicy changes the policy of the barrier groups of all boards, and makes the boards decide anew. It returns an error and changes
// nothing if the spec is wrong, or if the predictor that the policy needs is not available.
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
	for _, b := range l.inOrder { // each barrier group builds a policy of its own, because a policy has state
		b.setPolicy()
	}
	return nil
}

// policyFor builds the policy of a barrier group or, if barrier is false, of the ranks without a barrier. If the policy needs a predictor
// of output lengths, this predictor begins to learn.
func (b *board) policyFor(barrier bool) policyInUse {
	spec := b.cfg.DensePolicy // called dense because dense models need no barrier
	if barrier {
		spec = b.policySpec
	}
	p := b.buildPolicy(spec)
	p.predictor = b.findOrStartPredictor(needsOf(p.Policy))
	return p
}

// buildPolicy builds a policy from a spec that was checked before. It panics if the spec is wrong.
func (a *allBoards) buildPolicy(spec string) policyInUse {
	p, err := a.cfg.Parse(spec)
	if err != nil {
		panic("dispatcher: policy " + spec + " was accepted before and no longer parses: " + err.Error())
	}
	return policyInUse{Policy: p, name: p.Name(), shared: a, sendsAhead: policy.SendsAhead(p)}
}

// add adds a board. inOrder stays sorted by model, so that boards are always visited in the same order.
func (l *Boards) add(b *board) {
	l.boards[b.model] = b
	l.inOrder = slices.SortedFunc(maps.Values(l.boards), func(x, y *board) int { return cmp.Compare(x.model, y.model) })
}

// remove drops a board that has neither ranks nor entries.
func (l *Boards) remove(b *board) {
	delete(l.boards, b.model)
	l.inOrder = slices.DeleteFunc(slices.Clone(l.inOrder), func(o *board) bool { return o == b })
}
