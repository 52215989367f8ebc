package edge

import (
	"math"
	"net/netip"
	"sync"
)

// A Quota bounds how much of a resource all callers hold together: bytes of memory, or places.
//
// A caller may hold as much as stays free for others: half of the limit if it is alone, a third if there are two callers. So there is
// always room for another caller.
type Quota struct {
	limit int64 // 0: no limit
	small int64 // a reservation up to this is always allowed

	mu      sync.Mutex
	held    int64
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
	return &Quota{limit: bytes, small: smallBody, callers: map[caller]int64{}}
}

// NewPlaces returns an empty quota of n places; 0: no limit.
func NewPlaces(n int64) *Quota { return &Quota{limit: n, callers: map[caller]int64{}} }

// Held returns how many bytes or places are taken now.
func (a *Quota) Held() int64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.held
}

// Full says whether the whole limit is taken.
func (a *Quota) Full() bool { return a.limit > 0 && a.Held() >= a.limit }

// Reservation is what one request holds of a quota, in bytes or places, until Give.
type Reservation struct {
	quota *Quota
	who   caller
	body  *Reservation // the reservation of the same request's body on the same quota; nil: there is none
	n     int64        // bytes or places; protected by the quota's lock
}

// For returns an empty reservation on this quota, for the caller who is charged for body; nil: for no caller.
func (a *Quota) For(body *Reservation) *Reservation {
	c := &Reservation{quota: a}
	if body == nil {
		return c
	}
	c.who = body.who
	if body.quota == a {
		c.body = body
	}
	return c
}

// fits says whether Acquire would charge n more now.
func (c *Reservation) fits(n int) bool {
	c.quota.mu.Lock()
	defer c.quota.mu.Unlock()
	return c.allowed(int64(n))
}

// Acquire charges n more; false: the quota does not allow it, and charges nothing. A nil Reservation belongs to a request without a body,
// and allows everything.
func (c *Reservation) Acquire(n int) bool {
	if c == nil {
		return true
	}
	a := c.quota
	a.mu.Lock()
	defer a.mu.Unlock()
	if !c.allowed(int64(n)) {
		return false
	}
	c.n += int64(n)
	a.held += int64(n)
	a.callers[c.who] += int64(n)
	return true
}

// allowed applies the rule of Quota. A caller's only request may take all that is free, because otherwise a body as large as the limit
// could never be read.
func (c *Reservation) allowed(n int64) bool {
	a := c.quota
	mine, free, request := a.callers[c.who]+n, a.limit-a.held-n, c.n+n
	if c.body != nil {
		request += c.body.n
	}
	if a.limit <= 0 || c.n+n <= a.small {
		return true
	}
	isOnlyRequest := mine == request
	return free >= 0 && (mine <= free || isOnlyRequest)
}

// Most returns how much the reservation could hold if no other request held anything, but not more than n.
func (c *Reservation) Most(n int) int {
	a := c.quota
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.limit <= 0 {
		return n
	}
	most := a.limit
	if c.body != nil {
		most -= c.body.n
	}
	return int(min(int64(n), max(most, a.small)))
}

// Give returns the whole reservation to its quota. It may be called more than once.
func (c *Reservation) Give() { c.give(math.MaxInt64) }

// give returns n of the reservation to its quota, or the whole reservation if it is smaller. left is the rest of the reservation.
func (c *Reservation) give(n int64) (left int64) {
	if c == nil {
		return 0
	}
	a := c.quota
	a.mu.Lock()
	defer a.mu.Unlock()
	n = min(n, c.n)
	a.held -= n
	if a.callers[c.who] -= n; a.callers[c.who] == 0 {
		delete(a.callers, c.who)
	}
	c.n -= n
	return c.n
}

// smallBody is the largest body, in bytes, that is read although its request will be refused. Then the connection can stay open.
const smallBody = 4 << 10
