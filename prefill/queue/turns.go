package queue

import (
	"container/list"
	"slices"
)

// Keys of one priority take turns by start-time fair queueing (Goyal 1996), weighted by the prompt
// tokens that each key was served. While two keys both wait, their served tokens differ by at most
// one request of each key.

// class is one priority in the model queues of all models. It is dropped when no request of it
// waits.
type class[T any] struct {
	virtualTime int64 // nextTurn of the flow whose request was served last, in tokens; it never decreases
	flows       map[string]*flow[T]
	waiting     int
	sweepAt     int // number of flows from which on leaveFlow drops all flows that are not needed any more
}

// flow is one key within a class.
type flow[T any] struct {
	class    *class[T]
	priority int
	key      string
	nextTurn int64           // virtual time of its next turn; each served request adds its prompt tokens
	queues   []*flowQueue[T] // one for each model for which requests of the key wait
}

// flowQueue is a flow's requests for one model.
type flowQueue[T any] struct {
	*flow[T]
	modelQueue        *ModelQueue[T]
	items             list.List // *Item[T], in order of deadline and arrival
	displaceable      int       // items that are not pinned
	deferredIn        uint64    // the last round in which one of the items was deferred
	turnIndex         int       // in byTurn
	displacementIndex int       // in byDisplacement
}

// first panics if the flow queue is empty.
func (fq *flowQueue[T]) first() *Item[T] { return fq.items.Front().Value.(*Item[T]) }

func (fq *flowQueue[T]) insert(item *Item[T]) {
	previous := fq.items.Back() // from the end, because nearly every new request belongs there
	for previous != nil && item.beforeInFlow(previous.Value.(*Item[T])) {
		previous = previous.Prev()
	}
	if previous == nil {
		item.element = fq.items.PushFront(item)
	} else {
		item.element = fq.items.InsertAfter(item, previous)
	}
	item.flowQueue = fq
	if !item.pinned {
		fq.displaceable++
	}
}

// displacedBefore puts the lowest priority first, then the longest flow queue, so that a key that
// fills the queue gives way to other keys.
func (fq *flowQueue[T]) displacedBefore(other *flowQueue[T]) bool {
	switch {
	case (fq.displaceable == 0) != (other.displaceable == 0): // only one of them can lose a request
		return other.displaceable == 0
	case fq.priority != other.priority:
		return fq.priority < other.priority
	}
	return fq.items.Len() > other.items.Len()
}

// flowOf raises the nextTurn of a key of which no request waits to the virtual time of its class,
// so that a key gains nothing from time in which it sent no requests.
func (q *Queue[T]) flowOf(priority int, key string) *flow[T] {
	ofPriority := q.classes[priority]
	if ofPriority == nil {
		ofPriority = &class[T]{flows: map[string]*flow[T]{}, sweepAt: firstSweep}
		q.classes[priority] = ofPriority
	}
	f := ofPriority.flows[key]
	if f == nil {
		f = &flow[T]{class: ofPriority, priority: priority, key: key, nextTurn: ofPriority.virtualTime}
		ofPriority.flows[key] = f
	}
	if len(f.queues) == 0 {
		f.nextTurn = max(f.nextTurn, ofPriority.virtualTime)
	}
	return f
}

const firstSweep = 64

// leaveFlow removes an empty flow queue from its flow. A flow without flow queues is kept until the
// virtual time has passed its nextTurn, so that a key cannot overtake others by leaving and coming
// back.
func (fq *flowQueue[T]) leaveFlow() {
	f, c := fq.flow, fq.class
	i := slices.Index(f.queues, fq)
	f.queues = slices.Delete(f.queues, i, i+1)
	if f.isUnneeded() {
		delete(c.flows, f.key)
	}
	if len(c.flows) < c.sweepAt {
		return
	}
	for key, f := range c.flows {
		if f.isUnneeded() {
			delete(c.flows, key)
		}
	}
	c.sweepAt = max(firstSweep, 2*len(c.flows)) // so that sweeps stay rare, however many flows are needed
}

// isUnneeded reports whether a new flow of the key would be the same.
func (f *flow[T]) isUnneeded() bool { return len(f.queues) == 0 && f.nextTurn <= f.class.virtualTime }
