package request

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// completion is the body of a request for a completion.
func completion(prompt, more string) string {
	return fmt.Sprintf(`{%s"model":%q,"prompt":%q}`, more, refModel, prompt)
}

// seamless is what a client could notice of an answer's parts.
type seamless struct {
	texts    map[int]string // of the choices
	ids      []int32
	offsets  []int
	probs    int // tokens with logprobs
	prompts  int // prompt token ids
	finishes []string
	roles    int
	heads    map[string]bool // id, created and model of the events
	usage    []usage
	fail     string
}

type usage struct {
	Prompt     int `json:"prompt_tokens"`
	Completion int `json:"completion_tokens"`
	Total      int `json:"total_tokens"`
}

func readSeamless(t *testing.T, r reply) *seamless {
	t.Helper()
	s := &seamless{texts: map[int]string{}, heads: map[string]bool{}}
	all := []string{strings.TrimSpace(r.body)}
	if !strings.HasPrefix(r.body, "{") {
		all = eventsOf(r.body)
		require.Equal(t, "data: [DONE]", all[len(all)-1], r.body)
		require.Equal(t, 1, strings.Count(r.body, "[DONE]"))
		all = all[:len(all)-1]
	}
	for _, data := range all {
		data = strings.TrimPrefix(data, "data: ")
		require.NotContains(t, data, "recomputed\"")
		type said struct {
			Role, Content string
		}
		var e struct {
			ID      string
			Created int64
			Model   string
			Choices []struct {
				Index          int
				Text           string
				Delta, Message said
				Finish         string  `json:"finish_reason"`
				IDs            []int32 `json:"token_ids"`
				Prompt         []int32 `json:"prompt_token_ids"`
				Logprobs       struct {
					Offsets []int `json:"text_offset"`
					Tokens  []string
					Content []struct{ Token string }
				}
			}
			Prompt []int32 `json:"prompt_token_ids"`
			Usage  *usage
			Error  *struct{ Code any }
		}
		require.NoError(t, json.Unmarshal([]byte(data), &e), data)
		if e.Error != nil {
			s.fail = fmt.Sprint(e.Error.Code)
			continue
		}
		s.heads[fmt.Sprint(e.ID, e.Created, e.Model)] = true
		s.prompts += len(e.Prompt)
		if e.Usage != nil {
			s.usage = append(s.usage, *e.Usage)
		}
		for _, c := range e.Choices {
			s.texts[c.Index] += c.Text + c.Delta.Content + c.Message.Content
			s.ids = append(s.ids, c.IDs...)
			s.prompts += len(c.Prompt)
			s.offsets = append(s.offsets, c.Logprobs.Offsets...)
			s.probs += len(c.Logprobs.Tokens) + len(c.Logprobs.Content)
			if c.Finish != "" {
				s.finishes = append(s.finishes, c.Finish)
			}
			if c.Delta.Role != "" {
				s.roles++
			}
		}
	}
	return s
}

// right fails unless text is the beginning of the answer to key, and says how many tokens it has.
func right(t *testing.T, key uint64, text string) int {
	t.Helper()
	n, err := reftext.Check(key, 0, text)
	require.NoError(t, err)
	return n
}

// Ways in which an answer is lost behind its fifth token.
var (
	given = refengine.Rule{Fault: refengine.Recomputed, AfterTokens: 5, Count: 1}
	died  = refengine.Rule{Fault: refengine.Reset, Phase: refengine.PhaseMidStream, AfterTokens: 5, Count: 1}
)

// lossOf is the counter of what becomes of answers that a rule loses.
func lossOf(r refengine.Rule) string {
	if r.Fault == refengine.Recomputed {
		return "evenkeel_recomputes_total"
	}
	return "evenkeel_decode_losses_total"
}

// withUsage asks for a stream that ends with its counts.
func withUsage(body string) string {
	return strings.Replace(body, "{", `{"stream":true,"stream_options":{"include_usage":true},`, 1)
}

// ask is a request whose answer has between 12 and 40 tokens.
func ask(t *testing.T, ofChat bool, more string) (path, body, prompt string, rendered reftext.Prompt) {
	t.Helper()
	path, bodyOf := mooncake.Completions.Path(), completion
	if ofChat {
		path, bodyOf = mooncake.Chat.Path(), chat
	}
	for seed := uint64(0); len(rendered.IDs) == 0 || reftext.NaturalLength(rendered.Answer) > 40 ||
		reftext.NaturalLength(rendered.Answer) < 12; seed++ {
		prompt = reftext.MakePrompt(seed, 40)
		body = bodyOf(prompt, more)
		var err error
		rendered, err = reftext.Render(ofChat, []byte(body))
		require.NoError(t, err)
	}
	return path, body, prompt, rendered
}

// alone has decode ranks compute short prompts.
func alone(o setup) setup {
	o.profile.AllowLocalPrefill = true
	more := o.configure
	o.configure = func(c *config.Config, deps *Deps) {
		c.Prefill.Disaggregation.Mode = prefill.DisaggregateConditional
		if more != nil {
			more(c, deps)
		}
	}
	return o
}

// locals are the prompts that decode ranks were bound to compute, and all of them are short.
func (b *bed) locals() float64 {
	b.t.Helper()
	for _, why := range []string{localAsked, localEndpoint, localNoHandOff} {
		require.Zero(b.t, b.metric(b.t, "evenkeel_local_prefill_requests_total", why), why)
	}
	return b.metric(b.t, "evenkeel_local_prefill_requests_total", localShort)
}

func TestALostAnswerGoesOn(t *testing.T) {
	t.Parallel()
	rule := func(r refengine.Rule, change func(*refengine.Rule)) refengine.Rule { change(&r); return r }
	const everything = `"logprobs":2,"return_token_ids":true,"max_tokens":300,`
	const ids = `"logprobs":true,"top_logprobs":1,"return_token_ids":true,`
	const isLocal = "local" // the decode rank computed the prompt
	for _, row := range []struct {
		name   string
		chat   bool
		resume string // chat_resume
		more   string
		rule   refengine.Rule
		tier   string
		fail   string // code of the error; empty: the answer is whole
		way    string // isLocal or the connector
	}{
		{"a completion given back", false, "", everything, given, "1", "", ""},
		{"a completion given back with text held back so far", false, "", `"max_tokens":300,`, rule(given, func(r *refengine.Rule) { r.Text = true }), "1", "", ""},
		{"a completion given back three times", false, "", everything, rule(given, func(r *refengine.Rule) { r.Count = 3 }), "1", "", ""},
		{"a completion given back four times ends", false, "", everything, rule(given, func(r *refengine.Rule) { r.Count = 4 }), "4", "recompute_unresumable", ""},
		{"a completion whose engine dies", false, "", everything, died, "1", "", ""},
		{"a completion cut inside a chunk", false, "", everything, rule(died, func(r *refengine.Rule) { r.Phase = refengine.PhaseInsideChunk }), "1", "", ""},
		{"a completion that ends in silence", false, "", everything, refengine.Rule{Fault: refengine.SilentEnd, AfterTokens: 4, Count: 1}, "1", "", ""},
		{"a completion that ends with an error event", false, "", everything, refengine.Rule{Fault: refengine.ErrorEvent, AfterTokens: 4, Count: 1}, "1", "", ""},
		{"a completion without its finish_reason", false, "", everything, refengine.Rule{Fault: refengine.MissingFinish, AfterTokens: 4, Count: 1}, "1", "", ""},
		{"a completion ended by finish_reason error", false, "", everything, refengine.Rule{Fault: refengine.FinishError, AfterTokens: 4, Count: 1}, "1", "", ""},
		{"min_tokens and max_tokens count both parts", false, "", `"max_tokens":7,"min_tokens":7,`, given, "1", "", ""},
		{"no token left to go is the end by length", false, "", `"max_tokens":5,"ignore_eos":true,`, given, "finished", "", ""},
		{"a completion with a stop string ends", false, "", `"max_tokens":300,"stop":"zzz",`, died, "4", "upstream_broken", ""},
		{"a chat that nobody may resume ends", true, "none", "", given, "4", "recompute_unresumable", ""},
		{"a chat with its role only begins anew", true, "none", "", rule(given, func(r *refengine.Rule) { r.AfterTokens, r.Role = 0, true }), "0", "", ""},
		{"a chat whose engine dies with its role only", true, "none", "", rule(died, func(r *refengine.Rule) { r.AfterTokens, r.Role = 0, true }), "0", "", ""},
		{"a chat by token ids", true, mooncake.ChatResumeVLLM, ids, given, "2", "", ""},
		{"a chat by token ids, text held back", true, mooncake.ChatResumeVLLM, "", rule(given, func(r *refengine.Rule) { r.Text = true }), "2", "", ""},
		{"a chat by token ids whose engine dies", true, mooncake.ChatResumeVLLM, `"max_completion_tokens":150,`, died, "2", "", ""},
		{"a chat by vllm-ascend's key", true, mooncake.ChatResumeAscend, "", died, "2", "", ""},
		{"a chat by its text", true, mooncake.ChatResumeContinue, "", died, "3", "", ""},
		{"a chat by its text, given back", true, mooncake.ChatResumeContinue, "", rule(given, func(r *refengine.Rule) { r.Text = true }), "3", "", ""},
		{"a grammar has no way back into its middle", true, mooncake.ChatResumeVLLM, `"response_format":{"type":"json_object"},`, given, "4", "recompute_unresumable", ""},
		{"nor has a tool call", true, mooncake.ChatResumeVLLM, `"tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"required",`, given, "4", "recompute_unresumable", ""},
		{"nor logprobs by text", true, mooncake.ChatResumeContinue, `"logprobs":true,`, given, "4", "recompute_unresumable", ""},
		{"a completion of a local prefill", false, "", everything, given, "1", "", isLocal},
		{"a completion of a local prefill whose engine dies twice", false, "", everything, rule(died, func(r *refengine.Rule) { r.Count = 2 }), "1", "", isLocal},
		{"a chat of a local prefill by token ids", true, mooncake.ChatResumeVLLM, ids, died, "2", "", isLocal},
		{"a chat of a local prefill by its text", true, mooncake.ChatResumeContinue, "", given, "3", "", isLocal},
		{"a chat of a local prefill with its role only", true, "none", "", rule(died, func(r *refengine.Rule) { r.AfterTokens, r.Role = 0, true }), "0", "", isLocal},
		{"a completion that is bound anew", false, "", `"max_tokens":300,`, given, "1", "", mooncake.AscendLayerwise},
		{"a chat by token ids that is bound anew", true, mooncake.ChatResumeVLLM, `"max_tokens":300,`, given, "2", "", mooncake.AscendLayerwise},
		{"a completion of SGLang", false, "", `"max_tokens":300,`, died, "1", "", mooncake.SGLang},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			o := setup{profile: mooncake.Profile{ChatResume: row.resume}, prefill: []refengine.Config{{KV: refengine.KV{PrefixCache: 4096}}},
				configure: func(c *config.Config, _ *Deps) {
					c.Bind.Confirm = patience // the prefill's answer decides, however busy the machine is
				}}
			switch {
			case row.way == isLocal:
				o = alone(o)
				o.decode = []refengine.Config{{KV: refengine.KV{PrefixCache: 4096}}}
			default:
				o.profile.Connector = row.way
			}
			b := start(t, o)
			path, body, _, rendered := ask(t, row.chat, row.more)
			for i, body := range []string{withUsage(body), body} {
				require.NoError(t, b.d[0].SetFaults(row.rule))
				if row.fail != "" && i == 1 {
					continue // an answer that nobody has seen begins anew
				}
				r := b.post(path, body)
				got := readSeamless(t, r)
				b.over()
				if row.fail != "" {
					require.Equal(t, row.fail, got.fail, r.body)
					require.EqualValues(t, 1, b.metric(t, lossOf(row.rule), row.tier))
					continue
				}
				require.Equal(t, http.StatusOK, r.status, r.body)
				require.Empty(t, got.fail, r.body)
				n := right(t, rendered.Answer, got.texts[0])
				require.Len(t, got.finishes, 1)
				require.Len(t, got.heads, 1, "one answer has one id, creation time and model: %v", got.heads)
				require.Equal(t, []usage{{rendered.Tokens(), n, rendered.Tokens() + n}}, got.usage)
				if row.chat && i == 0 {
					require.Equal(t, 1, got.roles)
				}
				switch {
				case strings.Contains(row.more, `"min_tokens":7`):
					require.Equal(t, 7, n)
				case strings.Contains(row.more, `"max_tokens":5`):
					require.Equal(t, 5, n)
					require.Equal(t, "length", got.finishes[0])
				case strings.Contains(row.more, "150"):
					require.Equal(t, min(150, reftext.NaturalLength(rendered.Answer)), n)
				default:
					require.Equal(t, reftext.NaturalLength(rendered.Answer), n)
					require.Equal(t, "stop", got.finishes[0])
				}
				if strings.Contains(row.more, "return_token_ids") {
					require.Len(t, got.ids, n)
					require.Equal(t, rendered.Tokens(), got.prompts, "the client's own prompt, once")
					for i, id := range got.ids {
						require.Equal(t, reftext.TokenID(rendered.Answer, i), id)
					}
					require.Equal(t, n, got.probs)
				} else {
					require.NotContains(t, r.body, "token_ids", "the client has not asked for them")
				}
				if row.chat {
					require.Empty(t, got.offsets)
				} else if strings.Contains(row.more, "logprobs") {
					at := 0
					for i, offset := range got.offsets {
						require.Equal(t, at, offset, "of token %d", i)
						at += utf8.RuneCount(reftext.AppendToken(nil, reftext.TokenID(rendered.Answer, i)))
					}
				}
				last := b.asked[i].Record
				require.Equal(t, "ok", last.Outcome)
				require.Equal(t, n, last.OutputTokens)
				require.Equal(t, rendered.Tokens(), last.PromptTokens)
				if row.tier != "finished" {
					require.Equal(t, 1+row.rule.Count, last.Attempts)
				}
				if i == 0 {
					require.EqualValues(t, row.rule.Count, b.metric(t, lossOf(row.rule), row.tier))
				}
				if row.way == mooncake.AscendLayerwise { // each attempt has an id and a token of its own
					p, d, both := b.p[0].Stats(), b.d[0].Stats(), int64(2*(i+1))
					require.EqualValues(t, both, b.metric(t, "evenkeel_bind_callbacks_total", "ok"))
					require.Equal(t, both, p.Requests)
					require.Equal(t, both, d.Decodes)
					require.Zero(t, p.KeyMismatches+d.KeyMismatches, "of the prompts of the two legs")
				}
			}
			b.settle()
			if row.way == isLocal {
				require.EqualValues(t, 2, b.locals())
			}
		})
	}
}

// Without token ids an answer goes on by its text, which the engine tokenises anew:
// that is told. An echo is never asked for with ids.
func TestALostAnswerGoesOnByItsText(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name   string
		chat   bool
		resume string
		more   string
		ids    bool // the engines tell token ids
		tier   string
	}{
		{"a completion", false, "", `"max_tokens":300,`, false, "3"},
		{"a completion of a prompt of several", false, "", `"max_tokens":300,"n":2,`, false, "3"},
		{"an echo", false, "", `"max_tokens":300,"echo":true,`, true, "3"},
		{"a chat whose profile says ids", true, mooncake.ChatResumeVLLM, "", false, "3"},
		{"a chat that nobody may resume", true, mooncake.ChatResumeNone, "", false, "4"},
		{"logprobs would differ", false, "", `"max_tokens":300,"logprobs":1,`, false, "4"},
		{"a prompt that the engine cuts", false, "", `"max_tokens":300,"truncate_prompt_tokens":20,`, false, "4"},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			// On a busy machine, too, the proxy reads a token before the engine gives the request back.
			e := refengine.Config{Answers: refengine.Answers{NoTokenIDs: !row.ids}, Steps: refengine.Steps{C0: 20 * time.Millisecond}}
			b := start(t, setup{prefill: []refengine.Config{e}, decode: []refengine.Config{e}, profile: mooncake.Profile{ChatResume: row.resume}})
			path, body, prompt, rendered := ask(t, row.chat, row.more)
			require.NoError(t, b.d[0].SetFaults(given))
			r := b.post(path, withUsage(body))
			got := readSeamless(t, r)
			b.settle()
			require.EqualValues(t, 1, b.metric(t, "evenkeel_recomputes_total", row.tier))
			require.Equal(t, row.tier == "3", b.asked[0].Record.Inexact)
			if row.tier == "4" {
				require.Equal(t, "recompute_unresumable", got.fail)
				return
			}
			require.Empty(t, got.fail, r.body)
			text := got.texts[0]
			if strings.Contains(row.more, "echo") {
				var whole bool
				text, whole = strings.CutPrefix(text, prompt)
				require.True(t, whole, "the prompt stands once, before the answer: %q", got.texts[0])
			}
			require.Equal(t, reftext.NaturalLength(rendered.Answer), right(t, rendered.Answer, text))
		})
	}
}

// An engine that overlooks the answer so far would begin it again: the client
// must not read that.
func TestAnEngineThatIgnoresTheAnswerSoFar(t *testing.T) {
	t.Parallel()
	ignores := []refengine.Config{{Answers: refengine.Answers{NoResumeIDs: true}}}
	for name, o := range map[string]setup{"prefill": {prefill: ignores}, "decode": {decode: ignores}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o.profile.ChatResume = mooncake.ChatResumeVLLM
			b := start(t, o)
			require.NoError(t, b.d[0].SetFaults(given))
			prompt := reftext.MakePrompt(7, 40)
			got := readSeamless(t, b.post(mooncake.Chat.Path(), chat(prompt, `"stream":true,`)))
			b.settle()
			require.Equal(t, "recompute_unresumable", got.fail)
			require.Equal(t, 5, right(t, reftext.OfUser(prompt).Answer, got.texts[0]))
			require.EqualValues(t, 1, b.metric(t, "evenkeel_recomputes_total", "4"))
		})
	}
}

// Every leg of a fan-out goes on by itself.
func TestLegsGoOn(t *testing.T) {
	t.Parallel()
	b := start(t, setup{profile: mooncake.Profile{ChatResume: mooncake.ChatResumeVLLM}})
	for i, more := range []string{`"stream":true,"stream_options":{"include_usage":true},"n":3,"seed":5,`, `"n":3,"seed":5,`} {
		require.NoError(t,
			b.d[0].SetFaults(refengine.Rule{Fault: refengine.Reset, Phase: refengine.PhaseMidStream, AfterTokens: 4, Count: 3}))
		prompt, total := reftext.MakePrompt(uint64(11+i), 30), 0
		r := b.post(mooncake.Chat.Path(), chat(prompt, more))
		require.Equal(t, http.StatusOK, r.status, r.body)
		got := readSeamless(t, r)
		require.Empty(t, got.fail, r.body)
		require.Len(t, got.texts, 3)
		require.Len(t, got.finishes, 3)
		for k, text := range got.texts {
			p, err := reftext.Render(true, []byte(chat(prompt, fmt.Sprintf(`"seed":%d,`, 5+k))))
			require.NoError(t, err)
			require.Equal(t, reftext.NaturalLength(p.Answer), right(t, p.Answer, text))
			total += reftext.NaturalLength(p.Answer)
		}
		require.Equal(t, usage{30, total, 30 + total}, got.usage[len(got.usage)-1])
	}
	b.settle()
}

// What is kept for resuming is bounded, and given back.
func TestWhatIsKeptIsBounded(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name  string
		bytes int
		tier  string
		fails string
	}{{"room for one", 4096, "1", ""}, {"no room", 100, "4", "recompute_unresumable"}} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			b := start(t, setup{configure: func(c *config.Config, _ *Deps) { c.Limits.ResumeBytes = row.bytes }})
			for i := range 3 { // one after the other: each finds the room that the last one had
				require.NoError(t, b.d[0].SetFaults(refengine.Rule{Fault: refengine.Recomputed, AfterTokens: 3, Count: 1}))
				r := b.post(mooncake.Completions.Path(), completion(reftext.MakePrompt(uint64(i), 100), `"stream":true,"max_tokens":8,`))
				require.Equal(t, row.fails, readSeamless(t, r).fail, r.body)
				b.over()
				require.EqualValues(t, i+1, b.metric(t, "evenkeel_recomputes_total", row.tier))
			}
			b.settle()
		})
	}
}

// Under real want of KV memory the same requests are given back again and again, with text held
// back or none at all out yet. Every answer is right.
func TestAnswersThatDoNotFitGoOn(t *testing.T) {
	t.Parallel()
	b := start(t, setup{
		decode: []refengine.Config{{Steps: refengine.Steps{Recompute: true, C0: 2 * time.Millisecond}, KV: refengine.KV{Tokens: 1024},
			Slots: 16}},
		profile: mooncake.Profile{RecomputeMax: new(50)},
	})
	var wg sync.WaitGroup
	for i := range 24 {
		wg.Go(func() {
			prompt := reftext.MakePrompt(uint64(i), 60)
			r := b.post(mooncake.Completions.Path(), completion(prompt, fmt.Sprintf(`"stream":%v,"max_tokens":300,`, i%3 > 0)))
			got, key := readSeamless(t, r), reftext.Of(prompt).Answer
			if n, err := reftext.Check(key, 0, got.texts[0]); r.status != http.StatusOK || n != reftext.NaturalLength(key) || err != nil ||
				got.fail != "" {
				t.Errorf("%d: %d tokens of %d, %v %s", r.status, n, reftext.NaturalLength(key), err, got.fail)
			}
		})
	}
	wg.Wait()
	b.settle()
	require.Positive(t, b.metric(t, "evenkeel_recomputes_total", "1"))
}

// An answer in one piece is lost. The rest of it comes in one read with its end, and both together
// are more than limits.answer_bytes: what fits of them is not the answer.
func TestTheRestOfALostAnswerIsTooLarge(t *testing.T) {
	answered := map[int]int{}
	for _, most := range []int{1000, 1500, 2000, 6000} {
		var decodes atomic.Int32
		b := start(t, setup{
			decode:    []refengine.Config{{}, {}},
			configure: func(c *config.Config, _ *Deps) { c.Limits.AnswerBytes = most },
			front: func(w http.ResponseWriter, r *http.Request, engine http.Handler) {
				body, _ := io.ReadAll(r.Body)
				r.Body = io.NopCloser(bytes.NewReader(body))
				probe := bytes.Contains(body, []byte(`"do_remote_decode":true`))
				if probe || r.URL.Path != mooncake.Completions.Path() || decodes.Add(1) != 2 {
					engine.ServeHTTP(w, r)
					return
				}
				all := httptest.NewRecorder() // all that was missing comes at once
				engine.ServeHTTP(all, r)
				w.Header().Set("Content-Type", all.Header().Get("Content-Type"))
				w.WriteHeader(all.Code)
				_, _ = w.Write(all.Body.Bytes())
			},
		})
		lost := refengine.Rule{Fault: refengine.Reset, Phase: refengine.PhaseMidStream, AfterTokens: 5, Count: 1}
		require.NoError(t, b.d[0].SetFaults(lost))
		r := b.post(mooncake.Completions.Path(), completion("one two three", `"max_tokens":9,`))
		answered[most] = r.status
		if r.status == http.StatusOK {
			require.Contains(t, r.body, `"finish_reason":"length"`)
		}
		b.settle()
	}
	require.Equal(t, map[int]int{1000: 502, 1500: 502, 2000: 502, 6000: 200}, answered)
}
