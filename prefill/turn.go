package prefill

import (
	"container/heap"
	"container/list"
	"slices"
)

// The arrival queue serves the highest priority first; within one, keys in
// turn; of one key, whoever arrived first. Whose turn it is follows from what
// each key was served of late, in prompt tokens (start-time fair queueing, Goyal
// 1996): two keys that both wait never differ by more than a request of each. A
// queue of one key, or of none, is first come, first served.

// queue holds who waits for a model. Retries stand apart: they hold a place in
// the pool, so they must not wait behind a request that waits for one, and
// their turn has been.
type queue struct {
	retries ordered[*waiter]
	lanes   map[*flow]*lane
	turns   ordered[*lane] // the first is served next
	longest ordered[*lane] // the first gives way
	fresh   int            // in all lanes
	tokens  int64          // of their prompts
}

func newQueue() queue {
	return queue{
		retries: ordered[*waiter]{before: (*waiter).before, place: func(w *waiter) *int { return &w.place }},
		lanes:   map[*flow]*lane{},
		turns:   ordered[*lane]{before: func(a, b *lane) bool { return a.first().before(b.first()) }, place: func(l *lane) *int { return &l.turn }},
		longest: ordered[*lane]{before: (*lane).givesWayBefore, place: func(l *lane) *int { return &l.length }},
	}
}

// class is one priority over all models; it is forgotten when nobody of it
// waits.
type class struct {
	clock   int64 // the virtual time: when whoever was served last was due
	flows   map[string]*flow
	waiting int
	sweepAt int // flows from which those without anything to remember are dropped
}

// flow is a key within a class.
type flow struct {
	class    *class
	priority int
	key      string
	due      int64   // virtual time of its next request: the tokens it was served, no less than the clock when it began to wait
	lanes    []*lane // where it waits, one a model
}

// lane is a flow's requests for one model.
type lane struct {
	*flow
	queue   *queue
	waiters list.List // of *waiter, by arrival
	loose   int       // of them, those that may be displaced
	turn    int       // places in the queue's heaps
	length  int
}

func (l *lane) first() *waiter { return l.waiters.Front().Value.(*waiter) }

// givesWayBefore puts the lowest class first and in it the key that has most:
// a key that fills the queue gives way to those that do not.
func (l *lane) givesWayBefore(o *lane) bool {
	switch {
	case (l.loose == 0) != (o.loose == 0):
		return o.loose == 0
	case l.priority != o.priority:
		return l.priority < o.priority
	}
	return l.waiters.Len() > o.waiters.Len()
}

// before says who is served first.
func (w *waiter) before(o *waiter) bool {
	switch {
	case w.Priority != o.Priority:
		return w.Priority > o.Priority
	case w.Reserved != o.Reserved:
		return w.Reserved
	case w.lane != nil && o.lane != nil && w.lane.due != o.lane.due:
		return w.lane.due < o.lane.due
	}
	return w.olderThan(o)
}

func (w *waiter) olderThan(o *waiter) bool {
	if !w.Arrival.Equal(o.Arrival) {
		return w.Arrival.Before(o.Arrival)
	}
	return w.number < o.number
}

func (q *queue) empty() bool { return q.fresh+q.retries.Len() == 0 }

// next is who is served first; without a place in the pool only a retry.
func (q *queue) next(places bool) (first *waiter) {
	if q.retries.Len() > 0 {
		first = q.retries.members[0]
	}
	if places && q.fresh > 0 {
		if w := q.turns.members[0].first(); first == nil || w.before(first) {
			first = w
		}
	}
	return first
}

// nextBut is next among those that were not held in a round.
func (q *queue) nextBut(round uint64, places bool) *waiter {
	first := q.next(places)
	if first == nil || first.heldIn != round {
		return first
	}
	first = nil
	consider := func(w *waiter) {
		if first == nil || w.before(first) {
			first = w
		}
	}
	for _, w := range q.retries.members {
		if w.heldIn != round {
			consider(w)
		}
	}
	if !places {
		return first
	}
	for _, l := range q.turns.members {
		for at := l.waiters.Front(); at != nil; at = at.Next() {
			if w := at.Value.(*waiter); w.heldIn != round {
				consider(w)
				break
			}
		}
	}
	return first
}

// add puts a waiter at its place, by its first arrival among those of its key.
func (q *queue) add(w *waiter, classes map[int]*class) {
	if w.Reserved {
		heap.Push(&q.retries, w)
		return
	}
	f := flowOf(classes, w.Priority, w.Key)
	l := q.lanes[f]
	if l == nil {
		l = &lane{flow: f, queue: q}
		q.lanes[f] = l
		f.lanes = append(f.lanes, l)
	}
	at := l.waiters.Back() // nearly all are the youngest
	for at != nil && w.olderThan(at.Value.(*waiter)) {
		at = at.Prev()
	}
	if at == nil {
		w.at = l.waiters.PushFront(w)
	} else {
		w.at = l.waiters.InsertAfter(w, at)
	}
	w.lane = l
	q.fresh++
	q.tokens += int64(w.PromptTokens)
	f.class.waiting++
	if !w.fixed {
		l.loose++
	}
	if l.waiters.Len() == 1 {
		heap.Push(&q.turns, l)
		heap.Push(&q.longest, l)
	} else {
		heap.Fix(&q.turns, l.turn)
		heap.Fix(&q.longest, l.length)
	}
}

// remove reports whether the waiter was still there.
func (q *queue) remove(w *waiter, classes map[int]*class) bool {
	if w.Reserved {
		if w.place < 0 {
			return false
		}
		heap.Remove(&q.retries, w.place)
		return true
	}
	l := w.lane
	if l == nil {
		return false
	}
	if l.waiters.Len() == 1 {
		heap.Remove(&q.turns, l.turn)
		heap.Remove(&q.longest, l.length)
		delete(q.lanes, l.flow)
		l.leave()
	}
	l.waiters.Remove(w.at)
	if !w.fixed {
		l.loose--
	}
	if l.waiters.Len() > 0 {
		heap.Fix(&q.turns, l.turn)
		heap.Fix(&q.longest, l.length)
	}
	w.lane, w.at = nil, nil
	q.fresh--
	q.tokens -= int64(w.PromptTokens)
	if l.class.waiting--; l.class.waiting == 0 {
		delete(classes, l.priority)
	}
	return true
}

// fix keeps a waiter from being displaced.
func (q *queue) fix(w *waiter) {
	if w.lane == nil || w.fixed {
		return
	}
	w.fixed = true
	w.lane.loose--
	heap.Fix(&q.longest, w.lane.length)
}

// yields is who leaves a full queue for a request of that priority and key, of
// which `own` would wait then; nil: nobody. It is the youngest of the key that
// has most in the lowest class; within the request's own class only a key that
// has more than the request's.
func (q *queue) yields(priority int, key string, own int) *waiter {
	if q.longest.Len() == 0 {
		return nil
	}
	l := q.longest.members[0]
	switch {
	case l.loose == 0, l.priority > priority:
		return nil
	case l.priority == priority && (l.key == key || l.waiters.Len() <= own):
		return nil
	}
	at := l.waiters.Back()
	for at.Value.(*waiter).fixed {
		at = at.Prev()
	}
	return at.Value.(*waiter)
}

// waitingOf is how many of a key wait.
func (q *queue) waitingOf(priority int, key string, classes map[int]*class) int {
	if c := classes[priority]; c != nil {
		if l := q.lanes[c.flows[key]]; l != nil {
			return l.waiters.Len()
		}
	}
	return 0
}

// flowOf is the flow of a key that is about to wait: one that did not wait yet
// is due now, whatever it was served long ago.
func flowOf(classes map[int]*class, priority int, key string) *flow {
	c := classes[priority]
	if c == nil {
		c = &class{flows: map[string]*flow{}, sweepAt: firstSweep}
		classes[priority] = c
	}
	f := c.flows[key]
	if f == nil {
		f = &flow{class: c, priority: priority, key: key, due: c.clock}
		c.flows[key] = f
	}
	if len(f.lanes) == 0 {
		f.due = max(f.due, c.clock)
	}
	return f
}

const firstSweep = 64

// served moves a waiter's flow on, in the queues of all models.
func (w *waiter) served() {
	if w.lane == nil {
		return
	}
	f := w.lane.flow
	f.class.clock = max(f.class.clock, f.due)
	f.due += int64(max(1, w.PromptTokens))
	for _, l := range f.lanes {
		heap.Fix(&l.queue.turns, l.turn)
	}
}

// leave takes an empty lane from its flow. A flow without any is remembered
// until the clock has passed it, so that who comes back at once has no turn to
// gain.
func (l *lane) leave() {
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

// ordered is a heap whose members know their places, -1 outside of it.
type ordered[T any] struct {
	members []T
	before  func(a, b T) bool
	place   func(T) *int
}

// Len, Less, Swap, Push and Pop are for container/heap.
func (o *ordered[T]) Len() int           { return len(o.members) }
func (o *ordered[T]) Less(i, j int) bool { return o.before(o.members[i], o.members[j]) }

func (o *ordered[T]) Swap(i, j int) {
	o.members[i], o.members[j] = o.members[j], o.members[i]
	*o.place(o.members[i]), *o.place(o.members[j]) = i, j
}

func (o *ordered[T]) Push(x any) {
	*o.place(x.(T)) = len(o.members)
	o.members = append(o.members, x.(T))
}

func (o *ordered[T]) Pop() any {
	last := len(o.members) - 1
	x := o.members[last]
	var none T
	o.members[last] = none
	o.members = o.members[:last]
	*o.place(x) = -1
	return x
}
