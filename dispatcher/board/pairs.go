package board

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"evenkeel/dispatcher/policy"
	"evenkeel/pool"
)

const (
	// pairLimit is how many first-event failures in a row quarantine a pair.
	pairLimit = 3

	// pairMemory is how long a row of failures is kept that was never enough, or
	// that nobody tries again: one of its ends may be gone.
	pairMemory = 5 * time.Minute
)

// inOrder are the suspected pairs in an order that does not change.
func (p *pairs) inOrder() []Pair {
	return slices.SortedFunc(maps.Keys(p.suspects), func(x, y Pair) int {
		return cmp.Or(cmp.Compare(x.Prefiller, y.Prefiller), cmp.Compare(x.Engine, y.Engine))
	})
}

// pair is the way the request's KV takes.
func (c *charge) pair() Pair { return Pair{c.prefiller, c.rank.Engine} }

// pairEnded takes in how a hand-off fared whose slot is given back.
func (b *board) pairEnded(s *charge, o Outcome, now time.Time) {
	switch {
	case s.prefiller == "":
	case o.Lost:
		b.lost(s, now)
	case !s.started:
		if sus := b.pairs.suspects[s.pair()]; sus != nil {
			sus.circuit.Neutral(s.id)
		}
	}
}

// lost notes that a hand-off's first event did not come.
func (b *board) lost(s *charge, now time.Time) {
	p, key := &b.pairs, s.pair()
	p.forget(now)
	sus := p.suspects[key]
	if sus == nil {
		sus = &suspect{}
		p.suspects[key] = sus
	}
	sus.row++
	sus.last = now
	if sus.circuit.In() {
		b.consider(key, sus, now)
	} else if sus.circuit.Fail(s.id, now) {
		b.quarantined(key, sus)
	}
	b.countPairs()
}

// consider quarantines a pair once it alone can be what is wrong.
func (b *board) consider(key Pair, sus *suspect, now time.Time) {
	if sus.circuit.In() && sus.row >= pairLimit && sus.from && sus.to {
		sus.circuit.Trip(now)
		b.quarantined(key, sus)
	}
}

func (b *board) quarantined(key Pair, sus *suspect) {
	b.emit(Effect{Kind: EffectQuarantine, Pair: key, Count: sus.row, Lasts: sus.circuit.Out()})
}

// reached notes a first event: the pair works, and neither end is to blame for
// what fails with another one.
func (b *board) reached(key Pair, now time.Time) {
	p := &b.pairs
	p.forget(now)
	if sus := p.suspects[key]; sus != nil {
		b.changed = b.changed || !sus.circuit.In() // what was left may go now
		delete(p.suspects, key)
	}
	for _, k := range p.inOrder() {
		sus := p.suspects[k]
		sus.from = sus.from || k.Prefiller == key.Prefiller
		sus.to = sus.to || k.Engine == key.Engine
		b.consider(k, sus, now)
	}
	b.countPairs()
}

// forget drops what nothing was heard of for long. Those that are watched are
// few, so whoever comes by looks at all.
func (p *pairs) forget(now time.Time) {
	for k, sus := range p.suspects {
		quiet := sus.last
		if !sus.circuit.In() {
			quiet = sus.circuit.Until()
		}
		if now.Sub(quiet) > pairMemory {
			delete(p.suspects, k)
		}
	}
}

func (b *board) countPairs() {
	p := &b.pairs
	b.watch()
	p.out = 0
	for _, sus := range p.suspects {
		if !sus.circuit.In() {
			p.out++
		}
	}
}

// send tells of a hand-off: past a quarantine it becomes the trial.
func (p *pairs) send(s *charge, now time.Time) {
	if sus := p.suspects[s.pair()]; sus != nil {
		sus.circuit.Send(s.id, now)
	}
}

// rerouted notes that a hand-off of a rank comes from another prefiller.
func (b *board) rerouted(slot int32, prefiller string, now time.Time) {
	s := &b.ledger.table[slot]
	if sus := b.pairs.suspects[s.pair()]; sus != nil {
		sus.circuit.Neutral(s.id)
	}
	s.prefiller = prefiller
	if b.pairs.out > 0 {
		b.pairs.send(s, now)
	}
}

// Shunned are the prefillers whose KV should not go to the rank of a slot now; below slot 0, to some rank of the model.
func (l *Boards) Shunned(model string, slot int32, now time.Time) (prefillers []string) {
	b := l.boards[model]
	if b == nil {
		return nil
	}
	for key, sus := range b.pairs.suspects {
		if (slot < 0 || key.Engine == b.ledger.table[slot].rank.Engine) && !sus.circuit.Allows(now) {
			prefillers = append(prefillers, key.Prefiller)
		}
	}
	return prefillers
}

// vetoed says whether an entry should not go to a rank now.
func (p *pairs) vetoed(e *pool.Entry, r *rank, now time.Time) bool {
	sus := p.suspects[Pair{e.Prefiller, r.Engine}]
	return sus != nil && !sus.circuit.Allows(now)
}

// steer looks at one assignment of a round, those before it being bound, and
// moves it off a quarantined pair: to the rank with the fewest KV tokens that
// has room, else in exchange with a later assignment. Where another rank could
// take the entry but has no room it reports false: the entry stays in the pool.
// With no such rank, or little time left, the pair is used.
func (b *board) steer(g *group, p *decider, i int, now time.Time) (bind bool) {
	a := &b.assignments[i]
	w, ok := b.waiting[a.Entry]
	r := g.rank(a.Worker)
	if !ok || r == nil || w.entry.Prefiller == "" || !b.pairs.vetoed(w.entry, r, now) {
		return true
	}
	outcome := b.elsewhere(g, p, i, w, now)
	b.emit(Effect{Kind: EffectSteered, Label: outcome})
	return outcome != SteerLeft
}

func (b *board) elsewhere(g *group, p *decider, i int, w entrant, now time.Time) (outcome string) {
	if w.entry.Urgent(now) {
		return SteerKept
	}
	rest := b.assignments[i+1:]
	var best *rank
	for _, r := range g.ranks {
		if b.suits(r, w, now) && b.hasRoom(r, p, w, rest) && (best == nil || r.kv < best.kv) {
			best = r
		}
	}
	if best != nil {
		b.assignments[i].Worker = best.ID
		return SteerMoved
	}
	mine := g.rank(b.assignments[i].Worker)
	for j := range rest {
		other, ok := b.waiting[rest[j].Entry]
		theirs := g.rank(rest[j].Worker)
		if ok && theirs != nil && theirs != mine && b.suits(theirs, w, now) && b.suits(mine, other, now) &&
			fits(theirs, w) && fits(mine, other) {
			b.assignments[i].Worker, rest[j].Worker = theirs.ID, mine.ID
			return SteerSwapped
		}
	}
	for _, o := range b.groups {
		if slices.ContainsFunc(o.ranks, func(r *rank) bool { return b.suits(r, w, now) }) {
			b.pairs.wait(now)
			return SteerLeft
		}
	}
	return SteerKept
}

// suits says whether the rank could take the entry, room aside.
func (b *board) suits(r *rank, w entrant, now time.Time) bool {
	return r.takes() && r.lists(w.entry.Name) && r.usable() > 0 && (r.Capacity == 0 || int64(w.prompt()) <= r.Capacity) &&
		!b.pairs.vetoed(w.entry, r, now)
}

// hasRoom says whether the rank can have the entry and what the round still
// wants to give it.
func (b *board) hasRoom(r *rank, p *decider, w entrant, rest []policy.Assignment) bool {
	if p.Immediate() {
		return true
	}
	free, kv := r.free(), r.kv
	for _, a := range rest {
		if a.Worker == r.ID {
			free--
			kv += int64(b.promptOf(a.Entry))
		}
	}
	return free > 0 && (r.Capacity == 0 || kv+int64(w.prompt()) <= r.Capacity)
}

func (b *board) promptOf(entry uint64) int32 {
	if w, ok := b.waiting[entry]; ok {
		return w.prompt()
	}
	return 0
}

func fits(r *rank, w entrant) bool {
	return r.Capacity == 0 || r.kv+int64(w.prompt()) <= r.Capacity
}

// wait has the board look again when the first quarantine ends.
func (p *pairs) wait(now time.Time) {
	for _, sus := range p.suspects {
		if at := sus.circuit.Until(); at.After(now) && (p.checkAt.IsZero() || at.Before(p.checkAt)) {
			p.checkAt = at
		}
	}
}

// due says whether a quarantine ended that entries wait for.
func (p *pairs) due(now time.Time) bool { return !p.checkAt.IsZero() && !now.Before(p.checkAt) }

// PairStatus is a prefiller whose hand-offs fail on an engine.
type PairStatus struct {
	Prefiller   string    `json:"prefiller"`
	Engine      string    `json:"engine"`
	Failures    int       `json:"failures"` // in a row
	Quarantined bool      `json:"quarantined"`
	Until       time.Time `json:"until,omitzero"` // then one hand-off tries it
}

func (p *pairs) status() []PairStatus {
	var all []PairStatus
	for _, k := range p.inOrder() {
		sus := p.suspects[k]
		all = append(all, PairStatus{
			Prefiller: k.Prefiller, Engine: k.Engine, Failures: sus.row, Quarantined: !sus.circuit.In(), Until: sus.circuit.Until(),
		})
	}
	return all
}
