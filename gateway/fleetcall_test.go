package gateway_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/detect"
	"evenkeel/gateway/fleetcall"
	"evenkeel/mooncake"
)

// call is POST /admin/fleet/call.
func (c *cluster) call(body string) (r fleetcall.Result, status int) {
	c.Helper()
	got := c.Ask("POST", c.admin+"/admin/fleet/call", body)
	require.NoError(c, got.Err)
	if got.Status == http.StatusOK || got.Status == http.StatusBadGateway {
		require.NoError(c, json.Unmarshal([]byte(got.Body), &r), got.Body)
	}
	if got.Status != http.StatusOK {
		c.Log(got.Status, got.Body)
	}
	return r, got.Status
}

// does has all engines do something.
func (c *cluster) does(path string) {
	c.Helper()
	r, status := c.call(fmt.Sprintf(`{"path":%q}`, path))
	require.Equal(c, http.StatusOK, status, "%+v", r)
	require.True(c, r.Done)
	require.Len(c, r.Engines, len(c.gw.Status(c.Context()).Engines))
}

// incidents are those that began since, of kinds that engines cause which answer nothing.
func (c *cluster) incidents(since time.Time) (all []detect.Incident) {
	c.Helper()
	var d struct{ Incidents []detect.Incident }
	require.NoError(c, json.Unmarshal([]byte(c.get("/live?once").Body), &d))
	for _, i := range d.Incidents {
		if i.SinceMs >= since.UnixMilli() && (strings.HasPrefix(string(i.Kind), "engine") || i.Kind == detect.NoPrefill ||
			i.Kind == detect.QueueWaits || i.Kind == detect.NotReady) {
			all = append(all, i)
		}
	}
	return all
}

// Between two steps of a training all engines are paused, get other weights, drop their caches and
// go on. Requests run all the while: none is lost, and none is thought to find what was in a cache
// before.
func TestEnginesArePausedBetweenTwoSteps(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name, version string
		sglang        bool
		pause, end    string
		empty         string // empty: the engines refuse it while requests hold KV
	}{
		{name: "vLLM that aborts, and refuses what comes", version: "0.33.0", pause: "/pause", empty: "/reset_prefix_cache", end: "/resume"},
		{name: "vLLM that aborts, and lets wait what comes", version: "0.32.0", pause: "/pause", empty: "/reset_prefix_cache", end: "/resume"},
		{name: "vLLM that waits for what runs", version: "0.33.0", pause: "/pause?mode=wait", empty: "/reset_prefix_cache", end: "/resume"},
		{name: "vLLM that keeps what runs", version: "0.33.0", pause: "/pause?mode=keep", end: "/resume"},
		{name: "SGLang that aborts", sglang: true, pause: "/pause_generation", empty: "/flush_cache", end: "/continue_generation"},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			engine := refengine.Config{DPSize: 2, DPMode: "internal", Version: row.version, Steps: refengine.Steps{C0: 4 * time.Millisecond},
				KV:      refengine.KV{PrefixCache: 4096},
				Answers: refengine.Answers{PromptTokensDetails: true}}
			o := options{dirty: true, profile: mooncake.Profile{ChatResume: mooncake.ChatResumeContinue}, mixed: []refengine.Config{engine, engine},
				configure: func(cfg *config.Config) {
					retrying(cfg)
					cfg.ExposeRoute = true
					cfg.FleetCall.Paths = map[string][]string{"/update_weights": {config.CallEmpties}}
					cfg.Profiles[config.DefaultAggregated] = mooncake.Profile{Connector: mooncake.None, ChatResume: mooncake.ChatResumeContinue}
				}}
			begin := func() *cluster { return start(t, o) }
			if row.sglang {
				o.mixed = nil
				begin = func() *cluster { return early(t, refengine.SGLang, o) }
			}
			c := begin()
			stop := c.KeepAsking(6)
			defer stop()
			if row.empty == "" { // a request runs at every moment
				defer c.Endless()()
			}
			prompt := strings.Repeat("word ", 300)
			require.Equal(t, "right", c.Judge(prompt, `"stream":true,`))
			for step := range 2 {
				cached := strings.Repeat(fmt.Sprint("step", step, " "), 300)
				c.Eventually("a prompt is in the caches", func() bool {
					predicted, _ := c.Hits(cached)
					return predicted > 0
				})
				paused := time.Now()
				c.does(row.pause)
				for _, e := range c.gw.Status(t.Context()).Engines {
					require.Equal(t, "halted", e.State)
					require.Contains(t, e.Error, "paused through POST /admin/fleet/call ("+row.pause+")")
				}
				ready := c.get("/readyz")
				require.Equal(t, http.StatusOK, ready.Status, "requests are taken, and wait")
				require.Contains(t, ready.Body, "paused through")
				requests := func() (sum int64) {
					for _, e := range append(c.Prefill, c.Decode...) {
						sum += e.Stats().Requests
					}
					return sum
				}
				asked := int64(-1)
				c.Eventually("what was on its way to an engine has come", func() bool {
					before := asked
					time.Sleep(500 * time.Millisecond) // longer than a busy machine takes to send one
					asked = requests()
					return asked == before
				})
				waits := c.Judging(prompt, `"stream":true,`)
				if row.empty != "" {
					c.does(row.empty)
				} else {
					_, status := c.call(`{"path":"/reset_prefix_cache"}`)
					require.Equal(t, http.StatusBadGateway, status, "requests hold KV")
				}
				if !row.sglang {
					c.does("/update_weights")
				}
				time.Sleep(200 * time.Millisecond) // health checks fail meanwhile, of SGLang
				require.Equal(t, asked, requests(), "nothing is sent to an engine")
				require.Empty(t, waits)
				require.Empty(t, c.incidents(paused))
				c.does(row.end)
				require.Empty(t, c.gw.Status(t.Context()).Pauses)
				require.Equal(t, "right", <-waits)
				predicted, actual := c.Hits(cached)
				require.Zero(t, predicted)
				if row.empty != "" {
					require.Zero(t, actual)
				}
			}
			stop()
			require.Zero(t, c.Sum("evenkeel_engine_outages_total"))
			for _, r := range c.Records() {
				require.Equal(t, "ok", r.Outcome)
			}
		})
	}
}

// What an operator may do wrong, and what engines may: one proxy after the other leaves it as the
// next part wants it.
func TestACallThatNotAllEnginesFollow(t *testing.T) {
	t.Parallel()
	one := refengine.Config{Version: "0.33.0", Steps: refengine.Steps{C0: 4 * time.Millisecond}, KV: refengine.KV{PrefixCache: 4096}}
	c := start(t, options{dirty: true, mixed: []refengine.Config{one, one}, configure: func(cfg *config.Config) {
		retrying(cfg)
		for i := range cfg.Engines.Aggregated {
			cfg.Engines.Aggregated[i].Barrier = config.BarrierNone // one serves while the other is down
		}
		cfg.FleetCall = config.FleetCall{Timeout: 10 * time.Second,
			Paths: map[string][]string{"/nothing": {config.CallPauses}, "/is_paused": {}, "/metrics": {}}}
		cfg.Profiles[config.DefaultAggregated] = mooncake.Profile{Connector: mooncake.None, ChatResume: mooncake.ChatResumeContinue}
	}})
	pauses := func() int { return len(c.gw.Status(t.Context()).Pauses) }
	t.Run("what is refused before any engine is asked", func(t *testing.T) {
		for body, want := range map[string]int{
			`{`: 400, `{}`: 404, `{"path":"/pause","colour":1}`: 400, `{"path":"/v1/completions"}`: 404, `{"path":"/pause","method":"TRACE"}`: 400,
			`{"path":"/pause","group":"nobody's"}`: 404,
		} {
			_, status := c.call(body)
			require.Equal(t, want, status, body)
		}
		require.Equal(t, http.StatusUnsupportedMediaType, c.Ask("POST", c.admin+"/admin/fleet/call", `{"path":"/pause"}`, "Content-Type", "text/plain").Status)
		require.Zero(t, pauses())
	})
	t.Run("a question, and an answer that is too long", func(t *testing.T) {
		r, status := c.call(`{"path":"/is_paused","method":"GET"}`)
		require.Equal(t, 200, status)
		require.JSONEq(t, `{"is_paused":false}`, string(r.Engines[0].Body))
		r, status = c.call(`{"path":"/metrics","method":"GET"}`)
		require.Equal(t, 200, status)
		require.NotEmpty(t, r.Engines[1].Body)
		require.LessOrEqual(t, len(r.Engines[1].Body), 32<<10)
	})
	t.Run("a pause that no engine knows is none", func(t *testing.T) {
		r, status := c.call(`{"path":"/nothing"}`)
		require.Equal(t, 502, status)
		require.Contains(t, r.Engines[0].Error, "no such path")
		require.Zero(t, pauses())
		require.Equal(t, "right", c.Judge("it is served", `"stream":true,`))
	})
	t.Run("an engine dies, and comes back while the others are paused", func(t *testing.T) {
		c.Decode[0].Kill()
		r, status := c.call(`{"path":"/pause","group":"main"}`)
		require.Equal(t, 502, status)
		require.False(t, r.Done || r.Engines[0].Done || r.Engines[0].Status != 0)
		require.True(t, r.Engines[1].Done)
		require.Len(t, r.Paused, 1, "the group is")
		waits := c.Judging("waits", `"stream":true,`)
		require.NoError(t, c.Decode[0].Revive())
		c.Eventually("it is up, and gets nothing", func() bool { return c.state(c.Decode[0]) == "halted" })
		require.Empty(t, waits)
		_, status = c.call(`{"path":"/resume","group":"main"}`)
		require.Equal(t, 200, status)
		require.Equal(t, "right", <-waits)
		require.Zero(t, pauses())
	})
	t.Run("an engine dies, and the others resume", func(t *testing.T) {
		c.does("/pause")
		c.Decode[0].Kill()
		c.Eventually("it is down", func() bool { return c.state(c.Decode[0]) == "down" })
		r, status := c.call(`{"path":"/resume"}`)
		require.Equal(t, 502, status)
		require.Len(t, r.Paused, 1)
		require.Contains(t, r.Paused[0], "still paused")
		require.Equal(t, "right", c.Judge("the other one serves", `"stream":true,`))
		require.NoError(t, c.Decode[0].Revive())
		c.Eventually("it is another process, which nobody has paused", func() bool { return c.state(c.Decode[0]) == "up" })
		require.Zero(t, pauses())
	})
	t.Run("an engine that was restarted meanwhile is told of", func(t *testing.T) {
		c.does("/pause")
		c.Decode[1].Kill()
		c.Eventually("it is down", func() bool { return c.state(c.Decode[1]) == "down" })
		require.NoError(t, c.Decode[1].Revive())
		c.Eventually("it is back", func() bool { return c.state(c.Decode[1]) == "halted" })
		r, status := c.call(`{"path":"/resume"}`)
		require.Equal(t, 200, status)
		require.True(t, r.Engines[1].Restarted && !r.Engines[0].Restarted, "it has other weights")
	})
	t.Run("a group does not resume out of a pause of all", func(t *testing.T) {
		c.does("/pause")
		_, status := c.call(`{"path":"/resume","group":"main"}`)
		require.Equal(t, 409, status)
		c.does("/resume")
	})
	t.Run("a second caller, and one that leaves", func(t *testing.T) {
		leave := c.Endless()
		ctx, left := context.WithCancel(t.Context())
		req, err := http.NewRequestWithContext(ctx, "POST", c.admin+"/admin/fleet/call", strings.NewReader(`{"path":"/pause?mode=wait"}`))
		require.NoError(t, err)
		req.Header.Set("Content-Type", "application/json")
		gone := make(chan reply, 1)
		go func() { gone <- c.Do(req) }()
		c.Eventually("it waits for what runs", func() bool { return pauses() == 1 })
		_, status := c.call(`{"path":"/is_paused","method":"GET"}`)
		require.Equal(t, 409, status)
		left()
		require.Error(t, (<-gone).Err)
		leave()
		c.Eventually("the call went on without its caller", func() bool {
			r, status := c.call(`{"path":"/is_paused","method":"GET"}`)
			return status == 200 && strings.Contains(string(r.Engines[0].Body), "true") && len(r.Paused) == 1
		})
		c.does("/resume")
	})
	t.Run("engines that take too long", func(t *testing.T) {
		leave := c.Endless()
		r, status := c.call(`{"path":"/pause?mode=wait"}`)
		require.Equal(t, 502, status)
		require.Contains(t, r.Engines[0].Error+r.Engines[1].Error, "within fleet_call.timeout (10s)")
		require.Len(t, r.Paused, 1, "they may come to it")
		leave()
		c.does("/resume")
		require.Equal(t, "right", c.Judge("it is served", `"stream":true,`))
	})
	// A proxy that was restarted knows nothing of the pause, as one that was passed by. The engines
	// know.
	t.Run("engines that were paused by another", func(t *testing.T) {
		for _, e := range c.Decode {
			require.Equal(t, 200, c.Ask("POST", e.URLs()[0]+"/pause", "").Status)
		}
		c.Eventually("the engines say so", func() bool { return c.state(c.Decode[0]) == "halted" && c.state(c.Decode[1]) == "halted" })
		require.Contains(t, c.engineStatus(c.Decode[0]).Error, "it is paused")
		waits := c.Judging("waits", `"stream":true,`)
		c.does("/resume")
		require.Equal(t, "right", <-waits)
	})
	require.Zero(t, c.Sum("evenkeel_engine_outages_total"))
}

// A request that meets a pause of which nothing is known waits, and that is no attempt. A stream
// has begun before the core refuses its request.
func TestARequestThatMeetsAPauseOfAnotherWaits(t *testing.T) {
	t.Parallel()
	c := start(t, options{dirty: true, mixed: []refengine.Config{{Version: "0.33.0"}}, configure: func(cfg *config.Config) {
		quickHealth(cfg)
		cfg.Health.Interval, cfg.Prefill.Retry.Base = 2*time.Second, 500*time.Millisecond // requests come before the next check
	}})
	at := c.Decode[0].URLs()[0]
	require.Equal(t, 200, c.Ask("POST", at+"/pause", "").Status)
	stream, whole := c.Judging("a stream", `"stream":true,`), c.Judging("an answer in one piece", "")
	c.Eventually("it is seen", func() bool { return c.state(c.Decode[0]) == "halted" })
	require.Equal(t, 200, c.Ask("POST", at+"/resume", "").Status)
	require.Equal(t, "right", <-stream)
	require.Equal(t, "right", <-whole)
	require.Zero(t, c.Sum("evenkeel_engine_outages_total"))
}

// quickHealth looks at engines often, and tries their ranks.
func quickHealth(cfg *config.Config) {
	cfg.Health.Interval, cfg.Health.Canary, cfg.Health.SlowStart = 20*time.Millisecond, 3*time.Second, 0
	cfg.Prefill.Retry.Attempts = 1 // nothing that is withheld counts as an attempt
	cfg.Dispatch.Policy = "rr"
}

// retrying is quickHealth for tests in which requests are aborted, which counts as an attempt
// before their first event.
func retrying(cfg *config.Config) {
	quickHealth(cfg)
	cfg.Prefill.Retry.Attempts, cfg.Prefill.Retry.Budget = 3, 1
}

// state is what the page shows of an engine.
func (c *cluster) state(e *refengine.Engine) string { return c.engineStatus(e).State }

// An adapter is loaded on all engines by one call, and unloaded by another.
func TestAnAdapterIsLoadedOnAllEngines(t *testing.T) {
	t.Parallel()
	c := start(t, options{decode: []refengine.Config{{}, {}}, configure: quickHealth})
	call := func(path, body string) {
		r, status := c.call(fmt.Sprintf(`{"path":%q,"body":%s}`, path, body))
		require.Equal(t, http.StatusOK, status, "%+v", r)
		require.Len(t, r.Engines, 3)
	}
	lists := func() bool { return strings.Contains(c.Ask(http.MethodGet, c.URL+"/v1/models", "").Body, `"mine"`) }
	call("/v1/load_lora_adapter", `{"lora_name":"mine","lora_path":"/adapters/mine"}`)
	c.Eventually("clients may ask for it", lists)
	_, status := c.call(`{"path":"/v1/load_lora_adapter","body":{"lora_name":"mine","lora_path":"/adapters/mine"}}`)
	require.Equal(t, http.StatusBadGateway, status, "the engines have it already")
	call("/v1/unload_lora_adapter", `{"lora_name":"mine"}`)
	c.Eventually("it is gone", func() bool { return !lists() })
}
