package edge

import (
	"math"
	"net/netip"
	"sync"
)

// A Quota bounds how much all callers hold together: bytes of memory, or places for requests.
//
// A caller may hold only as much as is still free afterwards, so that there is always room for
// another. A single caller with several requests gets at most half of the limit, and each of two at
// most a third.
type Quota struct {
	limit         int64 // most bytes or places that all callers may hold; 0: no limit
	alwaysAllowed int64 // for one reservation, beyond the limit

	mu      sync.Mutex
	used    int64
	callers map[caller]int64
}

// caller has a name or, without one, an address.
type caller struct {
	name string
	addr netip.Addr
}

// NewBodies returns a quota of bytes for bodies; 0: no limit. A reservation up to 4 KiB is always
// allowed, because it is no larger than a connection's own buffers.
func NewBodies(bytes int64) *Quota {
	return &Quota{limit: bytes, alwaysAllowed: smallBody, callers: map[caller]int64{}}
}

// NewPlaces returns a quota of places for requests; 0: no limit.
func NewPlaces(n int64) *Quota { return &Quota{limit: n, callers: map[caller]int64{}} }

// Held returns how much all callers hold now.
func (q *Quota) Held() int64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.used
}

// Full says whether callers hold the whole limit, if there is one.
func (q *Quota) Full() bool { return q.limit > 0 && q.Held() >= q.limit }

// Reservation is what one request holds of a quota until Release. Any goroutine may call its
// methods.
type Reservation struct {
	quota  *Quota
	caller caller
	body   *Reservation // of the same request, on the same quota
	amount int64        // bytes or places; protected by the quota's lock
}

// For returns an empty reservation of the caller of bodyReservation, which may be on another quota.
// Without one, all requests without a body share one caller.
func (q *Quota) For(bodyReservation *Reservation) *Reservation {
	r := &Reservation{quota: q}
	if bodyReservation == nil {
		return r
	}
	r.caller = bodyReservation.caller
	if bodyReservation.quota == q {
		r.body = bodyReservation // both count as one request's
	}
	return r
}

func (r *Reservation) fits(n int) bool {
	r.quota.mu.Lock()
	defer r.quota.mu.Unlock()
	return r.allowed(int64(n))
}

// Acquire charges n more, or nothing (false). On nil, for a request without a body, it always
// succeeds.
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

// A caller, over all its requests, may hold at most as much as stays free for others. Its only
// request may take all that is free, because otherwise a body as large as the limit could never be
// read.
func (r *Reservation) allowed(n int64) bool {
	q := r.quota
	if q.limit <= 0 || r.amount+n <= q.alwaysAllowed {
		return true
	}
	// The three are what would be with n more.
	ofCaller := q.callers[r.caller] + n
	ofRequest := r.amount + n
	free := q.limit - q.used - n
	if r.body != nil {
		ofRequest += r.body.amount
	}
	isOnlyRequest := ofCaller == ofRequest
	return free >= 0 && (ofCaller <= free || isOnlyRequest)
}

// Most returns how much r could hold if no other request held anything, but at most n.
func (r *Reservation) Most(n int) int {
	q := r.quota
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.limit <= 0 {
		return n
	}
	bound := q.limit
	if r.body != nil {
		bound -= r.body.amount
	}
	return int(min(int64(n), max(bound, q.alwaysAllowed)))
}

// Release may be called more than once.
func (r *Reservation) Release() { r.releaseSome(math.MaxInt64) }

func (r *Reservation) held() int64 {
	if r == nil {
		return 0
	}
	r.quota.mu.Lock()
	defer r.quota.mu.Unlock()
	return r.amount
}

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
	if q.callers[r.caller] == 0 { // callers has only those that hold something
		delete(q.callers, r.caller)
	}
	r.amount -= n
}

// smallBody is the largest body, in bytes, that is read although its request will be refused, so
// that the connection can stay open.
const smallBody = 4 << 10
