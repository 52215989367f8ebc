package request

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/dispatcher/board"
	"evenkeel/gateway/config"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/openai/answertest"
	"evenkeel/mooncake"
)

// What the two dialects say of an answer that two engines made together, for engines of each kind
// that serve them.
func TestWhatMessagesAndResponsesSay(t *testing.T) {
	t.Parallel()
	const messages, responses = "/v1/messages", "/v1/responses"
	prompt := reftext.MakePrompt(1, 300)
	key := reftext.OfUser(prompt).Answer
	natural := reftext.NaturalLength(key)
	for _, row := range []struct {
		name    string
		version string
		profile mooncake.Profile
		cached  bool // tokens of the prompt that were cached are told at the end of a stream
		cut     bool // an answer that its limit ended has an event of its own
	}{
		{"vLLM", "0.32.0", mooncake.Profile{Connector: mooncake.NIXLPull}, true, false},
		{"vLLM 0.33, which has hand-offs in each chunk", "0.33.0", mooncake.Profile{Connector: mooncake.NIXLPull}, true, true},
		{"vllm-ascend that gives nothing back", "0.32.0", mooncake.Profile{Connector: mooncake.AscendMooncakeV1, GivesBack: new(false)}, true, false},
		{"SGLang", "", mooncake.Profile{Connector: mooncake.SGLang}, false, false},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			b := start(t, setup{
				prefill: []refengine.Config{{KV: refengine.KV{PrefixCache: 4096}, Version: row.version}},
				decode:  []refengine.Config{{DPSize: 2, Version: row.version}},
				profile: row.profile,
			})
			ofMessage := func(more string) string { return dialects[0].body(prompt, more) }
			post := func(path, body string) reply {
				t.Helper()
				r := b.post(path, body)
				require.Equal(t, http.StatusOK, r.status, r.body)
				require.NotContains(t, r.body, "kv_transfer_params")
				b.over()
				record := b.asked[len(b.asked)-1].Record
				require.Equal(t, journal.Disaggregated, record.Route, "both engines had a part in it")
				require.Equal(t, "ok", record.Outcome)
				return r
			}
			last := func() *journal.Record { return b.asked[len(b.asked)-1].Record }

			whole := answertest.ReadWholeMessage(t, post(messages, ofMessage("")).body)
			require.Equal(t, natural, right(t, key, whole.Text()))
			require.Equal(t, "end_turn", whole.Stop)
			require.Equal(t, refModel, whole.Model)
			require.Equal(t, answertest.Spent{Input: 300, Output: natural}, whole.Usage)

			r := post(messages, ofMessage(`"stream":true,`))
			require.Equal(t, "text/event-stream; charset=utf-8", r.header.Get("Content-Type"))
			got := answertest.ReadMessage(t, r.body)
			require.Equal(t, []string{"message_start", "content_block_start", "content_block_delta"}, got.Kinds[:3])
			require.Equal(t, []string{"content_block_stop", "message_delta", "message_stop"}, got.Kinds[len(got.Kinds)-3:])
			require.NotEmpty(t, got.ID)
			require.Equal(t, natural, right(t, key, got.Text()))
			require.Equal(t, "end_turn", got.Stop)
			require.Equal(t, answertest.Spent{Input: 300}, got.First, "no engine tells of cached tokens there")
			if row.cached {
				require.Equal(t, answertest.Spent{Input: 44, Output: natural, Cached: 256}, got.Usage,
					"two blocks that the first request left in prefill's prefix cache")
				require.Equal(t, 256, last().CachedTokens)
			} else {
				require.Equal(t, answertest.Spent{Output: natural}, got.Usage)
			}
			require.Equal(t, []int{300, natural}, []int{last().PromptTokens, last().OutputTokens})

			for stream, read := range map[string]func(*testing.T, string) answertest.Message{"": answertest.ReadWholeMessage, `"stream":true,`: answertest.ReadMessage} {
				cut := read(t, post(messages, strings.Replace(ofMessage(stream), "4000", "5", 1)).body)
				require.Equal(t, "max_tokens", cut.Stop)
				require.Equal(t, reftext.Text(key, 5), cut.Text())
				tools := `"tools":[{"name":"look_up","input_schema":{"type":"object","properties":{"image_url":{"type":"string"}}}}],"tool_choice":{"type":"tool","name":"look_up"},`
				call := read(t, post(messages, ofMessage(tools+stream)).body)
				require.Equal(t, "tool_use", call.Stop)
				require.Equal(t, []string{"tool_use", "look_up"}, []string{call.Content[0].Type, call.Content[0].Name})
			}
			if row.cached { // SGLang stops elsewhere
				stop := strings.Fields(reftext.Text(key, 5))[2]
				cut := answertest.ReadWholeMessage(t, post(messages, ofMessage(fmt.Sprintf(`"stop_sequences":[%q],`, stop))).body)
				require.Equal(t, "stop_sequence", cut.Stop)
				require.True(t, strings.HasPrefix(reftext.Text(key, 5), cut.Text()))
				thinks := answertest.ReadMessage(t, post(messages, ofMessage(`"thinking":{"type":"enabled","budget_tokens":1024},"stream":true,`)).body)
				require.Equal(t, natural, right(t, key, thinks.Text()), "no leg of one token has the budget")
			}
			talk, err := reftext.Render(true, []byte(`{"messages":[{"role":"system","content":"be short"},{"role":"user","content":"one two"},{"role":"assistant","content":"three"},{"role":"user","content":"four"}]}`))
			require.NoError(t, err)
			more := fmt.Sprintf(`{"model":%q,"max_tokens":4000,"system":[{"type":"text","text":"be short","cache_control":{"type":"ephemeral"}}],"messages":[{"role":"user","content":"one two"},{"role":"assistant","content":[{"type":"text","text":"three"}]},{"role":"user","content":[{"type":"text","text":"four"}]}]}`, refModel)
			right(t, talk.Answer, answertest.ReadWholeMessage(t, post(messages, more).body).Text())
			back := fmt.Sprintf(`{"model":%q,"max_tokens":9,"messages":[{"role":"user","content":"a"},{"role":"assistant","content":[{"type":"tool_use","id":"1","name":"look_up","input":{"source":{"url":"http://10.0.0.1/"}}}]},{"role":"user","content":[{"type":"tool_result","tool_use_id":"1","content":[{"type":"text","text":"b"}]}]}]}`, refModel)
			post(messages, back) // a URL among a tool's arguments is no medium

			respond := func(more string) string { return dialects[1].body(prompt, more) }
			post(responses, respond(""))
			said := answertest.ReadResponse(t, post(responses, respond(`"stream":true,"store":false,`)).body)
			require.Empty(t, said.Fail)
			require.Equal(t, []string{"response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
				"response.output_text.delta"}, said.Kinds[:5])
			require.Equal(t, natural, right(t, key, said.Text))
			require.Equal(t, said.Text, said.Last.Output[0].Content[0].Text)
			require.Equal(t, []int{300, natural}, []int{last().PromptTokens, last().OutputTokens})
			require.Equal(t, natural, said.Last.Usage.Output)
			if row.cached {
				require.Equal(t, 256, said.Last.Usage.Details.Cached, "as prefill counted")
				require.Equal(t, []int{256}, said.Last.Usage.Details.PerTurn)
				said = answertest.ReadResponse(t, post(responses, respond(`"stream":true,"max_output_tokens":5,`)).body)
				require.Equal(t, map[bool]string{false: "response.completed", true: "response.incomplete"}[row.cut], said.Kinds[len(said.Kinds)-1])
				require.Equal(t, reftext.Text(key, 5), said.Text)
				require.Equal(t, 5, last().OutputTokens)
			}
			more = fmt.Sprintf(`{"model":%q,"instructions":"be short","input":[{"role":"user","content":"one two"},{"type":"message","role":"assistant","content":[{"type":"output_text","text":"three"}]},{"role":"user","content":[{"type":"input_text","text":"four"}]}]}`, refModel)
			require.Contains(t, post(responses, more).body, strings.Trim(fmt.Sprintf("%q", reftext.Text(talk.Answer, reftext.NaturalLength(talk.Answer))), `"`))
			post(mooncake.Chat.Path(), chat(prompt, `"stream":true,`))
			b.clean()
		})
	}
}

func TestThinkingOfSGLang(t *testing.T) {
	t.Parallel()
	e := []refengine.Config{{Answers: refengine.Answers{ReasoningTokens: 3}}}
	b := start(t, setup{prefill: e, decode: e, profile: mooncake.Profile{Connector: mooncake.SGLang}})
	key := reftext.OfUser("one two three").Answer
	thinks := `"thinking":{"type":"enabled","budget_tokens":1024},`
	for stream, read := range map[string]func(*testing.T, string) answertest.Message{"": answertest.ReadWholeMessage, `"stream":true,`: answertest.ReadMessage} {
		r := b.post("/v1/messages", dialects[0].body("one two three", thinks+stream))
		require.Equal(t, http.StatusOK, r.status, r.body)
		got := read(t, r.body)
		require.Equal(t, []string{"thinking", "text"}, []string{got.Content[0].Type, got.Content[1].Type})
		require.Equal(t, reftext.Text(key, 3), got.Content[0].Thinking)
		require.Equal(t, reftext.NaturalLength(key), right(t, key, got.Content[0].Thinking+got.Text()))
	}
	b.clean()
}

// Where no id can be told, the end of the connection ends a leg.
func TestAClientOfSGLangLeaves(t *testing.T) {
	t.Parallel()
	for _, d := range dialects {
		for _, more := range []string{`"stream":true,`, ""} {
			for _, when := range []string{"in the prefill", "in the answer"} {
				t.Run(d.path+" "+more+" "+when, func(t *testing.T) {
					t.Parallel()
					b := start(t, setup{profile: mooncake.Profile{Connector: mooncake.SGLang}})
					rule, e, prefilled := refengine.Rule{Fault: refengine.Slow, DelayMS: 3000}, b.p[0], int64(0)
					if when == "in the answer" {
						rule, e, prefilled = refengine.Rule{Fault: refengine.Hang, Phase: refengine.PhaseMidStream, AfterTokens: 3}, b.d[0], 1
						if more == "" {
							rule = refengine.Rule{Fault: refengine.Hang, Phase: refengine.PhaseAfterHeaders}
						}
					}
					require.NoError(t, e.SetFaults(rule))
					leave, wait := b.sendTo(d.path, d.body("a long story", more))
					b.eventually("both legs are there", func() bool {
						p, d := b.p[0].Stats(), b.d[0].Stats()
						return p.Requests == 1 && d.Requests == 1 && p.Finished == prefilled && d.Tokens >= prefilled
					})
					leave()
					wait()
					b.over()
					require.Equal(t, "client_closed", b.asked[0].Record.Outcome)
					require.NoError(t, e.SetFaults())
					require.Equal(t, "right", d.judge(b, "a b", more != ""))
					b.settle()
				})
			}
		}
	}
}

// SGLang answers 400 to a response that failed for want of KV. It is not the client's fault.
func TestAResponseOfSGLangThatFails(t *testing.T) {
	t.Parallel()
	for _, d := range dialects {
		t.Run(d.path, func(t *testing.T) {
			t.Parallel()
			b := start(t, setup{decode: both, profile: mooncake.Profile{Connector: mooncake.SGLang}})
			b.says(b.d, refengine.Rule{Fault: refengine.Internal, Leg: refengine.LegDecode})
			for _, stream := range []bool{true, false} {
				require.Equal(t, "502", d.judge(b, "a b", stream))
			}
			b.settle()
		})
	}
}

// Without the recompute scheduler a rank of vllm-ascend that is full computes again what it has put
// aside, and the answer is whole.
func TestAFullRankOfAscendThatGivesNothingBack(t *testing.T) {
	t.Parallel()
	b := start(t, setup{
		decode:  []refengine.Config{{KV: refengine.KV{Tokens: 1024}, Slots: 16, Steps: refengine.Steps{C0: 2 * time.Millisecond}}},
		profile: mooncake.Profile{Connector: mooncake.AscendMooncakeV1, GivesBack: new(false)},
	})
	verdicts := make(chan string, 24)
	for i := range cap(verdicts) {
		go func() {
			got := "no verdict"
			defer func() { verdicts <- got }()
			got = dialects[0].judge(b, reftext.MakePrompt(uint64(i), 60), true)
		}()
	}
	for range cap(verdicts) {
		require.Equal(t, "right", <-verdicts)
	}
	b.settle()
	require.Positive(t, b.d[0].Stats().Preemptions)
}

// Where an engine takes no hand-off at an endpoint, a decode rank computes the whole request, and
// everything else is split as before.
func TestARequestGoesWholeToAnEngineThatTakesNoHandOffForIt(t *testing.T) {
	eachDialect(t, ofVLLM, func(t *testing.T, d dialect, o setup) {
		b := whole(t, o)
		prompt := reftext.MakePrompt(3, 500)
		for i, stream := range []bool{true, false} {
			require.Equal(t, "right", d.judge(b, prompt, stream))
			b.over()
			require.Equal(t, journal.Local, b.asked[i].Record.Route)
		}
		require.EqualValues(t, 2, b.metric(t, "evenkeel_local_prefill_requests_total", localEndpoint))
		require.Zero(t, b.probes())
		b.options.NoHandOff = false
		require.Equal(t, "right", b.judge("a", ""))
		require.Equal(t, 1, b.probes())
		b.settle()
	})
}

// The events that tell of a response come before the engine has the KV. They are no answer, and the
// time to pull it goes on behind them.
func TestAResponseBeginsWithItsFirstToken(t *testing.T) {
	t.Parallel()
	b := start(t, setup{
		profile:   mooncake.Profile{Connector: mooncake.NIXLPull, FirstEventTimeout: 250 * time.Millisecond},
		configure: func(c *config.Config, _ *Deps) { c.Limits.EventTimeout = time.Hour }, // between two events of an answer
	})
	require.NoError(t, b.d[0].SetFaults(refengine.Rule{Fault: refengine.Hang, Phase: refengine.PhaseAfterHeaders}))
	require.Equal(t, "504", dialects[1].judge(b, "a", true))
	require.NoError(t, b.d[0].SetFaults())
	b.settle()
}

// What opens a response, and what ends it, repeats what the client sent.
func TestAnEventOfAResponseThatIsTooLarge(t *testing.T) {
	t.Parallel()
	b := start(t, setup{profile: mooncake.Profile{Connector: mooncake.NIXLPull},
		configure: func(c *config.Config, _ *Deps) { c.Limits.EventBytes = 1 << 10 }})
	prompt := reftext.MakePrompt(5, 30)
	r := b.post("/v1/responses", dialects[1].body(prompt, `"stream":true,"ignore_eos":true,"max_output_tokens":2000,`))
	require.Equal(t, http.StatusOK, r.status, r.body)
	got := answertest.ReadResponse(t, r.body)
	require.Equal(t, "upstream_broken", got.Fail)
	right(t, reftext.OfUser(prompt).Answer, got.Text)
	require.Contains(t, r.body, "limits.event_bytes")
	b.settle()
}

// vLLM before 0.33 runs a response on a rank of its own choice, where several are behind one
// address: its KV is charged to all of them in equal parts. From 0.33 on it runs on the rank that
// it names.
func TestResponsesThatDoNotRunOnTheRankTheyName(t *testing.T) {
	t.Parallel()
	for version, pins := range map[string]bool{"0.32.0": false, "0.33.0": true} {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			b := start(t, setup{
				// Its steps are slow: what the first answer gets before the last one begins must be less than a
				// prompt.
				decode:  []refengine.Config{{DPSize: 2, DPMode: "internal", Version: version, Steps: refengine.Steps{C0: 100 * time.Millisecond}}},
				prefill: []refengine.Config{{Version: version}}, waits: true, pins: pins,
				profile: mooncake.Profile{Connector: mooncake.NIXLPull, DPMode: mooncake.DPInternal},
			})
			ranks := func() (all [2]board.WorkerStatus) {
				copy(all[:], b.Dispatcher.Status(t.Context()).Models[0].Workers)
				return all
			}
			const n, prompt = 3, 300
			var leaves []func()
			for i := range n {
				leave, _ := b.sendTo("/v1/responses", dialects[1].body(reftext.MakePrompt(uint64(i), prompt), `"stream":true,"ignore_eos":true,`))
				leaves = append(leaves, leave)
				b.eventually("one more decodes", func() bool { r := ranks(); return r[0].Running+r[1].Running == i+1 })
			}
			r := ranks()
			slots, kv := []int{r[0].Used, r[1].Used}, []int64{r[0].KVTokens, r[1].KVTokens}
			require.Equal(t, n, slots[0]+slots[1])
			require.NotEqual(t, slots[0], slots[1], "the slot of each stands on one rank all the same")
			if pins {
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
				b.eventually("one less runs", func() bool { r := ranks(); return r[0].Used+r[1].Used == n-1-i })
			}
			r = ranks()
			require.Zero(t, r[0].KVTokens)
			require.Zero(t, r[1].KVTokens)
			b.settle()
		})
	}
}
