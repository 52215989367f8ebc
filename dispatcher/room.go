package dispatcher

import (
	"math"
	"sync/atomic"

	"evenkeel/dispatcher/board"
)

// published is what any goroutine may read of a board: its pace, and whether first events are of interest to it.
type published struct {
	watched              atomic.Int32 // suspected pairs plus ranks that refuse requests; 0: the board needs no reports of first events
	slots, free, waiting atomic.Int64
	seconds              atomic.Uint64                         // a float64, as bits
	named                atomic.Pointer[map[string]*published] // for each name that some ranks list and others do not
}

// of returns what is published of a name. If only some ranks list the name, it has values of its own, and own is true. Else
// the values are those of all ranks of the board.
func (p *published) of(name string) (q *published, own bool) {
	if byName := p.named.Load(); byName != nil && (*byName)[name] != nil {
		return (*byName)[name], true
	}
	return p, false
}

// list sets the names that have values of their own. A name that had values before keeps them.
func (o *owned) list(names []string) {
	byName := make(map[string]*published, len(names))
	o.named = o.named[:0]
	for _, name := range names {
		p, listedBefore := o.pace.of(name)
		if !listedBefore {
			p = newPublished()
		}
		byName[name] = p
		o.named = append(o.named, p)
	}
	o.pace.named.Store(&byName)
}

func newPublished() *published {
	p := &published{}
	p.seconds.Store(math.Float64bits(board.PresumedSeconds))
	return p
}

// publish stores the pace, so that any goroutine can read it. more says whether more hand-offs than before may get a slot in time:
// because there are more slots, more of them are free for each entry that waits, or requests keep them for a shorter time. If no rank
// takes requests any more, more is true as well, because Room then has no limit.
func (p *published) publish(pace *board.Pace) (more bool) {
	slots, free, waiting := int64(pace.Slots), int64(pace.Free), int64(pace.Waiting)
	slotsBefore := p.slots.Load()
	more = slots > slotsBefore || slots == 0 && slotsBefore > 0 || pace.Seconds < math.Float64frombits(p.seconds.Load()) ||
		free-waiting > p.free.Load()-p.waiting.Load()
	p.slots.Store(slots)
	p.free.Store(free)
	p.waiting.Store(waiting)
	p.seconds.Store(math.Float64bits(pace.Seconds))
	return more
}
