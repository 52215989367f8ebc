package board

import (
	"slices"
	"time"

	"evenkeel/dispatcher/delivery"
	"evenkeel/dispatcher/policy"
	"evenkeel/pool"
)

func (s *slotRecord) link() delivery.Link {
	return delivery.Link{Prefiller: s.prefiller, Engine: s.rank.Engine}
}

// recordHandoffEnd records whether the hand-off of an ended request was lost. Arrivals are recorded
// at the first event.
func (b *board) recordHandoffEnd(s *slotRecord, o Outcome, now time.Time) {
	switch {
	case s.prefiller == "":
	case o.Lost:
		b.carryOutChanges(b.pairs.Lost(s.link(), s.id, s.boundAt, now))
		b.updateFirstEventWatch()
	case !s.started:
		b.pairs.Unknown(s.link(), s.id)
	}
}

func (b *board) recordArrived(s *slotRecord, now time.Time) {
	b.carryOutChanges(b.pairs.Arrived(s.link(), s.boundAt, now))
	b.updateFirstEventWatch()
}

func (b *board) carryOutChanges(changes []delivery.Change) {
	for _, c := range changes {
		b.decideNow = true // entries may have to go elsewhere, or may go to an engine again
		b.emit(Effect{Kind: EffectQuarantine, Pair: c.Subject, Count: c.Losses, Duration: c.Length})
	}
}

func (b *board) changePrefiller(slot int32, prefiller string, now time.Time) {
	s := &b.slots.records[slot]
	b.pairs.Unknown(s.link(), s.id)
	s.prefiller = prefiller // from here on, s.link() is the new pair
	b.pairs.Sent(s.link(), s.id, now)
}

// Quarantined returns the prefill engines from which no KV should go to the rank of a slot now; for
// a slot below 0, to at least one rank of the model.
func (l *Boards) Quarantined(model string, slot int32, now time.Time) (prefillers []string) {
	b := l.boards[model]
	if b == nil {
		return nil
	}
	for _, o := range b.pairs.Outages() {
		isAskedFor := slot < 0 || o.Subject.Engine == "" || o.Subject.Engine == b.slots.records[slot].rank.Engine
		// A trial that is due now may go.
		if o.Subject.Prefiller != "" && isAskedFor && now.Before(o.TrialAt()) {
			prefillers = append(prefillers, o.Subject.Prefiller)
		}
	}
	return prefillers
}

// BlamesRequest says whether two failed attempts show that the request itself is at fault.
func (l *Boards) BlamesRequest(model string, first, second delivery.Link, since time.Time) bool {
	b := l.boards[model]
	return b == nil || b.pairs.BlamesRequest(first, second, since)
}

// isQuarantined: a prefill engine alone is no obstacle, because it has computed the prompt already,
// and no other rank would get the KV sooner. An entry that another rank has failed before (Avoid)
// is no trial: the trials of several engines could use up its attempts.
func (p *pairs) isQuarantined(e *pool.Entry, r *rank, now time.Time) bool {
	l := delivery.Link{Prefiller: e.Prefiller, Engine: r.Engine}
	return e.Prefiller != "" && (!p.Allows(l, now) || len(e.Avoid) > 0 && p.LosesAt(l))
}

// avoidQuarantinedPair gives the i-th entry another rank if its pair of engines is quarantined. If
// bindNow is false, the entry must stay in the pool. All earlier assignments must be bound, because
// present loads are compared.
func (b *board) avoidQuarantinedPair(g *group, p *policyInUse, i int, now time.Time) (bindNow bool) {
	a := &b.assignments[i]
	w, ok := b.waiting[a.Entry]
	r := g.rankWithID(a.Worker)
	if !ok || r == nil {
		return true
	}
	if !b.pairs.isQuarantined(w.Entry, r, now) {
		return true
	}
	outcome := b.reassign(g, p, i, w, now)
	b.emit(Effect{Kind: EffectSteered, Label: outcome})
	return outcome != SteerLeft
}

// reassign moves the i-th entry w from its quarantined pair to the rank with the fewest KV tokens
// that has room, or exchanges its rank with that of a later assignment. Otherwise w stays in the
// pool, unless it is urgent or no other rank could take it even when idle. The outcome is a Steer
// constant.
func (b *board) reassign(g *group, p *policyInUse, i int, w waitingEntry, now time.Time) (outcome string) {
	if w.Entry.Urgent(now) {
		return SteerKept
	}
	var best *rank
	unbound := b.assignments[i+1:] // the earlier ones are bound already, so the loads include them
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
	for _, other := range b.groups { // no rank has room now, but one of any group may have room later
		if slices.ContainsFunc(other.steppingRanks, func(r *rank) bool { return b.couldTake(r, w, now) }) {
			b.pairs.wakeAtQuarantineEnd(now)
			return SteerLeft
		}
	}
	return SteerKept
}

// swapRanks exchanges the rank of the i-th assignment with that of a later one, because the other
// entries of the round need the free slots.
func (b *board) swapRanks(g *group, i int, w waitingEntry, now time.Time) (swapped bool) {
	mine, remaining := g.rankWithID(b.assignments[i].Worker), b.assignments[i+1:]
	for j := range remaining {
		other, ok := b.waiting[remaining[j].Entry]
		theirs := g.rankWithID(remaining[j].Worker)
		if !ok || theirs == nil || theirs == mine { // bind will refuse it anyway, or nothing would change
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

// couldTake: if all slots and the whole KV room of the rank were free.
func (b *board) couldTake(r *rank, w waitingEntry, now time.Time) bool {
	largeEnough := r.Capacity == 0 || int64(w.prompt()) <= r.Capacity
	return largeEnough && r.takesRequests() && r.lists(w.Entry.Name) && r.usableSlots() > 0 && !b.pairs.isQuarantined(w.Entry, r, now)
}

// hasRoomBeside: besides what the remaining assignments of the round need.
func (b *board) hasRoomBeside(r *rank, p *policyInUse, w waitingEntry, remaining []policy.Assignment) bool {
	if p.Immediate() {
		return true
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

// PairStatus says of a prefill engine, a decode engine, or the connection between the two that it
// loses hand-offs.
type PairStatus struct {
	Prefiller string `json:"prefiller,omitempty"` // empty: at all prefill engines the decode engine is to blame
	Engine    string `json:"engine,omitempty"`    // empty: at all decode engines the prefill engine is to blame
	Failures  int    `json:"failures"`            // hand-offs in a row that were lost
	// Quarantined: it gets no hand-offs. Otherwise its last hand-off was lost, and nobody is blamed
	// yet.
	Quarantined bool `json:"quarantined"`
	// Until is when one hand-off is sent as a trial. It is left out while there is no quarantine.
	Until time.Time `json:"until,omitzero"`
}

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
