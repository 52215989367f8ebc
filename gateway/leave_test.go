package gateway_test

import (
	"context"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/refengine"
	"evenkeel/gateway/config"
)

// send starts a request that its client will leave; wait returns when the
// client's side is over.
func (c *cluster) send(body string) (leave, wait func()) {
	c.Helper()
	ctx, cancel := context.WithCancel(c.Context())
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url+chatPath, strings.NewReader(body))
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

func (c *cluster) noticed() {
	c.Helper()
	c.eventually("the proxy notices", func() bool {
		all := c.outcomes()
		return len(all) == 1 && all[0] == "client_closed"
	})
}

// Clients leave in every phase; with a stream or without, alone or as the legs
// of a fan-out.
func TestClientsThatLeave(t *testing.T) {
	t.Parallel()
	for name, more := range map[string]string{"streamed": `"stream":true,`, "not streamed": "", "three answers": `"n":3,`, "three answers, streamed": `"n":3,"stream":true,`} {
		legs := int64(1)
		if strings.Contains(more, "n\":3") {
			legs = 3
		}
		body := chat("a b c", more+`"ignore_eos":true,`)

		t.Run(name+", in the arrival queue", func(t *testing.T) {
			t.Parallel()
			c := start(t, options{configure: func(cfg *config.Config) { cfg.Pool.Size = 1 }})
			require.NoError(t, c.prefill[0].SetFaults(refengine.Rule{Fault: refengine.Hang}))
			first, _ := c.send(chat("first", ""))
			c.eventually("the place is taken", func() bool { return c.gw.Status(t.Context()).PoolUsed == 1 })
			leave, _ := c.send(body)
			c.eventually("it waits", func() bool { return c.metric("evenkeel_requests_open") == 2 })
			leave()
			c.noticed() // while the first one is still at it
			require.EqualValues(t, 1, c.prefill[0].Stats().Probes, "no engine saw it")
			first()
		})

		t.Run(name+", in prefill", func(t *testing.T) {
			t.Parallel()
			c := start(t, options{prefill: []refengine.Config{{PrefillBase: time.Hour, PrefillConcurrency: 3}}})
			leave, _ := c.send(body)
			c.eventually("it is computed", func() bool { return c.prefill[0].Stats().Running == legs })
			leave()
			c.noticed()
			c.eventually("the engine stops", func() bool { return c.prefill[0].Stats().Running == 0 })
			require.Zero(t, c.decode[0].Stats().Decodes)
		})

		t.Run(name+", pooled", func(t *testing.T) {
			t.Parallel()
			c := start(t, options{decode: []refengine.Config{{Slots: 1}}})
			blocker := c.endless()
			leave, _ := c.send(body)
			c.eventually("it is pooled", func() bool { return c.metric("evenkeel_pool_entries") == float64(legs) })
			leave()
			c.noticed()
			require.EqualValues(t, legs, c.prefill[0].Stats().Pins, "there is no slot to drain with")
			blocker()
			c.eventually("drained", func() bool { return c.metric(`evenkeel_drains_total{outcome="drained"}`) == float64(legs) })
			require.Zero(t, c.prefill[0].Stats().Pins)
		})

		t.Run(name+", in transfer", func(t *testing.T) {
			t.Parallel()
			c := start(t, options{decode: []refengine.Config{{TransferBase: 300 * time.Millisecond}}})
			leave, _ := c.send(body)
			c.eventually("the KV is on its way", func() bool { return c.decode[0].Stats().Waiting == legs })
			leave()
			c.noticed()
			got := c.decode[0].Stats()
			require.Zero(t, got.InTransfer, "a pull that is cut leaks the prefiller's blocks")
			require.EqualValues(t, legs, got.Decodes)
			require.EqualValues(t, legs, c.prefill[0].Stats().Pulls)
			c.eventually("then the engine stops", func() bool { return c.decode[0].Stats().Running == 0 })
		})

		t.Run(name+", while it is decoded", func(t *testing.T) {
			t.Parallel()
			c := start(t, options{})
			leave, _ := c.send(body)
			c.eventually("it is decoded", func() bool { return c.decode[0].Stats().Running == legs })
			c.eventually("its first events are here", func() bool { return c.metric("evenkeel_ttft_seconds_count") == float64(legs) })
			leave()
			c.noticed()
			c.eventually("the engine stops", func() bool { return c.decode[0].Stats().Running == 0 })
		})
	}
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
