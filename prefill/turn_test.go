package prefill

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"
)

func TestAHigherPriorityIsServedFirstAndDisplaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pool := newPlaces(0)
		scheduler := newScheduler(t, up("a"), withPlaces(pool), func(c *Config) { c.Queue.Max = 2 })
		pool.wake = scheduler.Wake
		old, young := start(t.Context(), scheduler, Request{ID: "old"}), start(t.Context(), scheduler, Request{ID: "young"})
		high := start(t.Context(), scheduler, Request{ID: "high", Priority: 10})
		require.ErrorIs(t, (<-young).err, ErrQueueFull)
		_, err := scheduler.Acquire(t.Context(), Request{Model: testModel})
		require.ErrorIs(t, err, ErrQueueFull, "an equal displaces nobody")
		pool.Release()
		require.NoError(t, (<-high).err)
		synctest.Wait()
		require.Empty(t, old)
		pool.Release()
		require.NoError(t, (<-old).err)
	})
}

func TestAKeyThatFillsTheQueueDoesNotShutOthersOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pool := newPlaces(0)
		scheduler := newScheduler(t, up("a"), withPlaces(pool), func(c *Config) { c.Queue.Max = 1000 })
		pool.wake = scheduler.Wake
		ctx, stop := context.WithCancel(t.Context())
		refused, crowd := 0, []<-chan outcome(nil)
		for n := range 1500 {
			crowd = append(crowd, start(ctx, scheduler, Request{ID: fmt.Sprint(n), Key: "crowd", PromptTokens: 1000}))
		}
		one := start(ctx, scheduler, Request{ID: "one", Key: "one", PromptTokens: 1000})
		for range 2 {
			pool.Release()
			synctest.Wait()
		}
		require.NoError(t, (<-one).err, "after one of the crowd at most")
		stop()
		for _, c := range crowd {
			if (<-c).err != nil {
				refused++
			}
		}
		require.Equal(t, 1499, refused)
		scheduler.lock()
		require.Empty(t, scheduler.queue.ByPriority())
		scheduler.unlock()
	})
}

func TestKeysTakeTurnsOverAllModels(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		candidates := up("a", "b")
		candidates[1].Models = []string{"n"}
		pool := newPlaces(0)
		scheduler := newScheduler(t, candidates, withPlaces(pool))
		pool.wake = scheduler.Wake
		first := start(t.Context(), scheduler, Request{Key: "crowd", PromptTokens: 10})
		second := start(t.Context(), scheduler, Request{Key: "crowd", PromptTokens: 10})
		one := start(t.Context(), scheduler, Request{Key: "one", Model: "n", PromptTokens: 10})
		pool.Release()
		require.NoError(t, (<-first).err)
		pool.Release()
		require.NoError(t, (<-one).err, "the other key's turn, though it asks for another model")
		pool.Release()
		require.NoError(t, (<-second).err)
	})
}
