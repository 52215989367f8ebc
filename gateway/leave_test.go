package gateway_test

import (
	"context"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// send starts a request that its client will leave; wait returns when the
// client's side is over.
func (c *cluster) send(body string) (leave, wait func()) {
	c.Helper()
	path := chatPath
	if strings.Contains(body, `"prompt":`) {
		path = "/v1/completions"
	}
	return c.sendTo(path, body)
}

// sendTo is send for any endpoint.
func (c *cluster) sendTo(path, body string) (leave, wait func()) {
	c.Helper()
	ctx, cancel := context.WithCancel(c.Context())
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url+path, strings.NewReader(body))
	require.NoError(c, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if resp, err := c.http.Do(req); err == nil {
			_, _ = io.Copy(io.Discard, resp.Body)
			_ = resp.Body.Close()
		}
	}()
	wait = func() { <-done }
	leave = func() {
		cancel()
	}
	c.Cleanup(func() { leave(); wait() })
	return leave, wait
}

// A client that is served by a connection of its own leaves between requests:
// nothing of it may reach the engine's connection, which is another's by then.
func TestLateLeaversHarmNobody(t *testing.T) {
	t.Parallel()
	c := start(t, options{})
	for range 50 {
		own := &http.Transport{}
		resp, err := (&http.Client{Transport: own}).Post(c.url+chatPath, "application/json", strings.NewReader(chat("x", `"max_tokens":2,`)))
		require.NoError(t, err)
		require.Equal(t, 200, resp.StatusCode)
		require.NoError(t, resp.Body.Close())
		own.CloseIdleConnections()
		require.Equal(t, 200, c.post(chatPath, chat("y", `"max_tokens":2,`)).status)
	}
}
