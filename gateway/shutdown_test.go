package gateway_test

import (
	"context"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refclient"
)

// A shutdown ends what does not end by itself.
func TestShutdownCuts(t *testing.T) {
	t.Parallel()
	t.Run("what does not end in time ends with an error event", func(t *testing.T) {
		t.Parallel()
		c := start(t, options{})
		got := make(chan reply, 1)
		go func() {
			got <- c.Post(refclient.ChatPath, chat("an endless story", `"stream":true,"ignore_eos":true,`))
		}()
		c.Eventually("it is decoded", func() bool { return c.Metric("evenkeel_ttft_seconds_count") == 1 })
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		require.ErrorIs(t, c.gw.Shutdown(ctx), context.DeadlineExceeded)
		r := <-got
		require.NoError(t, r.Err)
		require.Equal(t, "draining", read(t, r.Body).Fail)
		c.Eventually("the engine stops", func() bool { return c.Decode[0].Stats().Running == 0 })
		c.Accounted()
		require.Equal(t, []string{"draining"}, c.Outcomes())
	})
	// Told from a whole answer all the same.
	t.Run("whoever cannot wait cuts", func(t *testing.T) {
		t.Parallel()
		c := start(t, options{})
		ctx, cancel := context.WithCancel(t.Context())
		got := make(chan reply, 1)
		go func() {
			got <- c.Post(refclient.ChatPath, chat("an endless story", `"stream":true,"ignore_eos":true,`))
		}()
		c.Eventually("it is decoded", func() bool { return c.Metric("evenkeel_ttft_seconds_count") == 1 })
		down := make(chan error, 1)
		go func() { down <- c.gw.Shutdown(ctx) }()
		c.Eventually("it ends", func() bool { return c.get("/readyz").Status == http.StatusServiceUnavailable })
		cancel()
		require.ErrorIs(t, <-down, context.Canceled)
		require.NotContains(t, (<-got).Body, `"finish_reason":"`)
		c.Eventually("the engine stops", func() bool { return c.Decode[0].Stats().Running == 0 })
	})
}
