package gateway_test

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/load"
	"evenkeel/bench/lab/refclient"
	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/trace"
	"evenkeel/gateway/advice"
	"evenkeel/gateway/config"
)

// Advice under load on real engines: whichever side is the narrow one is named.
func TestAdviceNamesTheNarrowSide(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name         string
		prefill      refengine.Config
		decode       refengine.Config
		prefillers   int
		concurrency  int
		kind, reason string // empty: whatever
		resource     string // of evenkeel_utilisation_ratio that tells why
	}{
		{
			"one slow prefill engine, many slots: add prefill",
			refengine.Config{Prompts: refengine.Prompts{Base: 100 * time.Millisecond}}, refengine.Config{DPSize: 2, Slots: 64}, 1, 24,
			advice.AddPrefill, "", `resource="time",role="prefill"`,
		},
		{
			"quick prefill, few slots that are held for long: add decode, for hand-offs wait",
			refengine.Config{}, refengine.Config{DPSize: 1, Slots: 2, Steps: refengine.Steps{C0: 20 * time.Millisecond}}, 2, 12, advice.AddDecode,
			advice.ReasonPoolWait, `resource="slots",role="decode"`,
		},
		{
			"both have room: none",
			refengine.Config{Prompts: refengine.Prompts{Base: 5 * time.Millisecond}},
			refengine.Config{DPSize: 2, Slots: 8, Steps: refengine.Steps{C0: 5 * time.Millisecond}}, 2, 3, advice.None, advice.ReasonBalanced,
			`resource="slots",role="decode"`,
		},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			o := options{
				decode: []refengine.Config{row.decode},
				configure: func(cfg *config.Config) {
					cfg.Health.SlowStart = 0
					cfg.Advice.Interval, cfg.Advice.Window, cfg.Advice.Calm = 10*time.Millisecond, 400*time.Millisecond, time.Minute
				},
			}
			for range row.prefillers {
				o.prefill = append(o.prefill, row.prefill)
			}
			c := start(t, o)
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan struct{})
			requests := make([]trace.Request, 10_000)
			for i := range requests {
				requests[i] = trace.Request{Prompt: 100, Output: 40}
			}
			go func() {
				defer close(ended)
				_, _ = load.Run(ctx, load.Config{URLs: []string{c.URL}, Requests: requests, Concurrency: row.concurrency, Stream: 1, Seed: 7})
			}()
			wanted := func(s advice.Step) bool { return s.Kind == row.kind && (row.reason == "" || s.Reason == row.reason) }
			c.Eventually("the advice", func() bool {
				given := c.gw.Status(ctx).Advice
				if len(given) != 1 || !slices.ContainsFunc(given[0].Steps, wanted) {
					return false
				}
				t.Logf("%+v", given[0])
				// At the beginning all requests are before prefill, and it is short, too.
				return (row.kind == advice.AddPrefill) == (given[0].Prefill.Advised > given[0].Prefill.Live) &&
					(row.kind == advice.AddDecode) == (given[0].Decode.Advised > given[0].Decode.Live)
			})
			// All of one page, for advice may come before the load has shown in the mean of the whole
			// window.
			c.Eventually("the same as a metric, and why", func() bool {
				page := c.get("/metrics").Body
				used := refclient.ValueOf(t, page, fmt.Sprintf("evenkeel_utilisation_ratio{model=%q,%s}", model, row.resource))
				ratio := refclient.ValueOf(t, page, fmt.Sprintf("evenkeel_pd_ratio_advice{model=%q}", model))
				given := slices.ContainsFunc(advice.Steps(), func(s advice.Step) bool {
					return wanted(s) &&
						refclient.ValueOf(t, page, fmt.Sprintf("evenkeel_advice{kind=%q,model=%q,reason=%q}", s.Kind, model, s.Reason)) == 1
				})
				return given && (used > 0.8) == (row.kind != advice.None) &&
					(ratio > float64(row.prefillers)/float64(max(1, row.decode.DPSize))) == (row.kind == advice.AddPrefill)
			})
			cancel()
			<-ended
		})
	}
}

func TestWhatIsTurnedOff(t *testing.T) {
	t.Parallel()
	c := start(t, options{configure: func(cfg *config.Config) { cfg.Advice.Interval, cfg.Admin.Receipts = 0, 0 }})
	t.Run("advice", func(t *testing.T) {
		require.Equal(t, "right", c.Judge("one two three", `"stream":true,`))
		require.Empty(t, c.gw.Status(t.Context()).Advice)
		require.NotContains(t, c.get("/metrics").Body, "evenkeel_advice")
	})
	t.Run("receipts", func(t *testing.T) {
		require.Equal(t, http.StatusOK, c.Post(refclient.ChatPath, chat("x", "")).Status)
		require.Equal(t, http.StatusNotFound, c.get("/decisions").Status)
	})
	t.Run("other regions", func(t *testing.T) {
		require.Equal(t, 404, c.get("/geo").Status)
		require.NotContains(t, c.get("/metrics").Body, "evenkeel_geo_")
		got := c.Post("/v1/chat/completions", chat("one", ""))
		require.Equal(t, 200, got.Status)
		require.Empty(t, got.Header.Get("X-Evenkeel-Route"))
	})
}
