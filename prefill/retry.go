package prefill

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/http"
	"time"

	"evenkeel/engine"
)

// poisonAttempts is the most that a request gets which an engine answered with
// 500: it may be the request that breaks engines (contract 9).
const poisonAttempts = 2

// Retry says whether a request whose k-th attempt failed may be tried again,
// and after what wait. status is the engine's, 0 without an answer; err is
// what failed without one, or what is wrong with a 200's hand-off. The poison
// guard holds for the request: once an attempt was answered 500, pass 500 for
// the later ones too. Wait longer where the engine's Retry-After says so.
//
// A yes is taken from the budget that all requests share (prefill P45).
func (t *Tier) Retry(k int, status int, err error) (backoff time.Duration, again bool) {
	attempts := t.cfg.Retry.Attempts
	if status == http.StatusInternalServerError {
		attempts = min(attempts, poisonAttempts)
	}
	if k >= attempts || !retryable(status, err) {
		return 0, false
	}
	t.lock()
	granted := t.budget.retry(t.now, t.cfg.Retry.Budget)
	t.unlock()
	if !granted {
		t.metrics.budgetExhausted.Inc()
		return 0, false
	}
	most := t.cfg.Retry.Base << min(max(k, 1)-1, 8)
	return rand.N(most + 1), true // full jitter
}

// retryable says whether another prefiller may do better.
func retryable(status int, err error) bool {
	switch status {
	case http.StatusTooManyRequests, http.StatusInternalServerError, http.StatusBadGateway,
		http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return true
	case 0, http.StatusOK:
		return err != nil && !ours(err)
	default:
		return false
	}
}

// ours says that we ended the attempt: the client left, or its time is over.
func ours(err error) bool {
	var failure *engine.Error
	return errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) ||
		errors.As(err, &failure) && failure.Aborted
}

const (
	budgetSeconds = 10

	// budgetFloor is how many retries are always allowed: with a handful of
	// requests, a share of them would be none.
	budgetFloor = 10
)

// budget keeps retries to a share of the requests of the last ten seconds, so
// that a fleet in trouble is not hit by more than it was before.
type budget struct {
	seconds [budgetSeconds]struct {
		unix              int64
		requests, retries int
	}
}

func (b *budget) request(now time.Time) { b.seconds[b.at(now)].requests++ }

// retry books one, if the share allows it.
func (b *budget) retry(now time.Time, share float64) bool {
	i := b.at(now)
	var requests, retries int
	for _, s := range b.seconds {
		if now.Unix()-s.unix < budgetSeconds {
			requests += s.requests
			retries += s.retries
		}
	}
	if float64(retries+1) > max(budgetFloor, share*float64(requests)) {
		return false
	}
	b.seconds[i].retries++
	return true
}

// at is the second's slot, emptied if it served an earlier one.
func (b *budget) at(now time.Time) int {
	unix := now.Unix()
	s := &b.seconds[unix%budgetSeconds]
	if s.unix != unix {
		s.unix, s.requests, s.retries = unix, 0, 0
	}
	return int(unix % budgetSeconds)
}
