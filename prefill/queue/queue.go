// Package queue holds the requests that wait for a prefill engine. The highest priority is served
// first; within a priority the earliest deadline, then the requests without a deadline, whose keys
// take turns; within a key the request that arrived first.
//
// Each model has a queue. A round goes through the requests of all model queues in this order. The
// caller serves each request, defers it to the next round, or closes its model queue for the round.
// The package has no clock and no lock.
package queue

import (
	"container/heap"
	"container/list"
	"math"
	"slices"
	"time"
)

// Batch is the lowest priority, for requests that only use capacity that no other request needs. At
// most half of the requests that may wait in a model queue can be batch.
const Batch = math.MinInt

type Queue[T any] struct {
	modelQueues map[string]*ModelQueue[T]
	classes     map[int]*class[T]
	byDeadline  ordered[*Item[T]] // not pinned; the earliest deadline first
	waiting     int
	arrivals    uint64

	round uint64
	// placesFree says that the pool of prefilled requests that wait for decode has a place left in
	// this round. Otherwise only retries can be served, because they have a place already.
	placesFree bool
	deferrals  int // in this round
}

// Item is one request that waits. The caller sets the exported fields before Add, and must not
// change them afterwards.
type Item[T any] struct {
	Value    T // the request itself
	Key      string
	Priority int
	Tokens   int // of the prompt
	Arrival  time.Time
	Deadline time.Time // latest time of the first token; zero: none
	HasPlace bool      // the request is a retry, with a place in the pool of prefilled requests
	Target   string    // ID of the only engine that may serve the request; empty: any

	number        uint64 // position in the order of Add
	deferredIn    uint64 // the last round in which the request was deferred
	pinned        bool   // must not be displaced
	modelQueue    *ModelQueue[T]
	retriesIndex  int           // -1: not in the heap
	deadlineIndex int           // -1: not in the heap
	flowQueue     *flowQueue[T] // nil: the request is a retry, or does not wait
	element       *list.Element
}

// ModelQueue holds the requests for one model: first attempts in a flow queue for each key, and
// retries in a heap of their own. Retries must not wait behind a request that still needs a place,
// and their key has used its turn.
type ModelQueue[T any] struct {
	queue          *Queue[T]
	retries        ordered[*Item[T]]
	flowQueues     map[*flow[T]]*flowQueue[T]
	byTurn         ordered[*flowQueue[T]] // the first one is served next
	byDisplacement ordered[*flowQueue[T]] // the first one loses a request first if the model queue is full
	firstAttempts  int                    // in all flow queues
	batchAttempts  int                    // those with priority Batch
	onlineTokens   int64                  // prompt tokens of the firstAttempts that are not batch

	onlyRetriesIn, closedIn, deferredIn uint64        // the last rounds of ServeOnlyRetries, CloseForRound, Defer
	retryDeferredIn                     uint64        // the last round in which a retry was deferred
	deferrals                           int           // in round deferredIn
	deferredTargets                     []targetClass // what DeferSameTarget has deferred in round deferredIn
}

// targetClass stands for all retries (hasPlace), or all first attempts, with the same target.
// Retries may be served where first attempts are not, because they have a place already.
type targetClass struct {
	target   string
	hasPlace bool
}

func New[T any]() *Queue[T] {
	return &Queue[T]{
		modelQueues: map[string]*ModelQueue[T]{}, classes: map[int]*class[T]{},
		byDeadline: ordered[*Item[T]]{before: func(a, b *Item[T]) bool { return a.Deadline.Before(b.Deadline) },
			index: func(item *Item[T]) *int { return &item.deadlineIndex }},
	}
}

// ModelQueue returns a model's queue, and makes it at the first call.
func (q *Queue[T]) ModelQueue(model string) *ModelQueue[T] {
	mq := q.modelQueues[model]
	if mq == nil {
		mq = &ModelQueue[T]{
			queue:      q,
			retries:    ordered[*Item[T]]{before: (*Item[T]).before, index: func(item *Item[T]) *int { return &item.retriesIndex }},
			flowQueues: map[*flow[T]]*flowQueue[T]{},
			byTurn: ordered[*flowQueue[T]]{before: func(a, b *flowQueue[T]) bool { return a.first().before(b.first()) },
				index: func(fq *flowQueue[T]) *int { return &fq.turnIndex }},
			byDisplacement: ordered[*flowQueue[T]]{before: (*flowQueue[T]).displacedBefore,
				index: func(fq *flowQueue[T]) *int { return &fq.displacementIndex }},
		}
		q.modelQueues[model] = mq
	}
	return mq
}

// DropModel removes a model's queue, which must be empty.
func (q *Queue[T]) DropModel(model string) { delete(q.modelQueues, model) }

// Len counts retries, too.
func (q *Queue[T]) Len() int { return q.waiting }

// ByPriority does not count retries.
func (q *Queue[T]) ByPriority() map[int]int {
	n := map[int]int{}
	for priority, c := range q.classes {
		n[priority] = c.waiting
	}
	return n
}

// OnlineFirstAttempts counts the requests in the model queue without retries and batch.
func (mq *ModelQueue[T]) OnlineFirstAttempts() int { return mq.firstAttempts - mq.batchAttempts }

func (mq *ModelQueue[T]) HasOnline() bool {
	onlineRetry := mq.retries.Len() > 0 && mq.retries.members[0].Priority != Batch // the first one has the highest priority
	return mq.OnlineFirstAttempts() > 0 || onlineRetry
}

// Tokens is the sum of the prompt tokens of the requests that OnlineFirstAttempts counts.
func (mq *ModelQueue[T]) Tokens() int64 { return mq.onlineTokens }

func (mq *ModelQueue[T]) Empty() bool { return mq.firstAttempts+mq.retries.Len() == 0 }

// Backlog is the number of waiting requests, with retries and without batch, and the sum of their
// prompt tokens.
func (mq *ModelQueue[T]) Backlog() (requests int, tokens int64) {
	requests, tokens = mq.OnlineFirstAttempts(), mq.onlineTokens
	for _, item := range mq.retries.members {
		if item.Priority != Batch {
			requests, tokens = requests+1, tokens+int64(item.Tokens)
		}
	}
	return requests, tokens
}

// AnyServable reports whether a request could be served now: if placesFree is false, only a retry.
func (mq *ModelQueue[T]) AnyServable(placesFree bool) bool {
	return mq.firstServable(placesFree) != nil
}

// StartRound begins another round, in which nothing is deferred yet, and the pool has places until
// MarkPoolFull is called.
func (q *Queue[T]) StartRound() {
	q.round++
	q.placesFree, q.deferrals = true, 0
}

// Round is 0 before the first StartRound.
func (q *Queue[T]) Round() uint64 { return q.round }

// These bounds keep a round short when many requests are deferred, because each later search passes
// over them. So a model or key whose requests are all deferred cannot keep the requests of others
// from free engines.
const (
	modelDepth = 4   // a model queue with fewer deferred requests is always searched as a whole
	roundDepth = 64  // deferred requests in all model queues from which on the others are searched only in part
	keysDepth  = 128 // from which on they are not searched at all
)

type searchedPart uint8

const (
	wholeQueue      searchedPart = iota
	undeferredFlows              // without flow queues that have a deferred request, and without retries if one of them is deferred
	nothing
)

// Next is the first request that may still be served in this round and was not deferred in it; nil:
// the round is over. Once many requests are deferred, it searches only a part of the model queues
// that have several of them (partToSearch).
func (q *Queue[T]) Next() (first *Item[T]) {
	for _, mq := range q.modelQueues {
		part, isClosed := q.partToSearch(mq), mq.closedIn == q.round
		if isClosed || part == nothing {
			continue
		}
		placesFree := q.placesFree && mq.onlyRetriesIn != q.round
		item := mq.firstNotDeferred(q.round, placesFree, part == undeferredFlows)
		if item != nil && (first == nil || item.before(first)) {
			first = item
		}
	}
	return first
}

func (q *Queue[T]) partToSearch(mq *ModelQueue[T]) searchedPart {
	deferredHere := 0
	if mq.deferredIn == q.round { // otherwise the count is of an earlier round
		deferredHere = mq.deferrals
	}
	switch {
	case deferredHere < modelDepth, q.deferrals < roundDepth:
		return wholeQueue
	case q.deferrals < keysDepth:
		return undeferredFlows
	}
	return nothing
}

func (q *Queue[T]) MarkPoolFull() { q.placesFree = false }

// Defer notes that this request cannot be served in this round. Requests behind it still can.
func (i *Item[T]) Defer() {
	mq, round := i.modelQueue, i.modelQueue.queue.round
	if mq.deferredIn != round { // the counts are of an earlier round
		mq.deferredIn, mq.deferrals = round, 0
		mq.deferredTargets = mq.deferredTargets[:0]
	}
	i.deferredIn = round
	if i.flowQueue != nil {
		i.flowQueue.deferredIn = round
	} else { // only retries wait outside of a flow queue
		mq.retryDeferredIn = round
	}
	mq.deferrals++
	mq.queue.deferrals++
}

// DeferSameTarget defers this request and all requests of the model queue with the same target that
// are of the same kind: retries, or first attempts.
func (i *Item[T]) DeferSameTarget() {
	i.Defer()
	i.modelQueue.deferredTargets = append(i.modelQueue.deferredTargets, targetClass{i.Target, i.HasPlace})
}

// isDeferred is true by the request's own Defer, or by DeferSameTarget of another one.
func (i *Item[T]) isDeferred(round uint64) bool {
	if i.deferredIn == round {
		return true
	}
	targetsOutdated := i.modelQueue.deferredIn != round
	if i.Target == "" || targetsOutdated {
		return false
	}
	return slices.Contains(i.modelQueue.deferredTargets, targetClass{target: i.Target, hasPlace: i.HasPlace})
}

func (mq *ModelQueue[T]) ServeOnlyRetries() { mq.onlyRetriesIn = mq.queue.round }

func (mq *ModelQueue[T]) CloseForRound() { mq.closedIn = mq.queue.round }

// before reports whether a request is served before another one, of the same model queue or not.
func (i *Item[T]) before(other *Item[T]) bool {
	switch {
	case i.Priority != other.Priority:
		return i.Priority > other.Priority
	case i.HasPlace != other.HasPlace: // a retry comes first
		return i.HasPlace
	case !i.Deadline.Equal(other.Deadline):
		return i.hasEarlierDeadline(other)
	case i.flowQueue != nil && other.flowQueue != nil && i.flowQueue.nextTurn != other.flowQueue.nextTurn: // retries take no turns
		return i.flowQueue.nextTurn < other.flowQueue.nextTurn
	}
	return i.olderThan(other)
}

// hasEarlierDeadline compares deadlines that differ. A request without one comes last.
func (i *Item[T]) hasEarlierDeadline(other *Item[T]) bool {
	return !i.Deadline.IsZero() && (other.Deadline.IsZero() || i.Deadline.Before(other.Deadline))
}

// beforeInFlow compares two requests of the same key.
func (i *Item[T]) beforeInFlow(other *Item[T]) bool {
	if !i.Deadline.Equal(other.Deadline) {
		return i.hasEarlierDeadline(other)
	}
	return i.olderThan(other)
}

func (i *Item[T]) olderThan(other *Item[T]) bool {
	if !i.Arrival.Equal(other.Arrival) {
		return i.Arrival.Before(other.Arrival)
	}
	return i.number < other.number
}

func (mq *ModelQueue[T]) firstServable(placesFree bool) (first *Item[T]) {
	if mq.retries.Len() > 0 {
		first = mq.retries.members[0]
	}
	if placesFree && mq.firstAttempts > 0 { // a first attempt needs a free place
		firstFlowQueue := mq.byTurn.members[0]
		if item := firstFlowQueue.first(); first == nil || item.before(first) {
			first = item
		}
	}
	return first
}

// firstNotDeferred, with onlyUndeferredFlows, leaves out the flow queues in which a request was
// deferred, and all retries if one was deferred.
func (mq *ModelQueue[T]) firstNotDeferred(round uint64, placesFree, onlyUndeferredFlows bool) *Item[T] {
	first := mq.firstServable(placesFree)
	if first == nil {
		return nil
	}
	if !onlyUndeferredFlows && !first.isDeferred(round) { // the usual case, which needs no search
		return first
	}
	first = mq.firstRetryNotDeferred(round, onlyUndeferredFlows)
	if !placesFree {
		return first
	}
	for _, fq := range mq.byTurn.members {
		if onlyUndeferredFlows && fq.deferredIn == round {
			continue
		}
		if item := fq.firstNotDeferred(round); item != nil && (first == nil || item.before(first)) {
			first = item
		}
	}
	return first
}

func (mq *ModelQueue[T]) firstRetryNotDeferred(round uint64, noneIfOneDeferred bool) (first *Item[T]) {
	if noneIfOneDeferred && mq.retryDeferredIn == round {
		return nil
	}
	for _, item := range mq.retries.members { // a heap: only its front is in order
		if !item.isDeferred(round) && (first == nil || item.before(first)) {
			first = item
		}
	}
	return first
}

func (fq *flowQueue[T]) firstNotDeferred(round uint64) *Item[T] {
	for element := fq.items.Front(); element != nil; element = element.Next() {
		if item := element.Value.(*Item[T]); !item.isDeferred(round) {
			return item
		}
	}
	return nil
}

// Add puts a request among the retries, or in its key's flow queue. A pinned request does not enter
// the heap of deadlines, because it must not be refused for its deadline.
func (mq *ModelQueue[T]) Add(item *Item[T]) {
	q := mq.queue
	if item.number == 0 { // a request that MakeRoom puts back keeps its number
		q.arrivals++
		item.number = q.arrivals
	}
	item.modelQueue, item.retriesIndex, item.deadlineIndex = mq, -1, -1 // in neither heap yet
	q.waiting++
	if !item.Deadline.IsZero() && !item.pinned {
		heap.Push(&q.byDeadline, item)
	}
	isRetry := item.HasPlace
	if isRetry {
		heap.Push(&mq.retries, item)
		return
	}
	fq := mq.flowQueueOf(q.flowOf(item.Priority, item.Key))
	fq.insert(item)
	mq.addToCounts(item, 1)
	fq.class.waiting++
	if fq.items.Len() == 1 { // it was empty, and so in neither heap
		heap.Push(&mq.byTurn, fq)
		heap.Push(&mq.byDisplacement, fq)
	} else { // its first request and its length may have changed
		heap.Fix(&mq.byTurn, fq.turnIndex)
		heap.Fix(&mq.byDisplacement, fq.displacementIndex)
	}
}

func (mq *ModelQueue[T]) addToCounts(item *Item[T], sign int) {
	mq.firstAttempts += sign
	if item.Priority == Batch {
		mq.batchAttempts += sign // no backlog counts batch requests, so their tokens do not count
	} else {
		mq.onlineTokens += int64(sign * item.Tokens)
	}
}

func (mq *ModelQueue[T]) flowQueueOf(f *flow[T]) *flowQueue[T] {
	keyQueue := mq.flowQueues[f]
	if keyQueue == nil {
		keyQueue = &flowQueue[T]{flow: f, modelQueue: mq}
		mq.flowQueues[f] = keyQueue
		f.queues = append(f.queues, keyQueue)
	}
	return keyQueue
}

// Remove reports whether the request still waited.
func (i *Item[T]) Remove() bool {
	isRetry := i.HasPlace
	isWaiting := i.flowQueue != nil
	if isRetry {
		isWaiting = i.retriesIndex >= 0
	}
	if !isWaiting {
		return false
	}
	if isRetry {
		heap.Remove(&i.modelQueue.retries, i.retriesIndex)
	} else {
		i.removeFromFlowQueue()
	}
	i.dropFromDeadlines()
	i.modelQueue.queue.waiting--
	return true
}

func (i *Item[T]) removeFromFlowQueue() {
	mq, fq := i.modelQueue, i.flowQueue
	if fq.items.Len() == 1 { // before the item leaves, because the heaps compare the first items
		heap.Remove(&mq.byTurn, fq.turnIndex)
		heap.Remove(&mq.byDisplacement, fq.displacementIndex)
		delete(mq.flowQueues, fq.flow)
		fq.leaveFlow()
	}
	fq.items.Remove(i.element)
	if !i.pinned {
		fq.displaceable--
	}
	if fq.items.Len() > 0 { // its first request and its length may have changed
		heap.Fix(&mq.byTurn, fq.turnIndex)
		heap.Fix(&mq.byDisplacement, fq.displacementIndex)
	}
	i.flowQueue, i.element = nil, nil
	mq.addToCounts(i, -1)
	if fq.class.waiting--; fq.class.waiting == 0 {
		delete(mq.queue.classes, fq.priority)
	}
}

// InFlowQueue is false for retries, which cannot be displaced.
func (i *Item[T]) InFlowQueue() bool { return i.flowQueue != nil }

// MarkServed must be called before Remove. The tokens of the prompt delay the next turn of its key
// in the model queues of all models (start-time fair queueing).
func (i *Item[T]) MarkServed() {
	if i.flowQueue == nil { // a retry: its key has used its turn at the first attempt
		return
	}
	f := i.flowQueue.flow
	f.class.virtualTime = max(f.class.virtualTime, f.nextTurn)
	f.nextTurn += int64(max(1, i.Tokens))
	for _, fq := range f.queues { // the key's turn has moved in each of them
		heap.Fix(&fq.modelQueue.byTurn, fq.turnIndex)
	}
}

func (i *Item[T]) dropFromDeadlines() {
	if i.deadlineIndex >= 0 {
		heap.Remove(&i.modelQueue.queue.byDeadline, i.deadlineIndex)
	}
}

// NextDeadline is the request with the earliest deadline; nil: no request that waits and is not
// pinned has one.
func (q *Queue[T]) NextDeadline() *Item[T] {
	if q.byDeadline.Len() == 0 {
		return nil
	}
	return q.byDeadline.members[0]
}

// Pin keeps a first attempt from being displaced, and from NextDeadline. Its deadline still decides
// its position. Pin does nothing for a retry, which cannot be displaced.
func (i *Item[T]) Pin() {
	if i.flowQueue == nil || i.pinned {
		return
	}
	i.pinned = true
	i.dropFromDeadlines()
	i.flowQueue.displaceable--
	heap.Fix(&i.modelQueue.byDisplacement, i.flowQueue.displacementIndex)
}

// MakeRoom displaces requests until the model queue has room for n more of a priority and key. At
// most limit requests may wait in it, without retries. A request gives way to one of a higher
// priority, and to one of the same priority whose key has fewer waiting requests. If this cannot
// make enough room, none is displaced.
func (mq *ModelQueue[T]) MakeRoom(priority int, key string, n, limit int) (displaced []*Item[T], ok bool) {
	ownLengthAfter := mq.waitingOf(priority, key) + n // of this priority, only a longer flow queue loses requests
	excess := mq.firstAttempts + n - limit
	if priority == Batch { // they have a limit of their own, and with the lowest priority they displace only each other
		excess = max(excess, mq.batchAttempts+n-MaxBatch(limit))
	}
	for ; excess > 0; excess-- {
		item := mq.toDisplace(priority, key, ownLengthAfter)
		if item == nil {
			for _, removed := range displaced { // there is not enough room
				mq.Add(removed)
			}
			return nil, false
		}
		item.Remove()
		displaced = append(displaced, item)
	}
	return displaced, true
}

// MaxBatch is how many of limit requests in a model queue may be batch.
func MaxBatch(limit int) int { return max(1, limit/2) }

// toDisplace is the request that leaves a full model queue for a new one; nil: there is none. It
// comes from a flow queue of a lower priority, or from a longer one of the same priority, so that
// no key keeps the others out. ownLengthAfter is how long the new request's flow queue will be.
func (mq *ModelQueue[T]) toDisplace(priority int, key string, ownLengthAfter int) *Item[T] {
	if mq.byDisplacement.Len() == 0 {
		return nil
	}
	fq := mq.byDisplacement.members[0]
	switch {
	case fq.displaceable == 0, fq.priority > priority:
		return nil
	case fq.priority == priority && (fq.key == key || fq.items.Len() <= ownLengthAfter):
		return nil
	}
	element := fq.items.Back() // the request that would be served last
	for element.Value.(*Item[T]).pinned {
		element = element.Prev()
	}
	return element.Value.(*Item[T])
}

func (mq *ModelQueue[T]) waitingOf(priority int, key string) int {
	if c := mq.queue.classes[priority]; c != nil {
		if fq := mq.flowQueues[c.flows[key]]; fq != nil {
			return fq.items.Len()
		}
	}
	return 0
}
