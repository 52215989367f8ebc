// Package pool holds finished prefills, and requests that need a rank before
// theirs, until a decode rank takes them: their order, their age, and the
// instant at which each has waited too long.
//
// A Pool has one owner and no lock; Places is the concurrent count of how many
// prefills may be on their way into it.
package pool

import (
	"errors"
	"time"
)

// Why an entry left the pool without a rank.
var (
	ErrUnbound = errors.New("pool: no decode rank had room for the request within pool.ttl, and its connector needs one before the prefill; " +
		"nothing was prefilled yet; retry later or add decode capacity")
	ErrTimeout = errors.New("pool: no decode rank had room within pool.ttl; retry later or add decode capacity")
	ErrExpired = errors.New("pool: the hand-off passed its deadline while it waited for a decode rank; prefill again")
)

// Entry is one finished prefill that waits for a decode rank, or a request whose
// connector needs the rank before the prefill. Whoever hands it over fills the
// exported fields and changes none of them afterwards.
type Entry struct {
	ID    uint64 // unique among the entries that wait
	Model string // whose ranks may have it
	Name  string // that the request asks for, which not all of these may list; empty: any rank has it

	Prefiller string // engine that holds its KV, or will; empty = nobody counts what fails with it

	// Early: nothing is prefilled before it has a rank. So no hand-off of it perishes, and Deadline,
	// if there is one, is its client's. The pool's TTL counts from Arrival, of a resumed request from Entered.
	Early bool

	// Mixed: its rank prefills and decodes it. So there is no hand-off that perishes, and Deadline, if there is one, is the
	// instant by which it must have been sent. Such entries stay in the order in which they came to the pool.
	Mixed bool

	// Express: a policy that sends requests in rounds sends it alone and holds it for no round. Only Mixed entries are.
	Express bool

	Prompt int    // tokens, as the prefill engine counted them
	Age    int    // tokens already generated for the client; above 0 for a request resumed after a recompute
	Key    uint64 // exact-match key for predictors, 0 = none

	Response bool // some engines run it on a rank of their own choice, whatever rank it names

	Arrival  time.Time // the client's request reached us; a resumed request keeps it, and so stands at the head
	Entered  time.Time // the prefill was finished; TTL and waits count from here
	Deadline time.Time // the hand-off's own, exclusive; zero = none

	// Discard marks a hand-off nobody will read, decoded once so that its
	// prefiller frees the KV. It is an admission like any other,
	// but holds no place, and the pool's TTL does not end its wait: no client
	// waits for it, and its KV stays on the prefiller until its deadline if
	// nothing pulls it.
	Discard bool

	// Avoid are the workers that failed at the request. While another one is up,
	// the entry waits for that, though not for ever.
	Avoid []int32

	// Last are the workers that it goes to only while no other one can take it at once: they are beside one that has refused it.
	Last []int32

	// Only are the workers that may have it, whatever it avoids; none: any may. It
	// waits for one of these as long as it may wait.
	Only []int32

	// Set by Add.
	seq      uint64
	expires  time.Time // zero = never
	urgentAt time.Time // zero = never
	why      error     // what to say at expires
}

// discardPatience is how long a policy may look for a rank where a discarded hand-off fits in
// well. It costs its rank one step, and all the while it fills its prefiller.
const discardPatience = 500 * time.Millisecond

// Urgent says whether three quarters of the time the entry may wait are over; of
// a discarded hand-off, half a second.
func (e *Entry) Urgent(now time.Time) bool {
	return !e.urgentAt.IsZero() && !now.Before(e.urgentAt)
}

// UrgentAt is the instant from which the entry is urgent; zero: it never is.
func (e *Entry) UrgentAt() time.Time { return e.urgentAt }

// Wait is the time in the pool, what admission statistics count.
func (e *Entry) Wait(now time.Time) time.Duration {
	return max(0, now.Sub(e.Entered))
}

// GuardWait is the wait the starvation guard sees: the time in the pool, of a
// resumed request its whole life.
func (e *Entry) GuardWait(now time.Time) time.Duration {
	if e.Age > 0 {
		return max(0, now.Sub(e.Arrival))
	}
	return e.Wait(now)
}

// Expiry is the instant from which the entry may not be admitted, and the
// error that says why; zero when it may wait for ever.
func (e *Entry) Expiry() (time.Time, error) { return e.expires, e.why }

func (e *Entry) arm(ttl time.Duration) {
	from, late, tooLong := e.Entered, ErrExpired, ErrTimeout
	if e.Mixed {
		late = ErrTimeout
	}
	if e.Early {
		late, tooLong = ErrUnbound, ErrUnbound
		if e.Age == 0 { // else its answer has run since
			from = e.Arrival
		}
	}
	e.expires, e.why = e.Deadline, late
	if end := from.Add(ttl); ttl > 0 && !e.Discard && (e.Deadline.IsZero() || !end.After(e.Deadline)) {
		e.expires, e.why = end, tooLong
	}
	if !e.expires.IsZero() {
		e.urgentAt = e.expires.Add(-e.expires.Sub(from) / 4)
	}
	if soon := e.Entered.Add(discardPatience); e.Discard && (e.urgentAt.IsZero() || soon.Before(e.urgentAt)) {
		e.urgentAt = soon
	}
}

func (e *Entry) expired(now time.Time) bool {
	return !e.expires.IsZero() && !now.Before(e.expires)
}
