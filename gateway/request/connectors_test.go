package request

import (
	"fmt"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// shapes are the four ways to ask for a chat: one answer or two, streamed or not. They are six
// answers.
var shapes = []string{`"stream":true,`, ``, `"stream":true,"n":2,"seed":5,`, `"n":2,"seed":5,`}

// Engines of each connector, and of versions that say some things in another way or not at all,
// serve each shape of a request.
func TestConnectors(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name   string
		engine refengine.Config
		config string
	}{
		{"ascend-mooncake-v1, nested block ids", refengine.Config{}, mooncake.AscendMooncakeV1},
		{"ascend-mooncake-v1, flat block ids of old versions", refengine.Config{KV: refengine.KV{FlatBlockIDs: true}}, mooncake.AscendMooncakeV1},
		{"vllm-ascend 0.11.0, whose hand-offs name no request", refengine.Config{Version: "0.11.0"}, mooncake.AscendMooncakeV1},
		{"vllm-ascend 0.13.0, whose hand-offs name no request", refengine.Config{Version: "0.13.0"}, mooncake.AscendMooncakeV1},
		{"nixl-pull 0.11.0, whose hand-offs name no request", refengine.Config{Version: "0.11.0"}, mooncake.NIXLPull},
		{"nixl-pull", refengine.Config{}, mooncake.NIXLPull},
		{"nixl-push", refengine.Config{}, mooncake.NIXLPush},
		{"vllm-mooncake", refengine.Config{}, mooncake.VLLMMooncake},
		{"ascend-layerwise", refengine.Config{}, mooncake.AscendLayerwise},
		{"sglang", refengine.Config{}, mooncake.SGLang},
		{"opaque", refengine.Config{}, mooncake.Opaque},
		{"opaque takes what ascend-mooncake-v1 answers", refengine.Config{Connector: refengine.AscendMooncake}, mooncake.Opaque},
		{"old engines: no continuous usage, no token ids, old metric names",
			refengine.Config{Answers: refengine.Answers{NoContinuousUsage: true, NoTokenIDs: true, OldMetricNames: true}},
			mooncake.AscendMooncakeV1},
		{"three tokens a chunk", refengine.Config{Steps: refengine.Steps{TokensPerChunk: 3}}, mooncake.AscendMooncakeV1},
		{"a chunk every four steps", refengine.Config{Steps: refengine.Steps{StreamInterval: 4}}, mooncake.AscendMooncakeV1},
		{"usage whether asked for or not", refengine.Config{Answers: refengine.Answers{ForceUsage: true}}, mooncake.AscendMooncakeV1},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			decode := row.engine
			decode.DPSize = 2
			b := start(t, setup{waits: true, prefill: []refengine.Config{row.engine}, decode: []refengine.Config{decode},
				profile: mooncake.Profile{Connector: row.config}})
			before := b.decodes()
			for _, more := range shapes {
				require.Equal(t, "right", b.judge("one two three "+more, more))
			}
			require.Equal(t, 6, b.decodes()-before)
			require.Equal(t, map[string]int{"right": 60}, <-b.judgeAll(60))
			b.clean()
			require.Equal(t, 66, b.decodes()-before)
			require.Equal(t, 66, b.probes())
		})
	}
}

// From vllm-ascend 0.14 on a decode engine waits for the name of the request, so a hand-off without
// it is refused before it is sent there. Of a version that names none, the shape alone decides.
func TestAHandoffThatNamesNoRequest(t *testing.T) {
	t.Parallel()
	for named, want := range map[bool]string{true: "502", false: "right"} {
		t.Run(fmt.Sprint(named), func(t *testing.T) {
			t.Parallel()
			old := []refengine.Config{{Version: "0.13.0"}} // takes such hand-offs
			b := start(t, setup{prefill: []refengine.Config{{Version: "0.14.0"}}, decode: old})
			b.engines.named = named
			require.NoError(t, b.p[0].SetFaults(refengine.Rule{Fault: refengine.NoRequestID}))
			require.Equal(t, want, b.judge("one two three", `"stream":true,`))
			require.Equal(t, want == "right", b.decodes() > 0)
			b.settle()
		})
	}
}

// A server of several ranks gets the rank by header, and every rank is used.
func TestRanksByHeader(t *testing.T) {
	t.Parallel()
	b := start(t, setup{
		decode: []refengine.Config{{DPSize: 4, DPMode: "internal", Slots: 2}}, waits: true,
		profile:   mooncake.Profile{DPMode: mooncake.DPInternal},
		configure: func(c *config.Config, _ *Deps) { c.Dispatch.Policy = "prr" },
	})
	require.Equal(t, map[string]int{"right": 16}, <-b.judgeAll(16))
	b.clean()
	for rank, s := range b.d[0].Stats().Ranks {
		require.Positive(t, s.Concurrent, "rank %d", rank)
		require.LessOrEqual(t, s.Concurrent, int64(2), "rank %d", rank)
	}
}

// Ranks of SGLang meet in rooms: the room belongs to the prefill rank, and the decode rank is told
// it.
func TestRoomsBelongToRanks(t *testing.T) {
	t.Parallel()
	for name, prefill := range map[string]refengine.Config{
		"with DP attention": {},
		"of replicas":       {SGLang: refengine.SGLangOptions{Replicas: true}},
		// each checks the room as if it were the first one
		"that share requests out": {SGLang: refengine.SGLangOptions{LoadBalance: "round_robin"}},
		// each tells its bootstrap server first whose room it is
		"of replicas that do both": {SGLang: refengine.SGLangOptions{LoadBalance: "round_robin", Replicas: true}},
	} {
		t.Run("ranks "+name, func(t *testing.T) {
			t.Parallel()
			prefill.DPSize, prefill.DPMode = 4, "internal"
			b := start(t, setup{
				prefill: []refengine.Config{prefill}, decode: []refengine.Config{{DPSize: 8, DPMode: "internal", Slots: 4}}, waits: true,
				profile: mooncake.Profile{Connector: mooncake.SGLang},
			})
			require.Equal(t, map[string]int{"right": 100}, <-b.judgeAll(100))
			b.clean()
			p, d := b.p[0].Stats(), b.d[0].Stats()
			require.EqualValues(t, 100, p.Requests, "no attempt is refused")
			require.EqualValues(t, 100, d.Requests)
			require.EqualValues(t, 100, d.Pushes)
			require.Zero(t, p.RankPosts, "no rank waits for its bootstrap server")
		})
	}
}

// With elastic EP a server of SGLang goes on without a rank whose GPU has failed, and ends when a
// request names it: settle holds that none did.
func TestRanksThatAreNotNamedMayFail(t *testing.T) {
	t.Parallel()
	b := start(t, setup{
		prefill: []refengine.Config{{DPSize: 2, DPMode: "internal", SGLang: refengine.SGLangOptions{LoadBalance: "round_robin"}}},
		decode:  []refengine.Config{{DPSize: 2, DPMode: "internal"}}, waits: true,
		profile: mooncake.Profile{Connector: mooncake.SGLang, NameRanks: new(false)},
	})
	b.says(append(b.p, b.d...), refengine.Rule{Fault: refengine.MaskedRank, Rank: new(1)})
	require.Equal(t, map[string]int{"right": 40}, <-b.judgeAll(40))
	b.settle()
}

// The engine's own answer may be passed on instead of one that is put together of its stream.
func TestAnAnswerInOnePieceIsPassedOn(t *testing.T) {
	t.Parallel()
	piece := mooncake.Profile{NonStream: mooncake.NonStreamPassthrough}
	b := start(t, setup{profile: piece})
	for _, more := range shapes {
		require.Equal(t, "right", b.judge("one two", more), "a stream is a stream")
	}
	r := b.post(mooncake.Chat.Path(), chat("one two", `"max_tokens":4,`))
	require.Contains(t, r.body, `"object":"chat.completion"`)
	require.Contains(t, r.body, `"cached_tokens":0`, "as prefill counted")
	b.clean()
	require.Equal(t, 4, b.asked[len(b.asked)-1].Record.OutputTokens)

	for _, rule := range []refengine.Rule{
		{Fault: refengine.ErrorEvent}, {Fault: refengine.FinishError, AfterTokens: 2}, {Fault: refengine.Recomputed, AfterTokens: 2},
		{Fault: refengine.MissingFinish, AfterTokens: 2}, {Fault: refengine.SilentEnd, AfterTokens: 2}, {Fault: refengine.Error200},
		{Fault: refengine.Reset, Phase: refengine.PhaseMidStream, AfterTokens: 2},
	} {
		t.Run(string(rule.Fault), func(t *testing.T) {
			t.Parallel()
			b := start(t, setup{profile: piece})
			require.NoError(t, b.d[0].SetFaults(rule))
			require.Equal(t, "502", b.judge("one two", ""))
			rule.Count = 1
			require.NoError(t, b.d[0].SetFaults(rule))
			require.Equal(t, "right", b.judge("one two", ""), "nothing has reached the client: it is tried again")
			b.settle()
		})
	}
}

// A client may ask for more than fits one piece. That is no failure of the engine, and every other
// one would answer the same.
func TestAWholeAnswerThatIsTooLarge(t *testing.T) {
	t.Parallel()
	b := start(t, setup{
		decode: both, profile: mooncake.Profile{NonStream: mooncake.NonStreamPassthrough},
		configure: func(c *config.Config, _ *Deps) { c.Limits.EventBytes, c.Limits.AnswerBytes = 300, 300 },
	})
	for i := range 8 {
		r := b.post(mooncake.Chat.Path(), chat(fmt.Sprint("prompt ", i), `"max_tokens":50,`))
		require.Equal(t, http.StatusBadGateway, r.status)
		require.Contains(t, r.body, "limits.answer_bytes")
	}
	b.settle()
	require.Equal(t, 8, b.decodes(), "none is tried again")
	require.Equal(t, "502", b.fate("502", b.asked[0], false, true), "no engine is blamed, and the KV was pulled")
}
