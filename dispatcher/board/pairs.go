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
	// pairLimit is the number of hand-offs in a row without a first event after which a pair of engines is quarantined.
	pairLimit = 3

	// pairMemory is how long a pair stays suspected without a new failure. For a pair that was quarantined, the time begins at the end
	// of the quarantine. A pair that is quiet for so long is forgotten, because one of its two engines may have left the fleet.
	pairMemory = 5 * time.Minute
)

// sortedLinks returns the suspected pairs, sorted by prefill engine and then by decode engine.
func (p *pairs) sortedLinks() []Link {
	return slices.SortedFunc(maps.Keys(p.suspected), func(x, y Link) int {
		return cmp.Or(cmp.Compare(x.Prefiller, y.Prefiller), cmp.Compare(x.Engine, y.Engine))
	})
}

// link returns the pair of engines of a request: the prefill engine that its KV comes from, and the decode engine that the KV goes to.
func (s *slotRecord) link() Link { return Link{s.prefiller, s.rank.Engine} }

// recordHandoffEnd records whether the hand-off of a request that has ended has failed. A success is recorded earlier, by
// recordWorkingPair, when the first event of the request comes.
func (b *board) recordHandoffEnd(s *slotRecord, o Outcome, now time.Time) {
	switch {
	case s.prefiller == "": // the request had no hand-off
	case o.Lost:
		b.recordLost(s, now)
	// The end of this request says nothing about its pair. If the request was the trial of a quarantined pair, the next hand-off is the
	// trial instead.
	case !s.started:
		if health := b.pairs.suspected[s.link()]; health != nil {
			health.circuit.Neutral(s.id)
		}
	}
}

// recordLost records that the first event of a hand-off did not come. From then on, the pair of its two engines (the link) is suspected. It
// stays suspected while it is quarantined. If the pair is not quarantined, quarantineIfBroken decides by all its failures whether it must
// be. If the hand-off was the trial of a quarantined pair, the next quarantine lasts twice as long.
func (b *board) recordLost(s *slotRecord, now time.Time) {
	p, link := &b.pairs, s.link()
	p.dropQuiet(now) // forgets the pairs whose failures are long ago
	health := p.suspected[link]
	if health == nil { // this is the first failure
		health = &linkHealth{}
		p.suspected[link] = health
	}
	health.failures++
	health.lastFailure = now
	if !health.quarantined() {
		b.quarantineIfBroken(link, health, now)
	} else if health.circuit.Fail(s.id, now) { // Fail returns true if this hand-off was the trial
		b.emitQuarantine(link, health)
	}
	b.updatePairCounts()
}

// quarantineIfBroken quarantines a pair that has failed pairLimit times in a row, while each of its two engines worked with another engine.
// In this case only the connection between the two can be broken. A pair that is quarantined already stays as it is.
func (b *board) quarantineIfBroken(link Link, health *linkHealth, now time.Time) {
	if !health.quarantined() && health.failures >= pairLimit && health.prefillerWorks && health.engineWorks {
		health.circuit.Trip(now)
		b.emitQuarantine(link, health)
	}
}

// emitQuarantine emits that a pair is quarantined from now on, and for how long.
func (b *board) emitQuarantine(link Link, health *linkHealth) {
	b.emit(Effect{Kind: EffectQuarantine, Pair: link, Count: health.failures, Duration: health.circuit.OutageLength()})
}

// recordWorkingPair records that a hand-off between the two engines of a pair has worked, so that the pair is not suspected any more. The
// success also says something about other suspected pairs with one of these engines: this engine works, so it is not the cause of their
// failures. If the other engine of such a pair is known to work, too, only the connection between the two can be broken, and the pair may
// have to be quarantined.
func (b *board) recordWorkingPair(worked Link, now time.Time) {
	p := &b.pairs
	p.dropQuiet(now) // forgets the pairs whose failures are long ago
	if health := p.suspected[worked]; health != nil {
		// If the pair was quarantined, entries that waited for the end of the quarantine may go to the engine now.
		b.decideNow = b.decideNow || health.quarantined()
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

// dropQuiet drops the suspected pairs that have been quiet for longer than pairMemory. It runs at each event of a pair and looks at all
// suspected pairs, because there are few.
func (p *pairs) dropQuiet(now time.Time) {
	for link, health := range p.suspected {
		quietSince := health.lastFailure
		if health.quarantined() { // pairMemory begins at the end of the quarantine
			quietSince = health.circuit.TrialAt()
		}
		if now.Sub(quietSince) > pairMemory {
			delete(p.suspected, link)
		}
	}
}

// updatePairCounts updates what depends on the suspected pairs, the pairs of a prefill and a decode engine whose last hand-off has failed.
// It counts those that are quarantined. It also emits whether streams must report their first events at once (updateFirstEventWatch): the
// first event of a stream shows that a hand-off of its pair has worked. It must run after each change of the suspected pairs.
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

// beginTrialIfDue records that a hand-off is sent between the two engines of a pair. If the quarantine of the pair has just ended, this
// hand-off is its trial.
func (p *pairs) beginTrialIfDue(s *slotRecord, now time.Time) {
	if health := p.suspected[s.link()]; health != nil {
		health.circuit.Send(s.id, now)
	}
}

// changePrefiller records that the KV of a slot comes from another prefill engine than was planned. The end of the request will then say
// nothing about the planned pair of engines. If this hand-off was the trial of that pair, the pair's next hand-off is the trial instead.
// The hand-off may become the trial of its new pair.
func (b *board) changePrefiller(slot int32, prefiller string, now time.Time) {
	s := &b.slots.records[slot]
	if plannedPair := b.pairs.suspected[s.link()]; plannedPair != nil {
		plannedPair.circuit.Neutral(s.id) // this request ends without a result for the pair
	}
	s.prefiller = prefiller           // from here on, s.link() is the new pair
	if b.pairs.quarantinedCount > 0 { // otherwise no pair can be due for a trial
		b.pairs.beginTrialIfDue(s, now)
	}
}

// Quarantined returns the prefill engines from which no KV should go to the rank of a slot now, because the pair of the two engines is
// quarantined. For a slot below 0, it returns those from which no KV should go to at least one rank of the model. It returns none for a
// model without a board.
func (l *Boards) Quarantined(model string, slot int32, now time.Time) (prefillers []string) {
	b := l.boards[model]
	if b == nil {
		return nil
	}
	for link, health := range b.pairs.suspected {
		isAskedFor := slot < 0 || link.Engine == b.slots.records[slot].rank.Engine
		if isAskedFor && !health.circuit.Allows(now) { // Allows is true again once a trial of the pair is due
			prefillers = append(prefillers, link.Prefiller)
		}
	}
	return prefillers
}

// isQuarantined says whether an entry should not go to a rank now, because the pair of the entry's prefill engine and the rank's engine is
// quarantined, and no trial of the pair is due.
func (p *pairs) isQuarantined(e *pool.Entry, r *rank, now time.Time) bool {
	health := p.suspected[Link{e.Prefiller, r.Engine}]
	return health != nil && !health.circuit.Allows(now)
}

// avoidQuarantinedPair gives the entry of the i-th assignment another rank if the prefill engine of the entry and the engine of the chosen
// rank are a quarantined pair. The caller then binds the i-th assignment, whether it was changed or not, if bindNow is true. If bindNow is
// false, the entry must stay in the pool: another rank can take it later, but none has room now. All assignments before the i-th must be
// bound, because the search for another rank compares the present loads of the ranks.
func (b *board) avoidQuarantinedPair(g *group, p *policyInUse, i int, now time.Time) (bindNow bool) {
	a := &b.assignments[i]
	w, ok := b.waiting[a.Entry]
	r := g.rankWithID(a.Worker)
	if !ok || r == nil {
		return true // the entry or the rank is not known, which bind reports as a fault
	}
	if w.Entry.Prefiller == "" || !b.pairs.isQuarantined(w.Entry, r, now) {
		return true // no hand-off comes over a quarantined pair
	}
	outcome := b.reassign(g, p, i, w, now) // changes the assignment, unless the outcome is SteerLeft or SteerKept
	b.emit(Effect{Kind: EffectSteered, Label: outcome})
	return outcome != SteerLeft
}

// reassign gives the entry w of the i-th assignment, whose pair of engines is quarantined, another rank: the rank with the fewest KV tokens
// that has room. p is the policy that made the assignments. If no rank has room, w exchanges its rank with the entry of a later assignment.
// If that is not possible either, w stays in the pool, as long as another rank could take it later. The quarantined pair is used if w is
// urgent, or if no other rank could take w even when idle. The outcome is one of the Steer constants.
func (b *board) reassign(g *group, p *policyInUse, i int, w waitingEntry, now time.Time) (outcome string) {
	if w.Entry.Urgent(now) {
		return SteerKept // the entry cannot wait any longer
	}
	var best *rank
	unbound := b.assignments[i+1:] // the earlier assignments are bound already, so the loads of the ranks include them
	for _, r := range g.steppingRanks {
		if b.couldTake(r, w, now) && b.hasRoomBeside(r, p, w, unbound) && (best == nil || r.kv < best.kv) {
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
	for _, other := range b.groups { // no rank has room now, but a rank of any group may have room later
		if slices.ContainsFunc(other.steppingRanks, func(r *rank) bool { return b.couldTake(r, w, now) }) {
			b.pairs.wakeAtQuarantineEnd(now)
			return SteerLeft
		}
	}
	return SteerKept
}

// swapRanks exchanges the rank of the i-th assignment, which is of entry w, with the rank of a later assignment. It is called if w should
// not go to its own rank, because a pair of engines is quarantined, and no other rank has room left: the other entries of the round need
// the free slots. It looks for a later entry such that each of the two may go to the other's rank and has KV room there.
func (b *board) swapRanks(g *group, i int, w waitingEntry, now time.Time) (swapped bool) {
	mine, remaining := g.rankWithID(b.assignments[i].Worker), b.assignments[i+1:]
	for j := range remaining {
		other, ok := b.waiting[remaining[j].Entry]
		theirs := g.rankWithID(remaining[j].Worker)
		if !ok || theirs == nil || theirs == mine { // bind will refuse this assignment anyway, or the exchange would change nothing
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

// couldTake says whether the rank could take the entry if all slots and the whole KV room of the rank were free: the rank takes requests
// and lists the entry's model name, the prompt is not larger than its Capacity, and the pair of the entry's prefill engine and the rank's
// engine is not quarantined.
func (b *board) couldTake(r *rank, w waitingEntry, now time.Time) bool {
	largeEnough := r.Capacity == 0 || int64(w.prompt()) <= r.Capacity
	return largeEnough && r.takesRequests() && r.lists(w.Entry.Name) && r.usableSlots() > 0 && !b.pairs.isQuarantined(w.Entry, r, now)
}

// hasRoomBeside says whether the rank has a slot and KV room for the entry w, besides those that the remaining assignments of the round
// need.
func (b *board) hasRoomBeside(r *rank, p *policyInUse, w waitingEntry, remaining []policy.Assignment) bool {
	if p.Immediate() {
		return true // the policy sends entries at once, and the engine queues those for which it has no room
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

// promptOf returns the prompt length of a waiting entry in tokens; 0: no entry with this ID waits.
func (b *board) promptOf(entry uint64) int32 {
	if w, ok := b.waiting[entry]; ok {
		return w.prompt()
	}
	return 0
}

// wakeAtQuarantineEnd makes the board decide again when the next quarantine of a pair ends.
func (p *pairs) wakeAtQuarantineEnd(now time.Time) {
	for _, health := range p.suspected {
		if at := health.circuit.TrialAt(); at.After(now) {
			p.quarantineEndsAt = earlier(p.quarantineEndsAt, at)
		}
	}
}

// PairStatus is a pair of a prefill engine and a decode engine whose last hand-off failed.
type PairStatus struct {
	Prefiller   string `json:"prefiller"`
	Engine      string `json:"engine"`
	Failures    int    `json:"failures"` // hand-offs in a row that failed
	Quarantined bool   `json:"quarantined"`
	// Until is the end of the quarantine, after which one hand-off is a trial. It is left out while there is no quarantine.
	Until time.Time `json:"until,omitzero"`
}

// status returns the state of the suspected pairs, sorted by prefill engine and then by decode engine.
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
