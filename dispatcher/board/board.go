// Package board mirrors the decode ranks of each model with the requests on them, and lets policies decide which waiting request gets which
// rank.
//
// A waiting request is an entry. When an entry is bound to a rank, it gets one of the rank's slots, and its KV tokens are charged to the
// rank until the slot is released. In a round, the policy of one group of ranks decides about all entries that wait. The package has no
// clock, goroutine or I/O: Boards.Apply takes an event and the time, and returns the effects that its owner must carry out.
package board

import (
	"errors"
	"time"

	"evenkeel/pool"
)

// newBoard returns a board without ranks.
func newBoard(model string, a *allBoards) *board {
	return &board{
		allBoards: a, model: model, pool: pool.New(a.cfg.TTL), pace: newPace(),
		waiting: map[uint64]waitingEntry{}, ranks: map[int32]*rank{}, outputLengths: map[uint64]int32{},
		pairs: pairs{suspected: map[Link]*linkHealth{}},
	}
}

// isEmpty says whether the board has neither ranks nor entries.
func (b *board) isEmpty() bool { return len(b.ranks) == 0 && b.pool.Len() == 0 }

// enqueue adds an entry to the pool, and to the counts of waiting entries. It refuses the entry if its ID is taken, if no rank can ever
// take it, or if all ranks that may take it are down. An entry without a hand-off (Local) does not enter the pool: the rounds that choose
// its rank begin at once.
func (b *board) enqueue(w waitingEntry, now time.Time) {
	err := b.reasonToRefuse(w.Entry)
	placement := b.partialNames[w.Entry.Name]                                      // nil: all ranks list the name, or none does
	noneUp := b.upOrAwaited == 0 || placement != nil && placement.upOrAwaited == 0 // of the ranks that may take the entry
	if _, taken := b.waiting[w.Entry.ID]; taken {
		err = ErrDuplicate
	} else if noneUp {
		err = ErrNoWorkers
	}
	if err != nil {
		b.emit(Effect{Kind: EffectRefuse, Entry: w.Entry, Err: err})
		return
	}
	if w.Local != nil {
		b.startLocalRounds(w, now)
		return
	}
	if w.Output > 0 {
		b.outputLengths[w.Entry.ID] = w.Output
	}
	b.pool.Add(w.Entry, now)
	if w.restricted = b.isRestricted(w.Entry); w.restricted {
		b.restrictedCount++
	}
	b.waiting[w.Entry.ID] = w
	b.entriesArrived = true
	b.countWaitingForName(w.Entry, 1)
	if len(w.Hits) > 0 {
		b.entriesWithHits++
	}
	if w.Entry.Discard {
		b.discardedWaiting++
	}
}

// reasonToRefuse says why no rank can ever take an entry, even an idle one; nil: a rank can. Ranks that are down count as able to take it,
// because they may come back, and the finished prefill is worth the wait.
func (b *board) reasonToRefuse(e *pool.Entry) error {
	largest := b.largestPrompt
	if p := b.partialNames[e.Name]; p != nil { // only some ranks list the name, and only these may take the entry
		largest = p.largestPrompt
	}
	switch {
	case len(b.groups) == 0:
		return ErrNoWorkers
	case b.isListedNowhere(e.Name):
		return ErrNotListed
	case int64(clampTokens(e.Prompt)) > largest:
		return ErrTooLarge
	}
	return nil
}

// removeAndRefuse takes a waiting entry out of the pool and answers its caller with err.
func (b *board) removeAndRefuse(e *pool.Entry, err error) {
	b.pool.Remove(e)
	b.refuse(e, err)
}

// refuse answers the caller of an entry that has left the pool, or was never in it, with err.
func (b *board) refuse(e *pool.Entry, err error) {
	b.forgetWaiting(e)
	delete(b.outputLengths, e.ID)
	b.emit(Effect{Kind: EffectRefuse, Entry: e, Err: err})
}

// forgetWaiting removes an entry from the board's table of waiting entries and from all counts.
func (b *board) forgetWaiting(e *pool.Entry) {
	w := b.waiting[e.ID]
	delete(b.waiting, e.ID)
	if w.restricted {
		b.restrictedCount--
	}
	wasInPool := w.Local == nil // a local entry never enters the pool, so countWaitingForName and discardedWaiting have not counted it
	if wasInPool {
		b.countWaitingForName(e, -1)
	}
	if len(w.Hits) > 0 {
		b.entriesWithHits--
	}
	if wasInPool && e.Discard {
		b.discardedWaiting--
	}
}

// expire takes the entries out of the pool that may wait no longer. It refuses them, except those whose hand-off is at its deadline and
// that bindOverdue could bind to a rank's queue.
func (b *board) expire(now time.Time) {
	if b.expired = b.pool.Expire(now, b.expired[:0]); len(b.expired) > 0 {
		for _, g := range b.groups {
			b.refreshGroup(g) // bindOverdue compares the present loads of the ranks
		}
	}
	for i, e := range b.expired {
		_, why := e.Expiry()
		atDeadline := errors.Is(why, ErrExpired) // else the TTL of the pool, or a limit of an entry without a hand-off
		if bound := atDeadline && b.bindOverdue(e, now); !bound {
			b.refuse(e, why)
		}
		b.expired[i] = nil // the reference would keep the entry from being garbage collected
	}
}

// outageGrace is how long entries go on waiting when all ranks are down. An engine that is down for longer is probably restarting, which
// takes minutes, so the clients had better get an error.
const outageGrace = 10 * time.Second

// refuseInOutage answers all entries with ErrNoWorkers once all ranks have been down for outageGrace. The time begins when refuseInOutage
// first finds all ranks down, and is forgotten as soon as a rank is up again.
func (b *board) refuseInOutage(now time.Time) {
	switch {
	case b.upOrAwaited > 0:
		b.outageGraceEnds = time.Time{}
	case b.outageGraceEnds.IsZero(): // the outage has just begun
		b.outageGraceEnds = now.Add(outageGrace)
	case !now.Before(b.outageGraceEnds):
		for len(b.pool.Entries()) > 0 {
			b.removeAndRefuse(b.pool.Entries()[0], ErrNoWorkers)
		}
	}
}

// refuseInNameOutage answers entries with ErrNoWorkers once all ranks that list their model name have been down for outageGrace, although
// other ranks of the board are up. It sets nameOutageEnds to the earliest time at which this happens to an entry that still waits.
func (b *board) refuseInNameOutage(now time.Time) {
	b.nameOutageEnds = time.Time{}
	if b.restrictedCount == 0 || len(b.partialNames) == 0 { // no entry asks for a name that only some ranks list
		return
	}
	for i := 0; i < b.pool.Len(); {
		e := b.pool.Entries()[i]
		p := b.partialNames[e.Name]
		allDown := p != nil && p.upOrAwaited == 0 // of the ranks that list the name
		if allDown && !now.Before(p.outageGraceEnds) {
			b.removeAndRefuse(e, ErrNoWorkers)
			continue // the entry has left the pool, so the next one has the index i now
		}
		if allDown {
			b.nameOutageEnds = earlier(b.nameOutageEnds, p.outageGraceEnds)
		}
		i++
	}
}

// release frees the slot of a request that has ended with so many generated tokens. The parts of the board that learn from requests get
// its outcome. started says whether its first event has come. If the engine still holds KV of the request, this KV goes on taking room.
// Requests that wait in the engine's queue may begin, and the next round may give the slot to an entry.
func (b *board) release(slot int32, o Outcome, generated int32, started bool, now time.Time) {
	s := &b.slots.records[slot]
	r, released := s.rank, *s // discharge clears the record
	s.started = s.started || started
	b.learnFromEnd(s, o, generated, now)
	delete(b.outputLengths, s.id)
	b.discharge(slot)
	if o.Orphaned && r.present && !released.unpinned { // an unpinned request may have left its KV on another rank
		b.addOrphan(r, &released, now)
	}
	if o.Kept && r.present && r.KeepsKVFor > 0 {
		b.keepKV(r, &released, o.Generated, now)
	}
	b.promoteQueued(r)
	b.endStepsIfIdle(r.group)
	b.countOutcome(r, o)
	if !r.present { // no entry gets the slot of a rank that has left the fleet
		b.dropIfGone(r)
		return
	}
	b.openWindow(now)
}

// learnFromEnd passes the end of a request to all parts of the board that learn from it, while its slot is still charged.
func (b *board) learnFromEnd(s *slotRecord, o Outcome, generated int32, now time.Time) {
	b.emitEstimate(s, o, generated, now)
	b.recordOutputLength(s, o)
	b.recordHandoffEnd(s, o, now)
	b.updateRefusals(s, o.Refused, now)
	if !s.discard { // a discarded hand-off has its slot for one step only, which would make the pace look faster than it is
		b.pace.recordEnd(now.Sub(s.boundAt), int64(s.prompt)+int64(generated))
	}
}

// countOutcome counts how a request ended and its tokens, for the board and for its rank.
func (b *board) countOutcome(r *rank, o Outcome) {
	b.outcomes[min(o.Kind, Failed)]++ // a Kind beyond the known ones counts as Failed
	b.outputTokens += int64(max(0, o.Generated))
	r.outputTokens += int64(max(0, o.Generated))
	if o.Kind != Finished {
		return // the answer was cut off, and the counts below are of whole answers
	}
	r.answers++
	if o.Empty {
		r.emptyAnswers++
	}
	if o.NoUsage {
		r.answersWithoutUsage++
	}
}

// openWindow makes the board decide at the end of a short window about all slots that come free in it. Slots come free in bursts, because
// the ranks of a group finish requests in the same step. The first free slot of a burst opens the window.
func (b *board) openWindow(now time.Time) {
	switch {
	case b.pool.Len() == 0: // no entry waits for the slot
	case b.cfg.Window == 0:
		b.decideNow = true
	case b.windowEnds.IsZero():
		b.windowEnds = now.Add(b.cfg.Window)
	}
}
