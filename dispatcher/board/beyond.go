package board

import (
	"time"

	"evenkeel/pool"
)

// Beyond the slots. An engine whose own queue renews the hold of hand-offs that
// wait there can keep a hand-off good for longer than the pool can. So an entry that reaches
// its deadline is not given up if such an engine has room in its queue: it is bound
// to the rank as any other, charged and counted, though the rank has no slot or no KV room
// for it. The engine begins with it once both are there.

// overflow binds an entry at its deadline to the rank that can begin with it, else to the
// one that has the shortest queue, and says whether there was one. The ranks must be fresh.
func (b *board) overflow(e *pool.Entry, now time.Time) bool {
	if e.Discard {
		return false // a discarded hand-off that waits in a queue only holds its KV longer
	}
	w := b.waiting[e.ID]
	prompt := int64(w.prompt())
	var best *rank
	for _, g := range b.groups {
		for _, r := range g.ranks {
			if wants(e, r) && r.queues(prompt) && !b.pairs.vetoed(e, r, now) && (best == nil || r.sooner(best, prompt)) {
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

// queues says whether the rank's engine may have a prompt at its deadline. Where the
// rank is limited, others' requests may be there or the engine is fresh in service: then
// none of ours may wait in its queue. What the engine keeps of answers ends sooner or later.
func (r *rank) queues(prompt int64) bool {
	if !r.takes() || r.Beyond == 0 || r.Capacity > 0 && prompt > r.room()+r.kept.Tokens() {
		return false
	}
	return r.startsAtOnce(prompt) || r.Limit == 0 && r.queue() < r.Beyond
}

// startsAtOnce says whether the rank's engine would begin with a prompt at once: it has a slot
// and the KV room, and nobody is ahead in its queue.
func (r *rank) startsAtOnce(prompt int64) bool {
	return r.queued == 0 && r.free() > 0 && (r.Capacity == 0 || r.kv+prompt <= r.room())
}

// queue is how many requests are in the engine's queue. Policies that send everything on
// at once use more slots than there are, and none of these is marked as one that waits.
func (r *rank) queue() int { return max(r.queued, -r.free()) }

// sooner says whether a prompt would begin here before it would at another rank: for the
// slots that each has, fewer wait here, or more slots are free.
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

// promote tells the oldest requests in the engine's queue that a slot and KV room have
// become free for them: engines take requests in order. An engine that has nothing else
// of ours begins with the first whatever we believe of its room.
func (b *board) promote(r *rank) {
	if r.queued == 0 {
		return
	}
	b.refresh(r)
	table := b.ledger.table
	slots, kv := len(r.slots)-r.queued, r.kv
	for i, slot := range r.slots {
		if table[slot].waits {
			kv -= r.running[i].Tokens()
		}
	}
	for ; r.queued > 0; r.queued-- {
		oldest := int32(-1)
		for _, slot := range r.slots {
			if table[slot].waits && (oldest < 0 || table[slot].before(&table[oldest])) {
				oldest = slot
			}
		}
		if oldest < 0 {
			r.queued = 0 // the last of them has begun in this moment
			return
		}
		c := &table[oldest]
		tokens := r.running[c.pos].Tokens()
		if slots > 0 && (slots >= r.usable() || r.Capacity > 0 && kv+tokens > r.room()) {
			return
		}
		slots, kv = slots+1, kv+tokens
		c.waits = false
		b.emit(Effect{Kind: EffectBegins, Group: GroupKey{Model: b.model}, Slot: oldest})
	}
}

// before says whether a charge is older than another.
func (c *charge) before(other *charge) bool {
	return c.since.Before(other.since) || c.since.Equal(other.since) && c.id < other.id
}

// PresumedSeconds is how long a slot is presumed to be taken before any request has ended.
// Each request that ends moves the mean by paceWeight of the difference.
const (
	PresumedSeconds = 30
	paceWeight      = 1.0 / 16
)

func newPace() Pace { return Pace{Seconds: PresumedSeconds} }

func (p *Pace) ended(after time.Duration, kv int64) {
	p.Seconds += paceWeight * (after.Seconds() - p.Seconds)
	p.tokens += paceWeight * (float64(kv) - p.tokens)
}

// keepPace tells how many slots there are. That comes last in a turn: who waits for Room
// is told then, and what is told inside a turn is looked up too early.
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
		b.pace.Waiting -= max(0, l.waiting-b.paces[i].Free) // those take no slot that others could have
	}
	b.emit(Effect{Kind: EffectPace, Group: GroupKey{Model: b.model}, Pace: b.pace, Named: b.paces})
}

// add takes in the slots of a rank.
func (p *Pace) add(r *rank) {
	if r.takes() {
		open := r.open(p.tokens)
		p.Slots, p.Free = p.Slots+min(r.usable(), max(1, len(r.slots)-r.queued+open)), p.Free+open
	}
}

// open is how many free slots the rank has KV room for, if requests need as many KV
// tokens as they did in the mean.
func (r *rank) open(tokens float64) int {
	free := max(0, r.free())
	if r.Capacity == 0 || tokens == 0 {
		return free
	}
	return int(min(float64(free), float64(max(0, r.room()-r.kv))/tokens))
}

// pace is the pace of a name: how fast the slots of the ranks that list it come free.
func (l *listing) pace(all *Pace) Pace {
	p := Pace{Seconds: all.Seconds, tokens: all.tokens, Waiting: l.waiting}
	for _, r := range l.ranks {
		p.add(r)
	}
	return p
}
