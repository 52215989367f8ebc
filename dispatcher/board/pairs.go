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

// sortedLinks returns the suspected pairs, sorted.
func (p *pairs) sortedLinks() []Link {
	return slices.SortedFunc(maps.Keys(p.suspected), func(x, y Link) int {
		return cmp.Or(cmp.Compare(x.Prefiller, y.Prefiller), cmp.Compare(x.Engine, y.Engine))
	})
}

// link returns the prefill engine that the request's KV comes from and the decode engine that it goes to.
func (s *slotRecord) link() Link { return Link{s.prefiller, s.rank.Engine} }

// recordHandoffEnd records how the hand-off of a request that has ended went, for the pair of its prefill and decode engine. If the
// request's first event came, recordWorkingPair has already recorded the success.
func (b *board) recordHandoffEnd(s *slotRecord, o Outcome, now time.Time) {
	switch {
	case s.prefiller == "": // there was no hand-off
	case o.Lost:
		b.recordLost(s, now)
	case !s.started: // the end says nothing about the pair; if this hand-off was the pair's trial, the next hand-off is the trial instead
		if health := b.pairs.suspected[s.link()]; health != nil {
			health.circuit.Neutral(s.id)
		}
	}
}

// recordLost records that a hand-off's first event did not come. If the pair is in service, quarantineIfBroken judges it by all its
// failures. If the hand-off was the trial of a quarantined pair, the pair is quarantined for twice as long.
func (b *board) recordLost(s *slotRecord, now time.Time) {
	p, link := &b.pairs, s.link()
	p.dropQuiet(now)
	health := p.suspected[link]
	if health == nil {
		health = &linkHealth{}
		p.suspected[link] = health
	}
	health.failures++
	health.lastFailure = now
	if !health.quarantined() {
		b.quarantineIfBroken(link, health, now)
	} else if health.circuit.Fail(s.id, now) { // the trial has failed
		b.emitQuarantine(link, health)
	}
	b.updatePairCounts()
}

// quarantineIfBroken quarantines a pair that has failed pairLimit times in a row while each of its two engines worked with another engine.
// In this case only the connection between the two can be broken. It does nothing to a pair that is quarantined already.
func (b *board) quarantineIfBroken(link Link, health *linkHealth, now time.Time) {
	if !health.quarantined() && health.failures >= pairLimit && health.prefillerWorks && health.engineWorks {
		health.circuit.Trip(now)
		b.emitQuarantine(link, health)
	}
}

// emitQuarantine emits that a pair is avoided from now on.
func (b *board) emitQuarantine(link Link, health *linkHealth) {
	b.emit(Effect{Kind: EffectQuarantine, Pair: link, Count: health.failures, Duration: health.circuit.OutageLength()})
}

// recordWorkingPair records that a hand-off between the engines of a pair has worked, so the pair is not suspected any more. This also
// shows that both engines work: if another suspected pair with one of them fails, the cause is not this engine, so that pair may be
// quarantined.
func (b *board) recordWorkingPair(worked Link, now time.Time) {
	p := &b.pairs
	p.dropQuiet(now)
	if health := p.suspected[worked]; health != nil {
		b.decideNow = b.decideNow || health.quarantined() // entries that waited for the end of the quarantine may go to the engine now
		delete(p.suspected, worked)
	}
	for _, link := range p.sortedLinks() {
		health := p.suspected[link]
		health.prefillerWorks = health.prefillerWorks || link.Prefiller == worked.Prefiller
		health.engineWorks = health.engineWorks || link.Engine == worked.Engine
		b.quarantineIfBroken(link, health, now)
	}
	b.updatePairCounts()
}

// dropQuiet drops the suspected pairs that have been quiet for longer than pairMemory. There are few pairs, so each event of a pair looks
// at all of them.
func (p *pairs) dropQuiet(now time.Time) {
	for link, health := range p.suspected {
		quietSince := health.lastFailure
		if health.quarantined() { // pairMemory then counts from the end of the quarantine
			quietSince = health.circuit.TrialAt()
		}
		if now.Sub(quietSince) > pairMemory {
			delete(p.suspected, link)
		}
	}
}

// updatePairCounts counts the quarantined pairs, and emits EffectWatchFirstEvents (see updateFirstEventWatch). It must run after each
// change of the suspected pairs.
func (b *board) updatePairCounts() {
	p := &b.pairs
	b.updateFirstEventWatch()
	p.quarantinedCount = 0
	for _, health := range p.suspected {
		if health.quarantined() {
			p.quarantinedCount++
		}
	}
}

// recordSend records that a hand-off goes to a pair. If the pair's quarantine has just ended, this hand-off is the trial.
func (p *pairs) recordSend(s *slotRecord, now time.Time) {
	if health := p.suspected[s.link()]; health != nil {
		health.circuit.Send(s.id, now)
	}
}

// changePrefiller records that the KV of a slot comes from another prefill engine. The end of the request says nothing about the old pair.
func (b *board) changePrefiller(slot int32, prefiller string, now time.Time) {
	s := &b.slots.records[slot]
	if health := b.pairs.suspected[s.link()]; health != nil {
		health.circuit.Neutral(s.id)
	}
	s.prefiller = prefiller
	if b.pairs.quarantinedCount > 0 {
		b.pairs.recordSend(s, now)
	}
}

// Quarantined returns the prefill engines whose KV should not go to the rank of a slot now, because of a quarantine. With a slot below 0,
// it returns the prefill engines whose KV should not go to at least one rank of the model.
func (l *Boards) Quarantined(model string, slot int32, now time.Time) (prefillers []string) {
	b := l.boards[model]
	if b == nil {
		return nil
	}
	for link, health := range b.pairs.suspected {
		if (slot < 0 || link.Engine == b.slots.records[slot].rank.Engine) && !health.circuit.Allows(now) {
			prefillers = append(prefillers, link.Prefiller)
		}
	}
	return prefillers
}

// isQuarantined says whether an entry should not go to a rank now, because the pair of its prefill engine and the rank's engine is
// quarantined and no trial is due.
func (p *pairs) isQuarantined(e *pool.Entry, r *rank, now time.Time) bool {
	health := p.suspected[Link{e.Prefiller, r.Engine}]
	return health != nil && !health.circuit.Allows(now)
}

// avoidQuarantinedPair changes the i-th assignment of a round if its prefill and decode engine are a quarantined pair. The assignments
// before it must be bound. bind false: the entry stays in the pool, because a rank could take it later, but none has room now.
func (b *board) avoidQuarantinedPair(g *group, p *policyInUse, i int, now time.Time) (bind bool) {
	a := &b.assignments[i]
	w, ok := b.waiting[a.Entry]
	r := g.rankWithID(a.Worker)
	if !ok || r == nil || w.Entry.Prefiller == "" || !b.pairs.isQuarantined(w.Entry, r, now) {
		return true
	}
	outcome := b.reassign(g, p, i, w, now)
	b.emit(Effect{Kind: EffectSteered, Label: outcome})
	return outcome != SteerLeft
}

// reassign moves the entry w of the i-th assignment, whose pair is quarantined, to the rank with the fewest KV tokens that has room, or
// else exchanges its rank with that of a later assignment. It does neither if the entry is urgent, or if no rank could take the entry even
// when idle: the quarantined pair is then used. The outcome is one of the Steer constants.
func (b *board) reassign(g *group, p *policyInUse, i int, w waitingEntry, now time.Time) (outcome string) {
	if w.Entry.Urgent(now) {
		return SteerKept
	}
	var best *rank
	for _, r := range g.steppingRanks {
		if b.couldTake(r, w, now) && b.hasRoomBeside(r, p, w, b.assignments[i+1:]) && (best == nil || r.kv < best.kv) {
			best = r
		}
	}
	if best != nil {
		b.assignments[i].Worker = best.ID
		return SteerMoved
	}
	if b.swapRanks(g, i, w, now) {
		return SteerSwapped
	}
	for _, other := range b.groups { // no rank has room now, but one of any group may have room later
		if slices.ContainsFunc(other.steppingRanks, func(r *rank) bool { return b.couldTake(r, w, now) }) {
			b.pairs.wakeAtQuarantineEnd(now)
			return SteerLeft
		}
	}
	return SteerKept
}

// swapRanks exchanges the rank of the i-th assignment, of entry w, with that of a later assignment, if each of the two entries may go to
// the other's rank and has KV room there.
func (b *board) swapRanks(g *group, i int, w waitingEntry, now time.Time) (swapped bool) {
	mine, remaining := g.rankWithID(b.assignments[i].Worker), b.assignments[i+1:]
	for j := range remaining {
		other, ok := b.waiting[remaining[j].Entry]
		theirs := g.rankWithID(remaining[j].Worker)
		if !ok || theirs == nil || theirs == mine { // bind will refuse this assignment, or the exchange would change nothing
			continue
		}
		allowed := b.couldTake(theirs, w, now) && b.couldTake(mine, other, now)
		if allowed && theirs.hasKVRoom(int64(w.prompt())) && mine.hasKVRoom(int64(other.prompt())) {
			b.assignments[i].Worker, remaining[j].Worker = theirs.ID, mine.ID
			return true
		}
	}
	return false
}

// couldTake says whether the rank could take the entry if all slots and the whole KV room of the rank were free. A rank whose pair with the
// entry's prefill engine is quarantined could not.
func (b *board) couldTake(r *rank, w waitingEntry, now time.Time) bool {
	largeEnough := r.Capacity == 0 || int64(w.prompt()) <= r.Capacity
	return largeEnough && r.takesRequests() && r.lists(w.Entry.Name) && r.usableSlots() > 0 && !b.pairs.isQuarantined(w.Entry, r, now)
}

// hasRoomBeside says whether the rank has a slot and KV room for the entry in addition to the remaining assignments of the round.
func (b *board) hasRoomBeside(r *rank, p *policyInUse, w waitingEntry, remaining []policy.Assignment) bool {
	if p.Immediate() {
		return true // the engine queues what has no room yet
	}
	free, kv := r.freeSlots(), r.kv
	for _, a := range remaining {
		if a.Worker == r.ID {
			free--
			kv += int64(b.promptOf(a.Entry))
		}
	}
	return free > 0 && (r.Capacity == 0 || kv+int64(w.prompt()) <= r.usableCapacity())
}

// promptOf returns the prompt of a waiting entry in tokens; 0: no such entry waits.
func (b *board) promptOf(entry uint64) int32 {
	if w, ok := b.waiting[entry]; ok {
		return w.prompt()
	}
	return 0
}

// wakeAtQuarantineEnd makes the board decide again when the first quarantine ends.
func (p *pairs) wakeAtQuarantineEnd(now time.Time) {
	for _, health := range p.suspected {
		if at := health.circuit.TrialAt(); at.After(now) {
			p.quarantineEndsAt = earlier(p.quarantineEndsAt, at)
		}
	}
}

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
	for _, link := range p.sortedLinks() {
		health := p.suspected[link]
		all = append(all, PairStatus{
			Prefiller: link.Prefiller, Engine: link.Engine, Failures: health.failures, Quarantined: health.quarantined(),
			Until: health.circuit.TrialAt(),
		})
	}
	return all
}
