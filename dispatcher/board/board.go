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

// refusal says why an entry can never be admitted, whatever is released.
// Ranks that are down may come back, so they count: a prefill that is done
// already is worth the wait.
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

// fail takes a waiting entry out of the pool and tells its caller why.
func (b *board) fail(e *pool.Entry, err error) {
	b.pool.Remove(e)
	b.refuse(e, err)
}

// refuse answers an entry that has left the pool, or was never in it.
func (b *board) refuse(e *pool.Entry, err error) {
	b.forget(e)
	delete(b.lengths, e.ID)
	b.emit(Effect{Kind: EffectRefuse, Entry: e, Err: err})
}

// forget ends what is kept of an entry that waited.
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

// outageGrace is how long those that wait outlast an outage of all ranks. An
// engine that is gone for longer restarts, which takes minutes: its clients had
// better know.
const outageGrace = 10 * time.Second

// outage ends the waits that no rank will end.
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

// lonely ends the waits for names of which all ranks are down, though other ranks of the board are up.
func (b *board) lonely(now time.Time) {
	b.lonelyTo = time.Time{}
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
		case b.lonelyTo.IsZero() || l.downTo.Before(b.lonelyTo):
			b.lonelyTo = l.downTo
		}
		i++
	}
}

// release takes the charge of a slot back that was so far at its end. Freed slots come in bursts, since the
// ranks of a group finish requests in the same step: the first of a burst
// opens the window at whose end all are decided together.
func (b *board) release(slot int32, o Outcome, generated int32, started bool, now time.Time) {
	c := &b.ledger.table[slot]
	r, left := c.rank, *c
	c.started = c.started || started
	b.settleUnheard(c, o, generated, now)
	b.learn(c, o)
	delete(b.lengths, c.id)
	b.pairEnded(c, o, now)
	b.tried(c, o.Refused, now)
	if !c.discard {
		b.pace.ended(now.Sub(c.since), int64(c.prompt)+int64(generated))
	}
	b.discharge(slot)
	if o.Orphaned && left.early && r.present {
		b.orphan(r, &left, now)
	}
	if o.Kept && r.Keeps > 0 && r.present {
		b.keep(r, &left, o.Generated, now)
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
	case b.pool.Len() == 0: // nobody to place
	case b.cfg.Window == 0:
		b.changed = true
	case b.windowEnds.IsZero():
		b.windowEnds = now.Add(b.cfg.Window)
	}
}
