// Package pool holds requests that wait for a decode rank: their order, their age, and the time at which each has waited too long. The
// prefill of most of these requests has finished. Others need the rank before their prefill, or are prefilled by the rank itself.
//
// A Pool has one owner and no lock. Semaphore counts, for all goroutines, the prefills that are in the pool or on their way into it.
package pool

import (
	"errors"
	"time"
)

// The errors of entries that leave the pool without a rank.
var (
	ErrUnbound = errors.New("pool: no decode rank had room for the request within pool.ttl, and its connector needs one before the prefill; " +
		"nothing was prefilled yet; retry later or add decode capacity")
	ErrTimeout = errors.New("pool: no decode rank had room within pool.ttl; retry later or add decode capacity")
	ErrExpired = errors.New("pool: the hand-off passed its deadline while it waited for a decode rank; prefill again")
)

// Entry is one request that waits for a decode rank. The caller of Add fills in the exported fields, and changes none of them afterwards.
type Entry struct {
	ID    uint64 // unique among the entries that wait
	Model string // the model whose ranks may take the entry
	Name  string // model name or adapter that the request asks for, which some of these ranks may not serve; empty: all serve it

	Prefiller string // prefill engine that has the request's KV, or will have it; empty: failures of the hand-off are recorded for no engine

	// Early: the request gets its rank before its prefill. It has no hand-off that expires: Deadline, if set, is the deadline of its
	// client. The pool's TTL counts from Arrival or, for a resumed request, from Entered.
	Early bool

	// Aggregated: its rank prefills and decodes it. It has no hand-off that expires: Deadline, if set, is the time by which it must
	// have been sent to the rank. Aggregated entries stay in the order in which they came to the pool.
	Aggregated bool

	// Express: no policy holds this request back. A policy may hold others back, to send them together or until a rank is below the
	// fullest.
	Express bool

	Prompt int    // tokens of the prompt, as the prefill engine counted them
	Age    int    // tokens already generated for the client; above 0 for a request that is resumed on another rank
	Key    uint64 // the same for equal prompts, whose output lengths predictors compare; 0: no key

	Response bool // the request is of the Responses API: some engines run it on a rank of their own choice, whichever rank it names

	Arrival  time.Time // when the client's request reached the proxy; a resumed request keeps this time, and so comes before newer requests
	Entered  time.Time // when the prefill was finished; the TTL and waits count from this time
	Deadline time.Time // when the hand-off expires; zero: never

	// Discard marks a hand-off whose answer no client reads: it is decoded only to make its prefill engine free the KV. It is admitted
	// like any other entry, but it has no place in the Semaphore, and the pool's TTL does not end its wait. If no rank pulled its KV,
	// the KV would stay on the prefill engine until the deadline.
	Discard bool

	// Avoid are the workers that failed the request. While another worker is up, the entry waits for that worker, but only for a
	// bounded time.
	Avoid []int32

	// Last are workers that may take the entry only if no other worker can take it at once, because workers of the same engine have
	// refused it.
	Last []int32

	// Only are the workers that may take the entry, even if they are in Avoid; empty: any worker may. The entry waits for them as long
	// as it may stay in the pool.
	Only []int32

	// Pool.Add sets the fields below.
	seq       uint64
	expires   time.Time // from this time on, the entry is not admitted any more; zero: never
	urgentAt  time.Time // from this time on, Urgent is true; zero: never
	expiryErr error     // the error that the entry gets if it is not admitted before the time expires
}

// discardPatience is the time after which a discarded hand-off is urgent. Until then, a policy may look for a rank where it disturbs least.
// The time is short, because the hand-off takes room on its prefill engine, and costs its decode rank only one step.
const discardPatience = 500 * time.Millisecond

// Urgent says whether three quarters of the time that the entry may wait are over. A discarded hand-off is urgent after discardPatience at
// the latest.
func (e *Entry) Urgent(now time.Time) bool {
	return !e.urgentAt.IsZero() && !now.Before(e.urgentAt)
}

// UrgentAt returns the time from which the entry is urgent; zero: never.
func (e *Entry) UrgentAt() time.Time { return e.urgentAt }

// Wait returns how long the entry has been in the pool.
func (e *Entry) Wait(now time.Time) time.Duration {
	return max(0, now.Sub(e.Entered))
}

// GuardWait returns the wait by which the starvation guard judges the entry: the time in the pool or, for a resumed request, the time since
// the client's request arrived.
func (e *Entry) GuardWait(now time.Time) time.Duration {
	if e.Age > 0 {
		return max(0, now.Sub(e.Arrival))
	}
	return e.Wait(now)
}

// Expiry returns the time from which the entry may not be admitted, and the error that says why; zero: it may wait for ever.
func (e *Entry) Expiry() (time.Time, error) { return e.expires, e.expiryErr }

// setExpiry sets when the entry expires, with which error, and from when it is urgent. The entry expires at its Deadline or, if that is
// earlier, when it has waited for ttl. With ttl 0, and for discarded hand-offs, only the Deadline counts.
func (e *Entry) setExpiry(ttl time.Duration) {
	waitBegins, deadlineError, ttlError := e.Entered, ErrExpired, ErrTimeout
	if e.Aggregated { // it has no hand-off that could expire
		deadlineError = ErrTimeout
	}
	if e.Early { // the entry waits for a rank before its prefill, so it has no hand-off yet that could expire
		deadlineError, ttlError = ErrUnbound, ErrUnbound
		// A new request has waited since Arrival. But the answer of a resumed request has run since then, so its wait begins at
		// Entered.
		if isNew := e.Age == 0; isNew { // no token was generated for its client yet
			waitBegins = e.Arrival
		}
	}
	e.expires, e.expiryErr = e.Deadline, deadlineError
	if ttlCounts := ttl > 0 && !e.Discard; ttlCounts {
		if end := waitBegins.Add(ttl); e.Deadline.IsZero() || !end.After(e.Deadline) {
			e.expires, e.expiryErr = end, ttlError
		}
	}
	e.setUrgentAt(waitBegins)
}

// setUrgentAt sets from when the entry is urgent: from then on, no policy holds it back any more to find a better rank. waitBegins is when
// its wait began.
func (e *Entry) setUrgentAt(waitBegins time.Time) {
	if !e.expires.IsZero() {
		e.urgentAt = e.expires.Add(-e.expires.Sub(waitBegins) / 4) // three quarters of the wait are over
	}
	if e.Discard { // it shall free room on its prefill engine soon
		if soon := e.Entered.Add(discardPatience); e.urgentAt.IsZero() || soon.Before(e.urgentAt) {
			e.urgentAt = soon
		}
	}
}

// expired says whether the entry may wait no longer.
func (e *Entry) expired(now time.Time) bool {
	return !e.expires.IsZero() && !now.Before(e.expires)
}
