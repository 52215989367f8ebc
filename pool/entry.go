// Package pool holds finished prefills, and requests that need a rank before
// their prefill, until a decode rank takes them: their order, their age, and the
// instant at which each has waited too long.
//
// A Pool has one owner and no lock. Places counts, for all goroutines, the
// prefills that are in the pool or on their way into it.
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
// connector needs the rank before the prefill. The caller of Add fills the
// exported fields and changes none of them afterwards.
type Entry struct {
	ID    uint64 // unique among the entries that wait
	Model string // the model whose ranks may take the entry
	Name  string // the name that the request asks for, which not all of these ranks may serve; empty: all serve it

	Prefiller string // the engine that holds its KV, or will hold it; empty: failures with it are not counted

	// Early: the request gets its rank before its prefill. So it has no hand-off that expires, and Deadline,
	// if set, is its client's. The pool's TTL counts from Arrival; for a resumed request, from Entered.
	Early bool

	// Mixed: its rank prefills and decodes it. So it has no hand-off that expires, and Deadline, if set, is the
	// instant by which it must have been sent. Mixed entries stay in the order in which they came to the pool.
	Mixed bool

	// Express: a policy that sends requests in rounds sends this one alone, and does not hold it for a round. Only Mixed entries have it.
	Express bool

	Prompt int    // tokens, as the prefill engine counted them
	Age    int    // tokens already generated for the client; above 0 for a request resumed after a recompute
	Key    uint64 // exact-match key for predictors; 0: none

	Response bool // a request that some engines run on a rank of their own choice, whatever rank it names

	Arrival  time.Time // when the client's request reached us; a resumed request keeps this time, and so stands at the head
	Entered  time.Time // when the prefill was finished; TTL and waits count from then
	Deadline time.Time // the hand-off's: at this instant it is too late; zero: none

	// Discard marks a hand-off whose answer no client reads: it is decoded once so that its
	// prefill engine frees the KV. It is admitted like any other entry,
	// but holds no place, and the pool's TTL does not end its wait: no client
	// waits for it, and if no rank pulls its KV, the KV stays on the prefill engine
	// until the deadline.
	Discard bool

	// Avoid are the workers that failed at the request. While another worker is up,
	// the entry waits for that worker, though not for ever.
	Avoid []int32

	// Last are the workers that take the entry only while no other can take it at once: a worker beside them has refused it.
	Last []int32

	// Only are the workers that may take the entry, even if they are in Avoid; empty: any may. The
	// entry waits for them as long as it may wait.
	Only []int32

	// Set by Add.
	seq      uint64
	expires  time.Time // zero: never
	urgentAt time.Time // zero: never
	why      error     // the error of an entry that is not admitted before expires
}

// discardPatience is how long a policy may look for a rank where a discarded hand-off fits in
// well. The hand-off costs its rank one step, and it takes room on its prefill engine until then.
const discardPatience = 500 * time.Millisecond

// Urgent says whether three quarters of the time that the entry may wait are over. A
// discarded hand-off is urgent after discardPatience at the latest.
func (e *Entry) Urgent(now time.Time) bool {
	return !e.urgentAt.IsZero() && !now.Before(e.urgentAt)
}

// UrgentAt is the instant from which the entry is urgent; zero: it never is.
func (e *Entry) UrgentAt() time.Time { return e.urgentAt }

// Wait is the time that the entry has been in the pool, as admission statistics count it.
func (e *Entry) Wait(now time.Time) time.Duration {
	return max(0, now.Sub(e.Entered))
}

// GuardWait is the wait that the starvation guard uses: the time in the pool; for a
// resumed request, the time since the client's request arrived.
func (e *Entry) GuardWait(now time.Time) time.Duration {
	if e.Age > 0 {
		return max(0, now.Sub(e.Arrival))
	}
	return e.Wait(now)
}

// Expiry is the instant from which the entry may not be admitted, and the
// error that says why; zero when it may wait for ever.
func (e *Entry) Expiry() (time.Time, error) { return e.expires, e.why }

// arm sets when the entry expires and with which error, and from when it is urgent. It expires at its Deadline or, if that is earlier,
// when it has waited for ttl; ttl 0: only the Deadline counts. A discarded hand-off does not expire by ttl.
func (e *Entry) arm(ttl time.Duration) {
	from, late, tooLong := e.Entered, ErrExpired, ErrTimeout
	if e.Mixed {
		late = ErrTimeout
	}
	if e.Early {
		late, tooLong = ErrUnbound, ErrUnbound
		if e.Age == 0 { // a resumed request had its answer running since Arrival
			from = e.Arrival
		}
	}
	e.expires, e.why = e.Deadline, late
	if end := from.Add(ttl); ttl > 0 && !e.Discard && (e.Deadline.IsZero() || !end.After(e.Deadline)) {
		e.expires, e.why = end, tooLong
	}
	if !e.expires.IsZero() {
		e.urgentAt = e.expires.Add(-e.expires.Sub(from) / 4) // three quarters of the wait are over
	}
	if soon := e.Entered.Add(discardPatience); e.Discard && (e.urgentAt.IsZero() || soon.Before(e.urgentAt)) {
		e.urgentAt = soon
	}
}

// expired says whether the entry may wait no longer.
func (e *Entry) expired(now time.Time) bool {
	return !e.expires.IsZero() && !now.Before(e.expires)
}
