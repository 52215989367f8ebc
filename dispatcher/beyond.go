package dispatcher

import (
	"math"
	"sync/atomic"
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
	if e.Drain {
		return false // a drain that waits in a queue only holds its KV longer
	}
	w := b.waiting[e.ID]
	prompt := int64(w.slot.prompt)
	var best *rank
	for _, g := range b.groups {
		for _, r := range g.ranks {
			if wants(e, r.ID) && r.queues(prompt) && !b.pairs.vetoed(e, r, now) && (best == nil || r.sooner(best, prompt)) {
				best = r
			}
		}
	}
	if best == nil {
		return false
	}
	w.slot.Beyond = !best.begins(prompt)
	w.slot.waits.Store(w.slot.Beyond)
	if w.slot.Beyond {
		best.queued++
		b.emit(effect{kind: effectBeyond})
	}
	b.admit(best, best.group.inForce().name, w, now)
	return true
}

// queues says whether the rank's engine may have a prompt at its deadline. Where the
// rank is limited, others' requests may be there or the engine is fresh in service: then
// none of ours may wait in its queue.
func (r *rank) queues(prompt int64) bool {
	if !r.Up || r.Beyond == 0 || r.Capacity > 0 && prompt > r.Capacity {
		return false
	}
	return r.begins(prompt) || r.Limit == 0 && r.queue() < r.Beyond
}

// begins says whether the rank's engine would begin with a prompt at once: it has a slot
// and the KV room, and nobody is ahead in its queue.
func (r *rank) begins(prompt int64) bool {
	return r.queued == 0 && r.free() > 0 && (r.Capacity == 0 || r.kv+prompt <= r.Capacity)
}

// queue is how many requests are in the engine's queue. Policies that send everything on
// at once use more slots than there are, and none of these is marked as one that waits.
func (r *rank) queue() int { return max(r.queued, -r.free()) }

// sooner says whether a prompt would begin here before it would at another rank: for the
// slots that each has, fewer wait here, or more slots are free.
func (r *rank) sooner(other *rank, prompt int64) bool {
	if here := r.begins(prompt); here != other.begins(prompt) {
		return here
	}
	mine, theirs := max(1, r.usable()), max(1, other.usable())
	if x, y := r.queue()*theirs, other.queue()*mine; x != y {
		return x < y
	}
	if x, y := r.free()*theirs, other.free()*mine; x != y {
		return x > y
	}
	return r.cost() < other.cost()
}

// promote tells the oldest requests in the engine's queue that a slot and KV room have
// become free for them: engines take requests in order. An engine that has nothing else
// of ours begins with the first whatever we believe of its room.
func (r *rank) promote() {
	if r.queued == 0 {
		return
	}
	r.refresh()
	slots, kv := len(r.slots)-r.queued, r.kv
	for i, s := range r.slots {
		if s.waits.Load() {
			kv -= int64(r.running[i].Prompt) + int64(r.running[i].Generated)
		}
	}
	for ; r.queued > 0; r.queued-- {
		var oldest *Slot
		for _, s := range r.slots {
			if s.waits.Load() && (oldest == nil || s.since.Before(oldest.since) || s.since.Equal(oldest.since) && s.id < oldest.id) {
				oldest = s
			}
		}
		if oldest == nil {
			r.queued = 0 // the last of them has begun in this moment
			return
		}
		if slots > 0 && (slots >= r.usable() || r.Capacity > 0 && kv+int64(oldest.prompt) > r.Capacity) {
			return
		}
		slots, kv = slots+1, kv+int64(oldest.prompt)
		oldest.waits.Store(false)
	}
}

// Waits says that the request is in its engine's queue, because the rank has no
// slot or no KV room for it yet. That its first event does not come then is no fault of the engine.
func (s *Slot) Waits() bool { return s.waits.Load() }

// pace is how fast the slots of a board come free. Room reads it to tell whether a
// hand-off would get a slot in time. The board writes it, any goroutine may read it.
type pace struct {
	slots, free atomic.Int64
	waiting     atomic.Int64  // in the pool, drains not counted
	seconds     atomic.Uint64 // bits of the mean time that a request has its slot

	// Only the board reads these.
	tokens float64 // mean KV tokens of a request at its end; 0: none has ended
	told   float64 // seconds when the board last published
}

// Before any request has ended, a slot is presumed to be taken for presumedSeconds.
// Each request that ends moves the mean by paceWeight of the difference.
const (
	presumedSeconds = 30
	paceWeight      = 1.0 / 16
)

func newPace() *pace {
	p := &pace{}
	p.seconds.Store(math.Float64bits(presumedSeconds))
	return p
}

func (p *pace) ended(after time.Duration, kv int64) {
	mean := math.Float64frombits(p.seconds.Load())
	p.seconds.Store(math.Float64bits(mean + paceWeight*(after.Seconds()-mean)))
	p.tokens += paceWeight * (float64(kv) - p.tokens)
}

// publish says whether more hand-offs than before would get a slot in time.
func (p *pace) publish(slots, free, waiting int64) (more bool) {
	seconds := math.Float64frombits(p.seconds.Load())
	was := p.slots.Load()
	more = slots > was || slots == 0 && was > 0 || seconds < p.told || free-waiting > p.free.Load()-p.waiting.Load()
	p.told = seconds
	p.slots.Store(slots)
	p.free.Store(free)
	p.waiting.Store(waiting)
	return more
}

// keepPace publishes how many slots there are, and tells who waits for Room that there is
// more of it. That comes last in a turn: what is told inside it is looked up too early.
func (b *board) keepPace() {
	slots, free := 0, 0
	for _, g := range b.groups {
		for _, r := range g.ranks {
			if r.Up {
				open := r.open(b.pace.tokens)
				slots, free = slots+min(r.usable(), max(1, len(r.slots)-r.queued+open)), free+open
			}
		}
	}
	if b.pace.publish(int64(slots), int64(free), int64(b.pool.Len()-b.draining)) {
		b.emit(effect{kind: effectRoom})
	}
}

// open is how many free slots the rank has KV room for, if requests need as many KV
// tokens as they did in the mean.
func (r *rank) open(tokens float64) int {
	free := max(0, r.free())
	if r.Capacity == 0 || tokens == 0 {
		return free
	}
	return int(min(float64(free), float64(max(0, r.Capacity-r.kv))/tokens))
}

// Room returns how many hand-offs more than those that wait in the pool of a board
// would get a slot within a time. It is at least one if none waits, so that a
// hand-off is always on its way.
func (d *Dispatcher) Room(board string, within time.Duration) int {
	v, ok := d.paces.Load(board)
	if !ok {
		return math.MaxInt // no rank was ever there: it is not the slots that are missing
	}
	p := v.(*pace)
	slots := p.slots.Load()
	if slots == 0 {
		return math.MaxInt
	}
	freed := within.Seconds() * float64(slots) / max(math.Float64frombits(p.seconds.Load()), 1e-3)
	return max(1, int(min(float64(p.free.Load())+freed, math.MaxInt32))) - int(p.waiting.Load())
}
