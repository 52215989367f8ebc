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
// to the rank as any other, charged and counted, though the rank has no slot for it.
// The engine begins with it once one is free.

// overflow binds an entry at its deadline to the rank that has the shortest queue
// for its slots, and says whether there was one.
func (b *board) overflow(e *pool.Entry, now time.Time) bool {
	if e.Drain {
		return false // a drain that waits in a queue only holds its KV longer
	}
	var best *rank
	for _, g := range b.groups {
		for _, r := range g.ranks {
			if r.queues(e) && !b.pairs.vetoed(e, r, now) && (best == nil || r.fuller(best)) {
				best = r
			}
		}
	}
	if best == nil {
		return false
	}
	best.refresh()
	w := b.waiting[e.ID]
	w.slot.waits.Store(best.free() <= 0)
	w.slot.Beyond = best.free() <= 0
	if w.slot.Beyond {
		b.metrics.beyond.Inc()
	}
	b.admit(best, best.group.inForce().name, w, now, 0)
	return true
}

// queues says whether the rank's engine may have the entry beyond its slots.
func (r *rank) queues(e *pool.Entry) bool {
	return r.Up && r.Beyond > 0 && r.free()+r.Beyond > 0 && wants(e, r.ID)
}

// fuller says whether another rank is fuller: for the slots that it has, it has
// fewer free ones, or more requests that wait.
func (r *rank) fuller(other *rank) bool {
	mine, theirs := r.free()*max(1, other.usable()), other.free()*max(1, r.usable())
	return mine > theirs || mine == theirs && r.cost() < other.cost()
}

// waitingBeyond counts the requests that the rank's engine has in its queue for
// want of a slot.
func (r *rank) waitingBeyond() (n int) {
	for _, s := range r.slots {
		if s.waits.Load() {
			n++
		}
	}
	return n
}

// promote tells the oldest request that waits beyond the slots that a slot has
// become free for it: engines take requests in order.
func (r *rank) promote() {
	for n := r.waitingBeyond(); n > 0 && n > len(r.slots)-r.usable(); n-- {
		var oldest *Slot
		for _, s := range r.slots {
			if s.waits.Load() && (oldest == nil || s.since.Before(oldest.since)) {
				oldest = s
			}
		}
		oldest.waits.Store(false)
	}
}

// Waits says that the request is in its engine's queue, because the rank has no
// slot for it yet. That its first event does not come then is no fault of the engine.
func (s *Slot) Waits() bool { return s.waits.Load() }

// pace is how fast the slots of a board come free. Room reads it to tell whether a
// hand-off would get a slot in time. The board writes it, any goroutine may read it.
type pace struct {
	slots, free atomic.Int64
	waiting     atomic.Int64  // in the pool, drains not counted
	seconds     atomic.Uint64 // bits of the mean time that a request has its slot
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

func (p *pace) ended(after time.Duration) {
	mean := math.Float64frombits(p.seconds.Load())
	p.seconds.Store(math.Float64bits(mean + paceWeight*(after.Seconds()-mean)))
}

// keepPace publishes how many slots there are.
func (b *board) keepPace() {
	slots, free := 0, 0
	for _, g := range b.groups {
		for _, r := range g.ranks {
			if r.Up {
				slots, free = slots+r.usable(), free+max(0, r.free())
			}
		}
	}
	b.pace.slots.Store(int64(slots))
	b.pace.free.Store(int64(free))
	b.pace.waiting.Store(int64(b.pool.Len() - b.draining))
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
