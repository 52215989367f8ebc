package board

import (
	"slices"
	"time"

	"evenkeel/dispatcher/delivery"
	"evenkeel/dispatcher/policy"
	"evenkeel/pool"
)

// link returns the two engines of a request's hand-off.
func (s *slotRecord) link() delivery.Link {
	return delivery.Link{Prefiller: s.prefiller, Engine: s.rank.Engine}
}

// recordHandoffEnd records whether the hand-off of a request that has ended was lost. That a hand-off has arrived is recorded earlier, when
// the first event of its request comes.
func (b *board) recordHandoffEnd(s *slotRecord, o Outcome, now time.Time) {
	switch {
	case s.prefiller == "": // the request had no hand-off
	case o.Lost:
		b.carryOutChanges(b.pairs.Lost(s.link(), s.id, s.boundAt, now))
		b.updateFirstEventWatch()
	case !s.started:
		b.pairs.Unknown(s.link(), s.id)
	}
}

// recordArrived records that the hand-off of a request has arrived.
func (b *board) recordArrived(s *slotRecord, now time.Time) {
	b.carryOutChanges(b.pairs.Arrived(s.link(), s.boundAt, now))
	b.updateFirstEventWatch()
}

// carryOutChanges reports which engines and pairs get no hand-offs from now on, or get them again.
func (b *board) carryOutChanges(changes []delivery.Change) {
	for _, c := range changes {
		b.decideNow = true // entries may have to go elsewhere, or may go to an engine again
		b.emit(Effect{Kind: EffectQuarantine, Pair: c.Subject, Count: c.Losses, Duration: c.Length})
	}
}

// changePrefiller records that the KV of a slot comes from another prefill engine than was planned.
func (b *board) changePrefiller(slot int32, prefiller string, now time.Time) {
	s := &b.slots.records[slot]
	b.pairs.Unknown(s.link(), s.id)
	s.prefiller = prefiller // from here on, s.link() is the new pair
	b.pairs.Sent(s.link(), s.id, now)
}

// Quarantined returns the prefill engines from which no KV should go to the rank of a slot now. For a slot below 0, it returns those from
// which no KV should go to at least one rank of the model. It returns none for a model without a board.
func (l *Boards) Quarantined(model string, slot int32, now time.Time) (prefillers []string) {
	b := l.boards[model]
	if b == nil {
		return nil
	}
	for _, o := range b.pairs.Outages() {
		isAskedFor := slot < 0 || o.Subject.Engine == "" || o.Subject.Engine == b.slots.records[slot].rank.Engine
		// With TrialAt, a trial that is due now may go.
		if o.Subject.Prefiller != "" && isAskedFor && now.Before(o.TrialAt()) {
			prefillers = append(prefillers, o.Subject.Prefiller)
		}
	}
	return prefillers
}

// BlamesRequest says whether two failed attempts of a request of the model show that the request itself is at fault.
func (l *Boards) BlamesRequest(model string, first, second delivery.Link, since time.Time) bool {
	b := l.boards[model]
	return b == nil || b.pairs.BlamesRequest(first, second, since)
}

// isQuarantined says whether the KV of an entry should not go to a rank now, because either engine or their connection loses hand-offs, and
// no trial is due. A prefill engine alone is no obstacle: it has computed the prompt already, and no other rank would get the KV sooner.
// An entry that another rank has failed before (Avoid) is no trial: the trials of several engines could use up its attempts.
func (p *pairs) isQuarantined(e *pool.Entry, r *rank, now time.Time) bool {
	l := delivery.Link{Prefiller: e.Prefiller, Engine: r.Engine}
	return e.Prefiller != "" && (!p.Allows(l, now) || len(e.Avoid) > 0 && p.LosesAt(l))
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
	if !b.pairs.isQuarantined(w.Entry, r, now) {
		return true
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

// wakeAtQuarantineEnd makes the board decide again when the next trial is due.
func (p *pairs) wakeAtQuarantineEnd(now time.Time) {
	if at := p.NextTrial(now); !at.IsZero() {
		p.quarantineEndsAt = earlier(p.quarantineEndsAt, at)
	}
}

// PairStatus says of a prefill engine, a decode engine, or the connection between the two that it loses hand-offs.
type PairStatus struct {
	Prefiller string `json:"prefiller,omitempty"` // empty: at all prefill engines the decode engine is to blame
	Engine    string `json:"engine,omitempty"`    // empty: at all decode engines the prefill engine is to blame
	Failures  int    `json:"failures"`            // hand-offs in a row that were lost
	// Quarantined: it gets no hand-offs. Otherwise its last hand-off was lost, and nobody is blamed yet.
	Quarantined bool `json:"quarantined"`
	// Until is when one hand-off is sent as a trial. It is left out while there is no quarantine.
	Until time.Time `json:"until,omitzero"`
}

// status returns who loses hand-offs, sorted by prefill engine and then by decode engine: who gets none, and then the pairs whose last
// hand-off was lost.
func (p *pairs) status() []PairStatus {
	var all []PairStatus
	for _, o := range p.Outages() {
		all = append(all, PairStatus{
			Prefiller: o.Subject.Prefiller, Engine: o.Subject.Engine, Failures: o.Losses, Quarantined: true, Until: o.TrialAt(),
		})
	}
	for _, s := range p.Suspected() {
		isListed := slices.ContainsFunc(p.Outages(), func(o delivery.Outage) bool { return o.Subject == s.Link })
		if !isListed {
			all = append(all, PairStatus{Prefiller: s.Prefiller, Engine: s.Engine, Failures: s.Losses})
		}
	}
	return all
}
