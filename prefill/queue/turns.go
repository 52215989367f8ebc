package queue

import (
	"container/list"
	"slices"
)

// Within a priority keys take turns. Whose turn it is follows from what each key
// was served of late, in prompt tokens (start-time fair queueing, Goyal 1996): two
// keys that both wait never differ by more than a request of each.

// class is one priority over all models; it is forgotten when no request of it
// waits.
type class[T any] struct {
	clock   int64 // the virtual time: when the request that was served last was due
	flows   map[string]*flow[T]
	waiting int
	sweepAt int // flows from which those without anything to remember are dropped
}

// flow is a key within a class.
type flow[T any] struct {
	class    *class[T]
	priority int
	key      string
	due      int64      // virtual time of its next request: the tokens it was served, no less than the clock when it began to wait
	lanes    []*lane[T] // where it waits, one per model
}

// lane is a flow's requests for one model.
type lane[T any] struct {
	*flow[T]
	line    *Line[T]
	entries list.List // of *Entry[T], by deadline and arrival
	loose   int       // of them, those that may be displaced
	turn    int       // places in the line's heaps
	length  int
}

func (l *lane[T]) first() *Entry[T] { return l.entries.Front().Value.(*Entry[T]) }

// givesWayBefore puts the lowest class first and in it the key that has most:
// a key that fills the queue gives way to those that do not.
func (l *lane[T]) givesWayBefore(o *lane[T]) bool {
	switch {
	case (l.loose == 0) != (o.loose == 0):
		return o.loose == 0
	case l.priority != o.priority:
		return l.priority < o.priority
	}
	return l.entries.Len() > o.entries.Len()
}

// flowOf is the flow of a key that is about to wait: one that did not wait yet
// is due now, whatever it was served long ago.
func (q *Queue[T]) flowOf(priority int, key string) *flow[T] {
	c := q.classes[priority]
	if c == nil {
		c = &class[T]{flows: map[string]*flow[T]{}, sweepAt: firstSweep}
		q.classes[priority] = c
	}
	f := c.flows[key]
	if f == nil {
		f = &flow[T]{class: c, priority: priority, key: key, due: c.clock}
		c.flows[key] = f
	}
	if len(f.lanes) == 0 {
		f.due = max(f.due, c.clock)
	}
	return f
}

const firstSweep = 64

// close removes an empty lane from its flow. A flow without any is remembered
// until the clock has passed it, so that a key that comes back at once gains no
// turn.
func (l *lane[T]) close() {
	f, c := l.flow, l.class
	i := slices.Index(f.lanes, l)
	f.lanes = slices.Delete(f.lanes, i, i+1)
	if len(f.lanes) == 0 && f.due <= c.clock {
		delete(c.flows, f.key)
	}
	if len(c.flows) < c.sweepAt {
		return
	}
	for key, f := range c.flows {
		if len(f.lanes) == 0 && f.due <= c.clock {
			delete(c.flows, key)
		}
	}
	c.sweepAt = max(firstSweep, 2*len(c.flows))
}
