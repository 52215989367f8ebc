package prefill

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/http"
	"time"

	"evenkeel/engine"
)

// maxUnsent is how often a request may meet an engine that cannot be reached. Such tries are not counted with the
// attempts, because no engine ran anything. They are bounded, because an address that answers health checks and
// refuses requests must not hold a request for ever.
const maxUnsent = 6

// RetryUnsent is Retry after an attempt of which no byte was sent, the k-th of
// its kind. It costs no engine anything, and so nothing of the budget.
func (t *Tier) RetryUnsent(k int) (backoff time.Duration, again bool) {
	retry := t.retries()
	return jittered(retry.Base, k), k <= maxUnsent && retry.Attempts > 1
}

// retries are the settings in force.
func (t *Tier) retries() RetryConfig {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.cfg.Retry
}

// jittered is how long to wait after the k-th failure of a request: a random time up to base, which doubles with each
// failure, up to 256 times base.
func jittered(base time.Duration, k int) time.Duration {
	longest := base << min(max(k, 1)-1, 8)
	return rand.N(longest + 1)
}

// Unsent says that a call failed before its request can have reached the
// engine.
func Unsent(err error) bool {
	var failure *engine.Error
	return errors.As(err, &failure) && !failure.Sent && !failure.Aborted && failure.Phase == engine.PhaseConnect
}

// Broke says that a call lost its connection after the request was sent: the
// engine died, or the way to it.
func Broke(err error) bool {
	var failure *engine.Error
	return errors.As(err, &failure) && failure.Sent && !failure.Aborted && !failure.Timeout &&
		!errors.Is(err, engine.ErrMalformed) && !errors.Is(err, engine.ErrTooLarge)
}

// retryable says whether another prefiller may do better.
func retryable(status int, err error) bool {
	switch status {
	case http.StatusTooManyRequests, http.StatusInternalServerError, http.StatusBadGateway,
		http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return true
	case 0, http.StatusOK:
		return err != nil && !endedByUs(err)
	default:
		return false
	}
}

// endedByUs reports whether the attempt failed because we ended it: the client left, or its time is over.
func endedByUs(err error) bool {
	var failure *engine.Error
	return errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) ||
		errors.As(err, &failure) && failure.Aborted
}

const (
	budgetSeconds = 10

	// budgetFloor is how many retries in budgetSeconds are always allowed, ten a second: engines do not feel them,
	// and a share of few requests would allow none.
	budgetFloor = 10 * budgetSeconds
)

// budget keeps retries to a share of the requests of the last ten seconds, so that engines in trouble do not get many
// more requests than they got before.
type budget struct {
	seconds [budgetSeconds]struct {
		unix              int64
		requests, retries int
	}
}

func (b *budget) request(now time.Time) { b.seconds[b.at(now)].requests++ }

// retry books a retry, and reports whether the request may be tried again. It refuses a retry if retries would then be
// more than share of the requests of the last ten seconds, and more than budgetFloor; mustGrant says that it may not
// refuse.
func (b *budget) retry(now time.Time, share float64, mustGrant bool) bool {
	i := b.at(now)
	var requests, retries int
	for _, s := range b.seconds {
		if now.Unix()-s.unix < budgetSeconds {
			requests += s.requests
			retries += s.retries
		}
	}
	if !mustGrant && float64(retries+1) > max(budgetFloor, share*float64(requests)) {
		return false
	}
	b.seconds[i].retries++
	return true
}

// at is the index of this second's slot. The slot is emptied if it counted an earlier second.
func (b *budget) at(now time.Time) int {
	unix := now.Unix()
	slot := &b.seconds[unix%budgetSeconds]
	if slot.unix != unix {
		slot.unix, slot.requests, slot.retries = unix, 0, 0
	}
	return int(unix % budgetSeconds)
}
