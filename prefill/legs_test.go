package prefill

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func legs(n int, r Request) (all []Request) {
	r.Model = testModel
	for range n {
		all = append(all, r)
	}
	return all
}

func waitAll(t *testing.T, tickets []Ticket) {
	t.Helper()
	for i := range tickets {
		lease, err := tickets[i].Wait(t.Context())
		require.NoError(t, err)
		lease.Release()
	}
}

func TestLegsEnterTogetherOrNotAtAll(t *testing.T) {
	closed := func(size int) (*Scheduler, *Lease) {
		scheduler := newScheduler(t, up("a"), func(c *Config) { c.Queue.Max = size })
		return scheduler, hold(t, scheduler, "a", pooled, 95_000)[0]
	}
	t.Run("all that are served at once", func(t *testing.T) {
		scheduler := newScheduler(t, up("a"), func(c *Config) { c.Queue.Max = 1 })
		tickets, err := scheduler.EnterAll(legs(4, Request{}))
		require.NoError(t, err)
		waitAll(t, tickets)
		requireIdle(t, scheduler)
	})
	t.Run("all that fit into the queue", func(t *testing.T) {
		scheduler, full := closed(4)
		tickets, err := scheduler.EnterAll(legs(4, Request{}))
		require.NoError(t, err)
		_, err = scheduler.Acquire(t.Context(), Request{Model: testModel})
		require.ErrorIs(t, err, ErrQueueFull, "each takes a place")
		full.Release()
		waitAll(t, tickets)
		requireIdle(t, scheduler)
	})
	t.Run("none, if one does not fit", func(t *testing.T) {
		scheduler, full := closed(3)
		_, err := scheduler.EnterAll(legs(4, Request{}))
		require.ErrorIs(t, err, ErrQueueFull)
		require.Zero(t, scheduler.queue.Len())
		full.Release()
		requireIdle(t, scheduler)
	})
	t.Run("what some were served is given back", func(t *testing.T) {
		pool := newPlaces(2)
		scheduler := newScheduler(t, up("a"), withPlaces(pool), func(c *Config) { c.Queue.Max = 1 })
		_, err := scheduler.EnterAll(legs(4, Request{}))
		require.ErrorIs(t, err, ErrQueueFull)
		require.EqualValues(t, 2, pool.free.Load())
		requireIdle(t, scheduler)
	})
	t.Run("nobody is displaced for some of them", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			scheduler := newScheduler(t, up("a"), func(c *Config) { c.Queue.Max = 3 })
			full := hold(t, scheduler, "a", pooled, 95_000)
			low := start(t.Context(), scheduler, Request{})
			high := start(t.Context(), scheduler, Request{Priority: 1})
			_, err := scheduler.EnterAll(legs(3, Request{Priority: 1}))
			require.ErrorIs(t, err, ErrQueueFull)
			require.Empty(t, low)
			tickets, err := scheduler.EnterAll(legs(2, Request{Priority: 1}))
			require.NoError(t, err)
			require.ErrorIs(t, (<-low).err, ErrQueueFull)
			full[0].Release()
			require.NoError(t, (<-high).err)
			waitAll(t, tickets)
		})
	})
	t.Run("a model nobody serves", func(t *testing.T) {
		scheduler := newScheduler(t, up("a"))
		_, err := scheduler.EnterAll([]Request{{Model: "x"}, {Model: "x"}})
		require.ErrorIs(t, err, ErrModelNotFound)
	})
}

func TestLegsAreDisplacedOnlyBeforeOneIsServed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pool := newPlaces(0)
		scheduler := newScheduler(t, up("a"), withPlaces(pool), func(c *Config) { c.Queue.Max = 2 })
		pool.wake = scheduler.Wake
		tickets, err := scheduler.EnterAll(legs(2, Request{}))
		require.NoError(t, err)
		pool.Release()
		_, err = tickets[0].Wait(t.Context())
		require.NoError(t, err)

		equal := start(t.Context(), scheduler, Request{})
		high := start(t.Context(), scheduler, Request{Priority: 1})
		require.ErrorIs(t, (<-equal).err, ErrQueueFull, "not the leg, though it is no younger")
		_, err = scheduler.Acquire(t.Context(), Request{Model: testModel, Key: "x"})
		require.ErrorIs(t, err, ErrQueueFull)
		_, err = scheduler.Acquire(t.Context(), Request{Model: testModel, Priority: 1})
		require.ErrorIs(t, err, ErrQueueFull, "the leg does not give way to a higher priority either")
		for range 2 {
			pool.Release()
		}
		require.NoError(t, (<-high).err)
		_, err = tickets[1].Wait(t.Context())
		require.NoError(t, err)
	})
}

func TestLegsGoElsewhereTogether(t *testing.T) {
	far := func(t *testing.T, free int64) (*Scheduler, *region, []Request, *places) {
		pool := newPlaces(free)
		scheduler := newScheduler(t, up("a"), withPlaces(pool))
		head := &region{offers: true, where: always(WaitsAlone)}
		all := legs(3, Request{})
		for i := range all {
			all[i].Remote = &region{offers: true, where: always(ToHere)}
		}
		all[0].Remote = head
		return scheduler, head, all, pool
	}
	t.Run("at once", func(t *testing.T) {
		scheduler, head, all, pool := far(t, 8)
		head.where = always(ToThere)
		_, err := scheduler.EnterAll(all)
		require.ErrorIs(t, err, ErrElsewhere)
		require.EqualValues(t, 8, pool.free.Load())
		requireIdle(t, scheduler)
	})
	t.Run("at once, though the first was served", func(t *testing.T) {
		scheduler, head, all, pool := far(t, 8)
		head.where = always(ToHere)
		all[1].Remote = &region{offers: true, where: always(ToThere)}
		_, err := scheduler.EnterAll(all)
		require.ErrorIs(t, err, ErrElsewhere)
		require.EqualValues(t, 8, pool.free.Load())
		requireIdle(t, scheduler)
	})
	t.Run("all, once the first may", func(t *testing.T) {
		scheduler, head, all, _ := far(t, 0)
		tickets, err := scheduler.EnterAll(all)
		require.NoError(t, err)
		gone := make(chan bool, 1)
		go func() { gone <- tickets[0].AwaitRegionDecision(t.Context()) }()
		scheduler.mu.Lock()
		head.where = always(ToThere)
		scheduler.mu.Unlock()
		scheduler.Wake()
		require.True(t, <-gone)
		require.Zero(t, scheduler.queue.Len())
		requireIdle(t, scheduler)
	})
	t.Run("none, once one is served here", func(t *testing.T) {
		scheduler, head, all, pool := far(t, 0)
		tickets, err := scheduler.EnterAll(all)
		require.NoError(t, err)
		pool.Release() // for the second: the first waits for something better
		scheduler.Wake()
		require.False(t, tickets[0].AwaitRegionDecision(t.Context()))
		require.True(t, head.stays)
		scheduler.mu.Lock()
		head.where = always(ToHere)
		scheduler.mu.Unlock()
		pool.Release()
		pool.Release()
		scheduler.Wake()
		waitAll(t, tickets)
		requireIdle(t, scheduler)
	})
	for what, refuse := range map[string]func(*Scheduler, *region){
		"none that is displaced": func(scheduler *Scheduler, _ *region) {
			scheduler.Offer(Request{Model: testModel, Priority: 1}, func(*Lease, error) {})
		},
		"none that nobody serves any more": func(scheduler *Scheduler, head *region) {
			head.offers = false
			scheduler.SetCandidates(nil)
		},
	} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				scheduler, head, all, _ := far(t, 0)
				scheduler.cfg.Queue.Max = len(all)
				for i := range all {
					all[i].Remote = head
				}
				tickets, err := scheduler.EnterAll(all)
				require.NoError(t, err)
				began := time.Now()
				refuse(scheduler, head)
				require.False(t, tickets[0].AwaitRegionDecision(t.Context()))
				require.Zero(t, time.Since(began), "it is known at once")
				require.True(t, head.stays)
				_, err = tickets[len(tickets)-1].Wait(t.Context())
				require.Error(t, err)
			})
		})
	}
	t.Run("none whose client has left", func(t *testing.T) {
		scheduler, head, all, _ := far(t, 0)
		tickets, err := scheduler.EnterAll(all)
		require.NoError(t, err)
		ctx, leave := context.WithCancel(t.Context())
		leave()
		require.False(t, tickets[0].AwaitRegionDecision(ctx))
		require.True(t, head.stays)
		for i := range tickets {
			_, err := tickets[i].Wait(ctx)
			require.ErrorIs(t, err, context.Canceled)
		}
		requireIdle(t, scheduler)
	})
}
