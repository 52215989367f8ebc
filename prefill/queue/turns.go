package queue

import (
	"container/list"
	"slices"
)

// Within a priority keys take turns. Whose turn it is depends on how many prompt tokens were served of each key
// lately (start-time fair queueing, Goyal 1996): what two keys that both wait get never differs by more than one
// request of each.

// class is one priority over all models. It is forgotten once no request of it waits.
type class[T any] struct {
	clock   int64 // the virtual time: the due of the request that was served last
	flows   map[string]*flow[T]
	waiting int
	sweepAt int // number of flows at which flows that need not be remembered are dropped
}

// flow is one key within a class.
type flow[T any] struct {
	class    *class[T]
	priority int
	key      string
	due      int64      // virtual time of its next request: the tokens it was served, but no less than the clock when it began to wait
	lanes    []*lane[T] // its lanes, one for each model for which it waits
}

// lane is a flow's requests for one model.
type lane[T any] struct {
	*flow[T]
	line         *Line[T]
	entries      list.List // its *Entry[T], by deadline and arrival
	loose        int       // entries that may be displaced
	turnsIndex   int       // turn and length: its indices in the line's heaps
	longestIndex int
}

func (l *lane[T]) first() *Entry[T] { return l.entries.Front().Value.(*Entry[T]) }

// givesWayBefore reports whether a request of this lane is displaced before one of another lane. The lowest class gives
// way first, and within it the key with the most requests: a key that fills the queue gives way to the others. A lane
// in which no request may be displaced comes last.
func (l *lane[T]) givesWayBefore(other *lane[T]) bool {
	switch {
	case (l.loose == 0) != (other.loose == 0):
		return other.loose == 0
	case l.priority != other.priority:
		return l.priority < other.priority
	}
	return l.entries.Len() > other.entries.Len()
}

// flowOf returns the flow of a key that is about to wait. A key that did not wait is due now at the earliest, so that
// it gains nothing from the time in which it was not served.
func (q *Queue[T]) flowOf(priority int, key string) *flow[T] {
	ofPriority := q.classes[priority]
	if ofPriority == nil {
		ofPriority = &class[T]{flows: map[string]*flow[T]{}, sweepAt: firstSweep}
		q.classes[priority] = ofPriority
	}
	f := ofPriority.flows[key]
	if f == nil {
		f = &flow[T]{class: ofPriority, priority: priority, key: key, due: ofPriority.clock}
		ofPriority.flows[key] = f
	}
	if len(f.lanes) == 0 {
		f.due = max(f.due, ofPriority.clock)
	}
	return f
}

const firstSweep = 64

// close removes an empty lane from its flow. A flow without lanes is remembered until the clock has passed it, so
// that a key that comes back at once gains no turn.
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
