// Package queue holds the requests that wait for a prefill engine. It serves the highest priority first. Within a
// priority, the earliest deadline comes first; requests without a deadline follow, and their keys take turns; within
// a key, the request that arrived first comes first. So a queue with one key, or none, and without deadlines is first
// come, first served.
//
// Each model has a line. A round looks at the requests of all lines in one order; its owner says of each request
// whether it was served, is held, or shuts its line. The package has no clock and no lock.
package queue

import (
	"container/heap"
	"container/list"
	"math"
	"time"
)

// Batch is the priority below all others, for requests that take only what others leave. Batch requests have at most
// half of the places of a line, and count in no backlog.
const Batch = math.MinInt

// Queue is the lines of all models.
type Queue[T any] struct {
	lines    map[string]*Line[T]
	classes  map[int]*class[T]
	due      ordered[*Entry[T]] // the requests with a deadline
	waiting  int
	arrivals uint64

	round  uint64
	places bool // the pool has room in this round
	holds  int  // requests that were held in this round
}

// Entry is one request that waits. Its owner sets the exported fields before Add, and does not change them any more.
type Entry[T any] struct {
	Of       T // the request
	Key      string
	Priority int
	Tokens   int // tokens of its prompt
	Arrival  time.Time
	Deadline time.Time // earlier deadlines are served first, and before requests without one; zero: it has none
	Reserved bool      // it holds a place in the pool already, as a retry does

	number       uint64 // number of its arrival, for requests that arrived at the same time
	heldIn       uint64 // the round in which it was held last
	fixed        bool   // it must not be displaced
	line         *Line[T]
	retriesIndex int      // index in the heap of retries, -1: not there
	dueIndex     int      // index in the heap of deadlines, -1: not there
	lane         *lane[T] // where it waits if it is no retry; nil: it does not wait there
	element      *list.Element
}

// Line holds the requests for one model. Retries are kept apart: they have a place in the pool already, so they must
// not wait behind a request that waits for a place, and they have had their turn.
type Line[T any] struct {
	queue   *Queue[T]
	retries ordered[*Entry[T]]
	lanes   map[*flow[T]]*lane[T]
	turns   ordered[*lane[T]] // the first lane is served next
	longest ordered[*lane[T]] // the first lane gives way first if the line is full
	fresh   int               // requests in all lanes
	batch   int               // of fresh, those of priority Batch
	tokens  int64             // prompt tokens of the other fresh requests

	settledIn, shutIn, heldIn uint64 // the last rounds in which Settle, Shut and Hold were called
	holds                     int    // requests that were held in round heldIn
}

// New returns a queue in which no request waits.
func New[T any]() *Queue[T] {
	return &Queue[T]{
		lines: map[string]*Line[T]{}, classes: map[int]*class[T]{},
		due: ordered[*Entry[T]]{before: func(a, b *Entry[T]) bool { return a.Deadline.Before(b.Deadline) },
			place: func(e *Entry[T]) *int { return &e.dueIndex }},
	}
}

// Line returns a model's line, and makes it when it is first asked for.
func (q *Queue[T]) Line(model string) *Line[T] {
	l := q.lines[model]
	if l == nil {
		l = &Line[T]{
			queue:   q,
			retries: ordered[*Entry[T]]{before: (*Entry[T]).before, place: func(e *Entry[T]) *int { return &e.retriesIndex }},
			lanes:   map[*flow[T]]*lane[T]{},
			turns: ordered[*lane[T]]{before: func(a, b *lane[T]) bool { return a.first().before(b.first()) },
				place: func(l *lane[T]) *int { return &l.turnsIndex }},
			longest: ordered[*lane[T]]{before: (*lane[T]).givesWayBefore, place: func(l *lane[T]) *int { return &l.longestIndex }},
		}
		q.lines[model] = l
	}
	return l
}

// Drop forgets a model's line, which must be empty.
func (q *Queue[T]) Drop(model string) { delete(q.lines, model) }

// Len is how many requests wait, retries included.
func (q *Queue[T]) Len() int { return q.waiting }

// ByPriority counts the requests that wait by priority, without retries.
func (q *Queue[T]) ByPriority() map[int]int {
	n := map[int]int{}
	for priority, c := range q.classes {
		n[priority] = c.waiting
	}
	return n
}

// Fresh is how many requests wait in the line, without retries and batch.
func (l *Line[T]) Fresh() int { return l.fresh - l.batch }

// Online reports whether a request waits that is not batch.
func (l *Line[T]) Online() bool {
	return l.Fresh() > 0 || l.retries.Len() > 0 && l.retries.members[0].Priority != Batch
}

// Tokens is the prompt tokens of the requests that Fresh counts.
func (l *Line[T]) Tokens() int64 { return l.tokens }

// Empty reports whether no request waits in the line.
func (l *Line[T]) Empty() bool { return l.fresh+l.retries.Len() == 0 }

// Backlog is how many requests wait, with retries and without batch, and the tokens of their prompts.
func (l *Line[T]) Backlog() (requests int, tokens int64) {
	requests, tokens = l.Fresh(), l.tokens
	for _, e := range l.retries.members {
		if e.Priority != Batch {
			requests, tokens = requests+1, tokens+int64(e.Tokens)
		}
	}
	return requests, tokens
}

// Waits reports whether a request waits that would be served before a new one. If places is false, there is no place
// in the pool, and only retries count.
func (l *Line[T]) Waits(places bool) bool { return l.next(places) != nil }

// StartRound begins another round of looking at the requests that wait.
func (q *Queue[T]) StartRound() {
	q.round++
	q.places, q.holds = true, 0
}

// Round is the number of the present round.
func (q *Queue[T]) Round() uint64 { return q.round }

// A round looks past roundDepth held requests, and past lineDepth of each line all the same: a model whose requests are all held must not
// keep another model from engines that are free.
const roundDepth, lineDepth = 64, 4

// Next is the first request that was not held in this round; nil: the round is over.
func (q *Queue[T]) Next() (first *Entry[T]) {
	for _, l := range q.lines {
		if l.shutIn == q.round || q.holds >= roundDepth && l.heldIn == q.round && l.holds >= lineDepth {
			continue
		}
		if e := l.nextBut(q.round, q.places && l.settledIn != q.round); e != nil && (first == nil || e.before(first)) {
			first = e
		}
	}
	return first
}

// NoPlaces says that the pool has no place left in this round: only retries may pass.
func (q *Queue[T]) NoPlaces() { q.places = false }

// Hold says that this request cannot pass in this round. Requests behind it still can.
func (e *Entry[T]) Hold() {
	l, round := e.line, e.line.queue.round
	if l.heldIn != round {
		l.heldIn, l.holds = round, 0
	}
	e.heldIn = round
	l.holds++
	l.queue.holds++
}

// Settle says that no first attempt of the line can pass in this round.
func (l *Line[T]) Settle() { l.settledIn = l.queue.round }

// Shut says that no request of the line can pass in this round.
func (l *Line[T]) Shut() { l.shutIn = l.queue.round }

// before reports whether a request is served before another one of any line.
func (e *Entry[T]) before(other *Entry[T]) bool {
	switch {
	case e.Priority != other.Priority:
		return e.Priority > other.Priority
	case e.Reserved != other.Reserved:
		return e.Reserved
	case !e.Deadline.Equal(other.Deadline):
		return e.sooner(other)
	case e.lane != nil && other.lane != nil && e.lane.due != other.lane.due:
		return e.lane.due < other.lane.due
	}
	return e.olderThan(other)
}

// sooner reports whether the deadline of a request is before that of another one, which has a different deadline or
// none.
func (e *Entry[T]) sooner(other *Entry[T]) bool {
	return !e.Deadline.IsZero() && (other.Deadline.IsZero() || e.Deadline.Before(other.Deadline))
}

// beforeInLane reports whether a request is served before another one of the same key: by deadline, then by arrival.
func (e *Entry[T]) beforeInLane(other *Entry[T]) bool {
	if !e.Deadline.Equal(other.Deadline) {
		return e.sooner(other)
	}
	return e.olderThan(other)
}

// olderThan reports whether a request arrived before another one; of two that arrived at the same time, the one that was
// added first did.
func (e *Entry[T]) olderThan(other *Entry[T]) bool {
	if !e.Arrival.Equal(other.Arrival) {
		return e.Arrival.Before(other.Arrival)
	}
	return e.number < other.number
}

// next is the request of the line that is served first; nil: none waits. If places is false there is no place in the
// pool, and only retries count.
func (l *Line[T]) next(places bool) (first *Entry[T]) {
	if l.retries.Len() > 0 {
		first = l.retries.members[0]
	}
	if places && l.fresh > 0 {
		if e := l.turns.members[0].first(); first == nil || e.before(first) {
			first = e
		}
	}
	return first
}

// nextBut is next, but without the requests that were held in the round. Nearly always the first request was not held;
// only if it was are all requests looked at.
func (l *Line[T]) nextBut(round uint64, places bool) *Entry[T] {
	first := l.next(places)
	if first == nil || first.heldIn != round {
		return first
	}
	first = nil
	consider := func(e *Entry[T]) {
		if first == nil || e.before(first) {
			first = e
		}
	}
	for _, e := range l.retries.members {
		if e.heldIn != round {
			consider(e)
		}
	}
	if !places {
		return first
	}
	for _, lane := range l.turns.members {
		for element := lane.entries.Front(); element != nil; element = element.Next() {
			if e := element.Value.(*Entry[T]); e.heldIn != round {
				consider(e)
				break
			}
		}
	}
	return first
}

// Add puts a request at its place among those of its key, by its deadline and its first arrival.
func (l *Line[T]) Add(e *Entry[T]) {
	q := l.queue
	if e.number == 0 { // it is new, and was not displaced a moment ago
		q.arrivals++
		e.number = q.arrivals
	}
	e.line, e.retriesIndex, e.dueIndex = l, -1, -1
	q.waiting++
	if !e.Deadline.IsZero() && !e.fixed {
		heap.Push(&q.due, e)
	}
	if e.Reserved {
		heap.Push(&l.retries, e)
		return
	}
	f := q.flowOf(e.Priority, e.Key)
	lane := l.laneOf(f)
	before := lane.entries.Back() // nearly every new request belongs at the end
	for before != nil && e.beforeInLane(before.Value.(*Entry[T])) {
		before = before.Prev()
	}
	if before == nil {
		e.element = lane.entries.PushFront(e)
	} else {
		e.element = lane.entries.InsertAfter(e, before)
	}
	e.lane = lane
	l.count(e, 1)
	f.class.waiting++
	if !e.fixed {
		lane.loose++
	}
	if lane.entries.Len() == 1 {
		heap.Push(&l.turns, lane)
		heap.Push(&l.longest, lane)
	} else {
		heap.Fix(&l.turns, lane.turnsIndex)
		heap.Fix(&l.longest, lane.longestIndex)
	}
}

// count adds a request to the line's counts if n is 1, and takes it off if n is -1.
func (l *Line[T]) count(e *Entry[T], n int) {
	l.fresh += n
	if e.Priority == Batch {
		l.batch += n
	} else {
		l.tokens += int64(n * e.Tokens)
	}
}

// laneOf returns the lane of a key in this line, and makes it if there is none.
func (l *Line[T]) laneOf(f *flow[T]) *lane[T] {
	keyLane := l.lanes[f]
	if keyLane == nil {
		keyLane = &lane[T]{flow: f, line: l}
		l.lanes[f] = keyLane
		f.lanes = append(f.lanes, keyLane)
	}
	return keyLane
}

// Remove takes the request out of the queue. It reports whether the request still waited.
func (e *Entry[T]) Remove() bool {
	l := e.line
	if e.Reserved {
		if e.retriesIndex < 0 {
			return false
		}
		heap.Remove(&l.retries, e.retriesIndex)
		l.queue.waiting--
		e.forgetDeadline()
		return true
	}
	lane := e.lane
	if lane == nil {
		return false
	}
	if lane.entries.Len() == 1 {
		heap.Remove(&l.turns, lane.turnsIndex)
		heap.Remove(&l.longest, lane.longestIndex)
		delete(l.lanes, lane.flow)
		lane.close()
	}
	lane.entries.Remove(e.element)
	if !e.fixed {
		lane.loose--
	}
	if lane.entries.Len() > 0 {
		heap.Fix(&l.turns, lane.turnsIndex)
		heap.Fix(&l.longest, lane.longestIndex)
	}
	e.lane, e.element = nil, nil
	e.forgetDeadline()
	l.count(e, -1)
	l.queue.waiting--
	if lane.class.waiting--; lane.class.waiting == 0 {
		delete(l.queue.classes, lane.priority)
	}
	return true
}

// Waits reports whether the request waits in a lane, where it can be displaced or passed: it is no retry and has not
// left.
func (e *Entry[T]) Waits() bool { return e.lane != nil }

// Served moves the request's key back in the turns of its lines, because it was served. It must be called before
// Remove.
func (e *Entry[T]) Served() {
	if e.lane == nil {
		return
	}
	f := e.lane.flow
	f.class.clock = max(f.class.clock, f.due)
	f.due += int64(max(1, e.Tokens))
	for _, l := range f.lanes {
		heap.Fix(&l.line.turns, l.turnsIndex)
	}
}

// forgetDeadline takes the request out of the heap of deadlines, if it is there.
func (e *Entry[T]) forgetDeadline() {
	if e.dueIndex >= 0 {
		heap.Remove(&e.line.queue.due, e.dueIndex)
	}
}

// NextDeadline is the request with the earliest deadline; nil: no request that waits has a deadline.
func (q *Queue[T]) NextDeadline() *Entry[T] {
	if q.due.Len() == 0 {
		return nil
	}
	return q.due.members[0]
}

// Fix keeps a request from being displaced, and its deadline from ending it: the deadline only orders from now on.
func (e *Entry[T]) Fix() {
	if e.lane == nil || e.fixed {
		return
	}
	e.fixed = true
	e.forgetDeadline()
	e.lane.loose--
	heap.Fix(&e.line.longest, e.lane.longestIndex)
}

// MakeRoom displaces requests until the line has room for n more of a priority and key; limit is how many requests may
// wait in the line, retries not counted. If that room cannot be made it displaces none, and ok is false.
func (l *Line[T]) MakeRoom(priority int, key string, n, limit int) (displaced []*Entry[T], ok bool) {
	ownWaiting := l.waitingOf(priority, key) + n
	over := l.fresh + n - limit
	if priority == Batch {
		over = max(over, l.batch+n-Share(limit))
	}
	for ; over > 0; over-- {
		e := l.yields(priority, key, ownWaiting)
		if e == nil {
			for _, e := range displaced {
				l.Add(e)
			}
			return nil, false
		}
		e.Remove()
		displaced = append(displaced, e)
	}
	return displaced, true
}

// Share is how many requests of a line with so many places may be batch.
func Share(most int) int { return max(1, most/2) }

// yields is the request that leaves a full line for a request of that priority and key; nil: there is none. It is the
// last request of the key that has the most requests in the lowest class. In the request's own class, a key yields only
// if it has more than ownWaiting requests, which is how many of the request's own key would wait then.
func (l *Line[T]) yields(priority int, key string, ownWaiting int) *Entry[T] {
	if l.longest.Len() == 0 {
		return nil
	}
	lane := l.longest.members[0]
	switch {
	case lane.loose == 0, lane.priority > priority:
		return nil
	case lane.priority == priority && (lane.key == key || lane.entries.Len() <= ownWaiting):
		return nil
	}
	element := lane.entries.Back()
	for element.Value.(*Entry[T]).fixed {
		element = element.Prev()
	}
	return element.Value.(*Entry[T])
}

// waitingOf is how many requests of a key wait.
func (l *Line[T]) waitingOf(priority int, key string) int {
	if c := l.queue.classes[priority]; c != nil {
		if lane := l.lanes[c.flows[key]]; lane != nil {
			return lane.entries.Len()
		}
	}
	return 0
}
