// Package board mirrors the decode ranks of each model with the requests on them, and lets policies
// decide which waiting request gets which rank.
//
// A waiting request is an entry. When it is bound to a rank, it gets one of the rank's slots, and
// its KV tokens are charged to the rank until the slot is released. In a round, the policy of one
// group of ranks decides about all entries that wait. The package has no clock, goroutine or I/O:
// Boards.Apply takes an event and the time, and returns the effects that its owner must carry out.
package board

import (
	"time"

	"evenkeel/pool"
)

func newBoard(model string, a *allBoards) *board {
	return &board{
		// lastGroup is -1 while no group has had a turn.
		allBoards: a, model: model, pool: pool.New(a.cfg.TTL), pace: newPace(), lastGroup: -1,
		waiting: map[uint64]waitingEntry{}, ranks: map[int32]*rank{}, outputLengths: map[uint64]int32{},
	}
}

func (b *board) isEmpty() bool { return len(b.ranks) == 0 && b.pool.Len() == 0 }

func (b *board) enqueue(w waitingEntry, now time.Time) {
	err := b.reasonToRefuse(w.Entry)
	placement := b.partlyListedNames[w.Entry.Name]
	noRankUp := b.upOrAwaited == 0
	noListingRankUp := placement != nil && placement.upOrAwaited == 0
	// A duplicate or an outage is reported even if no rank could ever take the entry.
	if _, taken := b.waiting[w.Entry.ID]; taken {
		err = ErrDuplicate
	} else if noRankUp || noListingRankUp {
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
	b.addWaiting(w)
	b.entriesArrived = true
}

// addWaiting is undone by forgetWaiting.
func (b *board) addWaiting(w waitingEntry) {
	if w.restricted = b.isRestricted(w.Entry); w.restricted {
		b.restrictedCount++
	}
	b.waiting[w.Entry.ID] = w
	b.countWaitingForName(w.Entry, 1)
	if len(w.Hits) > 0 {
		b.entriesWithHits++
	}
	if w.Entry.Discard {
		b.discardedWaiting++
	}
}

// reasonToRefuse says why no rank can ever take an entry. Ranks that are down count, because they
// may come back, and the finished prefill is worth the wait.
func (b *board) reasonToRefuse(e *pool.Entry) error {
	largest := b.largestPrompt
	if p := b.partlyListedNames[e.Name]; p != nil {
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

func (b *board) removeAndRefuse(e *pool.Entry, err error) {
	b.pool.Remove(e)
	b.refuse(e, err)
}

// refuse needs an entry that has left the pool, or was never in it.
func (b *board) refuse(e *pool.Entry, err error) {
	b.forgetWaiting(e)
	delete(b.outputLengths, e.ID)
	b.emit(Effect{Kind: EffectRefuse, Entry: e, Err: err})
}

func (b *board) forgetWaiting(e *pool.Entry) {
	w := b.waiting[e.ID]
	delete(b.waiting, e.ID)
	if w.restricted {
		b.restrictedCount--
	}
	// A local entry never enters the pool, so the other two have not counted it.
	wasInPool := w.Local == nil
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

func (b *board) expire(now time.Time) {
	b.expired = b.pool.Expire(now, b.expired[:0])
	for i, e := range b.expired {
		_, why := e.Expiry()
		b.refuse(e, why)
		b.expired[i] = nil // so that the entry can be garbage collected
	}
}

// outageGrace is how long entries wait after all ranks have gone down. An engine that is down for
// longer is probably restarting, which takes minutes.
const outageGrace = 10 * time.Second

// refuseInOutage lets entries go on waiting for an awaited rank.
func (b *board) refuseInOutage(now time.Time) {
	switch {
	case b.upOrAwaited > 0:
		b.outageGraceEnds = time.Time{}
	case b.outageGraceEnds.IsZero():
		b.outageGraceEnds = now.Add(outageGrace)
	case !now.Before(b.outageGraceEnds):
		for len(b.pool.Entries()) > 0 {
			b.removeAndRefuse(b.pool.Entries()[0], ErrNoWorkers)
		}
	}
}

// refuseInNameOutage does the same for the entries whose model name only ranks that are down list.
func (b *board) refuseInNameOutage(now time.Time) {
	b.nameOutageEnds = time.Time{}
	if b.restrictedCount == 0 || len(b.partlyListedNames) == 0 {
		return
	}
	for i := 0; i < b.pool.Len(); {
		e := b.pool.Entries()[i]
		p := b.partlyListedNames[e.Name]
		allDown := p != nil && p.upOrAwaited == 0
		if allDown && !now.Before(p.outageGraceEnds) {
			b.removeAndRefuse(e, ErrNoWorkers)
			continue
		}
		if allDown {
			b.nameOutageEnds = earlier(b.nameOutageEnds, p.outageGraceEnds)
		}
		i++
	}
}

// release frees the slot of a request that has ended. streamed is the number of tokens that the
// stream has brought, and o.Generated the number that the caller reports. KV that the engine still
// holds goes on taking room on the rank, as an orphan or as kept KV.
func (b *board) release(slot int32, o Outcome, streamed int32, started bool, now time.Time) {
	s := &b.slots.records[slot]
	s.started = s.started || started // an engine that has begun an answer has not refused the request
	b.learnFromEnd(s, o, streamed, now)
	delete(b.outputLengths, s.id)
	r, ended := s.rank, *s // a copy, because discharge clears the record
	b.discharge(slot)
	// If the engine has restarted since, it has lost all KV.
	mayHoldKV := r.present && (ended.process == 0 || ended.process == r.Process)
	// If the engine chose the rank, the orphan may be on another one.
	if o.Orphaned && mayHoldKV && !ended.engineChoosesRank {
		b.addOrphan(r, &ended, now)
	}
	if o.Kept && mayHoldKV && r.KeepsKVFor > 0 {
		b.keepKV(r, &ended, o.Generated, now)
	}
	b.promoteQueued(r)
	b.endStepsIfIdle(r.group)
	b.countOutcome(r, o)
	if !r.present {
		b.dropIfGone(r)
		return
	}
	b.decideSoon(now)
}

// learnFromEnd must run while the slot is still charged.
func (b *board) learnFromEnd(s *slotRecord, o Outcome, generated int32, now time.Time) {
	b.emitEstimate(s, o, generated, now)
	b.recordOutputLength(s, o)
	b.recordHandoffEnd(s, o, now)
	b.updateRefusals(s, o.Refused, now)
	// A discarded hand-off has its slot for one step only, so it would make the mean time in a slot
	// too short.
	if !s.discard {
		b.pace.recordEnd(now.Sub(s.boundAt), int64(s.prompt)+int64(generated))
	}
}

func (b *board) countOutcome(r *rank, o Outcome) {
	b.outcomes[min(o.Kind, Failed)]++ // a Kind above Failed counts as Failed
	b.outputTokens += int64(max(0, o.Generated))
	r.outputTokens += int64(max(0, o.Generated))
	if o.Kind != Finished {
		return // the counts below are of complete answers
	}
	r.answers++
	if o.Empty {
		r.emptyAnswers++
	}
	if o.NoUsage {
		r.answersWithoutUsage++
	}
}

// decideSoon opens a window (Config.Window), because slots come free in bursts: the ranks of a
// group finish requests in the same step.
func (b *board) decideSoon(now time.Time) {
	switch {
	case b.pool.Len() == 0:
	case b.cfg.Window == 0:
		b.decideNow = true
	case b.windowEnds.IsZero():
		b.windowEnds = now.Add(b.cfg.Window)
	}
}
