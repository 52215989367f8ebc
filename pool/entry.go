// Package pool holds requests that wait for a decode rank. The prefill of most of them has
// finished. Others need the rank before their prefill, or are prefilled by the rank itself.
//
// A Pool has one owner and no lock. Semaphore counts, for all goroutines, the prefills that are in
// the pool or on their way into it.
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

// Entry is one request that waits. The caller of Add fills in the exported fields, and changes none
// of them afterwards.
type Entry struct {
	ID    uint64 // unique among the entries that wait
	Model string
	Name  string // name that the request asks for, which some ranks of the model may not serve; empty: all serve it

	Prefiller string // engine that has the request's KV, or will have it; empty: failures of the hand-off are recorded for no engine

	// Early: the request gets its rank before its prefill. Deadline, if set, is that of its client.
	// The TTL counts from Arrival or, for a resumed request, from Entered.
	Early bool

	// Aggregated: its rank prefills and decodes it. Deadline, if set, is the time by which it must
	// have been sent to the rank. Aggregated entries stay in the order in which they came to the pool.
	Aggregated bool

	// Express: no policy holds this request back to wait for others, or until a rank is below the
	// fullest.
	Express bool

	Prompt int    // tokens, as the prefill engine counted them
	Age    int    // tokens already generated; above 0: the request is resumed on another rank
	Key    uint64 // the same for equal prompts, whose output lengths predictors compare; 0: no key

	Response bool // some engines run requests of the Responses API on a rank of their own choice, whichever rank the request names

	Arrival  time.Time // of the client's request; a resumed request keeps this time, and so comes before newer requests
	Entered  time.Time // when the prefill was finished; the TTL and waits count from this time
	Deadline time.Time // of the hand-off; zero: never

	// Discard marks a hand-off whose answer no client reads. It is decoded only to make its prefill
	// engine free the KV, which would otherwise stay there until the deadline. It has no place in the
	// Semaphore, and the TTL does not end its wait.
	Discard bool

	// Avoid are the workers that failed the request. While another worker is up, the entry waits for
	// that one for a bounded time.
	Avoid []int32

	// Last are workers whose engine has refused the entry. They may take it only if no other worker
	// can take it at once.
	Last []int32

	// Only are the workers that may take the entry, even if they are in Avoid; empty: any worker may.
	// The entry waits for them as long as it may stay in the pool.
	Only []int32

	// Pool.Add sets the fields below.
	seq       uint64
	expires   time.Time // zero: never
	urgentAt  time.Time // zero: never
	expiryErr error
}

// discardPatience is the time after which a discarded hand-off is urgent; until then, a policy may
// look for a rank where it disturbs least. It is short, because the hand-off takes room on its
// prefill engine, and costs its decode rank only one step.
const discardPatience = 500 * time.Millisecond

// Urgent says whether three quarters of the time that the entry may wait are over, or
// discardPatience for a discarded hand-off.
func (e *Entry) Urgent(now time.Time) bool {
	return !e.urgentAt.IsZero() && !now.Before(e.urgentAt)
}

// UrgentAt is zero for an entry that is never urgent.
func (e *Entry) UrgentAt() time.Time { return e.urgentAt }

// Wait returns how long the entry has been in the pool.
func (e *Entry) Wait(now time.Time) time.Duration {
	return max(0, now.Sub(e.Entered))
}

// GuardWait is the wait by which the starvation guard judges the entry. For a resumed request, it
// counts from the arrival of the client's request.
func (e *Entry) GuardWait(now time.Time) time.Duration {
	if e.Age > 0 {
		return max(0, now.Sub(e.Arrival))
	}
	return e.Wait(now)
}

// Expiry returns the time from which the entry may not be admitted, and the error that says why;
// zero: never.
func (e *Entry) Expiry() (time.Time, error) { return e.expires, e.expiryErr }

// With ttl 0, and for discarded hand-offs, only the Deadline counts.
func (e *Entry) setExpiry(ttl time.Duration) {
	waitBegins, deadlineError, ttlError := e.Entered, ErrExpired, ErrTimeout
	if e.Aggregated { // it has no hand-off that could expire
		deadlineError = ErrTimeout
	}
	if e.Early { // it has no hand-off yet
		deadlineError, ttlError = ErrUnbound, ErrUnbound
		// The answer of a resumed request has run since Arrival, so its wait begins at Entered.
		if isNew := e.Age == 0; isNew {
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

func (e *Entry) setUrgentAt(waitBegins time.Time) {
	if !e.expires.IsZero() {
		e.urgentAt = e.expires.Add(-e.expires.Sub(waitBegins) / 4) // three quarters of the wait are over
	}
	if e.Discard {
		if soon := e.Entered.Add(discardPatience); e.urgentAt.IsZero() || soon.Before(e.urgentAt) {
			e.urgentAt = soon
		}
	}
}

func (e *Entry) expired(now time.Time) bool {
	return !e.expires.IsZero() && !now.Before(e.expires)
}
