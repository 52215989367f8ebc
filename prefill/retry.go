package prefill

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/http"
	"time"

	"evenkeel/engine"
)

// maxUnsent is how often one request may fail to reach an engine. Such failures do not count as
// attempts. They are bounded, because an address that answers health checks but refuses requests
// must not keep a request for ever.
const maxUnsent = 6

// RetryUnsent is Retry for the k-th time that no byte of a request was sent. It does not use the
// budget, because no engine had any work.
func (s *Scheduler) RetryUnsent(k int) (backoff time.Duration, again bool) {
	retry := s.retries()
	retriesOn := retry.Attempts > 1 // Attempts includes the first
	return Backoff(retry.Base, k), retriesOn && k <= maxUnsent
}

func (r *Request) isFirstAttempt() bool { return !r.HasPlace && len(r.Exclude) == 0 }

func (s *Scheduler) retries() RetryConfig {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cfg.Retry
}

// maxRetryBase bounds the base, because Backoff multiplies it by up to 256, which a Duration must
// hold.
const maxRetryBase = time.Hour

// Backoff is the wait after the k-th failure of a request: a random time up to base, which doubles
// with each further failure, up to 256 times base.
func Backoff(base time.Duration, k int) time.Duration {
	const mostDoublings = 8
	longest := base << min(max(k, 1)-1, mostDoublings)
	return rand.N(longest + 1)
}

// Unsent reports whether a call failed to connect. One that the proxy itself gave up does not
// count.
func Unsent(err error) bool {
	var failure *engine.Error
	if !errors.As(err, &failure) || failure.Aborted {
		return false
	}
	return failure.Phase == engine.PhaseConnect && !failure.Sent
}

// Broke reports whether a call lost its connection after the request was sent. A call that the
// proxy itself gave up does not count.
func Broke(err error) bool {
	var failure *engine.Error
	if !errors.As(err, &failure) || !failure.Sent {
		return false
	}
	unusableAnswer := errors.Is(err, engine.ErrMalformed) || errors.Is(err, engine.ErrTooLarge)
	gaveUp := failure.Aborted || failure.Timeout || unusableAnswer
	return !gaveUp
}

// retryable reports whether the request may succeed on another candidate. For the parameters see
// Scheduler.Retry.
func retryable(status int, err error) bool {
	switch status {
	case http.StatusTooManyRequests, http.StatusInternalServerError, http.StatusBadGateway,
		http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return true
	case 0, http.StatusOK: // no answer, or no usable hand-off
		return err != nil && !endedByUs(err)
	default: // the request itself is at fault
		return false
	}
}

// endedByUs is true if the client left, or if the request's time was over.
func endedByUs(err error) bool {
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return true
	}
	var failure *engine.Error
	return errors.As(err, &failure) && failure.Aborted
}

const (
	budgetSeconds = 10

	// budgetFloor is always allowed, ten retries per second. So few do not harm engines, and a share
	// of few requests would allow none.
	budgetFloor = 10 * budgetSeconds
)

// budget limits retries to a share of the requests of the last ten seconds, so that they do not add
// much load to engines that are in trouble.
type budget struct {
	seconds [budgetSeconds]struct {
		unix              int64
		requests, retries int
	}
}

func (b *budget) countRequest(now time.Time) { b.seconds[b.rollTo(now)].requests++ }

// grantRetry counts the retry if it grants it. It refuses if the retries of the last ten seconds
// would exceed both budgetFloor and the share.
func (b *budget) grantRetry(now time.Time, share float64, mustGrant bool) bool {
	i := b.rollTo(now)
	var requests, retries int
	for _, s := range b.seconds {
		if age := now.Unix() - s.unix; age >= 0 && age < budgetSeconds { // negative after the clock was set back
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

// rollTo returns the entry of the present second, and clears it if it counts another one.
func (b *budget) rollTo(now time.Time) int {
	unix := now.Unix()
	slot := &b.seconds[unix%budgetSeconds]
	if slot.unix != unix {
		slot.unix, slot.requests, slot.retries = unix, 0, 0
	}
	return int(unix % budgetSeconds)
}
