package prefill

import (
	"context"
	"math"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// region is another one, as a test wants it.
type region struct {
	offers bool
	where  func(*Here) Where
	stays  bool

	mu    sync.Mutex
	moves []int // requests in the queue, after each that came or went
}

func (r *region) Offered() bool           { return r.offers }
func (r *region) Where(h *Here) Where     { return r.where(h) }
func (r *region) Stay()                   { r.stays = true }
func (r *region) Takes(p *Prefiller) bool { return p.Unanswered+p.OthersWaiting < 8 }
func always(w Where) func(*Here) Where    { return func(*Here) Where { return w } }
func (r *region) ask(n int) Request       { q := request(n); q.Model, q.Remote = testModel, r; return q }

func (r *region) Queued(_ time.Time, _ bool, waiting int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.moves = append(r.moves, waiting)
}

// moved says how many requests were in the queue after each that came or went.
func (r *region) moved() []int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.moves)
}

// untilWaiting waits until so many requests are in the queue.
func untilWaiting(t *testing.T, scheduler *Scheduler, n int) {
	t.Helper()
	require.Eventually(t, func() bool {
		scheduler.mu.Lock()
		defer scheduler.mu.Unlock()
		return scheduler.queue.Len() == n
	}, 10*time.Second, time.Millisecond)
}

func acquired(ctx context.Context, scheduler *Scheduler, q Request) chan error {
	done := make(chan error, 1)
	go func() {
		l, err := scheduler.Acquire(ctx, q)
		if l != nil {
			l.Release()
		}
		done <- err
	}()
	return done
}

func TestARequestMayGoToAnotherRegion(t *testing.T) {
	scheduler := newScheduler(t, up("a"))
	r := &region{offers: true, where: func(h *Here) Where {
		require.Len(t, h.Prefillers, 1)
		require.True(t, h.Prefillers[0].Live && h.Prefillers[0].Open)
		return ToThere
	}}
	_, err := scheduler.Acquire(t.Context(), r.ask(0))
	require.ErrorIs(t, err, ErrElsewhere)
	r.where = always(ToHere)
	l, err := scheduler.Acquire(t.Context(), r.ask(1))
	require.NoError(t, err)
	l.Release()
	requireIdle(t, scheduler)
}

func TestAModelOfAnotherRegionIsWaitedForAndForgotten(t *testing.T) {
	scheduler := newScheduler(t, up("a"))
	r := &region{offers: true, where: always(WaitsAlone)}
	q := r.ask(0)
	q.Model = "far"
	done := acquired(t.Context(), scheduler, q)
	untilWaiting(t, scheduler, 1)
	scheduler.mu.Lock()
	r.where = always(ToThere)
	scheduler.mu.Unlock()
	scheduler.Wake()
	require.ErrorIs(t, <-done, ErrElsewhere)
	require.Nil(t, scheduler.models["far"])
	r.offers = false
	_, err := scheduler.Acquire(t.Context(), q)
	require.ErrorIs(t, err, ErrModelNotFound)
}

func TestAFullRegionForwardsWhoMayGoPastWhoMayNot(t *testing.T) {
	room := newPlaces(0)
	scheduler := newScheduler(t, up("a"), withPlaces(room))
	full := false
	stay := &region{where: func(h *Here) Where {
		full = full || !h.Prefillers[0].Open
		return ToHere
	}}
	held := acquired(t.Context(), scheduler, stay.ask(0))
	untilWaiting(t, scheduler, 1)
	gone := &region{offers: true, where: always(ToThere)}
	require.ErrorIs(t, <-acquired(t.Context(), scheduler, gone.ask(1)), ErrElsewhere)
	room.Release()
	scheduler.Wake()
	require.NoError(t, <-held)
	require.True(t, full, "a pool without room is no place to go")
	require.Equal(t, []int{1, 0}, stay.moved()[:2])
}

func TestAnotherRegionIsToldWhenAClosedGateOpens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		scheduler := newScheduler(t, up("a"))
		var seen Prefiller
		r := &region{offers: true, where: func(h *Here) Where {
			seen = h.Prefillers[0]
			return ToThere
		}}
		look := func(n int) Prefiller {
			_, err := scheduler.Acquire(t.Context(), r.ask(n))
			require.ErrorIs(t, err, ErrElsewhere)
			return seen
		}
		full := hold(t, scheduler, "a", pooled, 95_000)
		require.False(t, look(0).Open || look(1).KVGateWillOpen, "nothing was freed yet: nobody knows when it opens")
		full[0].Release()
		for range 30 {
			time.Sleep(time.Second)
			hold(t, scheduler, "a", pooled, 2000)[0].Release()
		}
		require.True(t, look(2).Open)
		full = hold(t, scheduler, "a", pooled, 95_000)
		require.True(t, look(3).KVGateWillOpen)
		require.InDelta(t, 7000*seen.Room.TokenMs, seen.Room.InMs, 1, "7,000 tokens have to go")
		scheduler.SetSlots(testModel, map[string]int{"": 0})
		require.True(t, look(4).KVGateWillOpen, "no decode slot is free, nor is there one elsewhere")
		full[0].Release()
		requireIdle(t, scheduler)
	})
}

func TestWhatCameBackPassesAFullQueueAtItsFirstArrival(t *testing.T) {
	room := newPlaces(0)
	scheduler := newScheduler(t, up("a"), withPlaces(room), func(c *Config) { c.Queue.Max = 1 })
	start := time.Now()
	later := request(1)
	later.Model, later.Arrival = testModel, start
	second := acquired(t.Context(), scheduler, later)
	untilWaiting(t, scheduler, 1)
	back := request(0)
	back.Model, back.Arrival = testModel, start.Add(-time.Second)
	_, err := scheduler.Acquire(t.Context(), back)
	require.ErrorIs(t, err, ErrQueueFull, "another one does not pass")
	back.Returned = true
	first := acquired(t.Context(), scheduler, back)
	untilWaiting(t, scheduler, 2)
	room.Release()
	scheduler.Wake()
	require.NoError(t, <-first)
	select {
	case <-second:
		t.Fatal("the younger one was served, too")
	default:
	}
	room.Release()
	scheduler.Wake()
	require.NoError(t, <-second)
}

func TestNobodyBehindIsAskedWhereNobodyCanGo(t *testing.T) {
	scheduler := newScheduler(t, up("a"))
	asked := 0
	r := &region{offers: true, where: func(*Here) Where { asked++; return ModelWaits }}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	first, second := acquired(ctx, scheduler, r.ask(0)), acquired(ctx, scheduler, r.ask(1))
	untilWaiting(t, scheduler, 2)
	scheduler.mu.Lock()
	asked = 0
	scheduler.mu.Unlock()
	scheduler.Wake()
	scheduler.mu.Lock()
	require.Equal(t, 1, asked)
	scheduler.mu.Unlock()
	cancel()
	require.ErrorIs(t, <-first, context.Canceled)
	require.ErrorIs(t, <-second, context.Canceled)
	requireIdle(t, scheduler)
}

func TestWhatWaitsInAnEngineIsPendingWhoeverSentIt(t *testing.T) {
	now := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	g := &gauges{sample: Sample{KVUsage: math.NaN(), Running: 1, Waiting: 2}}
	scheduler := newScheduler(t, up("a"), func(c *Config) {
		c.Scrape.Interval = 500 * time.Millisecond
		c.Scraper = g.scrape
		c.Clock = func() time.Time { return now }
	})
	first, second := acquire(t, scheduler, request(1)), acquire(t, scheduler, request(2))
	scheduler.Scrape(t.Context(), "a")
	_, err := scheduler.Acquire(t.Context(), (&region{offers: true, where: func(h *Here) Where {
		require.Equal(t, 2, h.Prefillers[0].WaitingAtScrape)
		require.Zero(t, h.Prefillers[0].OthersWaiting)
		return ToThere
	}}).ask(3))
	require.ErrorIs(t, err, ErrElsewhere)
	first.Release()
	second.Release()
}

// What decides about regions is told of each request that leaves the queue, whatever ends its wait.
func TestAnotherRegionIsToldOfRequestsThatGiveUp(t *testing.T) {
	for name, leave := range map[string]func(t *testing.T, scheduler *Scheduler, stop func()){
		"the client leaves": func(_ *testing.T, _ *Scheduler, stop func()) { stop() },
		"its time is over":  func(*testing.T, *Scheduler, func()) { time.Sleep(2 * time.Minute) },
		"another takes its room": func(t *testing.T, scheduler *Scheduler, _ func()) {
			start(t.Context(), scheduler, Request{ID: "urgent", Model: testModel, Priority: 1})
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				scheduler := newScheduler(t, up("a"), func(c *Config) { c.Queue.Max = 1 })
				r := &region{offers: true, where: always(WaitsAlone)}
				ctx, stop := context.WithCancel(t.Context())
				defer stop()
				got := start(ctx, scheduler, r.ask(0))
				require.Equal(t, []int{1}, r.moved())
				leave(t, scheduler, stop)
				require.Error(t, (<-got).err)
				require.Equal(t, []int{1, 0}, r.moved())
			})
		})
	}
}

// However many requests of one key wait for another region, or for engines that residency leaves
// them, they keep no request of another key from the engines that are free.
func TestRequestsOfOneKeyThatWaitKeepNoOtherKeyFromTheEngines(t *testing.T) {
	for _, n := range []int{1, 64, 200} {
		synctest.Test(t, func(t *testing.T) {
			scheduler := newScheduler(t, up("a"))
			ctx, stop := context.WithCancel(t.Context())
			waits := &region{offers: true, where: always(WaitsAlone)}
			for i := range n {
				q := waits.ask(i)
				q.Key = "one"
				start(ctx, scheduler, q)
			}
			q := (&region{where: always(ToHere)}).ask(n)
			q.Key = "another"
			require.Len(t, start(t.Context(), scheduler, q), 1, "%d wait", n)
			stop()
			synctest.Wait()
		})
	}
}
