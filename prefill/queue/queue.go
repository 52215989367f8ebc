// Package queue holds the requests that wait for a prefill engine. It serves the highest priority first. Within a
// priority, the earliest deadline comes first; requests without a deadline follow, and their keys take turns; within
// a key, the request that arrived first comes first. Without deadlines, and with at most one key and priority, the
// queue is first come, first served.
//
// Each model has a line. A round goes through the requests of all lines in this order; the caller serves each request,
// holds it until the next round, or shuts its line for the round. The package has no clock and no lock.
package queue

import (
	"container/heap"
	"container/list"
	"math"
	"slices"
	"time"
)

// Batch is the lowest priority, for requests that only use capacity that no other request needs. At most half of the
// requests that may wait in a line can be batch, and no backlog counts them.
const Batch = math.MinInt

// Queue holds the lines of all models.
type Queue[T any] struct {
	lines    map[string]*ModelQueue[T]
	classes  map[int]*class[T]
	due      ordered[*Item[T]] // the requests with a deadline
	waiting  int
	arrivals uint64

	round  uint64
	places bool // the pool of prefilled requests that wait for decode has room in this round
	holds  int  // requests that were held in this round
}

// Item is one request that waits. The caller sets the exported fields before Add, and must not change them afterwards.
type Item[T any] struct {
	Of       T // the request
	Key      string
	Priority int
	Tokens   int // tokens of its prompt
	Arrival  time.Time
	Deadline time.Time // zero: none; requests with a deadline are served first, the earliest deadline before the others
	Reserved bool      // the request has a place in the pool already, because it is a retry
	Target   string    // the only engine to which the request may go; empty: it may go to any

	number       uint64 // counts arrivals; orders requests that arrived at the same time
	heldIn       uint64 // the last round in which the request was held
	fixed        bool   // the request must not be displaced
	line         *ModelQueue[T]
	retriesIndex int           // index in the heap of retries, -1: not in it
	dueIndex     int           // index in the heap of deadlines, -1: not in it
	lane         *flowQueue[T] // nil: the request is a retry, or does not wait
	element      *list.Element
}

// ModelQueue holds the requests for one model. Retries are kept apart from lanes. They have a place in the pool already, so
// they must not wait behind a request that still needs a place; and their key was charged for its turn already.
type ModelQueue[T any] struct {
	queue   *Queue[T]
	retries ordered[*Item[T]]
	lanes   map[*flow[T]]*flowQueue[T]
	turns   ordered[*flowQueue[T]] // its first lane is served next
	longest ordered[*flowQueue[T]] // its first lane gives way first if the line is full
	fresh   int                    // requests in all lanes
	batch   int                    // the part of fresh that has priority Batch
	tokens  int64                  // prompt tokens of the part of fresh that is not batch

	settledIn, shutIn, heldIn uint64 // the last rounds in which Settle, Shut and Hold were called
	retryHeldIn               uint64 // the last round in which a retry was held
	holds                     int    // requests that were held in round heldIn
	closed                    []aim  // what HoldAll has held in round heldIn
}

// aim stands for the requests of a line that HoldAll holds: those with a target that are retries (reserved), or those that are not.
type aim struct {
	target   string
	reserved bool
}

// New returns a queue in which no request waits.
func New[T any]() *Queue[T] {
	return &Queue[T]{
		lines: map[string]*ModelQueue[T]{}, classes: map[int]*class[T]{},
		due: ordered[*Item[T]]{before: func(a, b *Item[T]) bool { return a.Deadline.Before(b.Deadline) },
			index: func(item *Item[T]) *int { return &item.dueIndex }},
	}
}

// ModelQueue returns a model's line, which the first call makes.
func (q *Queue[T]) ModelQueue(model string) *ModelQueue[T] {
	l := q.lines[model]
	if l == nil {
		l = &ModelQueue[T]{
			queue:   q,
			retries: ordered[*Item[T]]{before: (*Item[T]).before, index: func(item *Item[T]) *int { return &item.retriesIndex }},
			lanes:   map[*flow[T]]*flowQueue[T]{},
			turns: ordered[*flowQueue[T]]{before: func(a, b *flowQueue[T]) bool { return a.first().before(b.first()) },
				index: func(l *flowQueue[T]) *int { return &l.turnsIndex }},
			longest: ordered[*flowQueue[T]]{before: (*flowQueue[T]).givesWayBefore, index: func(l *flowQueue[T]) *int { return &l.longestIndex }},
		}
		q.lines[model] = l
	}
	return l
}

// Drop removes a model's line, which must be empty.
func (q *Queue[T]) Drop(model string) { delete(q.lines, model) }

// Len is how many requests wait, retries included.
func (q *Queue[T]) Len() int { return q.waiting }

// ByPriority counts the waiting requests of each priority, without retries.
func (q *Queue[T]) ByPriority() map[int]int {
	n := map[int]int{}
	for priority, c := range q.classes {
		n[priority] = c.waiting
	}
	return n
}

// Fresh is how many requests wait in the line, without retries and batch.
func (l *ModelQueue[T]) Fresh() int { return l.fresh - l.batch }

// Online reports whether a request waits that is not batch.
func (l *ModelQueue[T]) Online() bool {
	return l.Fresh() > 0 || l.retries.Len() > 0 && l.retries.members[0].Priority != Batch
}

// Tokens is the sum of the prompt tokens of the requests that Fresh counts.
func (l *ModelQueue[T]) Tokens() int64 { return l.tokens }

// Empty reports whether no request waits in the line.
func (l *ModelQueue[T]) Empty() bool { return l.fresh+l.retries.Len() == 0 }

// Backlog is the number of waiting requests, with retries and without batch, and the sum of their prompt tokens.
func (l *ModelQueue[T]) Backlog() (requests int, tokens int64) {
	requests, tokens = l.Fresh(), l.tokens
	for _, item := range l.retries.members {
		if item.Priority != Batch {
			requests, tokens = requests+1, tokens+int64(item.Tokens)
		}
	}
	return requests, tokens
}

// Waits reports whether any request waits that could be served now. If places is false, the pool is full and only retries
// could be.
func (l *ModelQueue[T]) Waits(places bool) bool { return l.next(places) != nil }

// StartRound begins another round over the waiting requests.
func (q *Queue[T]) StartRound() {
	q.round++
	q.places, q.holds = true, 0
}

// Round is the number of the present round.
func (q *Queue[T]) Round() uint64 { return q.round }

// A round ends for a line after roundDepth held requests in all lines, but not before lineDepth held requests of the line
// itself: a model whose requests are all held must not keep the requests of another model from free engines. Nor may a key
// whose requests are all held keep another key from them. So until keysDepth requests are held, the round goes on with those
// lanes of the line in which no request is held yet, and with the retries if none of them is.
const roundDepth, keysDepth, lineDepth = 64, 128, 4

// Next is the first request that may still be served in this round and was not held in it; nil: the round is over.
func (q *Queue[T]) Next() (first *Item[T]) {
	for _, l := range q.lines {
		tooDeep := q.holds >= roundDepth && l.heldIn == q.round && l.holds >= lineDepth
		if l.shutIn == q.round || tooDeep && q.holds >= keysDepth {
			continue
		}
		places := q.places && l.settledIn != q.round
		if item := l.nextNotHeld(q.round, places, tooDeep); item != nil && (first == nil || item.before(first)) {
			first = item
		}
	}
	return first
}

// NoPlaces notes that the pool has no place left in this round, so that only retries can be served.
func (q *Queue[T]) NoPlaces() { q.places = false }

// Hold notes that this request cannot be served in this round. Requests behind it still can.
func (i *Item[T]) Hold() {
	l, round := i.line, i.line.queue.round
	if l.heldIn != round {
		l.heldIn, l.holds, l.closed = round, 0, l.closed[:0]
	}
	i.heldIn = round
	if i.lane != nil {
		i.lane.heldIn = round
	} else {
		l.retryHeldIn = round
	}
	l.holds++
	l.queue.holds++
}

// HoldAll holds this request, which has a target, and all requests of the line with the same target: if it is a retry, all retries with
// this target, else all first attempts. The round does not look at them.
func (i *Item[T]) HoldAll() {
	i.Hold()
	i.line.closed = append(i.line.closed, aim{i.Target, i.Reserved})
}

// held reports whether the request was held in a round, by its own Hold or by HoldAll of another request.
func (i *Item[T]) held(round uint64) bool {
	return i.heldIn == round || i.Target != "" && i.line.heldIn == round && slices.Contains(i.line.closed, aim{i.Target, i.Reserved})
}

// Settle notes that only retries of the line can be served in this round.
func (l *ModelQueue[T]) Settle() { l.settledIn = l.queue.round }

// Shut notes that no request of the line can be served in this round.
func (l *ModelQueue[T]) Shut() { l.shutIn = l.queue.round }

// before reports whether a request is served before another one, of the same line or not.
func (i *Item[T]) before(other *Item[T]) bool {
	switch {
	case i.Priority != other.Priority:
		return i.Priority > other.Priority
	case i.Reserved != other.Reserved:
		return i.Reserved
	case !i.Deadline.Equal(other.Deadline):
		return i.sooner(other)
	case i.lane != nil && other.lane != nil && i.lane.due != other.lane.due:
		return i.lane.due < other.lane.due
	}
	return i.olderThan(other)
}

// sooner reports whether the deadline of a request comes before the deadline of another request. The deadlines must
// differ; a request without a deadline comes last.
func (i *Item[T]) sooner(other *Item[T]) bool {
	return !i.Deadline.IsZero() && (other.Deadline.IsZero() || i.Deadline.Before(other.Deadline))
}

// beforeInLane reports whether a request is served before another one of the same key: by deadline, then by arrival.
func (i *Item[T]) beforeInLane(other *Item[T]) bool {
	if !i.Deadline.Equal(other.Deadline) {
		return i.sooner(other)
	}
	return i.olderThan(other)
}

// olderThan reports whether a request arrived before another one. Of two requests with the same arrival time, the one
// that was added first is older.
func (i *Item[T]) olderThan(other *Item[T]) bool {
	if !i.Arrival.Equal(other.Arrival) {
		return i.Arrival.Before(other.Arrival)
	}
	return i.number < other.number
}

// next is the request of the line that is served first; nil: none can be. If places is false, the pool is full and only
// retries can be served.
func (l *ModelQueue[T]) next(places bool) (first *Item[T]) {
	if l.retries.Len() > 0 {
		first = l.retries.members[0]
	}
	if places && l.fresh > 0 {
		if item := l.turns.members[0].first(); first == nil || item.before(first) {
			first = item
		}
	}
	return first
}

// nextNotHeld is next without the requests that were held in the round. It goes through all requests only if the first
// one was held, which is rare. If newLanes is true, it also leaves out the lanes of which a request was held, and all
// retries if one of them was.
func (l *ModelQueue[T]) nextNotHeld(round uint64, places, newLanes bool) *Item[T] {
	first := l.next(places)
	if first == nil || !first.held(round) && !newLanes {
		return first
	}
	first = nil
	consider := func(item *Item[T]) {
		if first == nil || item.before(first) {
			first = item
		}
	}
	for _, item := range l.retries.members {
		if !item.held(round) && !(newLanes && l.retryHeldIn == round) {
			consider(item)
		}
	}
	if !places {
		return first
	}
	for _, lane := range l.turns.members {
		if newLanes && lane.heldIn == round {
			continue
		}
		for element := lane.items.Front(); element != nil; element = element.Next() {
			if item := element.Value.(*Item[T]); !item.held(round) {
				consider(item)
				break
			}
		}
	}
	return first
}

// Add puts a request in the line: among the retries, or in its key's lane by deadline and first arrival.
func (l *ModelQueue[T]) Add(item *Item[T]) {
	q := l.queue
	if item.number == 0 { // a request that MakeRoom puts back keeps its number
		q.arrivals++
		item.number = q.arrivals
	}
	item.line, item.retriesIndex, item.dueIndex = l, -1, -1
	q.waiting++
	if !item.Deadline.IsZero() && !item.fixed {
		heap.Push(&q.due, item)
	}
	if item.Reserved {
		heap.Push(&l.retries, item)
		return
	}
	lane := l.laneOf(q.flowOf(item.Priority, item.Key))
	lane.insert(item)
	l.count(item, 1)
	lane.class.waiting++
	if lane.items.Len() == 1 {
		heap.Push(&l.turns, lane)
		heap.Push(&l.longest, lane)
	} else {
		heap.Fix(&l.turns, lane.turnsIndex)
		heap.Fix(&l.longest, lane.longestIndex)
	}
}

// count adds a request to the line's counts if n is 1, and subtracts it if n is -1.
func (l *ModelQueue[T]) count(item *Item[T], n int) {
	l.fresh += n
	if item.Priority == Batch {
		l.batch += n
	} else {
		l.tokens += int64(n * item.Tokens)
	}
}

// laneOf returns the lane of a key in this line, and makes it if there is none.
func (l *ModelQueue[T]) laneOf(f *flow[T]) *flowQueue[T] {
	keyLane := l.lanes[f]
	if keyLane == nil {
		keyLane = &flowQueue[T]{flow: f, line: l}
		l.lanes[f] = keyLane
		f.lanes = append(f.lanes, keyLane)
	}
	return keyLane
}

// Remove takes the request out of the queue. It reports whether the request still waited.
func (i *Item[T]) Remove() bool {
	l := i.line
	if i.Reserved {
		if i.retriesIndex < 0 {
			return false
		}
		heap.Remove(&l.retries, i.retriesIndex)
		l.queue.waiting--
		i.forgetDeadline()
		return true
	}
	lane := i.lane
	if lane == nil {
		return false
	}
	if lane.items.Len() == 1 {
		heap.Remove(&l.turns, lane.turnsIndex)
		heap.Remove(&l.longest, lane.longestIndex)
		delete(l.lanes, lane.flow)
		lane.close()
	}
	lane.items.Remove(i.element)
	if !i.fixed {
		lane.displaceable--
	}
	if lane.items.Len() > 0 {
		heap.Fix(&l.turns, lane.turnsIndex)
		heap.Fix(&l.longest, lane.longestIndex)
	}
	i.lane, i.element = nil, nil
	i.forgetDeadline()
	l.count(i, -1)
	l.queue.waiting--
	if lane.class.waiting--; lane.class.waiting == 0 {
		delete(l.queue.classes, lane.priority)
	}
	return true
}

// Waits reports whether the request waits in a lane. Retries do not wait in lanes, and cannot be displaced.
func (i *Item[T]) Waits() bool { return i.lane != nil }

// Served notes that the request is served: its tokens move the next turn of its key back, in the lines of all models. It
// must be called before Remove.
func (i *Item[T]) Served() {
	if i.lane == nil {
		return
	}
	f := i.lane.flow
	f.class.clock = max(f.class.clock, f.due)
	f.due += int64(max(1, i.Tokens))
	for _, l := range f.lanes {
		heap.Fix(&l.line.turns, l.turnsIndex)
	}
}

// forgetDeadline takes the request out of the heap of deadlines, if it is there.
func (i *Item[T]) forgetDeadline() {
	if i.dueIndex >= 0 {
		heap.Remove(&i.line.queue.due, i.dueIndex)
	}
}

// NextDeadline is the request with the earliest deadline; nil: no request that waits has a deadline.
func (q *Queue[T]) NextDeadline() *Item[T] {
	if q.due.Len() == 0 {
		return nil
	}
	return q.due.members[0]
}

// Fix keeps the request in the line: it can no longer be displaced, and NextDeadline no longer returns it. Its deadline
// still orders it.
func (i *Item[T]) Fix() {
	if i.lane == nil || i.fixed {
		return
	}
	i.fixed = true
	i.forgetDeadline()
	i.lane.displaceable--
	heap.Fix(&i.line.longest, i.lane.longestIndex)
}

// MakeRoom displaces requests until the line has room for n more of a priority and key. limit is how many requests may
// wait in the line, without retries. If displacing cannot make enough room, none is displaced and ok is false.
func (l *ModelQueue[T]) MakeRoom(priority int, key string, n, limit int) (displaced []*Item[T], ok bool) {
	ownWaiting := l.waitingOf(priority, key) + n
	over := l.fresh + n - limit
	if priority == Batch {
		over = max(over, l.batch+n-Share(limit))
	}
	for ; over > 0; over-- {
		item := l.yields(priority, key, ownWaiting)
		if item == nil {
			for _, item := range displaced {
				l.Add(item)
			}
			return nil, false
		}
		item.Remove()
		displaced = append(displaced, item)
	}
	return displaced, true
}

// Share is how many batch requests may wait in a line, if limit requests may wait in it.
func Share(limit int) int { return max(1, limit/2) }

// yields is the request that leaves a full line to make room for a new request with this priority and key; nil: there is
// none. It is the last displaceable request of the lane that gives way first. A lane of a higher priority does not yield.
// A lane of the same priority yields only if it is longer than ownWaiting, the length that the new request's lane gets.
func (l *ModelQueue[T]) yields(priority int, key string, ownWaiting int) *Item[T] {
	if l.longest.Len() == 0 {
		return nil
	}
	lane := l.longest.members[0]
	switch {
	case lane.displaceable == 0, lane.priority > priority:
		return nil
	case lane.priority == priority && (lane.key == key || lane.items.Len() <= ownWaiting):
		return nil
	}
	element := lane.items.Back()
	for element.Value.(*Item[T]).fixed {
		element = element.Prev()
	}
	return element.Value.(*Item[T])
}

// waitingOf is how many requests of a key wait.
func (l *ModelQueue[T]) waitingOf(priority int, key string) int {
	if c := l.queue.classes[priority]; c != nil {
		if lane := l.lanes[c.flows[key]]; lane != nil {
			return lane.items.Len()
		}
	}
	return 0
}
