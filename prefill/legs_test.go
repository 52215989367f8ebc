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
		tier := newTier(t, up("a"), func(c *Config) { c.Queue.Max = size })
		return tier, hold(t, tier, "a", pooled, 95_000)[0]
	}
	t.Run("all that are served at once", func(t *testing.T) {
		tier := newTier(t, up("a"), func(c *Config) { c.Queue.Max = 1 })
		tickets, err := tier.EnterAll(legs(4, Request{}))
		require.NoError(t, err)
		waitAll(t, tickets)
		requireIdle(t, tier)
	})
	t.Run("all that fit into the queue", func(t *testing.T) {
		tier, full := closed(4)
		tickets, err := tier.EnterAll(legs(4, Request{}))
		require.NoError(t, err)
		_, err = tier.Acquire(t.Context(), Request{Model: testModel})
		require.ErrorIs(t, err, ErrQueueFull, "each takes a place")
		full.Release()
		waitAll(t, tickets)
		requireIdle(t, tier)
	})
	t.Run("none, if one does not fit", func(t *testing.T) {
		tier, full := closed(3)
		_, err := tier.EnterAll(legs(4, Request{}))
		require.ErrorIs(t, err, ErrQueueFull)
		require.Zero(t, tier.queue.Len())
		full.Release()
		requireIdle(t, tier)
	})
	t.Run("what some were served is given back", func(t *testing.T) {
		pool := newPlaces(2)
		tier := newTier(t, up("a"), withPlaces(pool), func(c *Config) { c.Queue.Max = 1 })
		_, err := tier.EnterAll(legs(4, Request{}))
		require.ErrorIs(t, err, ErrQueueFull)
		require.EqualValues(t, 2, pool.free.Load())
		requireIdle(t, tier)
	})
	t.Run("nobody is displaced for some of them", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			tier := newTier(t, up("a"), func(c *Config) { c.Queue.Max = 3 })
			full := hold(t, tier, "a", pooled, 95_000)
			low := start(t.Context(), tier, Request{})
			high := start(t.Context(), tier, Request{Priority: 1})
			_, err := tier.EnterAll(legs(3, Request{Priority: 1}))
			require.ErrorIs(t, err, ErrQueueFull)
			require.Empty(t, low)
			tickets, err := tier.EnterAll(legs(2, Request{Priority: 1}))
			require.NoError(t, err)
			require.ErrorIs(t, (<-low).err, ErrQueueFull)
			full[0].Release()
			require.NoError(t, (<-high).err)
			waitAll(t, tickets)
		})
	})
	t.Run("a model nobody serves", func(t *testing.T) {
		tier := newTier(t, up("a"))
		_, err := tier.EnterAll([]Request{{Model: "x"}, {Model: "x"}})
		require.ErrorIs(t, err, ErrModelNotFound)
	})
}

func TestLegsAreDisplacedOnlyBeforeOneIsServed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pool := newPlaces(0)
		tier := newTier(t, up("a"), withPlaces(pool), func(c *Config) { c.Queue.Max = 2 })
		pool.wake = tier.Wake
		tickets, err := tier.EnterAll(legs(2, Request{}))
		require.NoError(t, err)
		pool.Release()
		_, err = tickets[0].Wait(t.Context())
		require.NoError(t, err)

		equal := start(t.Context(), tier, Request{})
		high := start(t.Context(), tier, Request{Priority: 1})
		require.ErrorIs(t, (<-equal).err, ErrQueueFull, "not the leg, though it is no younger")
		_, err = tier.Acquire(t.Context(), Request{Model: testModel, Key: "x"})
		require.ErrorIs(t, err, ErrQueueFull)
		_, err = tier.Acquire(t.Context(), Request{Model: testModel, Priority: 1})
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
		tier := newTier(t, up("a"), withPlaces(pool))
		head := &region{offers: true, where: always(Waits)}
		all := legs(3, Request{})
		for i := range all {
			all[i].Remote = &region{offers: true, where: always(ToHere)}
		}
		all[0].Remote = head
		return tier, head, all, pool
	}
	t.Run("at once", func(t *testing.T) {
		tier, head, all, pool := far(t, 8)
		head.where = always(ToThere)
		_, err := tier.EnterAll(all)
		require.ErrorIs(t, err, ErrElsewhere)
		require.EqualValues(t, 8, pool.free.Load())
		requireIdle(t, tier)
	})
	t.Run("at once, though the first was served", func(t *testing.T) {
		tier, head, all, pool := far(t, 8)
		head.where = always(ToHere)
		all[1].Remote = &region{offers: true, where: always(ToThere)}
		_, err := tier.EnterAll(all)
		require.ErrorIs(t, err, ErrElsewhere)
		require.EqualValues(t, 8, pool.free.Load())
		requireIdle(t, tier)
	})
	t.Run("all, once the first may", func(t *testing.T) {
		tier, head, all, _ := far(t, 0)
		tickets, err := tier.EnterAll(all)
		require.NoError(t, err)
		gone := make(chan bool, 1)
		go func() { gone <- tickets[0].Elsewhere(t.Context()) }()
		tier.mu.Lock()
		head.where = always(ToThere)
		tier.mu.Unlock()
		tier.Wake()
		require.True(t, <-gone)
		require.Zero(t, tier.queue.Len())
		requireIdle(t, tier)
	})
	t.Run("none, once one is served here", func(t *testing.T) {
		tier, head, all, pool := far(t, 0)
		tickets, err := tier.EnterAll(all)
		require.NoError(t, err)
		pool.Release() // for the second: the first waits for something better
		tier.Wake()
		require.False(t, tickets[0].Elsewhere(t.Context()))
		require.True(t, head.stays)
		tier.mu.Lock()
		head.where = always(ToHere)
		tier.mu.Unlock()
		pool.Release()
		pool.Release()
		tier.Wake()
		waitAll(t, tickets)
		requireIdle(t, tier)
	})
	for what, refuse := range map[string]func(*Scheduler, *region){
		"none that is displaced": func(tier *Scheduler, _ *region) {
			tier.Offer(Request{Model: testModel, Priority: 1}, func(*Lease, error) {})
		},
		"none that nobody serves any more": func(tier *Scheduler, head *region) {
			head.offers = false
			tier.SetCandidates(nil)
		},
	} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				tier, head, all, _ := far(t, 0)
				tier.cfg.Queue.Max = len(all)
				for i := range all {
					all[i].Remote = head
				}
				tickets, err := tier.EnterAll(all)
				require.NoError(t, err)
				began := time.Now()
				refuse(tier, head)
				require.False(t, tickets[0].Elsewhere(t.Context()))
				require.Zero(t, time.Since(began), "it is known at once")
				require.True(t, head.stays)
				_, err = tickets[len(tickets)-1].Wait(t.Context())
				require.Error(t, err)
			})
		})
	}
	t.Run("none whose client has left", func(t *testing.T) {
		tier, head, all, _ := far(t, 0)
		tickets, err := tier.EnterAll(all)
		require.NoError(t, err)
		ctx, leave := context.WithCancel(t.Context())
		leave()
		require.False(t, tickets[0].Elsewhere(ctx))
		require.True(t, head.stays)
		for i := range tickets {
			_, err := tickets[i].Wait(ctx)
			require.ErrorIs(t, err, context.Canceled)
		}
		requireIdle(t, tier)
	})
}
