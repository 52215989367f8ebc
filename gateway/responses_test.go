package gateway_test

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/dispatcher/board"
	"evenkeel/gateway/config"
	"evenkeel/gateway/openai/answertest"
	"evenkeel/geo"
	"evenkeel/mooncake"
)

const responsesPath = "/v1/responses"

// respond is the body of a response to a prompt, with more members.
func respond(prompt, more string) string {
	return fmt.Sprintf(`{%s"model":%q,"input":%q}`, more, model, prompt)
}

// nixl are engines of vLLM. Those of vllm-ascend do not serve responses.
func nixl(o options) options {
	o.profile.Connector = mooncake.NIXLPull
	if o.prefill == nil {
		o.prefill = []refengine.Config{{PrefixCache: 4096, PromptTokensDetails: true}}
	}
	if o.decode == nil {
		o.decode = []refengine.Config{{DPSize: 2, PromptTokensDetails: true}}
	}
	for _, list := range [][]refengine.Config{o.prefill, o.decode} {
		for i := range list {
			list[i].Connector = refengine.NIXLPull
		}
	}
	return o
}

// The official client asks for responses in bench/outside/api.
func TestResponses(t *testing.T) {
	t.Parallel()
	c := start(t, nixl(options{configure: func(cfg *config.Config) { cfg.ExposeRoute = true }}))
	prompt := reftext.MakePrompt(1, 300)
	key := reftext.OfUser(prompt).Answer
	natural := reftext.NaturalLength(key)
	require.Equal(t, http.StatusOK, c.post(responsesPath, respond(prompt, "")).status)
	t.Run("each event comes once and in order, with prefill's cached_tokens, and both engines had a part in it", func(t *testing.T) {
		r := c.post(responsesPath, respond(prompt, `"stream":true,"store":false,`), "X-Request-Id", "response")
		require.Equal(t, http.StatusOK, r.status, r.body)
		require.Equal(t, "disaggregated", r.header.Get("X-Evenkeel-Route"))
		got := answertest.ReadResponse(t, r.body)
		require.Equal(t, []string{"response.created", "response.in_progress", "response.output_item.added", "response.content_part.added", "response.output_text.delta"}, got.Kinds[:5])
		wholeText(t, key, got.Text)
		require.Equal(t, got.Text, got.Last.Output[0].Content[0].Text)
		require.Equal(t, natural, got.Last.Usage.Output)
		require.Equal(t, 256, got.Last.Usage.Details.Cached, "two blocks that the first request left in prefill's prefix cache")
		require.Equal(t, []int{256}, got.Last.Usage.Details.PerTurn)
		kept := c.receipt("response")
		require.Equal(t, responsesPath, kept.Endpoint)
		require.Equal(t, 300, kept.PromptTokens)
		require.Equal(t, natural, kept.OutputTokens)
	})
	t.Run("a conversation with instructions", func(t *testing.T) {
		body := fmt.Sprintf(`{"model":%q,"instructions":"be short","input":[{"role":"user","content":"one two"},{"type":"message","role":"assistant","content":[{"type":"output_text","text":"three"}]},{"role":"user","content":[{"type":"input_text","text":"four"}]}]}`, model)
		p, err := reftext.Render(true, []byte(`{"messages":[{"role":"system","content":"be short"},{"role":"user","content":"one two"},{"role":"assistant","content":"three"},{"role":"user","content":"four"}]}`))
		require.NoError(t, err)
		r := c.post(responsesPath, body)
		require.Equal(t, http.StatusOK, r.status, r.body)
		require.Contains(t, r.body, strings.Trim(fmt.Sprintf("%q", reftext.Text(p.Answer, reftext.NaturalLength(p.Answer))), `"`))
	})
}

// vLLM from 0.33 on has kv_transfer_params in each chunk with tokens, and an event of its own for an answer that its limit ended.
func TestStreamsOfVLLM33(t *testing.T) {
	t.Parallel()
	version := []refengine.Config{{Version: "0.33.0", PromptTokensDetails: true}}
	c := start(t, nixl(options{prefill: slices.Clone(version), decode: slices.Clone(version)}))
	prompt := reftext.MakePrompt(1, 300)
	key := reftext.OfUser(prompt).Answer
	for _, limit := range []struct {
		more, end string
		tokens    int
	}{{"", "response.completed", reftext.NaturalLength(key)}, {`"max_output_tokens":5,`, "response.incomplete", 5}} {
		r := c.post(responsesPath, respond(prompt, `"stream":true,`+limit.more), "X-Request-Id", limit.end)
		require.Equal(t, http.StatusOK, r.status, r.body)
		got := answertest.ReadResponse(t, r.body)
		require.Equal(t, limit.end, got.Kinds[len(got.Kinds)-1])
		require.Equal(t, reftext.Text(key, limit.tokens), got.Text)
		require.Equal(t, limit.tokens, c.receipt(limit.end).OutputTokens)
		require.Equal(t, "ok", c.receipt(limit.end).Outcome)
	}
	r := c.post(chatPath, chat(prompt, `"stream":true,`))
	require.Equal(t, http.StatusOK, r.status, r.body)
	require.NotContains(t, r.body, "kv_transfer_params")
}

// An engine that does not know hand-offs at /v1/responses would drop them without a word.
func TestAResponseGoesWholeToAnEngineThatTakesNoHandOffForIt(t *testing.T) {
	t.Parallel()
	for _, allowed := range []bool{true, false} {
		t.Run(fmt.Sprint(allowed), func(t *testing.T) {
			t.Parallel()
			c := start(t, nixl(options{
				decode:    []refengine.Config{{Version: "0.18.0"}},
				profile:   mooncake.Profile{AllowLocalPrefill: allowed},
				configure: func(cfg *config.Config) { cfg.ExposeRoute = true },
			}))
			prompt := reftext.MakePrompt(3, 500)
			r := c.post(responsesPath, respond(prompt, `"stream":true,`))
			if !allowed {
				require.Equal(t, http.StatusNotFound, r.status, "another try would not help: %s", r.body)
				require.Empty(t, r.header.Get("Retry-After"))
				code, _, _ := failure(t, r)
				require.Equal(t, "no_such_route", code)
				r = c.post(messagesPath, wordsOf(prompt, ""))
				require.Equal(t, http.StatusNotFound, r.status, r.body)
				kind, says := answertest.Refused(t, r.body)
				require.Equal(t, "not_found_error", kind)
				require.Contains(t, says, "allow_local_prefill")
				require.Zero(t, c.decode[0].Stats().Requests)
				require.Zero(t, c.prefill[0].Stats().Requests)
				return
			}
			require.Equal(t, http.StatusOK, r.status, r.body)
			wholeText(t, reftext.OfUser(prompt).Answer, answertest.ReadResponse(t, r.body).Text)
			require.Equal(t, "local-prefill", r.header.Get("X-Evenkeel-Route"))
			require.EqualValues(t, 1, c.metric(`evenkeel_local_prefill_requests_total{reason="endpoint"}`))
			require.Zero(t, c.prefill[0].Stats().Requests)
			require.Equal(t, http.StatusOK, c.post(responsesPath, respond(prompt, "")).status)
			require.Equal(t, http.StatusOK, c.post(chatPath, chat("a", "")).status)
			require.EqualValues(t, 1, c.prefill[0].Stats().Requests, "a chat is split as before")
		})
	}
}

// With no other engine left the client learns what the last one did.
// A client that leaves while a decode rank computes its prompt ends that at once: no pull is under way.
// What is lost in the middle cannot go on at the other rank, as a chat would: the client has parts of it that are numbered.
// A proxy that does not admit to the decode group refuses what it may not send to the one that does.
func TestAStandbyRefusesResponsesAndMessages(t *testing.T) {
	t.Parallel()
	us := standbyOf(t, takesMessages(options{}), func(http.ResponseWriter, *http.Request) { t.Error("it was forwarded") })
	r := us.post(responsesPath, respond("a", ""))
	require.Equal(t, http.StatusServiceUnavailable, r.status, r.body)
	code, _, _ := failure(t, r)
	require.Equal(t, geo.RejectOwner, code)
	require.NotEmpty(t, r.header.Get("Retry-After"))
	r = us.post(messagesPath, wordsOf("a", `"stream":true,`))
	require.Equal(t, http.StatusServiceUnavailable, r.status, r.body)
	kind, says := answertest.Refused(t, r.body)
	require.Equal(t, "overloaded_error", kind)
	require.Contains(t, says, "another proxy")
	require.Zero(t, us.decode[0].Stats().Requests)
	require.Zero(t, us.prefill[0].Stats().Requests)
}

// The events that tell of the request come before the engine has the KV. They are no answer, and the
// time to pull it goes on behind them.
func TestAResponseBeginsWithItsFirstToken(t *testing.T) {
	t.Parallel()
	within := func(silence time.Duration) func(*config.Config) {
		return func(cfg *config.Config) {
			cfg.Profiles = map[string]mooncake.Profile{config.DefaultProfile: {Connector: mooncake.NIXLPull, FirstEventTimeout: silence}}
			cfg.Limits.EventTimeout = time.Hour // between two events of an answer
		}
	}
	c := start(t, nixl(options{dirty: true, configure: within(250 * time.Millisecond), prefill: []refengine.Config{{}}, decode: []refengine.Config{{DPSize: 1}}}))
	require.NoError(t, c.decode[0].SetFaults(refengine.Rule{Fault: refengine.Hang, Phase: refengine.PhaseAfterHeaders}))
	r := c.post(responsesPath, respond("a", `"stream":true,`))
	require.Equal(t, http.StatusGatewayTimeout, r.status, r.body)
	require.NoError(t, c.decode[0].SetFaults())
}

// What opens a response, and what ends it, repeats what the client sent.
func TestAnEventOfAResponseThatIsTooLarge(t *testing.T) {
	t.Parallel()
	c := start(t, nixl(options{configure: func(cfg *config.Config) { cfg.Limits.EventBytes = 1 << 10 }}))
	prompt := reftext.MakePrompt(5, 30)
	r := c.post(responsesPath, respond(prompt, `"stream":true,"ignore_eos":true,"max_output_tokens":2000,`))
	require.Equal(t, http.StatusOK, r.status, r.body)
	got := answertest.ReadResponse(t, r.body)
	require.Equal(t, "upstream_broken", got.Fail)
	rightText(t, reftext.OfUser(prompt).Answer, got.Text)
	require.Contains(t, r.body, "limits.event_bytes")
}

// vLLM before 0.33 runs a response on a rank of its own choice, where several are behind one address: its KV is charged to
// all of them in equal parts. From 0.33 on it runs on the rank that it names.
func TestResponsesThatDoNotRunOnTheRankTheyName(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		version string
		pins    bool
	}{{"0.32.0", false}, {"0.33.0", true}} {
		t.Run(tc.version, func(t *testing.T) {
			t.Parallel()
			c := start(t, nixl(options{
				// Its steps are slow: what the first answer gets before the last one begins must be less than a prompt.
				decode:  []refengine.Config{{DPSize: 2, DPMode: "internal", Version: tc.version, PromptTokensDetails: true, C0: 100 * time.Millisecond}},
				prefill: []refengine.Config{{Version: tc.version, PromptTokensDetails: true}},
				profile: mooncake.Profile{DPMode: mooncake.DPInternal},
			}))
			ranks := func() (all [2]board.WorkerStatus) {
				copy(all[:], c.gw.Status(t.Context()).Dispatch.Models[0].Workers)
				return all
			}
			const n, prompt = 3, 300
			var leaves []func()
			for i := range n {
				leave, _ := c.sendTo(responsesPath, respond(reftext.MakePrompt(uint64(i), prompt), `"stream":true,"ignore_eos":true,`))
				leaves = append(leaves, leave)
				c.eventually("one more decodes", func() bool { r := ranks(); return r[0].Running+r[1].Running == i+1 })
			}
			r := ranks()
			slots, kv := []int{r[0].Used, r[1].Used}, []int64{r[0].KVTokens, r[1].KVTokens}
			require.Equal(t, n, slots[0]+slots[1])
			require.NotEqual(t, slots[0], slots[1], "the slot of each stands on one rank all the same")
			if tc.pins {
				for i := range kv {
					require.GreaterOrEqual(t, kv[i], int64(prompt*slots[i]))
				}
				require.Equal(t, slots[0] > slots[1], kv[0] > kv[1], "more is where more run: %v", kv)
			} else {
				require.InDelta(t, kv[0], kv[1], n, "equal parts, and of each the rest: %v", kv)
				require.GreaterOrEqual(t, kv[0]+kv[1], int64(n*prompt))
			}
			for i, leave := range leaves {
				leave()
				c.eventually("one less runs", func() bool { r := ranks(); return r[0].Used+r[1].Used == n-1-i })
			}
			r = ranks()
			require.Zero(t, r[0].KVTokens)
			require.Zero(t, r[1].KVTokens)
		})
	}
}
