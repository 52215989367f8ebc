package prefill

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/http"
	"time"

	"evenkeel/engine"
)

// maxUnsent is how often one request may fail to reach an engine. Such failures do not count as attempts, because no engine
// ran anything. They are bounded, because an address that answers health checks but refuses requests must not keep a
// request for ever.
const maxUnsent = 6

// RetryUnsent is Retry for a request of which no byte was sent, for the k-th time. Such a retry does not use the budget,
// because no engine had any work with the request.
func (s *Scheduler) RetryUnsent(k int) (backoff time.Duration, again bool) {
	retry := s.retries()
	retriesOn := retry.Attempts > 1 // Attempts includes the first attempt, so that 1 means no retries
	return Backoff(retry.Base, k), retriesOn && k <= maxUnsent
}

// isFirstAttempt reports whether the request was not tried before. A retry has its place in the pool already, or excludes the candidates
// that were tried.
func (r *Request) isFirstAttempt() bool { return !r.HasPlace && len(r.Exclude) == 0 }

// retries returns the present settings for retries.
func (s *Scheduler) retries() RetryConfig {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cfg.Retry
}

// maxRetryBase is the longest backoff base that a config may have. Backoff multiplies it by up to 256, which a Duration must hold.
const maxRetryBase = time.Hour

// Backoff is the wait after the k-th failure of a request: a random time between 0 and base, which doubles with each further
// failure, up to 256 times base.
func Backoff(base time.Duration, k int) time.Duration {
	const mostDoublings = 8
	longest := base << min(max(k, 1)-1, mostDoublings)
	return rand.N(longest + 1)
}

// Unsent reports whether a call failed to connect, so that no part of its request could reach the engine. A call that the proxy itself
// gave up (Aborted) does not count.
func Unsent(err error) bool {
	var failure *engine.Error
	if !errors.As(err, &failure) || failure.Aborted {
		return false
	}
	return failure.Phase == engine.PhaseConnect && !failure.Sent
}

// Broke reports whether a call lost its connection after the request was sent, because the engine or the network failed. A
// call that the proxy itself gave up does not count: it was aborted, its time was over, or the answer was not usable.
func Broke(err error) bool {
	var failure *engine.Error
	if !errors.As(err, &failure) || !failure.Sent {
		return false
	}
	unusableAnswer := errors.Is(err, engine.ErrMalformed) || errors.Is(err, engine.ErrTooLarge)
	gaveUp := failure.Aborted || failure.Timeout || unusableAnswer
	return !gaveUp
}

// retryable reports whether the request may succeed on another candidate. For the parameters see Scheduler.Retry.
func retryable(status int, err error) bool {
	switch status {
	case http.StatusTooManyRequests, http.StatusInternalServerError, http.StatusBadGateway,
		http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return true
	case 0, http.StatusOK: // no answer, or one without a usable hand-off
		return err != nil && !endedByUs(err)
	default: // with any other status, the request itself is at fault, and fails everywhere
		return false
	}
}

// endedByUs reports whether the attempt failed because this proxy ended it: the client left, or its time was over.
func endedByUs(err error) bool {
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return true
	}
	var failure *engine.Error
	return errors.As(err, &failure) && failure.Aborted
}

const (
	budgetSeconds = 10

	// budgetFloor is the number of retries in budgetSeconds that are always allowed, ten per second. So few retries do
	// not harm engines, and a share of few requests would allow none.
	budgetFloor = 10 * budgetSeconds
)

// budget limits retries to a share of the requests of the last ten seconds, so that retries do not add much load to engines
// that are in trouble.
type budget struct {
	seconds [budgetSeconds]struct {
		unix              int64
		requests, retries int
	}
}

// countRequest counts the first attempt of a request.
func (b *budget) countRequest(now time.Time) { b.seconds[b.rollTo(now)].requests++ }

// grantRetry reports whether a request may be tried again, and counts the retry if so. It refuses if the retries of the last ten
// seconds would exceed both budgetFloor and the share of the requests. With mustGrant it never refuses.
func (b *budget) grantRetry(now time.Time, share float64, mustGrant bool) bool {
	i := b.rollTo(now)
	var requests, retries int
	for _, s := range b.seconds {
		if age := now.Unix() - s.unix; age >= 0 && age < budgetSeconds { // age is negative after the clock was set back
			requests += s.requests
			retries += s.retries
		}
	}
	maxRetries := max(budgetFloor, share*float64(requests))
	if !mustGrant && float64(retries+1) > maxRetries {
		return false
	}
	b.seconds[i].retries++
	return true
}

// rollTo returns the index of the entry of b.seconds for the present second. Entries are used again after budgetSeconds: rollTo first
// clears an entry that counts another second.
func (b *budget) rollTo(now time.Time) int {
	unix := now.Unix()
	slot := &b.seconds[unix%budgetSeconds]
	if slot.unix != unix {
		slot.unix, slot.requests, slot.retries = unix, 0, 0
	}
	return int(unix % budgetSeconds)
}
