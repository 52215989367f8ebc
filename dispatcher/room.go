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
	seconds              atomic.Uint64                         // bits
	named                atomic.Pointer[map[string]*published] // of names that some ranks list and others do not
}

// of is what is published of a name: its own, or that of all ranks of the board. own says which.
func (p *published) of(name string) (q *published, own bool) {
	if all := p.named.Load(); all != nil && (*all)[name] != nil {
		return (*all)[name], true
	}
	return p, false
}

// list begins to publish of names, and keeps what is known of those that were published before.
func (o *owned) list(names []string) {
	all := make(map[string]*published, len(names))
	o.named = o.named[:0]
	for _, name := range names {
		p, was := o.pace.of(name)
		if !was {
			p = newPublished()
		}
		all[name] = p
		o.named = append(o.named, p)
	}
	o.pace.named.Store(&all)
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
	more = slots > was || slots == 0 && was > 0 || now.Seconds < math.Float64frombits(p.seconds.Load()) ||
		free-waiting > p.free.Load()-p.waiting.Load()
	p.slots.Store(slots)
	p.free.Store(free)
	p.waiting.Store(waiting)
	p.seconds.Store(math.Float64bits(now.Seconds))
	return more
}
