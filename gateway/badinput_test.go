package gateway_test

import (
	"encoding/json"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/gateway/config"
)

const (
	chatPath       = "/v1/chat/completions"
	completionPath = "/v1/completions"
)

// failure reads OpenAI's error object and holds its shape.
func failure(t *testing.T, r reply) (code, param, kind string) {
	t.Helper()
	require.NoError(t, r.err)
	require.Equal(t, "application/json", r.header.Get("Content-Type"), r.body)
	var e struct {
		Error struct {
			Message, Type, Code string
			Param               *string
		}
	}
	require.NoError(t, json.Unmarshal([]byte(r.body), &e), r.body)
	require.NotEmpty(t, e.Error.Message)
	if e.Error.Param != nil {
		param = *e.Error.Param
	}
	return e.Error.Code, param, e.Error.Type
}

func TestNobodyToServe(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		engine func(*cluster) *refengine.Engine
		code   string
	}{
		"no prefill engine": {func(c *cluster) *refengine.Engine { return c.prefill[0] }, "prefill_unavailable"},
		"no decode engine":  {func(c *cluster) *refengine.Engine { return c.decode[0] }, "decode_unavailable"},
	} {
		t.Run(name, func(t *testing.T) {
			c := start(t, options{dirty: true})
			row.engine(c).Kill()
			for range 2 { // first found out by the request itself, then known
				r := c.post(chatPath, chat("a", `"stream":true,`))
				require.Equal(t, http.StatusServiceUnavailable, r.status, r.body)
				code, _, kind := failure(t, r)
				require.Equal(t, row.code, code)
				require.Equal(t, "server_error", kind)
				require.NotEmpty(t, r.header.Get("Retry-After"))
				c.eventually("not ready any more", func() bool { return c.get("/readyz").status == http.StatusServiceUnavailable })
			}
			require.Equal(t, http.StatusServiceUnavailable, c.ask("GET", c.url+"/health", "").status)
			require.NoError(t, row.engine(c).Revive())
			c.eventually("all is well again", func() bool { return c.judge("one two", "") == "right" })
		})
	}
}

// Hand-offs that nobody fetches fill a prefill engine's KV cache: new prompts
// wait, and are refused when that takes too long.
func TestPrefillMemoryIsTaken(t *testing.T) {
	t.Parallel()
	c := start(t, options{
		prefill:   []refengine.Config{{KVTokens: 2048}},
		decode:    []refengine.Config{{Slots: 1}},
		configure: func(cfg *config.Config) { cfg.Prefill.Queue.Timeout = 200 * time.Millisecond },
	})
	leave := c.endless()
	pooled, _ := c.send(chat(reftext.MakePrompt(1, 1900), ""))
	c.eventually("it is pooled", func() bool { return c.metric("evenkeel_pool_entries") == 1 })
	r := c.post(chatPath, chat("one two", ""))
	require.Equal(t, http.StatusServiceUnavailable, r.status, r.body)
	code, _, _ := failure(t, r)
	require.Equal(t, "prefill_kv_exhausted", code)
	require.NotEmpty(t, r.header.Get("Retry-After"))
	pooled()
	leave()
	c.eventually("room again", func() bool { return c.judge("one two", "") == "right" })
}

// A prompt that no rank's KV cache can hold is refused, once it was counted.
func TestAPromptThatFitsNoRank(t *testing.T) {
	t.Parallel()
	c := start(t, options{dirty: true, decode: []refengine.Config{{KVTokens: 1024}}})
	r := c.post(chatPath, chat(reftext.MakePrompt(1, 2000), ""))
	require.Equal(t, http.StatusBadRequest, r.status, r.body)
	code, _, _ := failure(t, r)
	require.Equal(t, "prompt_too_long", code)
	require.Equal(t, "right", c.judge("one two", ""))
}

func TestEngineRefusalsReachTheClientAsTheyCame(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name string
		rule refengine.Rule
	}{
		{"400, new shape", refengine.Rule{Fault: refengine.Reject}},
		{"400, old shape", refengine.Rule{Fault: refengine.Reject, Shape: refengine.ShapeOld}},
		{"400 of the Rust frontend", refengine.Rule{Fault: refengine.Reject, Shape: refengine.ShapeRust}},
		{"422 of FastAPI", refengine.Rule{Fault: refengine.Status, Value: 422, Shape: refengine.ShapeFastAPI}},
		{"404 as text", refengine.Rule{Fault: refengine.Status, Value: 404, Shape: refengine.ShapeText}},
		{"429, on every attempt", refengine.Rule{Fault: refengine.Throttle, Shape: refengine.ShapeHTML}},
	} {
		for _, stream := range []string{"true", "false"} {
			t.Run(row.name+", stream "+stream, func(t *testing.T) {
				c := start(t, options{decode: []refengine.Config{{RejectReleases: true}}, configure: func(cfg *config.Config) { cfg.Prefill.Retry.Attempts = 1 }})
				body := chat("a", `"stream":`+stream+`,`)
				direct := func(e *refengine.Engine) reply {
					return c.ask("POST", e.URLs()[0]+chatPath, chat("a", ""))
				}
				for side, e := range map[string]*refengine.Engine{"prefill": c.prefill[0], "decode": c.decode[0]} {
					rule := row.rule
					rule.Cleanup = true // as engines of this version do
					require.NoError(t, e.SetFaults(rule))
					want, got := direct(e), c.post(chatPath, body)
					require.Equal(t, want.status, got.status, side)
					require.Equal(t, want.body, got.body, side)
					require.Equal(t, want.header.Get("Content-Type"), got.header.Get("Content-Type"), side)
					require.Equal(t, want.header.Get("Retry-After"), got.header.Get("Retry-After"), side)
					require.NoError(t, e.SetFaults())
				}
				c.settled(false)
				require.Equal(t, []string{"engine_refused", "engine_refused"}, c.outcomes())
			})
		}
	}
}

func TestARefusedCredentialIsOurProblem(t *testing.T) {
	t.Parallel()
	for _, status := range []float64{401, 403} {
		c := start(t, options{})
		for side, e := range map[string]*refengine.Engine{"prefill": c.prefill[0], "decode": c.decode[0]} {
			require.NoError(t, e.SetFaults(refengine.Rule{Fault: refengine.Status, Value: status, Cleanup: true}))
			r := c.post(chatPath, chat("a", ""))
			require.Equal(t, http.StatusBadGateway, r.status)
			code, _, _ := failure(t, r)
			require.Equal(t, side+"_failed", code)
			require.NoError(t, e.SetFaults())
		}
		alarms := c.logs.FilterLevelExact(zap.ErrorLevel).FilterMessageSnippet("ALARM").All()
		require.Len(t, alarms, 2)
	}
}

func TestAnAnswerThatBreaksOffIsNotWhole(t *testing.T) {
	t.Parallel()
	prompt := reftext.MakePrompt(4, 30)
	key := reftext.OfUser(prompt).Answer
	for _, row := range []struct {
		name string
		rule refengine.Rule
		code string
	}{
		{"reset", refengine.Rule{Fault: refengine.Reset, Phase: refengine.PhaseMidStream, AfterTokens: 5}, "upstream_broken"},
		{"reset inside a chunk", refengine.Rule{Fault: refengine.Reset, Phase: refengine.PhaseInsideChunk, AfterTokens: 5}, "upstream_broken"},
		{"silence", refengine.Rule{Fault: refengine.Hang, Phase: refengine.PhaseMidStream, AfterTokens: 5}, "upstream_broken"},
		{"a clean end without a finish", refengine.Rule{Fault: refengine.SilentEnd, AfterTokens: 5}, "upstream_incomplete"},
		{"[DONE] without a finish", refengine.Rule{Fault: refengine.MissingFinish, AfterTokens: 5}, "upstream_incomplete"},
		{"an error event", refengine.Rule{Fault: refengine.ErrorEvent, AfterTokens: 5}, "500"},
		{"an error event of old engines", refengine.Rule{Fault: refengine.ErrorEvent, AfterTokens: 5, Shape: refengine.ShapeOld}, "500"},
		{"an error event of the Rust frontend", refengine.Rule{Fault: refengine.ErrorEvent, AfterTokens: 5, Shape: refengine.ShapeRust}, "server_error"},
		{"finish_reason error", refengine.Rule{Fault: refengine.FinishError, AfterTokens: 5}, "finish_error"},
		{"recomputed", refengine.Rule{Fault: refengine.Recomputed, AfterTokens: 5}, "recompute_unresumable"},
		{"recomputed, with the last text", refengine.Rule{Fault: refengine.Recomputed, AfterTokens: 5, Text: true}, "recompute_unresumable"},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			c := start(t, options{configure: func(cfg *config.Config) {
				if row.rule.Fault == refengine.Hang {
					cfg.Limits.EventTimeout = 2 * time.Second
				}
			}})
			require.NoError(t, c.decode[0].SetFaults(row.rule, slow))

			r := c.post(chatPath, chat(prompt, `"stream":true,`))
			require.NoError(t, r.err, "the HTTP answer ends properly: what is wrong is said in it")
			require.Equal(t, 200, r.status)
			got := read(t, r.body)
			require.Equal(t, 5, rightText(t, key, got.text[0]))
			require.Equal(t, row.code, got.fail)
			require.Empty(t, got.finish[0])
			require.True(t, got.done)
			require.NotContains(t, r.body, "recomputed\"")

			r = c.post(chatPath, chat(prompt, `"stream":true,"n":2,`))
			got = read(t, r.body)
			require.Equal(t, row.code, got.fail, r.body)
			require.False(t, got.whole(0) || got.whole(1))

			r = c.post(chatPath, chat(prompt, ""))
			require.Equal(t, http.StatusBadGateway, r.status, r.body)
			failure(t, r)
			c.settled(false)
			require.NotContains(t, c.outcomes(), "ok")
			require.NotContains(t, c.outcomes(), "500", "an engine's words are no label")
		})
	}
}

func TestTheArrivalQueueIsFull(t *testing.T) {
	t.Parallel()
	c, free := jam(t, 1, "team ek-team")
	waiting := c.queued("ek-team", chat("a", ""))
	r := c.post(chatPath, chat("a", ""), "Authorization", "Bearer ek-team")
	require.Equal(t, http.StatusTooManyRequests, r.status)
	code, _, kind := failure(t, r)
	require.Equal(t, "queue_full", code)
	require.Equal(t, "rate_limit_error", kind)
	require.NotEmpty(t, r.header.Get("Retry-After"))
	free()
	require.Equal(t, 200, (<-waiting).status)
}

func TestTheArrivalQueueTimesOut(t *testing.T) {
	t.Parallel()
	c := start(t, options{configure: func(cfg *config.Config) { cfg.Pool.Size, cfg.Prefill.Queue.Timeout = 1, 100*time.Millisecond }})
	require.NoError(t, c.prefill[0].SetFaults(refengine.Rule{Fault: refengine.Slow, DelayMS: 3000}))
	first := make(chan reply, 1)
	go func() { first <- c.post(chatPath, chat("a", "")) }()
	c.eventually("the place is taken", func() bool { return c.gw.Status(t.Context()).PoolUsed == 1 })
	r := c.post(chatPath, chat("a", ""))
	require.Equal(t, http.StatusServiceUnavailable, r.status)
	code, _, _ := failure(t, r)
	require.Equal(t, "queue_timeout", code)
	require.NotEmpty(t, r.header.Get("Retry-After"))
	require.Equal(t, 200, (<-first).status)
}

func TestThePoolTimesOut(t *testing.T) {
	t.Parallel()
	c := start(t, options{
		decode:    []refengine.Config{{Slots: 1}},
		configure: func(cfg *config.Config) { cfg.Pool.TTL = time.Second },
	})
	leave := c.endless()
	r := c.post(chatPath, chat("b", `"stream":true,`))
	require.Equal(t, http.StatusServiceUnavailable, r.status, r.body)
	code, _, _ := failure(t, r)
	require.Equal(t, "pool_timeout", code)
	require.NotEmpty(t, r.header.Get("Retry-After"))
	require.Equal(t, 1, c.prefill[0].Stats().Pins, "held by a hand-off that waits for a slot to be drained")
	leave()
	c.eventually("it is drained", func() bool { return c.metric(`evenkeel_drains_total{outcome="drained"}`) == 1 })
	require.Zero(t, c.prefill[0].Stats().Pins)
}
