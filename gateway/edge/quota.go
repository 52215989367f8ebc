package edge

import (
	"math"
	"net/netip"
	"sync"
)

// A Quota bounds how much of a resource all callers hold together: bytes of memory, or places for requests.
//
// A caller may hold only as much as is still free afterwards, so that there is always room for another caller. A single caller gets at most
// half of the limit, and each of two callers gets at most a third.
type Quota struct {
	limit         int64 // most bytes or places that all callers may hold; 0: no limit
	alwaysAllowed int64 // a reservation may hold this many bytes or places even if they do not fit into the limit

	mu      sync.Mutex
	used    int64
	callers map[caller]int64
}

// caller identifies a holder of reservations: by name or, without a name, by address.
type caller struct {
	name string
	addr netip.Addr
}

// NewBodies returns a quota of bytes for the bodies of requests and answers; 0: no limit. A reservation up to 4 KiB is always allowed,
// because it is no larger than a connection's own buffers.
func NewBodies(bytes int64) *Quota {
	return &Quota{limit: bytes, alwaysAllowed: smallBody, callers: map[caller]int64{}}
}

// NewPlaces returns a quota of n places, one per request; 0: no limit.
func NewPlaces(n int64) *Quota { return &Quota{limit: n, callers: map[caller]int64{}} }

// Held returns how many bytes or places all callers hold now.
func (q *Quota) Held() int64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.used
}

// Full says whether callers hold the whole limit. A quota without a limit is never full.
func (q *Quota) Full() bool { return q.limit > 0 && q.Held() >= q.limit }

// Reservation is what one request holds of a quota, in bytes or places, until Release. Its methods may be called from any goroutine.
type Reservation struct {
	quota  *Quota
	caller caller
	body   *Reservation // the reservation for the body of the same request, if it counts on the same quota; otherwise nil
	amount int64        // bytes or places; protected by the quota's lock
}

// For returns an empty reservation on this quota for something else of a request: it is charged to the same caller as bodyReservation,
// which the request has for its body, perhaps on another quota. If bodyReservation is nil, it is charged to one caller, whom all requests
// without a body share.
func (q *Quota) For(bodyReservation *Reservation) *Reservation {
	r := &Reservation{quota: q}
	if bodyReservation == nil {
		return r
	}
	r.caller = bodyReservation.caller
	if bodyReservation.quota == q {
		r.body = bodyReservation // so that both reservations count as those of one request
	}
	return r
}

// fits says whether Acquire(n) would succeed now. It charges nothing.
func (r *Reservation) fits(n int) bool {
	r.quota.mu.Lock()
	defer r.quota.mu.Unlock()
	return r.allowed(int64(n))
}

// Acquire charges n more bytes or places; false: the quota does not allow it, and nothing is charged. A nil Reservation belongs to a
// request without a body, and Acquire on it always succeeds.
func (r *Reservation) Acquire(n int) bool {
	if r == nil {
		return true
	}
	q := r.quota
	q.mu.Lock()
	defer q.mu.Unlock()
	if !r.allowed(int64(n)) {
		return false
	}
	r.amount += int64(n)
	q.used += int64(n)
	q.callers[r.caller] += int64(n)
	return true
}

// allowed says whether r may hold n more. It always may on a quota without a limit, or if it then holds no more than alwaysAllowed.
// Otherwise it may if its caller, over all its requests, then holds at most as much as stays free for others. A caller's only request may
// even take all that is free, because otherwise a body as large as the limit could never be read.
func (r *Reservation) allowed(n int64) bool {
	q := r.quota
	if q.limit <= 0 || r.amount+n <= q.alwaysAllowed {
		return true
	}
	// With n more, the caller would hold ofCaller, the request ofRequest, and free would be left.
	ofCaller := q.callers[r.caller] + n
	ofRequest := r.amount + n
	free := q.limit - q.used - n
	if r.body != nil { // the body of the same request has a reservation of its own on this quota
		ofRequest += r.body.amount
	}
	isOnlyRequest := ofCaller == ofRequest
	return free >= 0 && (ofCaller <= free || isOnlyRequest)
}

// Most returns how much r could hold if no other request held anything, but at most n. A quota without a limit allows n. Otherwise the
// bound is the limit less what the body of the same request holds, and at least alwaysAllowed.
func (r *Reservation) Most(n int) int {
	q := r.quota
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.limit <= 0 {
		return n
	}
	bound := q.limit
	if r.body != nil { // the body of the same request stays in the quota
		bound -= r.body.amount
	}
	return int(min(int64(n), max(bound, q.alwaysAllowed)))
}

// Release gives all that r holds back to its quota. It may be called more than once.
func (r *Reservation) Release() { r.releaseSome(math.MaxInt64) }

// held returns how many bytes or places r holds now. A nil Reservation holds nothing.
func (r *Reservation) held() int64 {
	if r == nil {
		return 0
	}
	r.quota.mu.Lock()
	defer r.quota.mu.Unlock()
	return r.amount
}

// releaseSome gives n bytes or places back to the quota, or all that r holds if that is less. Nothing happens if r is nil.
func (r *Reservation) releaseSome(n int64) {
	if r == nil {
		return
	}
	q := r.quota
	q.mu.Lock()
	defer q.mu.Unlock()
	n = min(n, r.amount)
	q.used -= n
	q.callers[r.caller] -= n
	if q.callers[r.caller] == 0 { // callers lists only those that hold something
		delete(q.callers, r.caller)
	}
	r.amount -= n
}

// smallBody is the largest body, in bytes, that is read although its request will be refused, so that the connection can stay open.
const smallBody = 4 << 10
