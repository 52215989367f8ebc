package queue

import (
	"container/list"
	"slices"
)

// Keys of one priority take turns by start-time fair queueing (Goyal 1996), weighted by the prompt tokens that each key was
// served. While two keys both wait, their served tokens differ by at most one request of each key.

// class is one priority in the model queues of all models. It is dropped when no request of it waits.
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
	nextTurn int64           // virtual time at which its next request has its turn; each served request adds its prompt tokens
	queues   []*flowQueue[T] // one queue for each model for which requests of the key wait
}

// flowQueue is a flow's requests for one model.
type flowQueue[T any] struct {
	*flow[T]
	modelQueue        *ModelQueue[T]
	items             list.List // the requests (*Item[T]), in order of deadline and arrival
	displaceable      int       // number of items that are not pinned
	deferredIn        uint64    // the last round in which one of the items was deferred
	turnIndex         int       // index in the model queue's heap byTurn
	displacementIndex int       // index in the model queue's heap byDisplacement
}

// first is the request of the flow queue that is served first. The flow queue must not be empty.
func (fq *flowQueue[T]) first() *Item[T] { return fq.items.Front().Value.(*Item[T]) }

// insert adds a request to the flow queue, at its position by deadline and arrival.
func (fq *flowQueue[T]) insert(item *Item[T]) {
	previous := fq.items.Back() // searches from the end, because nearly every new request belongs there
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

// displacedBefore reports whether a full model queue displaces a request of this flow queue before a request of the other flow
// queue. The flow queue with the lowest priority gives way first. Among flow queues of one priority it is the longest one, so that
// a key that fills the queue gives way to other keys. A flow queue without displaceable requests comes last.
func (fq *flowQueue[T]) displacedBefore(other *flowQueue[T]) bool {
	switch {
	case (fq.displaceable == 0) != (other.displaceable == 0): // only one of them can lose a request
		return other.displaceable == 0
	case fq.priority != other.priority:
		return fq.priority < other.priority
	}
	return fq.items.Len() > other.items.Len()
}

// flowOf returns the flow of a key for which a request is about to wait. If no request of the key waits yet, its nextTurn is
// raised to the virtual time of the class. A key therefore gains no advantage from time in which it sent no requests.
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
	if len(f.queues) == 0 { // no request of the key waits
		f.nextTurn = max(f.nextTurn, ofPriority.virtualTime)
	}
	return f
}

const firstSweep = 64 // number of flows of a class at which leaveFlow first drops all unneeded ones

// leaveFlow removes an empty flow queue from its flow. A flow without flow queues is kept until the virtual time has passed its nextTurn. A
// key that comes back before then keeps its nextTurn, and cannot overtake other keys by leaving and coming back. From sweepAt flows on,
// leaveFlow drops all flows of the class that are not needed any more.
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

// isUnneeded reports whether no request of the key waits, and its nextTurn has passed, so that a new flow would be the same.
func (f *flow[T]) isUnneeded() bool { return len(f.queues) == 0 && f.nextTurn <= f.class.virtualTime }
