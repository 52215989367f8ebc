// Package board mirrors the decode ranks of each model with the requests on them, and lets policies decide which waiting request gets which
// rank.
//
// A waiting request is an entry. When an entry is bound to a rank, it gets one of the rank's slots, and its KV tokens are charged to the
// rank until the slot is released. In a round, the policy of one group of ranks decides about all entries that wait. The package has no
// clock, goroutine or I/O: Boards.Apply takes an event and the time, and returns the effects that its owner must carry out.
package board

import (
	"time"

	"evenkeel/pool"
)

// newBoard returns the board of a model, without ranks and entries. a is what all boards share.
func newBoard(model string, a *allBoards) *board {
	return &board{
		allBoards: a, model: model, pool: pool.New(a.cfg.TTL), pace: newPace(), lastGroup: -1, // no group has had a turn
		waiting: map[uint64]waitingEntry{}, ranks: map[int32]*rank{}, outputLengths: map[uint64]int32{},
	}
}

// isEmpty says whether the board has neither ranks nor waiting entries, so that it can be removed.
func (b *board) isEmpty() bool { return len(b.ranks) == 0 && b.pool.Len() == 0 }

// enqueue adds an entry to the pool and to the waiting entries. It refuses the entry if another entry with its ID waits, if no rank can
// ever take it, or if all ranks that may take it are down. An entry without a hand-off (Local) does not enter the pool: the rounds that
// choose its rank begin at once.
func (b *board) enqueue(w waitingEntry, now time.Time) {
	err := b.reasonToRefuse(w.Entry)
	// placement has the ranks that list the model name of the entry; nil: all ranks list it, or none does.
	placement := b.partlyListedNames[w.Entry.Name]
	noRankUp := b.upOrAwaited == 0 // no rank of the board is up, or soon will be
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
	if w.Output > 0 { // only a simulation knows the length of the output in advance
		b.outputLengths[w.Entry.ID] = w.Output
	}
	b.pool.Add(w.Entry, now)
	b.addWaiting(w)
	b.entriesArrived = true
}

// addWaiting adds an entry of the pool to the table of waiting entries, and to all counts that include it. forgetWaiting undoes this.
func (b *board) addWaiting(w waitingEntry) {
	if w.restricted = b.isRestricted(w.Entry); w.restricted { // the entry may not go to every rank
		b.restrictedCount++
	}
	b.waiting[w.Entry.ID] = w
	b.countWaitingForName(w.Entry, 1)
	if len(w.Hits) > 0 {
		b.entriesWithHits++
	}
	if w.Entry.Discard { // no client waits for the answer: the entry only makes its prefill engine free the KV
		b.discardedWaiting++
	}
}

// reasonToRefuse says why no rank can ever take an entry, even when idle; nil: a rank can. Ranks that are down count as able to take the
// entry, because they may come back, and the finished prefill is worth the wait.
func (b *board) reasonToRefuse(e *pool.Entry) error {
	largest := b.largestPrompt
	if p := b.partlyListedNames[e.Name]; p != nil { // only some ranks list the model name of the entry, and only these may take it
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

// removeAndRefuse takes a waiting entry out of the pool and answers the caller of Enqueue with err.
func (b *board) removeAndRefuse(e *pool.Entry, err error) {
	b.pool.Remove(e)
	b.refuse(e, err)
}

// refuse answers the caller of Enqueue with err. The entry must have left the pool, or never have been in it.
func (b *board) refuse(e *pool.Entry, err error) {
	b.forgetWaiting(e)
	delete(b.outputLengths, e.ID)
	b.emit(Effect{Kind: EffectRefuse, Entry: e, Err: err})
}

// forgetWaiting removes an entry from the table of waiting entries, and from all counts that include it.
func (b *board) forgetWaiting(e *pool.Entry) {
	w := b.waiting[e.ID]
	delete(b.waiting, e.ID)
	if w.restricted {
		b.restrictedCount--
	}
	// A local entry never enters the pool, so countWaitingForName and discardedWaiting have not counted it.
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

// expire takes the entries out of the pool whose time to wait is over, and refuses them.
func (b *board) expire(now time.Time) {
	b.expired = b.pool.Expire(now, b.expired[:0])
	for i, e := range b.expired {
		_, why := e.Expiry()
		b.refuse(e, why)
		b.expired[i] = nil // the reference would keep the entry from being garbage collected
	}
}

// outageGrace is how long entries go on waiting after all ranks have gone down. An engine that is down for longer is probably restarting,
// which takes minutes, so an error is better for the clients.
const outageGrace = 10 * time.Second

// refuseInOutage answers all entries with ErrNoWorkers once no rank has been up or awaited for outageGrace. An awaited rank takes no
// requests now, but soon will, so entries go on waiting for it. The time begins when refuseInOutage first finds no such rank, and is reset
// as soon as there is one.
func (b *board) refuseInOutage(now time.Time) {
	switch {
	case b.upOrAwaited > 0:
		b.outageGraceEnds = time.Time{}
	case b.outageGraceEnds.IsZero(): // the outage was not known before
		b.outageGraceEnds = now.Add(outageGrace)
	case !now.Before(b.outageGraceEnds):
		for len(b.pool.Entries()) > 0 {
			b.removeAndRefuse(b.pool.Entries()[0], ErrNoWorkers)
		}
	}
}

// refuseInNameOutage answers an entry with ErrNoWorkers once all ranks that list its model name have been down for outageGrace, although
// other ranks of the board are up. It sets nameOutageEnds to the earliest time at which this will happen to an entry that still waits.
func (b *board) refuseInNameOutage(now time.Time) {
	b.nameOutageEnds = time.Time{}
	if b.restrictedCount == 0 || len(b.partlyListedNames) == 0 { // no entry asks for a name that only some ranks list
		return
	}
	for i := 0; i < b.pool.Len(); {
		e := b.pool.Entries()[i]
		p := b.partlyListedNames[e.Name]
		// allDown: no rank that lists the name is up, or soon will be.
		allDown := p != nil && p.upOrAwaited == 0
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

// release frees the slot of a request that has ended. Then requests that wait in the engine's queue may begin, and one of the next rounds
// may give the slot to an entry. streamed is the number of tokens that the stream of the answer has brought, and o.Generated the number
// that the caller reports with the outcome. started says whether the first event of the answer had come.
//
// KV of the request that the engine still holds goes on taking room on the rank: as an orphan, if its prefill engine may never finish
// writing it, or as kept KV, if the engine keeps it for the next turn of the chat. Predictors, hand-off statistics and the pace of the
// board learn from the outcome.
func (b *board) release(slot int32, o Outcome, streamed int32, started bool, now time.Time) {
	s := &b.slots.records[slot]
	s.started = s.started || started // learnFromEnd reads it: an engine that has begun an answer has not refused the request
	b.learnFromEnd(s, o, streamed, now)
	delete(b.outputLengths, s.id) // only a simulation has stored the length of the output, when the entry came
	r, ended := s.rank, *s        // ended is a copy, because discharge clears the record
	b.discharge(slot)
	// If the engine has restarted since, it has lost all KV.
	mayHoldKV := r.present && (ended.process == 0 || ended.process == r.Process)
	// If the engine has chosen the rank itself, the orphan may be on another rank, so it is not counted.
	if o.Orphaned && mayHoldKV && !ended.engineChoosesRank {
		b.addOrphan(r, &ended, now)
	}
	if o.Kept && mayHoldKV && r.KeepsKVFor > 0 {
		b.keepKV(r, &ended, o.Generated, now)
	}
	b.promoteQueued(r)
	b.endStepsIfIdle(r.group)
	b.countOutcome(r, o)
	if !r.present { // no entry gets the slot of a rank that has left the fleet
		b.dropIfGone(r)
		return
	}
	b.decideSoon(now) // an entry may get the slot
}

// learnFromEnd passes the end of a request to all parts of the board that learn from ended requests. It must run while the slot is still
// charged.
func (b *board) learnFromEnd(s *slotRecord, o Outcome, generated int32, now time.Time) {
	b.emitEstimate(s, o, generated, now)
	b.recordOutputLength(s, o)
	b.recordHandoffEnd(s, o, now)
	b.updateRefusals(s, o.Refused, now)
	// A discarded hand-off has its slot for one step only, so it would make the mean time in a slot too short.
	if !s.discard {
		b.pace.recordEnd(now.Sub(s.boundAt), int64(s.prompt)+int64(generated))
	}
}

// countOutcome updates the totals of outcomes, tokens and answers that the status shows for the board and for the rank.
func (b *board) countOutcome(r *rank, o Outcome) {
	b.outcomes[min(o.Kind, Failed)]++ // a Kind above Failed counts as Failed
	b.outputTokens += int64(max(0, o.Generated))
	r.outputTokens += int64(max(0, o.Generated))
	if o.Kind != Finished {
		return // the answer was cut off, and the counts below are of complete answers
	}
	r.answers++
	if o.Empty {
		r.emptyAnswers++
	}
	if o.NoUsage {
		r.answersWithoutUsage++
	}
}

// decideSoon makes the board wait for a short window (Config.Window) and then decide about all slots that came free in it. The first free
// slot of a burst opens the window. Slots come free in bursts, because the ranks of a group finish requests in the same step. If no window
// is configured, the next Tick decides.
func (b *board) decideSoon(now time.Time) {
	switch {
	case b.pool.Len() == 0: // no entry waits for the slot
	case b.cfg.Window == 0:
		b.decideNow = true
	case b.windowEnds.IsZero(): // this slot is the first of a burst
		b.windowEnds = now.Add(b.cfg.Window)
	}
}
