package gateway_test

import (
	"context"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
)

// Shutting down: not ready at once, nothing new is taken, what runs finishes.
func TestShutdownLetsStreamsFinish(t *testing.T) {
	t.Parallel()
	c := start(t, options{decode: []refengine.Config{{C0: 25 * time.Millisecond}}})
	got := make(chan string, 4)
	for range cap(got) {
		go func() { got <- c.judge("one two three", `"stream":true,`) }()
	}
	c.eventually("all are decoded", func() bool { return c.decode[0].Stats().Running == int64(cap(got)) })
	down := make(chan error, 1)
	go func() { down <- c.gw.Shutdown(t.Context()) }()
	c.eventually("not ready", func() bool { r := c.get("/readyz"); return r.status == http.StatusServiceUnavailable })
	require.Positive(t, c.decode[0].Stats().Running, "first of all")
	r := c.post(chatPath, chat("a", ""))
	require.True(t, r.err != nil || r.status == http.StatusServiceUnavailable, "nobody listens any more, or an open connection says so: %v", r)
	for range cap(got) {
		require.Equal(t, "right", <-got)
	}
	require.NoError(t, <-down)
	require.Error(t, c.get("/livez").err)
}

// What does not end in time ends with an error event.
func TestShutdownCutsWhatTakesTooLong(t *testing.T) {
	t.Parallel()
	c := start(t, options{})
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	got := make(chan reply, 1)
	go func() { got <- c.post(chatPath, chat("an endless story", `"stream":true,"ignore_eos":true,`)) }()
	c.eventually("it is decoded", func() bool { return c.metric("evenkeel_ttft_seconds_count") == 1 })
	require.ErrorIs(t, c.gw.Shutdown(ctx), context.DeadlineExceeded)
	r := <-got
	require.NoError(t, r.err)
	require.Equal(t, "draining", read(t, r.body).fail)
	c.eventually("the engine stops", func() bool { return c.decode[0].Stats().Running == 0 })
	c.accounted()
	require.Equal(t, []string{"draining"}, c.outcomes())
}

// Who cannot wait cuts: told from a whole answer all the same.
func TestShutdownCutsWhenItIsCancelled(t *testing.T) {
	t.Parallel()
	c := start(t, options{})
	ctx, cancel := context.WithCancel(t.Context())
	got := make(chan reply, 1)
	go func() { got <- c.post(chatPath, chat("an endless story", `"stream":true,"ignore_eos":true,`)) }()
	c.eventually("it is decoded", func() bool { return c.metric("evenkeel_ttft_seconds_count") == 1 })
	down := make(chan error, 1)
	go func() { down <- c.gw.Shutdown(ctx) }()
	c.eventually("it ends", func() bool { return c.get("/readyz").status == http.StatusServiceUnavailable })
	cancel()
	require.ErrorIs(t, <-down, context.Canceled)
	require.NotContains(t, (<-got).body, `"finish_reason":"`)
	c.eventually("the engine stops", func() bool { return c.decode[0].Stats().Running == 0 })
}
