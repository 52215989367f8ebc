package request

import (
	"encoding/json"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// callsTool is a chat that has to call a tool.
const callsTool = `"tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"required",`

// choicesOf are the choices of a whole answer, without what is new in each call.
func choicesOf(t *testing.T, body string) string {
	t.Helper()
	var a struct{ Choices json.RawMessage }
	require.NoError(t, json.Unmarshal([]byte(body), &a), body)
	require.NotEmpty(t, a.Choices, body)
	return regexp.MustCompile(`"id":"call_[^"]*"`).ReplaceAllString(string(a.Choices), `"id":"call"`)
}

// An engine that answers in one piece where a stream was asked for has failed. Its answer does not
// count as a whole one, by which the engine would stay in service however often it fails.
func TestAWholeAnswerInPlaceOfAStreamIsAFailure(t *testing.T) {
	t.Parallel()
	b := misled(t, &unruly{probe: tell, decode: func(w *script, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.send(`{"id":"d","choices":[{"index":0,"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}],` +
			`"usage":{"prompt_tokens":7,"completion_tokens":1}}`)
	}})
	r := b.post(mooncake.Chat.Path(), chat("a", `"stream":true,`))
	require.Equal(t, http.StatusBadGateway, r.status)
	require.Contains(t, r.body, "application/json instead of an event stream")
	b.settle()
	require.Zero(t, b.Dispatcher.Status(t.Context()).Models[0].Workers[0].Answers)
}

// An answer that is not streamed is what its engine says without a stream, where that is not the
// same.
func TestAnAnswerInOnePieceIsTheEnginesOwn(t *testing.T) {
	t.Parallel()
	for _, connector := range mooncake.Connectors() {
		if connector == mooncake.None || connector == mooncake.Opaque || connector == mooncake.VLLMMooncake {
			continue
		}
		t.Run(connector, func(t *testing.T) {
			t.Parallel()
			b := start(t, setup{profile: mooncake.Profile{Connector: connector}})
			before := b.metric(t, "evenkeel_ttft_seconds", "")
			plain, err := refengine.Start(refengine.Config{Connector: refengine.NIXLPull})
			require.NoError(t, err)
			t.Cleanup(plain.Close)
			for name, more := range map[string]string{
				"a call that is whole":         callsTool,
				"a call that max_tokens cuts":  callsTool + `"max_tokens":4,`,
				"no call":                      `"tools":[{"type":"function","function":{"name":"f"}}],"max_tokens":6,`,
				"what it says beside the text": `"return_something":true,"max_tokens":6,`,
			} {
				prompt := "one two three " + name
				got := b.post(mooncake.Chat.Path(), chat(prompt, more))
				require.Equal(t, http.StatusOK, got.status, got.body)
				if connector == mooncake.SGLang { // none of its engines answers alone
					require.Contains(t, got.body, `"metadata":{"weight_version"`, "which streams lack")
					continue
				}
				want := postTo(t, plain.URLs()[0]+mooncake.Chat.Path(), chat(prompt, more))
				require.JSONEq(t, choicesOf(t, want), choicesOf(t, got.body), name)
				require.NotContains(t, got.body, "do_remote", "of hand-offs nobody is told")
			}
			got := b.post(mooncake.Chat.Path(), chat("one two three", callsTool+`"max_tokens":4,"n":2,`))
			require.Equal(t, 2, strings.Count(got.body, `"finish_reason":"length"`), got.body)
			b.settle()
			require.EqualValues(t, 6, b.metric(t, "evenkeel_unheard_tokens_ratio", ""), "of each the board is told how far it was off")
			require.Equal(t, before, b.metric(t, "evenkeel_ttft_seconds", ""), "nobody knows when the first token came")
		})
	}
}

func postTo(t *testing.T, url, body string) string {
	t.Helper()
	resp, err := http.Post(url, "application/json", strings.NewReader(body)) //nolint:noctx // of a reference engine
	require.NoError(t, err)
	defer func() { _ = resp.Body.Close() }()
	var all json.RawMessage
	require.NoError(t, json.NewDecoder(resp.Body).Decode(&all))
	require.Equal(t, http.StatusOK, resp.StatusCode, string(all))
	return string(all)
}

// An answer in one piece may take longer than limits.probe_timeout, as one that is streamed may, as
// long as its rank goes on.
func TestAnAnswerInOnePieceIsWaitedForAsLongAsItsRankGoesOn(t *testing.T) {
	t.Parallel()
	for _, connector := range []string{mooncake.NIXLPull, mooncake.AscendMooncakeV1, mooncake.SGLang, mooncake.NIXLPush} {
		t.Run(connector, func(t *testing.T) {
			t.Parallel()
			b := start(t, setup{
				profile: mooncake.Profile{Connector: connector, FirstEventTimeout: patience},
				decode:  []refengine.Config{{Steps: refengine.Steps{C0: 20 * time.Millisecond}}},
				configure: func(c *config.Config, _ *Deps) {
					c.Limits.ProbeTimeout, c.Limits.EventTimeout, c.Prefill.Retry.Attempts = 2*time.Second, patience, 1
				},
			})
			stream := make(chan reply, 1)
			go func() {
				stream <- b.post(mooncake.Chat.Path(), chat("a stream", `"stream":true,"ignore_eos":true,"max_tokens":250,`))
			}()
			got := b.post(mooncake.Chat.Path(), chat("one two three", callsTool+`"ignore_eos":true,"max_tokens":200,`)) // four seconds
			require.Equal(t, http.StatusOK, got.status, got.body)
			require.Contains(t, got.body, `"completion_tokens":200`)
			require.Equal(t, http.StatusOK, (<-stream).status)
			b.settle()
		})
	}
}

// If no sign of life comes from its rank, the wait for it ends.
func TestAnAnswerInOnePieceIsNotWaitedForOnARankThatStandsStill(t *testing.T) {
	t.Parallel()
	for _, connector := range []string{mooncake.AscendMooncakeV1, mooncake.NIXLPush} {
		t.Run(connector, func(t *testing.T) {
			t.Parallel()
			b := start(t, setup{
				profile: mooncake.Profile{Connector: connector, FirstEventTimeout: patience},
				configure: func(c *config.Config, _ *Deps) {
					c.Limits.ProbeTimeout, c.Limits.EventTimeout, c.Prefill.Retry.Attempts = 500*time.Millisecond, 100*time.Millisecond, 1
				},
			})
			require.NoError(t,
				b.d[0].SetFaults(refengine.Rule{Fault: refengine.Hang, Phase: refengine.PhaseBeforeHeaders, Leg: refengine.LegDecode}))
			got := b.post(mooncake.Chat.Path(), chat("one two three", callsTool))
			require.Equal(t, http.StatusGatewayTimeout, got.status, got.body)
		})
	}
}
