package dispatcher

import (
	"math"
	"sync/atomic"
	"time"

	"evenkeel/dispatcher/board"
)

// published is what any goroutine may read of a board: its pace, and whether it suspects any pair.
type published struct {
	watched              atomic.Int32 // suspected pairs: what arrives is of interest only while there are some
	slots, free, waiting atomic.Int64
	seconds              atomic.Uint64 // bits
}

func newPublished() *published {
	p := &published{}
	p.seconds.Store(math.Float64bits(board.PresumedSeconds))
	return p
}

// publish says whether more hand-offs than before would get a slot in time.
func (p *published) publish(now *board.Pace) (more bool) {
	slots, free, waiting := int64(now.Slots), int64(now.Free), int64(now.Waiting)
	was := p.slots.Load()
	more = slots > was || slots == 0 && was > 0 || now.Seconds < math.Float64frombits(p.seconds.Load()) || free-waiting > p.free.Load()-p.waiting.Load()
	p.slots.Store(slots)
	p.free.Store(free)
	p.waiting.Store(waiting)
	p.seconds.Store(math.Float64bits(now.Seconds))
	return more
}

// Room returns how many hand-offs more than those that wait in the pool of a board
// would get a slot within a time. It is at least one if none waits, so that a
// hand-off is always on its way.
func (d *Dispatcher) Room(board string, within time.Duration) int {
	v, ok := d.paces.Load(board)
	if !ok {
		return math.MaxInt // no rank was ever there: it is not the slots that are missing
	}
	p := v.(*published)
	slots := p.slots.Load()
	if slots == 0 {
		return math.MaxInt
	}
	freed := within.Seconds() * float64(slots) / max(math.Float64frombits(p.seconds.Load()), 1e-3)
	return max(1, int(min(float64(p.free.Load())+freed, math.MaxInt32))) - int(p.waiting.Load())
}
