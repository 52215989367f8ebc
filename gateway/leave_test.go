package gateway_test

import (
	"context"
	"io"
	"net/http"
	"strings"

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
