package gateway_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/refengine"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
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
	two := func(more string) string {
		return fmt.Sprintf(`{%s"ignore_eos":true,"max_tokens":4000,"model":%q,"prompt":["a b c","d e f"]}`, more, model)
	}
	for _, row := range []struct {
		name, body string
		legs       int64
	}{
		{"streamed", chat("a b c", `"stream":true,"ignore_eos":true,`), 1},
		{"not streamed", chat("a b c", `"ignore_eos":true,`), 1},
		{"three answers", chat("a b c", `"n":3,"ignore_eos":true,`), 3},
		{"three answers, streamed", chat("a b c", `"n":3,"stream":true,"ignore_eos":true,`), 3},
		{"two prompts", two(""), 2},
		{"two prompts, streamed", two(`"stream":true,`), 2},
	} {
		name, body, legs := row.name, row.body, row.legs
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
			require.EqualValues(t, legs, c.metric(`evenkeel_cancels_total{phase="queued"}`))
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
			require.EqualValues(t, legs, c.metric(`evenkeel_cancel_release_seconds_count{phase="prefill"}`))
		})

		t.Run(name+", at the end of prefill", func(t *testing.T) {
			t.Parallel()
			c := start(t, options{prefill: []refengine.Config{{PrefillBase: time.Second, PrefillConcurrency: 3}}, configure: func(cfg *config.Config) { cfg.Limits.ProbeGrace = patience }})
			leave, _ := c.send(body)
			c.eventually("it is computed", func() bool { return c.prefill[0].Stats().Running == legs })
			leave()
			c.eventually("drained", func() bool { return c.metric(`evenkeel_drains_total{outcome="drained"}`) == float64(legs) })
			require.EqualValues(t, legs, c.prefill[0].Stats().Pulls)
			require.EqualValues(t, legs, c.metric(`evenkeel_cancels_total{phase="prefill"}`))
			require.EqualValues(t, legs, c.metric(`evenkeel_cancel_release_seconds_count{phase="prefill"}`))
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
			require.EqualValues(t, legs, c.metric(`evenkeel_cancel_release_seconds_count{phase="pooled"}`))
		})

		t.Run(name+", pooled, of engines whose hand-offs name no request", func(t *testing.T) {
			t.Parallel()
			c := start(t, options{prefill: []refengine.Config{{Version: "0.13.0"}}, decode: []refengine.Config{{Slots: 1, Version: "0.13.0"}}})
			blocker := c.endless()
			leave, _ := c.send(body)
			c.eventually("it is pooled", func() bool { return c.metric("evenkeel_pool_entries") == float64(legs) })
			leave()
			c.noticed()
			blocker()
			c.eventually("drained", func() bool { return c.metric(`evenkeel_drains_total{outcome="drained"}`) == float64(legs) })
			require.Zero(t, c.prefill[0].Stats().Pins, "the prefill engine knows the blocks by the probe's id alone")
		})

		t.Run(name+", in transfer", func(t *testing.T) {
			t.Parallel()
			c := start(t, options{decode: []refengine.Config{{TransferBase: time.Second}}})
			leave, _ := c.send(body)
			c.eventually("the KV is on its way", func() bool { return c.decode[0].Stats().Waiting == legs })
			leave()
			c.noticed()
			got := c.decode[0].Stats()
			require.Zero(t, got.InTransfer, "a pull that is cut leaks the prefiller's blocks")
			require.EqualValues(t, legs, got.Decodes)
			require.EqualValues(t, legs, c.prefill[0].Stats().Pulls)
			c.eventually("then the engine stops", func() bool { return c.decode[0].Stats().Running == 0 })
			require.EqualValues(t, legs, c.metric(`evenkeel_cancel_release_seconds_count{phase="transfer"}`))
		})

		t.Run(name+", while it is decoded", func(t *testing.T) {
			t.Parallel()
			c := start(t, options{})
			leave, _ := c.send(body)
			c.eventually("it is decoded", func() bool { return c.decode[0].Stats().Running == legs })
			c.eventually("its first events are here", func() bool { return c.metric("evenkeel_ttft_seconds_count") == float64(legs) })
			leave()
			c.noticed()
			c.eventually("the engine has stopped", func() bool { return c.decode[0].Stats().Running == 0 })
			c.eventually("each is counted where it was", func() bool { // by the proxy, after the engine
				return c.metric(`evenkeel_cancel_release_seconds_count{phase="streaming"}`) == float64(legs)
			})
		})
	}
}

// An answer that goes on elsewhere is left in its second leg.
func TestClientsThatLeaveASecondLeg(t *testing.T) {
	t.Parallel()
	given := func(d refengine.Config, after int) []refengine.Config {
		d.Faults = []refengine.Rule{{Fault: refengine.Recomputed, AfterTokens: after, Count: 1}}
		return []refengine.Config{d}
	}
	for name, body := range map[string]string{
		"streamed":     completion("a b c", `"stream":true,"ignore_eos":true,"max_tokens":4000,`),
		"not streamed": completion("a b c", `"ignore_eos":true,"max_tokens":4000,`),
	} {
		t.Run(name+", in prefill", func(t *testing.T) {
			t.Parallel()
			c := start(t, options{decode: given(refengine.Config{}, 20), prefill: []refengine.Config{{Faults: []refengine.Rule{{Fault: refengine.Hang, Skip: 1}}}}})
			leave, _ := c.send(body)
			c.eventually("it is prefilled again", func() bool { return c.prefill[0].Stats().Probes == 2 })
			leave()
			c.noticed()
			require.EqualValues(t, 1, c.metric(`evenkeel_cancel_release_seconds_count{phase="prefill"}`))
		})

		t.Run(name+", pooled", func(t *testing.T) {
			t.Parallel()
			one := refengine.Config{Slots: 1, C0: 10 * time.Millisecond}
			c := start(t, options{decode: []refengine.Config{one, one}})
			c.allUp()
			blocker := c.endless()
			mine := c.decode[0]
			if mine.Stats().Running == 1 {
				mine = c.decode[1]
			}
			leave, _ := c.send(body)
			c.eventually("it is decoded", func() bool { return c.metric("evenkeel_ttft_seconds_count") == 2 })
			c.drainOut(mine)
			c.eventually("it waits for the other", func() bool {
				return c.prefill[0].Stats().Probes == 3 && c.metric("evenkeel_pool_entries") == 1
			})
			leave()
			c.noticed()
			c.eventually("it holds its KV", func() bool { return c.prefill[0].Stats().Pins == 1 })
			blocker()
			c.eventually("drained", func() bool { return c.metric(`evenkeel_drains_total{outcome="drained"}`) == 1 })
			require.EqualValues(t, 1, c.metric(`evenkeel_cancel_release_seconds_count{phase="pooled"}`))
		})

		t.Run(name+", in transfer", func(t *testing.T) {
			t.Parallel()
			c := start(t, options{decode: given(refengine.Config{TransferBase: time.Second}, 20)})
			leave, _ := c.send(body)
			c.eventually("the KV is on its way again", func() bool { s := c.decode[0].Stats(); return s.Decodes == 2 && s.Waiting == 1 })
			leave()
			c.noticed()
			require.EqualValues(t, 2, c.prefill[0].Stats().Pulls)
			require.Zero(t, c.decode[0].Stats().InTransfer)
			require.EqualValues(t, 1, c.metric(`evenkeel_cancel_release_seconds_count{phase="transfer"}`))
		})

		t.Run(name+", while it is decoded", func(t *testing.T) {
			t.Parallel()
			c := start(t, options{decode: given(refengine.Config{}, 20)})
			leave, _ := c.send(body)
			c.eventually("it goes on", func() bool { return c.metric(`evenkeel_recomputes_total{tier="1"}`) == 1 })
			leave()
			c.noticed()
			c.eventually("the engine has stopped", func() bool { return c.decode[0].Stats().Running == 0 })
			require.EqualValues(t, 1, c.metric(`evenkeel_cancels_total{phase="streaming"}`))
		})
	}
}

// Drains are bounded: what is beyond stays on the prefiller's budget.
func TestMoreDrainsThanPlaces(t *testing.T) {
	t.Parallel()
	c := start(t, options{
		prefill:   []refengine.Config{{KVHoldTimeout: 10 * time.Second}},
		decode:    []refengine.Config{{Slots: 1}},
		profile:   mooncake.Profile{KVHoldTimeout: 10 * time.Second},
		configure: func(cfg *config.Config) { cfg.Pool.Size = 2 },
		dirty:     true, // two hand-offs time out
	})
	blocker := c.endless()
	for i := range 4 {
		leave, wait := c.send(chat(fmt.Sprint("leaver ", i), `"stream":true,`))
		c.eventually("it is prefilled", func() bool {
			return c.prefill[0].Stats().Probes == int64(i)+2 && c.gw.Status(t.Context()).PoolUsed == 1
		})
		c.eventually("pooled", func() bool { return c.prefill[0].Stats().Pins == i+1 })
		leave()
		wait()
		c.eventually("its place is free", func() bool { return c.gw.Status(t.Context()).PoolUsed == 0 })
	}
	require.EqualValues(t, 2, c.metric(`evenkeel_drains_total{outcome="crowded"}`))
	require.Positive(t, c.gw.Status(t.Context()).Prefill[0].KVTokens)
	blocker()
	c.eventually("the others are drained", func() bool { return c.metric(`evenkeel_drains_total{outcome="drained"}`) == 2 })
	c.eventually("the rest times out", func() bool {
		return c.prefill[0].Stats().Pins == 0 && c.gw.Status(t.Context()).Prefill[0].KVTokens == 0
	})
	require.EqualValues(t, 2, c.prefill[0].Stats().Leaks)
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

// A decode engine that refuses a drain and leaves the hand-off alone is asked
// again, or another one is, but not for ever.
func TestARefusedDrainIsTriedAgain(t *testing.T) {
	t.Parallel()
	for times, outcome := range map[int]string{2: "drained", 3: "refused"} {
		t.Run(fmt.Sprintf("refused %d times", times), func(t *testing.T) {
			t.Parallel()
			keeps := false
			c := start(t, options{
				decode:  []refengine.Config{{Slots: 1, Faults: []refengine.Rule{{Fault: refengine.Busy, Leg: refengine.LegDecode, Skip: 1, Count: times}}}},
				profile: mooncake.Profile{RejectReleases: &keeps},
				dirty:   true,
			})
			blocker := c.endless()
			leave, _ := c.send(chat("a b c", ""))
			c.eventually("it is pooled", func() bool { return c.metric("evenkeel_pool_entries") == 1 })
			leave()
			c.noticed()
			blocker()
			c.eventually(outcome, func() bool { return c.metric(fmt.Sprintf("evenkeel_drains_total{outcome=%q}", outcome)) == 1 })
			require.EqualValues(t, map[string]int{"drained": 0, "refused": 1}[outcome], c.prefill[0].Stats().Pins)
		})
	}
}

// An answer that comes in one piece has no first event: its call goes on for as
// long as a pull may take, and no longer.
func TestAClientThatLeavesAnAnswerInOnePiece(t *testing.T) {
	t.Parallel()
	c := start(t, options{
		// The pull ends by itself well within the time of the first event, or the call would be cut in it.
		decode:  []refengine.Config{{TransferBase: 200 * time.Millisecond}},
		profile: mooncake.Profile{NonStream: mooncake.NonStreamPassthrough, FirstEventTimeout: 15 * time.Second},
	})
	leave, _ := c.send(chat("a b c", `"ignore_eos":true,"max_tokens":30000,`))
	c.eventually("the KV is on its way", func() bool { return c.decode[0].Stats().Waiting == 1 })
	leave()
	c.noticed()
	require.EqualValues(t, 1, c.decode[0].Stats().Decodes)
	require.Zero(t, c.decode[0].Stats().InTransfer, "a pull that is cut leaks the prefiller's blocks")
	require.EqualValues(t, 1, c.prefill[0].Stats().Pulls)
	c.eventually("then the engine stops", func() bool { return c.decode[0].Stats().Running == 0 })
	require.EqualValues(t, 1, c.metric(`evenkeel_cancel_release_seconds_count{phase="transfer"}`))
	require.Zero(t, c.metric("evenkeel_heedless_engines_total"))
	require.Zero(t, c.sum("evenkeel_handoffs"), "the prefiller has its blocks back")

	leave, _ = c.send(chat("a b c", `"ignore_eos":true,"max_tokens":30000,`))
	c.eventually("it is decoded again", func() bool { return c.decode[0].Stats().Running == 1 })
	leave()
	c.eventually("it stops again", func() bool { return c.decode[0].Stats().Running == 0 })
	require.EqualValues(t, 2, c.prefill[0].Stats().Pulls)
}
