package prefill

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestConfigureARunningTier(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var scrapes atomic.Int64
		scheduler := newScheduler(t, up("p/0"), func(c *Config) {
			c.Scrape.Interval = time.Hour
			c.Scraper = func(context.Context, Candidate) (Sample, error) { scrapes.Add(1); return Sample{}, nil }
			c.Queue.Timeout = time.Minute
		})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); scheduler.Run(ctx) }()
		synctest.Wait()
		require.EqualValues(t, 1, scrapes.Load())
		held := acquire(t, scheduler, Request{ID: "a", PromptTokens: 10})

		next := scheduler.cfg
		next.Policy, next.KVThreshold, next.Scrape.Interval = "round-robin", 0.5, time.Second
		next.Queue, next.Retry = QueueConfig{Max: 1, Timeout: time.Second}, RetryConfig{Attempts: 1, Base: time.Second, Budget: 1}
		require.NoError(t, scheduler.Configure(next))
		require.Equal(t, "round-robin", scheduler.Policy())
		time.Sleep(5*time.Second + time.Millisecond)
		synctest.Wait()
		require.EqualValues(t, 7, scrapes.Load(), "one at once, then every second")
		_, again := scheduler.Retry(1, 503, nil)
		require.False(t, again)
		require.Equal(t, 1, scheduler.Status()[0].Inflight, "accounts stay")

		next.Scrape.Interval = 0
		require.NoError(t, scheduler.Configure(next))
		before := scrapes.Load()
		time.Sleep(5 * time.Second)
		require.Equal(t, before, scrapes.Load(), "never")
		next.Policy = "fastest"
		require.Error(t, scheduler.Configure(next))
		require.Equal(t, "round-robin", scheduler.Policy())
		held.Release()
		require.Zero(t, scheduler.Status()[0].Inflight)
		cancel()
		<-done
	})
}
