package dispatcher

import (
	"math"
	"sync/atomic"

	"evenkeel/dispatcher/board"
)

// published is what any goroutine may read of a board: its pace, and whether it suspects any pair.
type published struct {
	watched              atomic.Int32 // suspected pairs, and ranks that refuse: what arrives is of interest only while there are some
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
