package prefill

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/engine"
)

var errReset = errors.New("connection reset")

func TestRetry(t *testing.T) {
	for _, tt := range []struct {
		name   string
		k      int
		status int
		err    error
		again  bool
	}{
		{"a refused connection is tried again", 1, 0, errReset, true},
		{"a timeout of the engine is tried again", 1, 0, &engine.Error{Timeout: true, Err: errReset}, true},
		{"an overloaded engine is tried again", 2, 503, nil, true},
		{"a rate limit is tried again", 1, 429, nil, true},
		{"a bad gateway is tried again", 1, 502, nil, true},
		{"a gateway timeout is tried again", 1, 504, nil, true},
		{"a 200 without a usable hand-off is tried again", 1, 200, errors.New("null params"), true},
		{"a good answer is not", 1, 200, nil, false},
		{"three attempts are enough", 3, 503, nil, false},
		{"a 500 is tried again: whether it is the request's fault, its caller judges", 2, 500, nil, true},
		{"a bad request stays bad", 1, 400, nil, false},
		{"an unknown model stays unknown", 1, 404, nil, false},
		{"too large stays too large", 1, 413, nil, false},
		{"a wrong type stays wrong", 1, 415, nil, false},
		{"what cannot be processed stays so", 1, 422, nil, false},
		{"our credentials do not get better", 1, 401, nil, false},
		{"nor our rights", 1, 403, nil, false},
		{"not implemented stays so", 1, 501, nil, false},
		{"a client that left wants no retry", 1, 0, fmt.Errorf("probe: %w", context.Canceled), false},
		{"nor one whose time is over", 1, 0, context.DeadlineExceeded, false},
		{"nor a call that we aborted", 1, 0, &engine.Error{Aborted: true, Err: errReset}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			scheduler := newScheduler(t, up("a"))
			_, again := scheduler.Retry(tt.k, tt.status, tt.err)
			require.Equal(t, tt.again, again, "Retry(%d, %d, %v)", tt.k, tt.status, tt.err)
		})
	}
}

var (
	errUnsent = &engine.Error{Phase: engine.PhaseConnect, Err: errReset}
	errBroke  = &engine.Error{Phase: engine.PhaseHead, Sent: true, Err: errReset}
)

func TestWhatACallThatFailedSays(t *testing.T) {
	for _, tt := range []struct {
		name          string
		err           error
		unsent, broke bool
	}{
		{"refused", errUnsent, true, false},
		{"a connect that timed out", &engine.Error{Phase: engine.PhaseConnect, Timeout: true, Err: errReset}, true, false},
		{"a request that the proxy itself refuses", &engine.Error{Phase: engine.PhaseRequest, Err: errReset}, false, false},
		{"lost before an answer", errBroke, false, true},
		{"lost within it", fmt.Errorf("decode: %w", &engine.Error{Phase: engine.PhaseBody, Sent: true, Answered: true, Err: errReset}), false, true},
		{"silence", &engine.Error{Phase: engine.PhaseHead, Sent: true, Timeout: true, Err: errReset}, false, false},
		{"not HTTP", &engine.Error{Phase: engine.PhaseHead, Sent: true, Err: engine.ErrMalformed}, false, false},
		{"our own abort", &engine.Error{Phase: engine.PhaseHead, Sent: true, Aborted: true, Err: engine.ErrAborted}, false, false},
		{"no call at all", errReset, false, false},
		{"nothing", nil, false, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			require.Equal(t, tt.unsent, Unsent(tt.err))
			require.Equal(t, tt.broke, Broke(tt.err))
		})
	}
}

func TestWhatCostsNoEngineAnythingCostsNoBudget(t *testing.T) {
	scheduler := newScheduler(t, up("a"))
	for range 1000 {
		_, again := scheduler.RetryUnsent(1)
		require.True(t, again)
	}
	for k := range maxUnsent + 3 {
		_, again := scheduler.RetryUnsent(k)
		require.Equal(t, k <= maxUnsent, again, "after %d engines that could not be reached", k)
	}
	for range budgetFloor {
		_, again := scheduler.Retry(1, 503, nil)
		require.True(t, again)
	}
	_, again := scheduler.Retry(1, 503, nil)
	require.False(t, again)
	_, again = scheduler.RetryUnsent(1)
	require.True(t, again, "with nothing left")
	scheduler = newScheduler(t, up("a"), func(c *Config) { c.Retry.Attempts = 1 })
	_, again = scheduler.RetryUnsent(1)
	require.False(t, again, "one attempt means one")
}

func TestAnEngineThatDiesUnderManyLosesNone(t *testing.T) {
	scheduler := newScheduler(t, up("a"))
	for range 1000 {
		_, again := scheduler.Retry(1, 0, errBroke)
		require.True(t, again, "its first lost connection")
	}
	_, again := scheduler.Retry(2, 0, errBroke)
	require.False(t, again, "the second asks the budget")
	_, again = scheduler.Retry(1, 503, nil)
	require.False(t, again, "from which the others were taken")
}

func TestBackoffIsJitteredBelowADoublingBound(t *testing.T) {
	for k, most := range map[int]time.Duration{1: 50 * time.Millisecond, 2: 100 * time.Millisecond, 3: 200 * time.Millisecond} {
		var longest time.Duration
		for range 200 {
			scheduler := newScheduler(t, up("a"), func(c *Config) { c.Retry.Attempts = 9 })
			backoff, again := scheduler.Retry(k, 503, nil)
			require.True(t, again)
			require.LessOrEqual(t, backoff, most, "after attempt %d", k)
			longest = max(longest, backoff)
		}
		require.Greater(t, longest, most/2, "after attempt %d", k)
	}
}

func TestTheLongestBackoffOfAConfigOverflowsNowhere(t *testing.T) {
	for k := range 20 {
		require.LessOrEqual(t, Backoff(maxRetryBase, k), 256*maxRetryBase, "after attempt %d", k)
	}
}

func TestRetriesAreAShareOfTheRequestsOfTenSeconds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		scheduler := newScheduler(t, up("a"))
		retries := func() (n int) {
			for range 1000 {
				if _, again := scheduler.Retry(1, 503, nil); again {
					n++
				}
			}
			return n
		}
		for n := range 1000 {
			acquire(t, scheduler, request(n)).Release()
		}
		require.Equal(t, 500, retries(), "half of 1000 requests")
		time.Sleep(9 * time.Second)
		require.Zero(t, retries(), "the window still holds them")
		time.Sleep(6 * time.Second)
		require.Equal(t, budgetFloor, retries(), "an idle proxy may still retry")
	})
}

// Retries of seconds that have not come yet, because the clock was set back since, do not count.
func TestRetriesFromBeforeTheClockWasSetBackDoNotCount(t *testing.T) {
	var b budget
	now := time.Unix(1_000_000, 0)
	for range budgetFloor {
		require.True(t, b.grantRetry(now, 0.5, false))
	}
	require.False(t, b.grantRetry(now, 0.5, false))
	require.True(t, b.grantRetry(now.Add(-time.Hour-time.Second), 0.5, false))
}

// Candidate p0 refuses, p1/0 answers 503, p2 serves.
func TestEachAttemptGoesToAnotherInstance(t *testing.T) {
	for n := range 20 {
		scheduler := newScheduler(t, up("p0/0", "p0/1", "p1/0", "p1/1", "p2/0", "p2/1"))
		var exclude []string
		instances := map[string]bool{}
		for range 3 {
			r := request(n)
			r.Exclude = exclude
			l := acquire(t, scheduler, r)
			require.False(t, instances[l.Candidate.Instance], "%v after %v", l.Candidate.ID, exclude)
			instances[l.Candidate.Instance] = true
			exclude = append(exclude, l.Candidate.ID)
			l.Failed(false, 0)
		}
	}
}

func TestARetryTakesAnotherRankIfThereIsNoOtherInstance(t *testing.T) {
	scheduler := newScheduler(t, up("p0/0", "p0/1"))
	require.Equal(t, "p0/1", acquire(t, scheduler, Request{Exclude: []string{"p0/0"}}).Candidate.ID)
}

func TestARetryTakesTheSameCandidateIfThereIsNoOther(t *testing.T) {
	scheduler := newScheduler(t, up("p0/0"))
	require.Equal(t, "p0/0", acquire(t, scheduler, Request{Exclude: []string{"p0/0"}}).Candidate.ID)
}

// With one of two engines that fails nine of ten probes, almost half of all
// requests are tried again.
func TestOneFlakyPrefillerDoesNotUseUpTheBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		scheduler := newScheduler(t, up("a", "b"))
		for n := range 2000 {
			acquire(t, scheduler, request(n)).Release()
			if n%2 == 0 && n%20 != 0 {
				_, again := scheduler.Retry(1, 503, nil)
				require.True(t, again, "request %d", n)
			}
			time.Sleep(time.Millisecond)
		}
	})
}
