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

	// pairMemory is how long a suspected pair stays suspected without a new failure or, after its quarantine has
	// ended, without a new hand-off: one of its two engines may have left the fleet.
	pairMemory = 5 * time.Minute
)

// inOrder returns the suspected pairs, sorted.
func (p *pairs) inOrder() []Link {
	return slices.SortedFunc(maps.Keys(p.links), func(x, y Link) int {
		return cmp.Or(cmp.Compare(x.Prefiller, y.Prefiller), cmp.Compare(x.Engine, y.Engine))
	})
}

// pair returns the prefill engine that the request's KV comes from and the engine that it goes to.
func (s *slotRecord) pair() Link { return Link{s.prefiller, s.rank.Engine} }

// pairEnded records how the hand-off of a request that has ended went, for the pair of its prefill and decode engine. If the request's
// first event came, reached has already recorded the success.
func (b *board) pairEnded(s *slotRecord, o Outcome, now time.Time) {
	switch {
	case s.prefiller == "": // there was no hand-off
	case o.Lost:
		b.lost(s, now)
	case !s.started: // the end says nothing about the pair; if this hand-off was the pair's trial, the next hand-off is the trial instead
		if health := b.pairs.links[s.pair()]; health != nil {
			health.circuit.Neutral(s.id)
		}
	}
}

// lost records that a hand-off's first event did not come. If the pair is in service, consider judges it by all its failures. If the
// hand-off was the trial of a quarantined pair, the pair is quarantined for twice as long.
func (b *board) lost(s *slotRecord, now time.Time) {
	p, link := &b.pairs, s.pair()
	p.forget(now)
	health := p.links[link]
	if health == nil {
		health = &linkHealth{}
		p.links[link] = health
	}
	health.failures++
	health.last = now
	if health.circuit.In() {
		b.consider(link, health, now)
	} else if health.circuit.Fail(s.id, now) {
		b.quarantined(link, health)
	}
	b.countPairs()
}

// consider quarantines a pair that has failed pairLimit times in a row while each of its two engines worked with another engine. In this
// case only the connection between the two can be broken.
func (b *board) consider(link Link, health *linkHealth, now time.Time) {
	if health.circuit.In() && health.failures >= pairLimit && health.fromWorks && health.toWorks {
		health.circuit.Trip(now)
		b.quarantined(link, health)
	}
}

// quarantined emits that a pair is avoided from now on.
func (b *board) quarantined(link Link, health *linkHealth) {
	b.emit(Effect{Kind: EffectQuarantine, Pair: link, Count: health.failures, Duration: health.circuit.Out()})
}

// reached records that a hand-off between the engines of a pair has worked. This shows that both engines work: if another suspected pair
// with one of them fails, the cause is not this engine, so consider may quarantine that pair.
func (b *board) reached(worked Link, now time.Time) {
	p := &b.pairs
	p.forget(now)
	if health := p.links[worked]; health != nil {
		b.changed = b.changed || !health.circuit.In() // entries that waited for the end of the quarantine may go to the engine now
		delete(p.links, worked)
	}
	for _, link := range p.inOrder() {
		health := p.links[link]
		health.fromWorks = health.fromWorks || link.Prefiller == worked.Prefiller
		health.toWorks = health.toWorks || link.Engine == worked.Engine
		b.consider(link, health, now)
	}
	b.countPairs()
}

// forget drops the suspected pairs that have been quiet for longer than pairMemory. There are few pairs, so each event of a pair looks at
// all of them.
func (p *pairs) forget(now time.Time) {
	for link, health := range p.links {
		quietSince := health.last
		if quarantined := !health.circuit.In(); quarantined { // pairMemory then counts from the end of the quarantine
			quietSince = health.circuit.Until()
		}
		if now.Sub(quietSince) > pairMemory {
			delete(p.links, link)
		}
	}
}

// countPairs counts the quarantined pairs, and emits EffectWatchFirstEvents (see watch).
func (b *board) countPairs() {
	p := &b.pairs
	b.watch()
	p.quarantined = 0
	for _, health := range p.links {
		if !health.circuit.In() {
			p.quarantined++
		}
	}
}

// send records that a hand-off goes to a pair. If the pair's quarantine has just ended, this hand-off is the trial.
func (p *pairs) send(s *slotRecord, now time.Time) {
	if health := p.links[s.pair()]; health != nil {
		health.circuit.Send(s.id, now)
	}
}

// rerouted records that the KV of a slot comes from another prefill engine.
func (b *board) rerouted(slot int32, prefiller string, now time.Time) {
	s := &b.slots.records[slot]
	if health := b.pairs.links[s.pair()]; health != nil {
		health.circuit.Neutral(s.id)
	}
	s.prefiller = prefiller
	if b.pairs.quarantined > 0 {
		b.pairs.send(s, now)
	}
}

// Quarantined returns the prefill engines whose KV should not go to the rank of a slot now, because of a quarantine. With a slot below 0,
// it returns the prefill engines whose KV should not go to at least one rank of the model.
func (l *Boards) Quarantined(model string, slot int32, now time.Time) (prefillers []string) {
	b := l.boards[model]
	if b == nil {
		return nil
	}
	for link, health := range b.pairs.links {
		if (slot < 0 || link.Engine == b.slots.records[slot].rank.Engine) && !health.circuit.Allows(now) {
			prefillers = append(prefillers, link.Prefiller)
		}
	}
	return prefillers
}

// vetoed says whether an entry should not go to a rank now, because the pair of its prefill engine and the rank's engine is quarantined.
func (p *pairs) vetoed(e *pool.Entry, r *rank, now time.Time) bool {
	health := p.links[Link{e.Prefiller, r.Engine}]
	return health != nil && !health.circuit.Allows(now)
}

// steer changes the i-th assignment of a round if its prefill and decode engine are a quarantined pair. The assignments before it must be
// bound. steer moves the entry to the rank with the fewest KV tokens that has room, or else exchanges its rank with that of a later
// assignment. If no rank has room but one could take the entry later, steer returns false: the entry stays in the pool. If no rank
// could take it even then, or the entry is urgent, the quarantined pair is used.
func (b *board) steer(g *group, p *policyInUse, i int, now time.Time) (bind bool) {
	a := &b.assignments[i]
	w, ok := b.waiting[a.Entry]
	r := g.rank(a.Worker)
	if !ok || r == nil || w.Entry.Prefiller == "" || !b.pairs.vetoed(w.Entry, r, now) {
		return true
	}
	outcome := b.rerank(g, p, i, w, now)
	b.emit(Effect{Kind: EffectSteered, Label: outcome})
	return outcome != SteerLeft
}

// rerank does the work of steer for an assignment whose pair is quarantined. The outcome is one of the Steer constants.
func (b *board) rerank(g *group, p *policyInUse, i int, w waitingEntry, now time.Time) (outcome string) {
	if w.Entry.Urgent(now) {
		return SteerKept
	}
	remaining := b.assignments[i+1:]
	var best *rank
	for _, r := range g.ranks {
		if b.suits(r, w, now) && b.hasRoom(r, p, w, remaining) && (best == nil || r.kv < best.kv) {
			best = r
		}
	}
	if best != nil {
		b.assignments[i].Worker = best.ID
		return SteerMoved
	}
	mine := g.rank(b.assignments[i].Worker)
	for j := range remaining {
		other, ok := b.waiting[remaining[j].Entry]
		theirs := g.rank(remaining[j].Worker)
		if !ok || theirs == nil || theirs == mine { // bind will refuse this assignment, or the exchange would change nothing
			continue
		}
		if b.suits(theirs, w, now) && b.suits(mine, other, now) && fits(theirs, w) && fits(mine, other) {
			b.assignments[i].Worker, remaining[j].Worker = theirs.ID, mine.ID
			return SteerSwapped
		}
	}
	for _, other := range b.groups { // no rank has room now, but one of any group may have room later
		if slices.ContainsFunc(other.ranks, func(r *rank) bool { return b.suits(r, w, now) }) {
			b.pairs.wait(now)
			return SteerLeft
		}
	}
	return SteerKept
}

// suits says whether the rank could take the entry if all slots and the whole KV room of the rank were free.
func (b *board) suits(r *rank, w waitingEntry, now time.Time) bool {
	largeEnough := r.Capacity == 0 || int64(w.prompt()) <= r.Capacity
	return largeEnough && r.takes() && r.lists(w.Entry.Name) && r.usable() > 0 && !b.pairs.vetoed(w.Entry, r, now)
}

// hasRoom says whether the rank has a slot and KV room for the entry in addition to the remaining assignments of the round.
func (b *board) hasRoom(r *rank, p *policyInUse, w waitingEntry, remaining []policy.Assignment) bool {
	if p.Immediate() {
		return true // the engine queues what has no room yet
	}
	free, kv := r.free(), r.kv
	for _, a := range remaining {
		if a.Worker == r.ID {
			free--
			kv += int64(b.promptOf(a.Entry))
		}
	}
	return free > 0 && (r.Capacity == 0 || kv+int64(w.prompt()) <= r.room())
}

// promptOf returns the prompt of a waiting entry in tokens; 0: no such entry waits.
func (b *board) promptOf(entry uint64) int32 {
	if w, ok := b.waiting[entry]; ok {
		return w.prompt()
	}
	return 0
}

// fits says whether a rank has KV room for an entry, whether or not a slot is free.
func fits(r *rank, w waitingEntry) bool {
	return r.Capacity == 0 || r.kv+int64(w.prompt()) <= r.room()
}

// wait makes the board look at the pool again when the first quarantine ends.
func (p *pairs) wait(now time.Time) {
	for _, health := range p.links {
		if at := health.circuit.Until(); at.After(now) && (p.checkAt.IsZero() || at.Before(p.checkAt)) {
			p.checkAt = at
		}
	}
}

// due says whether a quarantine has ended that entries in the pool waited for.
func (p *pairs) due(now time.Time) bool { return !p.checkAt.IsZero() && !now.Before(p.checkAt) }

// PairStatus is a pair of a prefill engine and a decode engine whose hand-offs fail.
type PairStatus struct {
	Prefiller   string    `json:"prefiller"`
	Engine      string    `json:"engine"`
	Failures    int       `json:"failures"` // in a row
	Quarantined bool      `json:"quarantined"`
	Until       time.Time `json:"until,omitzero"` // end of the quarantine; the next hand-off is then a trial
}

// status returns the suspected pairs, sorted.
func (p *pairs) status() []PairStatus {
	var all []PairStatus
	for _, link := range p.inOrder() {
		health := p.links[link]
		all = append(all, PairStatus{
			Prefiller: link.Prefiller, Engine: link.Engine, Failures: health.failures, Quarantined: !health.circuit.In(),
			Until: health.circuit.Until(),
		})
	}
	return all
}
