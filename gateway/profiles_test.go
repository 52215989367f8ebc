package gateway_test

import (
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

func TestConnectors(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name   string
		engine refengine.Config
		config string
	}{
		{"ascend-mooncake-v1, nested block ids", refengine.Config{Connector: refengine.AscendMooncake}, mooncake.AscendMooncakeV1},
		{"ascend-mooncake-v1, flat block ids of old versions", refengine.Config{Connector: refengine.AscendMooncake, FlatBlockIDs: true}, mooncake.AscendMooncakeV1},
		{"vllm-ascend 0.11.0, whose hand-offs name no request", refengine.Config{Connector: refengine.AscendMooncake, Version: "0.11.0"}, mooncake.AscendMooncakeV1},
		{"vllm-ascend 0.13.0, whose hand-offs name no request", refengine.Config{Connector: refengine.AscendMooncake, Version: "0.13.0"}, mooncake.AscendMooncakeV1},
		{"nixl-pull 0.11.0, whose hand-offs name no request", refengine.Config{Connector: refengine.NIXLPull, Version: "0.11.0"}, mooncake.NIXLPull},
		{"nixl-pull", refengine.Config{Connector: refengine.NIXLPull}, mooncake.NIXLPull},
		{"nixl-push", refengine.Config{Connector: refengine.NIXLPush}, mooncake.NIXLPush},
		{"vllm-mooncake", refengine.Config{Connector: refengine.VLLMMooncake}, mooncake.VLLMMooncake},
		{"opaque", refengine.Config{Connector: refengine.Opaque}, mooncake.Opaque},
		{"opaque takes what ascend-mooncake-v1 answers", refengine.Config{Connector: refengine.AscendMooncake}, mooncake.Opaque},
		{"old engines: no continuous usage, no token ids, old metric names", refengine.Config{NoContinuousUsage: true, NoTokenIDs: true, OldMetricNames: true}, mooncake.AscendMooncakeV1},
		{"three tokens a chunk", refengine.Config{TokensPerChunk: 3}, mooncake.AscendMooncakeV1},
		{"a chunk every four steps", refengine.Config{StreamInterval: 4}, mooncake.AscendMooncakeV1},
		{"usage whether asked for or not", refengine.Config{ForceUsage: true}, mooncake.AscendMooncakeV1},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			decode := row.engine
			decode.DPSize = 2
			c := start(t, options{
				prefill: []refengine.Config{row.engine}, decode: []refengine.Config{decode},
				profile: mooncake.Profile{Connector: row.config},
				configure: func(cfg *config.Config) {
					u, err := url.Parse(cfg.Engines.Prefill[0].URL)
					require.NoError(t, err)
					p := cfg.Profiles[config.DefaultProfile]
					p.BootstrapPort, err = strconv.Atoi(u.Port())
					require.NoError(t, err)
					cfg.Profiles[config.DefaultProfile] = p
				},
			})
			for _, more := range []string{`"stream":true,`, ``, `"stream":true,"n":2,"seed":5,`, `"n":2,"seed":5,`} {
				require.Equal(t, "right", c.judge("one two three "+more, more))
			}
			require.EqualValues(t, 6, c.prefill[0].Stats().Pulls)
			require.EqualValues(t, 6, c.decode[0].Stats().Decodes)
		})
	}
}

// From vllm-ascend 0.14 on a decode engine waits for the name of the request, so a
// hand-off without it is refused before it is sent there. Of a version that cannot
// be read, nothing is known, and the shape alone decides.
func TestAHandoffThatNamesNoRequest(t *testing.T) {
	t.Parallel()
	for version, want := range map[string]string{"0.13.0": "right", "0.14.0rc1": "502", "0.23.0": "502", "main": "right"} {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			old := refengine.Config{Version: "0.13.0"} // takes such hand-offs
			c := start(t, options{prefill: []refengine.Config{{Version: version}}, decode: []refengine.Config{old}, dirty: true})
			if version != "0.13.0" {
				require.NoError(t, c.prefill[0].SetFaults(refengine.Rule{Fault: refengine.NoRequestID}))
			}
			require.Equal(t, want, c.judge("one two three", `"stream":true,`))
			if want == "502" {
				require.Zero(t, c.decode[0].Stats().Decodes)
			}
		})
	}
}

// A server of several ranks gets the rank by header; every rank is used.
func TestRanksByHeader(t *testing.T) {
	t.Parallel()
	c := start(t, options{
		decode:    []refengine.Config{{DPSize: 4, DPMode: "internal", Slots: 2}},
		profile:   mooncake.Profile{DPMode: mooncake.DPInternal},
		configure: func(cfg *config.Config) { cfg.Dispatch.Policy = "prr" },
	})
	require.Len(t, c.gw.Status(t.Context()).Dispatch.Models[0].Workers, 4)
	got := make(chan string, 16)
	for i := range cap(got) {
		go func() { got <- c.judge("prompt "+strconv.Itoa(i), `"stream":true,`) }()
	}
	for range cap(got) {
		require.Equal(t, "right", <-got)
	}
	for rank, s := range c.decode[0].Stats().Ranks {
		require.Positive(t, s.Concurrent, "rank %d", rank)
		require.LessOrEqual(t, s.Concurrent, int64(2), "rank %d", rank)
	}
}

// The engine's own answer instead of one put together.
func TestPassthrough(t *testing.T) {
	t.Parallel()
	c := start(t, options{profile: mooncake.Profile{NonStream: mooncake.NonStreamPassthrough}})
	require.Equal(t, "right", c.judge("one two", ""))
	require.Equal(t, "right", c.judge("one two", `"n":2,"seed":5,`))
	require.Equal(t, "right", c.judge("one two", `"stream":true,`), "a stream is a stream")
	r := c.post(chatPath, chat("one two", `"max_tokens":4,`))
	require.Contains(t, r.body, `"object":"chat.completion"`)
	require.Contains(t, r.body, `"cached_tokens":0`, "as prefill counted")
	c.settledRequests(4)
	require.Equal(t, 4, c.records()[3].OutputTokens)

	for _, rule := range []refengine.Rule{
		{Fault: refengine.ErrorEvent}, {Fault: refengine.FinishError, AfterTokens: 2}, {Fault: refengine.Recomputed, AfterTokens: 2},
		{Fault: refengine.MissingFinish, AfterTokens: 2}, {Fault: refengine.SilentEnd, AfterTokens: 2}, {Fault: refengine.Error200},
		{Fault: refengine.Reset, Phase: refengine.PhaseMidStream, AfterTokens: 2},
	} {
		t.Run(string(rule.Fault), func(t *testing.T) {
			c := start(t, options{dirty: true, profile: mooncake.Profile{NonStream: mooncake.NonStreamPassthrough}})
			require.NoError(t, c.decode[0].SetFaults(rule))
			require.Equal(t, "502", c.judge("one two", ""))
			rule.Count = 1
			require.NoError(t, c.decode[0].SetFaults(rule))
			require.Equal(t, "right", c.judge("one two", ""), "nothing has reached the client: it is tried again")
		})
	}
}

// A client may ask for more than fits one piece. That is no failure of the
// engine, and every other one would answer the same.
func TestAWholeAnswerThatIsTooLarge(t *testing.T) {
	t.Parallel()
	c := start(t, options{
		decode: []refengine.Config{{}, {}}, profile: mooncake.Profile{NonStream: mooncake.NonStreamPassthrough},
		configure: func(cfg *config.Config) { cfg.Limits.EventBytes, cfg.Limits.AnswerBytes = 300, 300 },
	})
	for i := range 8 {
		r := c.post(chatPath, chat(fmt.Sprint("prompt ", i), `"max_tokens":50,`))
		require.Equal(t, http.StatusBadGateway, r.status)
		require.Contains(t, r.body, "limits.answer_bytes")
	}
	require.EqualValues(t, 8, c.decode[0].Stats().Decodes+c.decode[1].Stats().Decodes, "none is tried again")
	require.Zero(t, c.sum("evenkeel_engine_outages_total"))
	require.Zero(t, c.sum("evenkeel_handoffs"), "the KV was pulled")
}
