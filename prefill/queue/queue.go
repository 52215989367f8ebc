// Package queue holds the requests that wait for a prefill engine. It serves the highest priority first. Within a
// priority, the earliest deadline comes first; requests without a deadline follow, and their keys take turns; within
// a key, the request that arrived first comes first. Without deadlines, and with at most one key and priority, the
// queue is first come, first served.
//
// Each model has a queue. A round goes through the requests of all model queues in this order; the caller serves each request,
// defers it to the next round, or closes its model queue for the round. The package has no clock and no lock.
package queue

import (
	"container/heap"
	"container/list"
	"math"
	"slices"
	"time"
)

// Batch is the lowest priority, for requests that only use capacity that no other request needs. At most half of the
// requests that may wait in a model queue can be batch, and no backlog counts them.
const Batch = math.MinInt

// Queue holds the model queues of all models.
type Queue[T any] struct {
	modelQueues map[string]*ModelQueue[T]
	classes     map[int]*class[T]
	byDeadline  ordered[*Item[T]] // requests with a deadline that are not pinned, the earliest deadline first
	waiting     int
	arrivals    uint64

	round uint64
	// placesFree says that the pool of prefilled requests that wait for decode has a place left in this round. If it is false, only
	// retries can be served, because they have a place already.
	placesFree bool
	deferrals  int // requests that were deferred in this round
}

// Item is one request that waits. The caller sets the exported fields before Add, and must not change them afterwards.
type Item[T any] struct {
	Value    T // the request itself
	Key      string
	Priority int
	Tokens   int // length of the request's prompt in tokens
	Arrival  time.Time
	Deadline time.Time // latest time of the first token; zero: none. Within a priority, earlier deadlines are served first
	HasPlace bool      // the request is a retry, and has a place in the pool of prefilled requests already
	Target   string    // ID of the only engine to which the request may go; empty: any

	number        uint64 // position in the order of Add; decides between requests that arrived at the same time
	deferredIn    uint64 // the last round in which the request was deferred
	pinned        bool   // Pin was called: the request must not be displaced
	modelQueue    *ModelQueue[T]
	retriesIndex  int           // index in the heap of retries, -1: not in it
	deadlineIndex int           // index in the heap of deadlines, -1: not in it
	flowQueue     *flowQueue[T] // flow queue in which the request waits; nil: the request is a retry, or does not wait
	element       *list.Element
}

// ModelQueue holds the requests for one model. First attempts wait in flow queues, one for each key. Retries wait in a heap of
// their own, because they have a place in the pool already and must not wait behind a request that still needs one. Their key has
// used its turn at the first attempt.
type ModelQueue[T any] struct {
	queue          *Queue[T]
	retries        ordered[*Item[T]]
	flowQueues     map[*flow[T]]*flowQueue[T]
	byTurn         ordered[*flowQueue[T]] // flow queues; a request of the first one is served next
	byDisplacement ordered[*flowQueue[T]] // flow queues; the first one loses a request first if the model queue is full
	firstAttempts  int                    // requests in all flow queues
	batchAttempts  int                    // number of firstAttempts that have priority Batch
	onlineTokens   int64                  // prompt tokens of the firstAttempts that are not batch

	onlyRetriesIn, closedIn, deferredIn uint64        // the last rounds in which ServeOnlyRetries, CloseForRound and Defer were called
	retryDeferredIn                     uint64        // the last round in which a retry was deferred
	deferrals                           int           // requests that were deferred in round deferredIn
	deferredTargets                     []targetClass // groups of requests that DeferSameTarget has deferred in round deferredIn
}

// targetClass is a group of requests that DeferSameTarget defers together: all retries (hasPlace) with the same target, or all
// first attempts with this target.
type targetClass struct {
	target   string
	hasPlace bool
}

// New returns a queue in which no request waits.
func New[T any]() *Queue[T] {
	return &Queue[T]{
		modelQueues: map[string]*ModelQueue[T]{}, classes: map[int]*class[T]{},
		byDeadline: ordered[*Item[T]]{before: func(a, b *Item[T]) bool { return a.Deadline.Before(b.Deadline) },
			index: func(item *Item[T]) *int { return &item.deadlineIndex }},
	}
}

// ModelQueue returns a model's queue, which the first call makes.
func (q *Queue[T]) ModelQueue(model string) *ModelQueue[T] {
	mq := q.modelQueues[model]
	if mq == nil {
		// Each heap (ordered) sorts by before. index says where a member stores its position in the heap, so that it can be
		// removed.
		mq = &ModelQueue[T]{
			queue: q,
			// The retry that is served first comes first.
			retries:    ordered[*Item[T]]{before: (*Item[T]).before, index: func(item *Item[T]) *int { return &item.retriesIndex }},
			flowQueues: map[*flow[T]]*flowQueue[T]{},
			// The key (flow queue) whose first request is served first comes first.
			byTurn: ordered[*flowQueue[T]]{before: func(a, b *flowQueue[T]) bool { return a.first().before(b.first()) },
				index: func(fq *flowQueue[T]) *int { return &fq.turnIndex }},
			// The key that loses a request first, if the model queue is full, comes first.
			byDisplacement: ordered[*flowQueue[T]]{before: (*flowQueue[T]).displacedBefore,
				index: func(fq *flowQueue[T]) *int { return &fq.displacementIndex }},
		}
		q.modelQueues[model] = mq
	}
	return mq
}

// DropModel removes a model's queue, which must be empty.
func (q *Queue[T]) DropModel(model string) { delete(q.modelQueues, model) }

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

// OnlineFirstAttempts is how many requests wait in the model queue, without retries and batch.
func (mq *ModelQueue[T]) OnlineFirstAttempts() int { return mq.firstAttempts - mq.batchAttempts }

// HasOnline reports whether a request waits that is not batch.
func (mq *ModelQueue[T]) HasOnline() bool {
	onlineRetry := mq.retries.Len() > 0 && mq.retries.members[0].Priority != Batch // the first retry has the highest priority
	return mq.OnlineFirstAttempts() > 0 || onlineRetry
}

// Tokens is the sum of the prompt tokens of the requests that OnlineFirstAttempts counts.
func (mq *ModelQueue[T]) Tokens() int64 { return mq.onlineTokens }

// Empty reports whether no request waits in the model queue.
func (mq *ModelQueue[T]) Empty() bool { return mq.firstAttempts+mq.retries.Len() == 0 }

// Backlog is the number of waiting requests, with retries and without batch, and the sum of their prompt tokens.
func (mq *ModelQueue[T]) Backlog() (requests int, tokens int64) {
	requests, tokens = mq.OnlineFirstAttempts(), mq.onlineTokens
	for _, item := range mq.retries.members {
		if item.Priority != Batch {
			requests, tokens = requests+1, tokens+int64(item.Tokens)
		}
	}
	return requests, tokens
}

// AnyServable reports whether any request waits that could be served now. If placesFree is false, the pool is full and only retries
// could be.
func (mq *ModelQueue[T]) AnyServable(placesFree bool) bool {
	return mq.firstServable(placesFree) != nil
}

// StartRound begins another round over the waiting requests. In a new round nothing is deferred, and the pool counts as having places until
// MarkPoolFull is called.
func (q *Queue[T]) StartRound() {
	q.round++
	q.placesFree, q.deferrals = true, 0
}

// Round is the number of the present round; 0 before the first StartRound.
func (q *Queue[T]) Round() uint64 { return q.round }

// These bounds keep a round short when many requests are deferred; partToSearch applies them. A model or key whose requests are all
// deferred can therefore not keep the requests of other models and keys from free engines.
const (
	modelDepth = 4   // a model queue with fewer deferred requests is always searched as a whole
	roundDepth = 64  // deferred requests in all model queues from which on the others are searched only in part
	keysDepth  = 128 // deferred requests in all model queues from which on the others are not searched at all
)

// searchedPart is the part of a model queue that Next searches.
type searchedPart uint8

const (
	wholeQueue      searchedPart = iota
	undeferredFlows              // without the flow queues that have a deferred request, and without retries if one of them is deferred
	nothing
)

// Next is the first request that may still be served in this round and was not deferred in it; nil: the round is over. It leaves out the
// model queues that were closed for the round (CloseForRound), and considers only retries if the pool is full (MarkPoolFull) or the model
// queue asks for it (ServeOnlyRetries). Once many requests are deferred, it searches a model queue with several of them only in part, and
// later not at all (partToSearch).
func (q *Queue[T]) Next() (first *Item[T]) {
	for _, mq := range q.modelQueues {
		part, isClosed := q.partToSearch(mq), mq.closedIn == q.round
		if isClosed || part == nothing {
			continue
		}
		placesFree := q.placesFree && mq.onlyRetriesIn != q.round // false: only retries are considered, which have a place already
		item := mq.firstNotDeferred(q.round, placesFree, part == undeferredFlows)
		if item != nil && (first == nil || item.before(first)) {
			first = item
		}
	}
	return first
}

// partToSearch is the part of a model queue that Next searches now. Each deferred request makes later searches of the round longer, because
// they pass over it. A model queue with few deferred requests (modelDepth) is always searched as a whole, and so are all of them while few
// requests are deferred in total (roundDepth). Otherwise a search leaves out the keys with a deferred request. From keysDepth on, a model
// queue with several deferred requests is not searched at all.
func (q *Queue[T]) partToSearch(mq *ModelQueue[T]) searchedPart {
	deferredHere := 0
	if mq.deferredIn == q.round { // otherwise mq.deferrals is the count of an earlier round
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

// MarkPoolFull notes that the pool has no place left in this round, so that only retries can be served.
func (q *Queue[T]) MarkPoolFull() { q.placesFree = false }

// Defer notes that this request cannot be served in this round. Requests behind it still can. Next reads the counts of deferred requests:
// if there are many, it searches less.
func (i *Item[T]) Defer() {
	mq, round := i.modelQueue, i.modelQueue.queue.round
	if mq.deferredIn != round { // the first request of the model queue that is deferred in this round: the counts are of an earlier one
		mq.deferredIn, mq.deferrals = round, 0
		mq.deferredTargets = mq.deferredTargets[:0] // DeferSameTarget fills the list
	}
	i.deferredIn = round
	if i.flowQueue != nil {
		i.flowQueue.deferredIn = round
	} else { // only retries wait outside of a flow queue
		mq.retryDeferredIn = round
	}
	mq.deferrals++       // of this model
	mq.queue.deferrals++ // of all models
}

// DeferSameTarget defers this request, which has a target, and all requests of the model queue with the same target that are of the same
// kind: retries, or first attempts. Next does not return them in this round.
func (i *Item[T]) DeferSameTarget() {
	i.Defer()
	i.modelQueue.deferredTargets = append(i.modelQueue.deferredTargets, targetClass{i.Target, i.HasPlace})
}

// isDeferred reports whether the request was deferred in a round: by its own Defer, or by DeferSameTarget of another request that may go
// only to the same engine. If that one was a first attempt, only first attempts are deferred with it: a retry may still be served, because
// it has its place in the pool of prefilled requests already (HasPlace). If it was a retry, only retries are.
func (i *Item[T]) isDeferred(round uint64) bool {
	if i.deferredIn == round {
		return true
	}
	targetsOutdated := i.modelQueue.deferredIn != round // deferredTargets is of an earlier round
	if i.Target == "" || targetsOutdated {              // without a Target, the request may go to any engine
		return false
	}
	return slices.Contains(i.modelQueue.deferredTargets, targetClass{target: i.Target, hasPlace: i.HasPlace})
}

// ServeOnlyRetries notes that only retries of the model queue can be served in this round.
func (mq *ModelQueue[T]) ServeOnlyRetries() { mq.onlyRetriesIn = mq.queue.round }

// CloseForRound notes that no request of the model queue can be served in this round.
func (mq *ModelQueue[T]) CloseForRound() { mq.closedIn = mq.queue.round }

// before reports whether a request is served before another one, of the same model queue or not. The first difference decides: priority,
// retry before first attempt, deadline, turn of the request's Key (within a priority, the keys take turns), age. Only retries have a place
// in the pool (HasPlace).
func (i *Item[T]) before(other *Item[T]) bool {
	switch {
	case i.Priority != other.Priority:
		return i.Priority > other.Priority
	case i.HasPlace != other.HasPlace: // one of them is a retry, which comes first
		return i.HasPlace
	case !i.Deadline.Equal(other.Deadline):
		return i.hasEarlierDeadline(other)
	case i.flowQueue != nil && other.flowQueue != nil && i.flowQueue.nextTurn != other.flowQueue.nextTurn: // retries take no turns
		return i.flowQueue.nextTurn < other.flowQueue.nextTurn
	}
	return i.olderThan(other)
}

// hasEarlierDeadline reports whether the deadline of a request comes before the deadline of another request. The deadlines must
// differ; a request without a deadline comes last.
func (i *Item[T]) hasEarlierDeadline(other *Item[T]) bool {
	return !i.Deadline.IsZero() && (other.Deadline.IsZero() || i.Deadline.Before(other.Deadline))
}

// beforeInFlow reports whether a request is served before another one of the same key: by deadline, then by arrival.
func (i *Item[T]) beforeInFlow(other *Item[T]) bool {
	if !i.Deadline.Equal(other.Deadline) {
		return i.hasEarlierDeadline(other)
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

// firstServable is the request of the model queue that is served first; nil: no request can be served. If placesFree is false, the
// pool is full and only retries can be served.
func (mq *ModelQueue[T]) firstServable(placesFree bool) (first *Item[T]) {
	if mq.retries.Len() > 0 {
		first = mq.retries.members[0]
	}
	if placesFree && mq.firstAttempts > 0 { // a first attempt needs a free place
		firstFlowQueue := mq.byTurn.members[0] // the heap has the flow queue in front whose first request is served first
		if item := firstFlowQueue.first(); first == nil || item.before(first) {
			first = item
		}
	}
	return first
}

// firstNotDeferred is the request of the model queue that is served first of those that were not deferred in the round; nil: there is none.
// placesFree says that the pool of prefilled requests has a place left; if it is false, only retries can be served, which have a place. If
// onlyUndeferredFlows is true, the search leaves out the flow queues (each has the requests of one key) in which a request was deferred,
// and all retries if one retry was deferred. This keeps the search short when many requests are deferred.
func (mq *ModelQueue[T]) firstNotDeferred(round uint64, placesFree, onlyUndeferredFlows bool) *Item[T] {
	first := mq.firstServable(placesFree)
	if first == nil {
		return nil
	}
	if !onlyUndeferredFlows && !first.isDeferred(round) { // the usual case, which needs no search
		return first
	}
	first = mq.firstRetryNotDeferred(round, onlyUndeferredFlows)
	if !placesFree { // only retries can be served
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

// firstRetryNotDeferred is the retry that is served first of those that were not deferred in the round; nil: there is none. If one retry
// was deferred and noneIfOneDeferred is true, it does not search, and the result is nil.
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

// firstNotDeferred is the first request of the flow queue that was not deferred in the round; nil: there is none.
func (fq *flowQueue[T]) firstNotDeferred(round uint64) *Item[T] {
	for element := fq.items.Front(); element != nil; element = element.Next() {
		if item := element.Value.(*Item[T]); !item.isDeferred(round) {
			return item
		}
	}
	return nil
}

// Add puts a request in the model queue: among the retries, or in its key's flow queue by deadline and first arrival. A request with a
// deadline also enters a heap of all deadlines, unless it was pinned before: a pinned request must not be refused for its deadline.
func (mq *ModelQueue[T]) Add(item *Item[T]) {
	q := mq.queue
	if item.number == 0 { // a request that MakeRoom puts back keeps its number
		q.arrivals++
		item.number = q.arrivals
	}
	item.modelQueue, item.retriesIndex, item.deadlineIndex = mq, -1, -1 // -1: in neither heap yet
	q.waiting++
	if !item.Deadline.IsZero() && !item.pinned { // NextDeadline returns the first one of this heap
		heap.Push(&q.byDeadline, item)
	}
	isRetry := item.HasPlace // only a retry has a place in the pool already
	if isRetry {
		heap.Push(&mq.retries, item)
		return
	}
	fq := mq.flowQueueOf(q.flowOf(item.Priority, item.Key))
	fq.insert(item)
	mq.addToCounts(item, 1)
	fq.class.waiting++
	if fq.items.Len() == 1 { // the flow queue was empty, and so in neither heap
		heap.Push(&mq.byTurn, fq)         // by when its first request is served
		heap.Push(&mq.byDisplacement, fq) // by which flow queue loses a request first if the model queue is full
	} else { // its first request and its length may have changed
		heap.Fix(&mq.byTurn, fq.turnIndex)
		heap.Fix(&mq.byDisplacement, fq.displacementIndex)
	}
}

// addToCounts adds a first attempt to the model queue's counts if sign is 1, and subtracts it if sign is -1. The tokens of batch requests
// are not counted, because no backlog counts batch requests.
func (mq *ModelQueue[T]) addToCounts(item *Item[T], sign int) {
	mq.firstAttempts += sign
	if item.Priority == Batch {
		mq.batchAttempts += sign
	} else {
		mq.onlineTokens += int64(sign * item.Tokens)
	}
}

// flowQueueOf returns the flow queue of a key in this model queue, and makes it if there is none.
func (mq *ModelQueue[T]) flowQueueOf(f *flow[T]) *flowQueue[T] {
	keyQueue := mq.flowQueues[f]
	if keyQueue == nil {
		keyQueue = &flowQueue[T]{flow: f, modelQueue: mq}
		mq.flowQueues[f] = keyQueue
		f.queues = append(f.queues, keyQueue)
	}
	return keyQueue
}

// Remove takes the request out of the queue, and drops its flow queue and its class if they are then empty. It reports whether
// the request still waited.
func (i *Item[T]) Remove() bool {
	isRetry := i.HasPlace // only a retry has a place in the pool already
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

// removeFromFlowQueue takes a first attempt out of its flow queue, which has the requests of one key, and out of the counts.
func (i *Item[T]) removeFromFlowQueue() {
	mq, fq := i.modelQueue, i.flowQueue
	if fq.items.Len() == 1 { // before the item leaves, because the heaps compare the first items
		heap.Remove(&mq.byTurn, fq.turnIndex)
		heap.Remove(&mq.byDisplacement, fq.displacementIndex)
		delete(mq.flowQueues, fq.flow)
		fq.leaveFlow()
	}
	fq.items.Remove(i.element)
	if !i.pinned { // a pinned request was not counted as displaceable
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

// InFlowQueue reports whether the request waits in a flow queue. Retries do not wait in flow queues, and cannot be displaced.
func (i *Item[T]) InFlowQueue() bool { return i.flowQueue != nil }

// MarkServed notes that the request is served. The tokens of its prompt delay the next turn of its key, in the model queues of all models.
// In this way, keys take turns by the tokens that each was served (start-time fair queueing). MarkServed must be called before Remove.
func (i *Item[T]) MarkServed() {
	if i.flowQueue == nil { // a retry: its key has used its turn at the first attempt
		return
	}
	f := i.flowQueue.flow
	// virtualTime is the latest turn that was served. A key that comes back after a pause has its turn then at the earliest.
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

// NextDeadline is the request with the earliest deadline; nil: no request that waits and is not pinned has a deadline.
func (q *Queue[T]) NextDeadline() *Item[T] {
	if q.byDeadline.Len() == 0 {
		return nil
	}
	return q.byDeadline.members[0]
}

// Pin keeps a first attempt in the model queue: it can no longer be displaced, and NextDeadline no longer returns it. Its deadline still
// decides its position in the queue. Pin does nothing for a retry, which cannot be displaced, and for a request that does not wait.
func (i *Item[T]) Pin() {
	if i.flowQueue == nil || i.pinned { // only first attempts wait in flow queues
		return
	}
	i.pinned = true
	i.dropFromDeadlines()
	i.flowQueue.displaceable--
	heap.Fix(&i.modelQueue.byDisplacement, i.flowQueue.displacementIndex)
}

// MakeRoom displaces requests until the model queue has room for n more of a priority and key. limit is how many requests may wait in the
// model queue, without retries. A request gives way to one of a higher priority, and to one of the same priority whose key has fewer
// waiting requests (toDisplace). If displacing cannot make enough room, none is displaced and ok is false.
func (mq *ModelQueue[T]) MakeRoom(priority int, key string, n, limit int) (displaced []*Item[T], ok bool) {
	ownLengthAfter := mq.waitingOf(priority, key) + n // of the flow queues of this priority, only a longer one loses requests
	excess := mq.firstAttempts + n - limit
	if priority == Batch { // batch requests have a limit of their own, too; with the lowest priority, they displace only each other
		excess = max(excess, mq.batchAttempts+n-MaxBatch(limit))
	}
	for ; excess > 0; excess-- {
		item := mq.toDisplace(priority, key, ownLengthAfter)
		if item == nil {
			for _, removed := range displaced { // there is not enough room: put the removed requests back
				mq.Add(removed)
			}
			return nil, false
		}
		item.Remove()
		displaced = append(displaced, item)
	}
	return displaced, true
}

// MaxBatch is how many batch requests may wait in a model queue, if limit requests may wait in it.
func MaxBatch(limit int) int { return max(1, limit/2) }

// toDisplace is the request that leaves a full model queue to make room for a new request with this priority and key; nil: there is none.
// Each key has a flow queue. The heap byDisplacement has the flow queue in front that loses a request first: the one with the lowest
// priority and, within a priority, the longest one. Its last request that is not pinned leaves. It leaves only if its priority is lower
// than that of the new request, or if the priority is the same and the key is another one with a longer flow queue, so that no key keeps
// the others out. ownLengthAfter is how long the new request's own flow queue will be, with all the requests for which MakeRoom makes room.
func (mq *ModelQueue[T]) toDisplace(priority int, key string, ownLengthAfter int) *Item[T] {
	if mq.byDisplacement.Len() == 0 {
		return nil
	}
	fq := mq.byDisplacement.members[0]
	switch {
	case fq.displaceable == 0, fq.priority > priority: // all of its requests are pinned, or it matters more
		return nil
	case fq.priority == priority && (fq.key == key || fq.items.Len() <= ownLengthAfter): // it is the own key, or is not longer
		return nil
	}
	element := fq.items.Back() // the request that would be served last
	for element.Value.(*Item[T]).pinned {
		element = element.Prev()
	}
	return element.Value.(*Item[T])
}

// waitingOf is how many first attempts with this priority and key wait in the model queue. These are the requests in the key's flow queue,
// because retries wait in a heap of their own (ModelQueue.retries).
func (mq *ModelQueue[T]) waitingOf(priority int, key string) int {
	if c := mq.queue.classes[priority]; c != nil {
		if fq := mq.flowQueues[c.flows[key]]; fq != nil {
			return fq.items.Len()
		}
	}
	return 0
}
