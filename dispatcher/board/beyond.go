package board

import (
	"time"

	"evenkeel/pool"
)

// Beyond the slots. While a hand-off waits in an engine's own queue, some engines renew the prefill engine's hold
// on its KV. There the hand-off stays valid for longer than it does in the pool. So an entry that reaches
// its deadline is not given up if such an engine has room in its queue. It is bound
// to the rank, charged and counted as usual, although the rank has no slot or no KV room
// for it. The engine begins with the request once both are free.

// overflow binds an entry at its deadline to a rank that can begin with it at once, else to the rank
// with the shortest queue. It says whether there was such a rank. The ranks must have been refreshed.
func (b *board) overflow(e *pool.Entry, now time.Time) bool {
	if e.Discard {
		return false // a discarded hand-off that waits in a queue only holds its KV longer
	}
	w := b.waiting[e.ID]
	prompt := int64(w.prompt())
	var best *rank
	for _, g := range b.groups {
		for _, r := range g.ranks {
			if mayGo(e, r) && r.queues(prompt) && !b.pairs.vetoed(e, r, now) && (best == nil || r.sooner(best, prompt)) {
				best = r
			}
		}
	}
	if best == nil {
		return false
	}
	beyond := !best.startsAtOnce(prompt)
	if beyond {
		best.queued++
		b.emit(Effect{Kind: EffectBeyond})
	}
	b.admit(best, w, Bound{Policy: best.group.inForce().name, Beyond: beyond}, now)
	return true
}

// queues says whether the rank's engine may get a prompt that is at its deadline. A rank with a Limit
// gets it only if it can begin at once, because other proxies' requests may be there or the engine has just come into
// service. The KV that the engine keeps of answers does not count, because it is given up sooner or later.
func (r *rank) queues(prompt int64) bool {
	if !r.takes() || r.Beyond == 0 || r.Capacity > 0 && prompt > r.room()+r.kept.Tokens() {
		return false
	}
	return r.startsAtOnce(prompt) || r.Limit == 0 && r.queue() < r.Beyond
}

// startsAtOnce says whether the rank's engine would begin with a prompt at once: the rank has a free slot
// and the KV room, and no request waits in the engine's queue.
func (r *rank) startsAtOnce(prompt int64) bool {
	return r.queued == 0 && r.free() > 0 && (r.Capacity == 0 || r.kv+prompt <= r.room())
}

// queue returns how many requests are in the engine's queue. Immediate policies use more slots
// than there are without marking the requests as waiting, so these are counted by the slots.
func (r *rank) queue() int { return max(r.queued, -r.free()) }

// sooner says whether a prompt would begin sooner on this rank than on the other one: fewer requests
// wait here for each slot of the rank or, in a tie, a larger share of the slots is free.
func (r *rank) sooner(other *rank, prompt int64) bool {
	if here := r.startsAtOnce(prompt); here != other.startsAtOnce(prompt) {
		return here
	}
	mine, theirs := max(1, r.usable()), max(1, other.usable())
	if x, y := r.queue()*theirs, other.queue()*mine; x != y {
		return x < y
	}
	if x, y := r.free()*theirs, other.free()*mine; x != y {
		return x > y
	}
	return r.weigh(r.kv) < other.weigh(other.kv)
}

// promote marks the oldest requests in the engine's queue as begun for which a slot and KV room have
// become free: engines take requests in order. An engine that runs no other request of ours begins
// with the first one in any case, whatever room the board counts.
func (b *board) promote(r *rank) {
	if r.queued == 0 {
		return
	}
	b.refresh(r)
	table := b.ledger.table
	begun, kv := len(r.slots)-r.queued, r.kv // requests that the engine has begun, and their KV
	for i, slot := range r.slots {
		if table[slot].waits {
			kv -= r.running[i].Tokens()
		}
	}
	for ; r.queued > 0; r.queued-- {
		oldest := int32(-1)
		for _, slot := range r.slots {
			if table[slot].waits && (oldest < 0 || table[slot].older(&table[oldest])) {
				oldest = slot
			}
		}
		if oldest < 0 {
			r.queued = 0 // no request waits any more
			return
		}
		c := &table[oldest]
		tokens := r.running[c.pos].Tokens()
		if begun > 0 && (begun >= r.usable() || r.Capacity > 0 && kv+tokens > r.room()) {
			return
		}
		begun, kv = begun+1, kv+tokens
		c.waits = false
		b.emit(Effect{Kind: EffectBegins, Group: GroupKey{Model: b.model}, Slot: oldest})
	}
}

// older says whether a charge is older than the other one.
func (c *charge) older(other *charge) bool {
	return c.since.Before(other.since) || c.since.Equal(other.since) && c.id < other.id
}

// PresumedSeconds is the assumed mean time that a request has its slot, in s, until requests have ended.
// Each request that ends moves the mean by paceWeight of the difference.
const (
	PresumedSeconds = 30
	paceWeight      = 1.0 / 16
)

func newPace() Pace { return Pace{Seconds: PresumedSeconds} }

// ended takes in a request that has ended: how long it had its slot, and how many KV tokens it had at the end.
func (p *Pace) ended(after time.Duration, kv int64) {
	p.Seconds += paceWeight * (after.Seconds() - p.Seconds)
	p.tokens += paceWeight * (float64(kv) - p.tokens)
}

// keepPace emits the pace of the board: how many slots there are, and how many are free. It runs at the end of
// a turn: the effect wakes those who wait for Room, and in the middle of a turn they would read old numbers.
func (b *board) keepPace() {
	b.pace.Slots, b.pace.Free = 0, 0
	for _, g := range b.groups {
		for _, r := range g.ranks {
			b.pace.add(r)
		}
	}
	b.pace.Waiting = b.pool.Len() - b.discarding
	for i, l := range b.names {
		b.paces[i] = l.pace(&b.pace)
		b.pace.Waiting -= max(0, l.waiting-b.paces[i].Free) // these find no free slot on their own ranks, so they take none from other names
	}
	b.emit(Effect{Kind: EffectPace, Group: GroupKey{Model: b.model}, Pace: b.pace, Named: b.paces})
}

// add counts the slots of a rank, unless the rank takes no requests. Free slots without KV room do not count, so that Room does not
// promise them.
func (p *Pace) add(r *rank) {
	if r.takes() {
		free := r.freeFor(p.tokens)
		p.Slots, p.Free = p.Slots+min(r.usable(), max(1, len(r.slots)-r.queued+free)), p.Free+free
	}
}

// freeFor returns how many free slots the rank has KV room for, if each request needs so many KV tokens in the mean; 0: the mean is not
// known, and all free slots count.
func (r *rank) freeFor(tokens float64) int {
	free := max(0, r.free())
	if r.Capacity == 0 || tokens == 0 {
		return free
	}
	return int(min(float64(free), float64(max(0, r.room()-r.kv))/tokens))
}

// pace returns the pace of a name, which counts only the ranks that list it.
func (l *listing) pace(all *Pace) Pace {
	p := Pace{Seconds: all.Seconds, tokens: all.tokens, Waiting: l.waiting}
	for _, r := range l.ranks {
		p.add(r)
	}
	return p
}
