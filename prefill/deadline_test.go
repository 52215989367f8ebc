package prefill

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// by is a request whose first token is wanted within that time.
func by(id string, within time.Duration) Request {
	return Request{ID: id, Model: testModel, PromptTokens: 100, Deadline: time.Now().Add(within)}
}

// sure knows how long prefills take: 100 ms each.
func sure(c *Config) {
	c.Calibration = CalibrationConfig{T0Ms: 100, TPMs: 1e-9, Known: true}
}

func TestTheEarliestDeadlineIsServedFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pool := newPlaces(0)
		scheduler := newScheduler(t, up("a"), withPlaces(pool))
		pool.wake = scheduler.Wake
		rest := start(t.Context(), scheduler, Request{ID: "any"})
		late, soon := start(t.Context(), scheduler, by("late", 9*time.Second)), start(t.Context(), scheduler, by("soon", 5*time.Second))
		for _, next := range []<-chan outcome{soon, late, rest} {
			pool.Release()
			synctest.Wait()
			require.NoError(t, (<-next).err)
		}
	})
}

// A request that waits ends at its deadline, whatever it waits for: it does not wait for the
// timeout of the queue.
func TestAWaitEndsAtTheDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pool := newPlaces(0)
		scheduler := newScheduler(t, up("a"), withPlaces(pool))
		ctx, leave := context.WithCancel(t.Context())
		ahead := start(ctx, scheduler, Request{ID: "ahead", Priority: 1}) // so that nobody looks at those behind it
		waits := start(t.Context(), scheduler, by("r", 3*time.Second))
		got := <-waits
		require.ErrorIs(t, got.err, ErrDeadline)
		require.Equal(t, 3*time.Second, got.after)
		leave()
		<-ahead
		_, err := scheduler.Acquire(t.Context(), by("r", -1))
		require.ErrorIs(t, err, ErrDeadline, "it had passed before")
		pool.Release()
		_, err = scheduler.Acquire(t.Context(), by("r", 0))
		require.ErrorIs(t, err, ErrDeadline, "nothing is spent on it")
		require.EqualValues(t, 1, pool.free.Load())
		requireIdle(t, scheduler)
	})
}

// Where it is known how long prefills take, no prefill is spent on a request that would be too
// late, and none is held back for one that would not.
func TestNoPrefillIsSpentOnARequestThatWouldBeTooLate(t *testing.T) {
	for _, row := range []struct {
		name    string
		change  func(*Config)
		engines []Candidate
		within  time.Duration
		want    error
	}{
		{"the third prompt of an engine ends after 300 ms", sure, up("a"), 299 * time.Millisecond, ErrDeadline},
		{"which is soon enough", sure, up("a"), 301 * time.Millisecond, nil},
		{"another engine is soon enough", sure, up("a", "b", "c"), 101 * time.Millisecond, nil},
		{"and no other is", sure, up("a", "b", "c"), 99 * time.Millisecond, ErrDeadline},
		{"nobody knows how long it takes", func(*Config) {}, up("a"), time.Millisecond, nil},
		{"nobody knows of ranks that decode beside it", sure, doBoth("g"), time.Millisecond, nil},
	} {
		t.Run(row.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				scheduler := newScheduler(t, row.engines, row.change, withPolicy("finish"))
				for n := range 2 {
					acquire(t, scheduler, request(n))
				}
				_, err := scheduler.Acquire(t.Context(), by("r", row.within))
				require.ErrorIs(t, err, row.want)
			})
		})
	}
}

// A request that waits for its best engine ends as soon as that is too slow for it.
func TestAWaitEndsWhenTheDeadlineCannotBeMet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		scheduler := newScheduler(t, up("a"), sure, withPolicy("finish"), func(c *Config) { c.Push.MaxUnanswered = 1 })
		acquire(t, scheduler, request(1))
		waits := start(t.Context(), scheduler, by("r", 250*time.Millisecond))
		require.Empty(t, waits, "the engine is predicted to be free in time")
		time.Sleep(200 * time.Millisecond)
		scheduler.Wake() // it is not
		got := <-waits
		require.ErrorIs(t, got.err, ErrDeadline)
		require.Less(t, got.after, 250*time.Millisecond)
	})
}

// Once one leg of a request has its turn, the others need not be in time: the first token is the
// first leg's.
func TestTheFirstLegMeetsTheDeadlineForAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pool := newPlaces(0)
		scheduler := newScheduler(t, up("a"), withPlaces(pool))
		pool.wake = scheduler.Wake
		tickets, err := scheduler.EnterAll(legs(2, by("r", time.Second)))
		require.NoError(t, err)
		pool.Release()
		time.Sleep(2 * time.Second)
		pool.Release()
		waitAll(t, tickets)

		pool.free.Store(1)
		tickets, err = scheduler.EnterAll(legs(2, by("r", time.Second)))
		require.NoError(t, err)
		time.Sleep(2 * time.Second)
		pool.Release()
		waitAll(t, tickets)

		tickets, err = scheduler.EnterAll(legs(2, by("r", time.Second)))
		require.NoError(t, err)
		for i := range tickets {
			_, err := tickets[i].Wait(t.Context())
			require.ErrorIs(t, err, ErrDeadline)
		}
	})
}

// Whatever comes and goes, nobody with a deadline is told later than at it, and no place is lost.
func TestDeadlinesLoseNoPlace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rapid.Check(noDeadline{t}, func(r *rapid.T) {
			size := rapid.Int64Range(1, 3).Draw(r, "places")
			pool := newPlaces(size)
			scheduler := newScheduler(t, up("a", "b"), withPlaces(pool), sure, withPolicy("finish"), func(c *Config) { c.Push.MaxUnanswered = 1 })
			pool.wake = scheduler.Wake
			ended := make(chan string, 64)
			clients := rapid.IntRange(1, 16).Draw(r, "clients")
			for n := range clients {
				begin, works := rapid.IntRange(0, 1000).Draw(r, "begins at ms"), rapid.IntRange(0, 1000).Draw(r, "works for ms")
				within, leaves := rapid.IntRange(0, 2000).Draw(r, "within ms"), rapid.IntRange(1, 4000).Draw(r, "leaves after ms")
				go func() {
					time.Sleep(time.Duration(begin) * time.Millisecond)
					q := Request{ID: fmt.Sprint(n), Model: testModel, PromptTokens: 10}
					if within > 500 {
						q.Deadline = time.Now().Add(time.Duration(within) * time.Millisecond)
					}
					ctx, stop := context.WithTimeout(t.Context(), time.Duration(leaves)*time.Millisecond)
					defer stop()
					l, err := scheduler.Acquire(ctx, q)
					switch at := time.Now(); {
					case !q.Deadline.IsZero() && at.After(q.Deadline):
						ended <- "it was told after its deadline"
					case err == nil:
						time.Sleep(time.Duration(works) * time.Millisecond)
						l.Answered(Usage{PromptTokens: 10}, time.Time{})
						l.Release()
						pool.Release()
						ended <- ""
					case errors.Is(err, ErrDeadline) && q.Deadline.IsZero():
						ended <- "it had no deadline"
					default:
						ended <- ""
					}
				}()
			}
			for range clients {
				require.Empty(r, <-ended)
			}
			require.Equal(r, size, pool.free.Load(), "places free at the end")
			requireIdle(r, scheduler)
		})
	})
}
