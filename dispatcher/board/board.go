package board

import (
	"errors"
	"time"

	"evenkeel/pool"
)

func newBoard(model string, r *rules) *board {
	return &board{
		rules: r, model: model, pool: pool.New(r.cfg.TTL), waiting: map[uint64]entrant{}, ranks: map[int32]*rank{}, lengths: map[uint64]int32{},
		pace: newPace(), pairs: pairs{suspects: map[Pair]*suspect{}},
	}
}

func (b *board) empty() bool { return len(b.ranks) == 0 && b.pool.Len() == 0 }

// enqueue adds an entry to the pool. It refuses the entry if its ID is taken, if no rank can ever take it, or if all ranks that may take
// it are down. A prompt without a hand-off (local) does not enter the pool: the rounds about it begin at once.
func (b *board) enqueue(w entrant, now time.Time) {
	err := b.refusal(w.entry)
	if l := b.partial[w.entry.Name]; b.up == 0 || l != nil && l.up == 0 {
		err = ErrNoWorkers
	}
	if _, taken := b.waiting[w.entry.ID]; taken {
		err = ErrDuplicate
	}
	if err != nil {
		b.emit(Effect{Kind: EffectRefuse, Entry: w.entry, Err: err})
		return
	}
	if w.local != nil {
		b.placeLocal(w, now)
		return
	}
	if w.output > 0 {
		b.lengths[w.entry.ID] = w.output
	}
	b.pool.Add(w.entry, now)
	if w.particular = b.particular(w.entry); w.particular {
		b.avoiding++
	}
	b.waiting[w.entry.ID] = w
	b.arrived = true
	b.waitsFor(w.entry, 1)
	if len(w.hits) > 0 {
		b.holders++
	}
	if w.entry.Discard {
		b.discarding++
	}
}

// refusal says why an entry can never be admitted, however many slots are released; nil: it can.
// Ranks that are down count as ranks that could take it, because they may come back and
// the finished prefill is worth the wait.
func (b *board) refusal(e *pool.Entry) error {
	largest := b.largest
	if l := b.partial[e.Name]; l != nil {
		largest = l.largest
	}
	switch {
	case len(b.groups) == 0:
		return ErrNoWorkers
	case b.unlisted(e.Name):
		return ErrNotListed
	case int64(tokens(e.Prompt)) > largest:
		return ErrTooLarge
	}
	return nil
}

// fail takes a waiting entry out of the pool and answers its caller with err.
func (b *board) fail(e *pool.Entry, err error) {
	b.pool.Remove(e)
	b.refuse(e, err)
}

// refuse answers the caller of an entry that has left the pool, or was never in it, with err.
func (b *board) refuse(e *pool.Entry, err error) {
	b.forget(e)
	delete(b.lengths, e.ID)
	b.emit(Effect{Kind: EffectRefuse, Entry: e, Err: err})
}

// forget drops what the board keeps of an entry that waits, and takes it out of the counts.
func (b *board) forget(e *pool.Entry) {
	w := b.waiting[e.ID]
	delete(b.waiting, e.ID)
	if w.particular {
		b.avoiding--
	}
	if w.local == nil {
		b.waitsFor(e, -1)
	}
	if len(w.hits) > 0 {
		b.holders--
	}
	if e.Discard && w.local == nil {
		b.discarding--
	}
}

// expire takes those entries out of the pool that may wait no longer. If an entry's hand-off is at its deadline, overflow may bind it to
// a rank's queue. Otherwise the entry is refused.
func (b *board) expire(now time.Time) {
	if b.expired = b.pool.Expire(now, b.expired[:0]); len(b.expired) > 0 {
		for _, g := range b.groups {
			b.refreshGroup(g)
		}
	}
	for i, e := range b.expired {
		_, why := e.Expiry()
		if !errors.Is(why, ErrExpired) || !b.overflow(e, now) {
			b.refuse(e, why)
		}
		b.expired[i] = nil
	}
}

// outageGrace is how long entries go on waiting when all ranks are down. An
// engine that is away for longer is restarting, which takes minutes: it is better that
// the clients get the error then.
const outageGrace = 10 * time.Second

// outage answers all entries with ErrNoWorkers once all ranks have been down for outageGrace.
func (b *board) outage(now time.Time) {
	switch {
	case b.up > 0:
		b.downTo = time.Time{}
	case b.downTo.IsZero():
		b.downTo = now.Add(outageGrace)
	case !now.Before(b.downTo):
		for len(b.pool.Entries()) > 0 {
			b.fail(b.pool.Entries()[0], ErrNoWorkers)
		}
	}
}

// lonely answers entries with ErrNoWorkers once all ranks that list their name have been down for outageGrace, although other
// ranks of the board are up.
func (b *board) lonely(now time.Time) {
	b.lonelyUntil = time.Time{}
	if b.avoiding == 0 || len(b.partial) == 0 {
		return
	}
	for i := 0; i < b.pool.Len(); {
		e := b.pool.Entries()[i]
		l := b.partial[e.Name]
		switch {
		case l == nil || l.up > 0:
		case !now.Before(l.downTo):
			b.fail(e, ErrNoWorkers)
			continue
		case b.lonelyUntil.IsZero() || l.downTo.Before(b.lonelyUntil):
			b.lonelyUntil = l.downTo
		}
		i++
	}
}

// release takes back the charge of a slot whose request has ended after so many generated tokens. Slots come free in
// bursts, because the ranks of a group finish requests in the same step. The first one of a burst
// opens a window, and at the end of the window the board decides on all free slots together.
func (b *board) release(slot int32, o Outcome, generated int32, started bool, now time.Time) {
	c := &b.ledger.table[slot]
	r, released := c.rank, *c
	c.started = c.started || started
	b.settleUnheard(c, o, generated, now)
	b.learn(c, o)
	delete(b.lengths, c.id)
	b.pairEnded(c, o, now)
	b.updateRefusals(c, o.Refused, now)
	if !c.discard {
		b.pace.ended(now.Sub(c.since), int64(c.prompt)+int64(generated))
	}
	b.discharge(slot)
	if o.Orphaned && !released.strays && r.present {
		b.orphan(r, &released, now)
	}
	if o.Kept && r.Keeps > 0 && r.present {
		b.keep(r, &released, o.Generated, now)
	}
	b.promote(r)
	b.rest(r.group)
	b.outcomes[min(o.Kind, Failed)]++
	b.output += int64(max(0, o.Generated))
	r.output += int64(max(0, o.Generated))
	if o.Kind == Finished {
		if r.answers++; o.Empty {
			r.empty++
		}
		if o.Unsaid {
			r.unsaid++
		}
	}
	if !r.present {
		b.leave(r)
		return
	}
	switch {
	case b.pool.Len() == 0: // no entry waits for the slot
	case b.cfg.Window == 0:
		b.changed = true
	case b.windowEnds.IsZero():
		b.windowEnds = now.Add(b.cfg.Window)
	}
}
