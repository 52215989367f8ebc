package edge

import (
	"math"
	"net/netip"
	"sync"
)

// A Quota bounds how much of a resource all callers hold together: bytes of memory, or places.
//
// A caller may hold only as much as stays free after it, so that there is always room for another caller. This is half of the limit for a
// caller that is alone, and a third for each of two callers.
type Quota struct {
	limit         int64 // 0: no limit
	alwaysAllowed int64 // a reservation up to this is always allowed

	mu      sync.Mutex
	used    int64
	callers map[caller]int64
}

// caller is the holder of a reservation: a name or, if it has none, an address.
type caller struct {
	name string
	addr netip.Addr
}

// NewBodies returns an empty quota of bytes that the bodies of requests and answers may take; 0: no limit. A
// reservation up to 4 KiB is always allowed, because it is no larger than a connection's own buffers.
func NewBodies(bytes int64) *Quota {
	return &Quota{limit: bytes, alwaysAllowed: smallBody, callers: map[caller]int64{}}
}

// NewPlaces returns an empty quota of n places; 0: no limit.
func NewPlaces(n int64) *Quota { return &Quota{limit: n, callers: map[caller]int64{}} }

// Held returns how many bytes or places are taken now.
func (q *Quota) Held() int64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.used
}

// Full says whether the whole limit is taken.
func (q *Quota) Full() bool { return q.limit > 0 && q.Held() >= q.limit }

// Reservation is what one request holds of a quota, in bytes or places, until Release.
type Reservation struct {
	quota  *Quota
	caller caller
	body   *Reservation // the reservation of the same request's body on the same quota; nil: there is none
	amount int64        // bytes or places; protected by the quota's lock
}

// For returns an empty reservation on this quota, for the caller who is charged for body; nil: for no caller.
func (q *Quota) For(body *Reservation) *Reservation {
	r := &Reservation{quota: q}
	if body == nil {
		return r
	}
	r.caller = body.caller
	if body.quota == q { // allowed takes both for one request
		r.body = body
	}
	return r
}

// fits says whether Acquire would charge n more now.
func (r *Reservation) fits(n int) bool {
	r.quota.mu.Lock()
	defer r.quota.mu.Unlock()
	return r.allowed(int64(n))
}

// Acquire charges n more; false: the quota does not allow it, and charges nothing. A nil Reservation belongs to a request without a body,
// and allows everything.
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

// allowed applies the rule of Quota. A caller's only request may take all that is free, because otherwise a body as large as the limit
// could never be read.
func (r *Reservation) allowed(n int64) bool {
	q := r.quota
	if q.limit <= 0 || r.amount+n <= q.alwaysAllowed {
		return true
	}
	// what the caller and the request would hold with n more, and what would be free
	ofCaller := q.callers[r.caller] + n
	ofRequest := r.amount + n
	free := q.limit - q.used - n
	if r.body != nil {
		ofRequest += r.body.amount
	}
	isOnlyRequest := ofCaller == ofRequest
	return free >= 0 && (ofCaller <= free || isOnlyRequest)
}

// Most returns how much the reservation could hold if no other request held anything, but not more than n.
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

// Release returns the whole reservation to its quota. It may be called more than once.
func (r *Reservation) Release() { r.releaseSome(math.MaxInt64) }

// releaseSome returns n of the reservation to its quota, or all of it if it is smaller. remaining is what the reservation still holds.
func (r *Reservation) releaseSome(n int64) (remaining int64) {
	if r == nil {
		return 0
	}
	q := r.quota
	q.mu.Lock()
	defer q.mu.Unlock()
	n = min(n, r.amount)
	q.used -= n
	if q.callers[r.caller] -= n; q.callers[r.caller] == 0 {
		delete(q.callers, r.caller)
	}
	r.amount -= n
	return r.amount
}

// smallBody is the largest body, in bytes, that is read although its request will be refused, so that the connection can stay open.
const smallBody = 4 << 10
