package prefill

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/mooncake"
)

// outcome of an Acquire that runs beside the test.
type outcome struct {
	lease *Lease
	err   error
	after time.Duration
}

// start calls Acquire in a goroutine, and returns when it waits or is done.
func start(ctx context.Context, scheduler *Scheduler, r Request) <-chan outcome {
	if r.Model == "" {
		r.Model = testModel
	}
	got := make(chan outcome, 1)
	begin := time.Now()
	go func() {
		lease, err := scheduler.Acquire(ctx, r)
		got <- outcome{lease, err, time.Since(begin)}
	}()
	synctest.Wait()
	return got
}

func TestRequestsAreServedInTheOrderTheyArrived(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pool := newPlaces(0)
		scheduler := newScheduler(t, up("a"), withPlaces(pool))
		pool.wake = scheduler.Wake
		late := start(t.Context(), scheduler, Request{ID: "late", Arrival: time.Now()})
		early := start(t.Context(), scheduler, Request{ID: "early", Arrival: time.Now().Add(-time.Second)})
		pool.Release()
		synctest.Wait()
		require.Empty(t, late)
		require.NoError(t, (<-early).err)
		pool.Release()
		require.NoError(t, (<-late).err)
	})
}

func TestAPlaceGoesToTheOldestOfAllModels(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		candidates := up("a", "b")
		candidates[1].Models = []string{"n"}
		pool := newPlaces(0)
		scheduler := newScheduler(t, candidates, withPlaces(pool))
		pool.wake = scheduler.Wake
		second := start(t.Context(), scheduler, Request{Model: testModel, Arrival: time.Now()})
		first := start(t.Context(), scheduler, Request{Model: "n", Arrival: time.Now().Add(-1)})
		pool.Release()
		synctest.Wait()
		require.Empty(t, second)
		require.Equal(t, "b", (<-first).lease.Candidate.ID)
		pool.Release()
		require.Equal(t, "a", (<-second).lease.Candidate.ID)
	})
}

func TestNobodyTakesAPlaceThatAnotherModelWaitedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		candidates := up("a", "b")
		candidates[1].Models = []string{"n"}
		pool := newPlaces(0)
		scheduler := newScheduler(t, candidates, withPlaces(pool))
		waits := start(t.Context(), scheduler, request(1))
		pool.Release() // and before Wake is called:
		mustWait(t, scheduler, Request{Model: "n"})
		require.Equal(t, "a", (<-waits).lease.Candidate.ID)
	})
}

func TestAModelWithClosedGatesDoesNotHoldUpAnother(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		candidates := up("a", "b")
		candidates[1].Models = []string{"n"}
		scheduler := newScheduler(t, candidates)
		hold(t, scheduler, "a", pooled, 95_000)
		ctx, stop := context.WithCancel(t.Context())
		waits := start(ctx, scheduler, request(1))
		require.Equal(t, "b", acquire(t, scheduler, Request{Model: "n"}).Candidate.ID)
		stop()
		require.ErrorIs(t, (<-waits).err, context.Canceled)
	})
}

func TestARetryDoesNotWaitBehindWhoWaitsForAPlace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pool := newPlaces(0)
		scheduler := newScheduler(t, up("a"), withPlaces(pool))
		pool.wake = scheduler.Wake
		waits := start(t.Context(), scheduler, Request{ID: "old", Arrival: time.Now().Add(-time.Second)})
		acquire(t, scheduler, Request{ID: "retry", HasPlace: true}) // or it would hold the place that old needs
		require.Empty(t, waits)
		pool.Release()
		require.NoError(t, (<-waits).err)
	})
}

func TestNoPlaceIsTakenWhileTheGateIsClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pool := newPlaces(1)
		scheduler := newScheduler(t, up("a"), withPlaces(pool))
		full := hold(t, scheduler, "a", pooled, 95_000)
		waits := start(t.Context(), scheduler, request(1))
		require.EqualValues(t, 1, pool.free.Load())
		full[0].Release()
		require.NoError(t, (<-waits).err)
		require.Zero(t, pool.free.Load())
	})
}

func TestTheTimeoutSaysWhatWasMissing(t *testing.T) {
	for _, tt := range []struct {
		name   string
		places int64
		held   int
		want   error
	}{
		{"a place in the pool", 0, 10, ErrQueueTimeout},
		{"an open gate", 1, 95_000, ErrKVExhausted},
		{"an open gate, whether or not there is a place", 0, 95_000, ErrKVExhausted},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				scheduler := newScheduler(t, up("a"), withPlaces(newPlaces(tt.places)))
				hold(t, scheduler, "a", pooled, tt.held)
				got := <-start(t.Context(), scheduler, Request{Arrival: time.Now().Add(-10 * time.Second)})
				require.ErrorIs(t, got.err, tt.want)
				require.Equal(t, 50*time.Second, got.after, "60 s from the first arrival")
				require.Nil(t, got.lease)
			})
		})
	}
}

// Requests wait for an engine that is late or full, but it cannot be scored.
func TestNoScoreSaysWhatWasMissing(t *testing.T) {
	scheduler := newScheduler(t, up("a"))
	hold(t, scheduler, "a", pooled, 95_000)
	_, err := scheduler.Score(Request{Model: testModel})
	require.ErrorIs(t, err, ErrKVExhausted)
	late := up("a")
	late[0].Live, late[0].AnswersLate = false, true
	scheduler.SetCandidates(late)
	_, err = scheduler.Score(Request{Model: testModel})
	require.ErrorIs(t, err, ErrUnavailable)
	require.ErrorContains(t, err, "none of the 1 that serve it takes requests now")
}

func TestARetryPastTheTimeoutIsServedAtOnceOrNotAtAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		scheduler := newScheduler(t, up("a"))
		late := Request{Model: testModel, HasPlace: true, Arrival: time.Now().Add(-61 * time.Second)}
		full := hold(t, scheduler, "a", pooled, 95_000)
		_, err := scheduler.Acquire(t.Context(), late)
		require.ErrorIs(t, err, ErrKVExhausted)
		full[0].Release()
		_, err = scheduler.Acquire(t.Context(), late)
		require.NoError(t, err)
	})
}

func TestAFullQueueRefusesButNotRetries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		scheduler := newScheduler(t, up("a"), func(c *Config) { c.Queue.Max = 2 })
		full := hold(t, scheduler, "a", pooled, 95_000)
		one, two := start(t.Context(), scheduler, request(1)), start(t.Context(), scheduler, request(2))
		_, err := scheduler.Acquire(t.Context(), Request{Model: testModel})
		require.ErrorIs(t, err, ErrQueueFull)
		retry := start(t.Context(), scheduler, Request{HasPlace: true})
		require.Empty(t, retry, "it waits")
		full[0].Release()
		for _, got := range []<-chan outcome{one, two, retry} {
			require.NoError(t, (<-got).err)
		}
	})
}

func TestAClientThatLeavesLeavesTheQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pool := newPlaces(1)
		scheduler := newScheduler(t, up("a"), withPlaces(pool))
		full := hold(t, scheduler, "a", pooled, 95_000)
		ctx, leave := context.WithCancel(t.Context())
		gone, stays := start(ctx, scheduler, request(1)), start(t.Context(), scheduler, request(2))
		leave()
		require.ErrorIs(t, (<-gone).err, context.Canceled)
		full[0].Release()
		lease := (<-stays).lease
		require.NotNil(t, lease)
		lease.Release()
		requireIdle(t, scheduler)

		_, err := scheduler.Acquire(ctx, request(3))
		require.ErrorIs(t, err, context.Canceled, "a client that is gone is not even tried")
	})
}

func TestWhatAClientThatLeftWasServedIsGivenBack(t *testing.T) {
	pool := newPlaces(0)
	scheduler := newScheduler(t, up("a"), withPlaces(pool))
	pool.wake = scheduler.Wake
	w, _, err := scheduler.enter(Request{Model: testModel})
	require.NoError(t, err)
	pool.Release()
	require.NotNil(t, w.lease, "served")
	scheduler.withdraw(w)
	require.EqualValues(t, 1, pool.free.Load())
	requireIdle(t, scheduler)
}

func TestWhoCanServeDecidesTheError(t *testing.T) {
	down := func(c []Candidate, which ...int) []Candidate {
		for _, i := range which {
			c[i].Live = false
		}
		return c
	}
	unnamed := func(c []Candidate, which ...int) []Candidate {
		for _, i := range which {
			c[i].Models = nil
		}
		return c
	}
	for _, tt := range []struct {
		name       string
		candidates []Candidate
		model      string
		want       error
	}{
		{"a live candidate serves", down(up("a", "b"), 0), testModel, nil},
		{"all candidates are down", down(up("a", "b"), 0, 1), testModel, ErrUnavailable},
		{"there are no candidates", nil, testModel, ErrUnavailable},
		{"nobody has named his models yet", unnamed(up("a"), 0), testModel, ErrUnavailable},
		{"a live candidate may serve it, once it has named its models", unnamed(up("a", "b"), 1), "other", ErrUnavailable},
		{"a candidate that is down does not hide a wrong model", down(unnamed(up("a", "b"), 1), 1), "other", ErrModelNotFound},
		{"no candidate serves the model", up("a", "b"), "other", ErrModelNotFound},
	} {
		t.Run(tt.name, func(t *testing.T) {
			scheduler := newScheduler(t, tt.candidates)
			lease, err := scheduler.Acquire(t.Context(), Request{Model: tt.model})
			require.ErrorIs(t, err, tt.want)
			require.Equal(t, tt.want == nil, lease != nil)
		})
	}
}

func TestAQueueWhoseLastCandidateGoesDownIsAnsweredAtOnce(t *testing.T) {
	for name, then := range map[string][]Candidate{"removed": nil, "down": {{ID: "a", Models: []string{testModel}}}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				scheduler := newScheduler(t, up("a"))
				hold(t, scheduler, "a", pooled, 95_000)
				waits := start(t.Context(), scheduler, request(1))
				scheduler.SetCandidates(then)
				got := <-waits
				require.ErrorIs(t, got.err, ErrUnavailable)
				require.Zero(t, got.after)
			})
		})
	}
}

func TestACandidateThatComesUpServesTheQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		scheduler := newScheduler(t, up("a"))
		hold(t, scheduler, "a", pooled, 95_000)
		waits := start(t.Context(), scheduler, request(1))
		scheduler.SetCandidates(up("a", "b"))
		require.Equal(t, "b", (<-waits).lease.Candidate.ID)
	})
}

// Whatever the order of events, who waits is served or told, and nothing stays.
func TestNobodyWaitsForEver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rapid.Check(noDeadline{t}, func(r *rapid.T) {
			size := rapid.Int64Range(1, 4).Draw(r, "places")
			pool := newPlaces(size)
			scheduler := newScheduler(t, up("a", "b"), withPlaces(pool), func(c *Config) { c.Queue.Max = 8 })
			pool.wake = scheduler.Wake
			type done struct{ served, failed int }
			ended := make(chan done, 64)
			clients := rapid.IntRange(1, 20).Draw(r, "clients")
			for n := range clients {
				tokens := rapid.IntRange(1, 95_000).Draw(r, "tokens")
				begin := rapid.IntRange(0, 5000).Draw(r, "begins at ms")
				leaves := rapid.IntRange(0, 90_000).Draw(r, "leaves after ms")
				works := rapid.IntRange(0, 20_000).Draw(r, "works for ms")
				lost := rapid.Bool().Draw(r, "lost")
				go func() {
					time.Sleep(time.Duration(begin) * time.Millisecond)
					ctx, stop := context.WithTimeout(t.Context(), time.Duration(leaves)*time.Millisecond)
					defer stop()
					l, err := scheduler.Acquire(ctx, Request{ID: fmt.Sprint(n), Model: testModel, PromptTokens: tokens})
					if err != nil {
						ended <- done{failed: 1}
						return
					}
					time.Sleep(time.Duration(works) * time.Millisecond)
					if lost {
						l.Failed(true, 20*time.Second)
					} else {
						l.Answered(Usage{PromptTokens: tokens}, time.Now().Add(10*time.Second))
						time.Sleep(time.Second)
						l.Release()
					}
					pool.Release() // what the dispatcher does
					ended <- done{served: 1}
				}()
			}
			var all done
			for range clients {
				d := <-ended
				all.served += d.served
				all.failed += d.failed
			}
			require.Equal(r, clients, all.served+all.failed)
			require.Equal(r, size, pool.free.Load(), "places free at the end")
			time.Sleep(time.Minute)
			requireIdle(r, scheduler)
		})
	})
}

// An engine that stands still may go on: requests wait for it, those that come now
// and those that wait already, but not for one that is dead.
func TestRequestsWaitForAnEngineThatIsLate(t *testing.T) {
	late := []Candidate{{ID: "a", Models: []string{testModel}, CapacityTokens: 100_000, AnswersLate: true}}
	for name, row := range map[string]struct {
		then  []Candidate
		after time.Duration
		want  error
	}{
		"it goes on":                          {up("a"), 7 * time.Second, nil},
		"it is down for good":                 {[]Candidate{{ID: "a", Models: []string{testModel}}}, 7 * time.Second, ErrUnavailable},
		"it is late for as long as one waits": {late, 60 * time.Second, ErrUnavailable},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				scheduler := newScheduler(t, up("a"))
				full := hold(t, scheduler, "a", pooled, 95_000)
				before := start(t.Context(), scheduler, request(1))
				scheduler.SetCandidates(late)
				since := start(t.Context(), scheduler, request(1))
				time.Sleep(7 * time.Second)
				synctest.Wait()
				require.Empty(t, before)
				require.Empty(t, since)
				scheduler.SetCandidates(row.then)
				full[0].Release()
				for _, waits := range []<-chan outcome{before, since} {
					got := <-waits
					require.ErrorIs(t, got.err, row.want)
					require.Equal(t, row.after, got.after)
				}
			})
		})
	}
}

// The decode side of model A is full, so its requests are held. However many they are, they keep no
// request of model B from its engine.
func TestAModelWithoutRoomKeepsNoOtherModelFromItsEngines(t *testing.T) {
	for _, n := range []int{1, 64, 200} { // a round looks past 64 of a model
		t.Run(fmt.Sprint(n, " requests wait"), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				candidates := up("a", "b")
				for i, model := range []string{"A", "B"} {
					candidates[i].Models, candidates[i].Board = []string{model}, model
					candidates[i].Profile = &mooncake.Profile{KVHoldTimeout: 30 * time.Second}
				}
				scheduler := newScheduler(t, candidates, func(c *Config) {
					c.Push.MaxUnanswered = 1
					c.Decode = func(board, _ string, _ time.Duration) (int, bool) {
						return map[string]int{"B": 1000}[board], false // no hand-off of A would get a slot in time
					}
				})
				for i := range n {
					start(t.Context(), scheduler, Request{ID: fmt.Sprint("a", i), Model: "A"})
				}
				time.Sleep(time.Second)
				first := acquire(t, scheduler, Request{ID: "b0", Model: "B"})
				second := start(t.Context(), scheduler, Request{ID: "b1", Model: "B"}) // the engine is busy for a moment
				require.Empty(t, second)
				first.Answered(Usage{}, time.Time{})
				synctest.Wait()
				require.Len(t, second, 1)
			})
		})
	}
}
