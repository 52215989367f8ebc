package gateway_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
)

// judge asks and fails if what came is wrong, or looks whole and is not. It
// says "right", or what the client was told.
func (c *cluster) judge(prompt, more string, headers ...string) string {
	c.Helper()
	body := chat(prompt, more)
	var all []uint64 // answers: without a seed, and those of two seeds
	for _, seed := range []string{"", `"seed":5,`, `"seed":6,`} {
		p, err := reftext.Render(true, []byte(chat(prompt, seed)))
		require.NoError(c, err)
		all = append(all, p.Answer)
	}
	keys := all[:1]
	if strings.Contains(more, `"n":2`) {
		keys = all[1:]
	}
	r := c.post(chatPath, body, headers...)
	require.NoError(c, r.err, "an answer ends as HTTP says, whatever it says")
	if r.status != http.StatusOK {
		require.Contains(c, []int{400, 422, 429, 500, 501, 502, 503, 504}, r.status, r.body)
		c.Logf("%d: %s", r.status, r.body)
		return fmt.Sprint(r.status)
	}
	if r.header.Get("Content-Type") == "application/json" {
		for i, text := range whole(c.T, r.body) {
			wholeText(c.T, keys[i], text)
		}
		return "right"
	}
	got := read(c.T, r.body)
	require.True(c, got.done)
	for i, key := range keys {
		rightText(c.T, key, got.text[i])
		if got.fail == "" {
			require.NotEmpty(c, got.finish[i], "an end without a reason: %s", r.body)
			wholeText(c.T, key, got.text[i])
		}
	}
	if got.fail != "" {
		return got.fail
	}
	return "right"
}

// accounted waits until every request is in the request log and in all counts: a client has the last byte of
// its answer a moment before.
func (c *cluster) accounted() {
	c.Helper()
	c.eventually("all requests are accounted for", func() bool { return c.gw.Status(context.Background()).Open == 0 })
}

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
func (c *cluster) sendTo(path, body string, header ...string) (leave, wait func()) {
	c.Helper()
	ctx, cancel := context.WithCancel(c.Context())
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url+path, strings.NewReader(body))
	require.NoError(c, err)
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
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

// slow keeps the answer's beginning from coming in one read, before which all
// begins anew; halting, all of it.
var (
	slow    = refengine.Rule{Fault: refengine.Slow, DelayMS: 120, Tokens: 6, Leg: refengine.LegDecode}
	halting = refengine.Rule{Fault: refengine.Slow, DelayMS: 250, Leg: refengine.LegDecode}
)
