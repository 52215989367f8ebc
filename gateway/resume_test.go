package gateway_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/race"
	"evenkeel/bench/refengine"
	"evenkeel/bench/reftext"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// seamless is what a client could notice of an answer's parts.
type seamless struct {
	text     string
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

func readSeamless(t *testing.T, body string) *seamless {
	t.Helper()
	s := &seamless{heads: map[string]bool{}}
	all := []string{strings.TrimSpace(body)}
	if !strings.HasPrefix(body, "{") {
		all = events(t, body)
		require.Equal(t, "[DONE]", all[len(all)-1], body)
		require.Equal(t, 1, strings.Count(body, "[DONE]"))
		all = all[:len(all)-1]
	}
	for _, data := range all {
		require.NotContains(t, data, "recomputed\"")
		type said struct {
			Role, Content string
		}
		var e struct {
			ID      string
			Created int64
			Model   string
			Choices []struct {
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
			Error  *struct{ Code string }
		}
		require.NoError(t, json.Unmarshal([]byte(data), &e), data)
		if e.Error != nil {
			s.fail = e.Error.Code
			continue
		}
		s.heads[fmt.Sprint(e.ID, e.Created, e.Model)] = true
		s.prompts += len(e.Prompt)
		if e.Usage != nil {
			s.usage = append(s.usage, *e.Usage)
		}
		for _, c := range e.Choices {
			s.text += c.Text + c.Delta.Content + c.Message.Content
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

// slow keeps the answer's beginning from coming in one read, before which all
// begins anew; halting, all of it.
var (
	slow    = refengine.Rule{Fault: refengine.Slow, DelayMS: 120, Tokens: 6, Leg: refengine.LegDecode}
	halting = refengine.Rule{Fault: refengine.Slow, DelayMS: 250, Leg: refengine.LegDecode}
)

// slowLocal is that of a rank that computes the prompt.
var slowLocal = refengine.Rule{Fault: refengine.Slow, DelayMS: 25, Leg: refengine.LegPlain}

func lossOf(r refengine.Rule, tier string) string {
	if r.Fault == refengine.Recomputed {
		return fmt.Sprintf("evenkeel_recomputes_total{tier=%q}", tier)
	}
	return fmt.Sprintf("evenkeel_decode_losses_total{tier=%q}", tier)
}

func TestALostAnswerGoesOn(t *testing.T) {
	t.Parallel()
	given := refengine.Rule{Fault: refengine.Recomputed, AfterTokens: 5, Count: 1}
	died := refengine.Rule{Fault: refengine.Reset, Phase: refengine.PhaseMidStream, AfterTokens: 5, Count: 1}
	rule := func(r refengine.Rule, change func(*refengine.Rule)) refengine.Rule { change(&r); return r }
	const everything = `"logprobs":2,"return_token_ids":true,"max_tokens":300,`
	for _, row := range []struct {
		name   string
		chat   bool
		resume string // chat_resume
		more   string
		rule   refengine.Rule
		tier   string
		fail   string // code of the error; empty: the answer is whole
		local  bool   // the decode rank computed the prompt
	}{
		{"a completion given back", false, "", everything, given, "1", "", false},
		{"a completion given back with text held back so far", false, "", `"max_tokens":300,`, rule(given, func(r *refengine.Rule) { r.Text = true }), "1", "", false},
		{"a completion given back three times", false, "", everything, rule(given, func(r *refengine.Rule) { r.Count = 3 }), "1", "", false},
		{"a completion given back four times ends", false, "", everything, rule(given, func(r *refengine.Rule) { r.Count = 4 }), "4", "recompute_unresumable", false},
		{"a completion whose engine dies", false, "", everything, died, "1", "", false},
		{"a completion cut inside a chunk", false, "", everything, rule(died, func(r *refengine.Rule) { r.Phase = refengine.PhaseInsideChunk }), "1", "", false},
		{"a completion that ends in silence", false, "", everything, refengine.Rule{Fault: refengine.SilentEnd, AfterTokens: 4, Count: 1}, "1", "", false},
		{"a completion that ends with an error event", false, "", everything, refengine.Rule{Fault: refengine.ErrorEvent, AfterTokens: 4, Count: 1}, "1", "", false},
		{"a completion without its finish_reason", false, "", everything, refengine.Rule{Fault: refengine.MissingFinish, AfterTokens: 4, Count: 1}, "1", "", false},
		{"a completion ended by finish_reason error", false, "", everything, refengine.Rule{Fault: refengine.FinishError, AfterTokens: 4, Count: 1}, "1", "", false},
		{"min_tokens and max_tokens count both parts", false, "", `"max_tokens":7,"min_tokens":7,`, given, "1", "", false},
		{"no token left to go is the end by length", false, "", `"max_tokens":5,"ignore_eos":true,`, given, "finished", "", false},
		{"a completion with a stop string ends", false, "", `"max_tokens":300,"stop":"zzz",`, died, "4", "upstream_broken", false},
		{"a chat that nobody may resume ends", true, "none", "", given, "4", "recompute_unresumable", false},
		{"a chat with its role only begins anew", true, "none", "", rule(given, func(r *refengine.Rule) { r.AfterTokens, r.Role = 0, true }), "0", "", false},
		{"a chat whose engine dies with its role only", true, "none", "", rule(died, func(r *refengine.Rule) { r.AfterTokens, r.Role = 0, true }), "0", "", false},
		{"a chat by token ids", true, mooncake.ChatResumeVLLM, `"logprobs":true,"top_logprobs":1,"return_token_ids":true,`, given, "2", "", false},
		{"a chat by token ids, text held back", true, mooncake.ChatResumeVLLM, "", rule(given, func(r *refengine.Rule) { r.Text = true }), "2", "", false},
		{"a chat by token ids whose engine dies", true, mooncake.ChatResumeVLLM, `"max_completion_tokens":150,`, died, "2", "", false},
		{"a chat by vllm-ascend's key", true, mooncake.ChatResumeAscend, "", died, "2", "", false},
		{"a chat by its text", true, mooncake.ChatResumeContinue, "", died, "3", "", false},
		{"a chat by its text, given back", true, mooncake.ChatResumeContinue, "", rule(given, func(r *refengine.Rule) { r.Text = true }), "3", "", false},
		{"a grammar has no way back into its middle", true, mooncake.ChatResumeVLLM, `"response_format":{"type":"json_object"},`, given, "4", "recompute_unresumable", false},
		{"nor has a tool call", true, mooncake.ChatResumeVLLM, `"tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"required",`, given, "4", "recompute_unresumable", false},
		{"nor logprobs by text", true, mooncake.ChatResumeContinue, `"logprobs":true,`, given, "4", "recompute_unresumable", false},
		{"a completion of a local prefill", false, "", everything, given, "1", "", true},
		{"a completion of a local prefill whose engine dies twice", false, "", everything, rule(died, func(r *refengine.Rule) { r.Count = 2 }), "1", "", true},
		{"a chat of a local prefill by token ids", true, mooncake.ChatResumeVLLM, `"logprobs":true,"top_logprobs":1,"return_token_ids":true,`, died, "2", "", true},
		{"a chat of a local prefill by its text", true, mooncake.ChatResumeContinue, "", given, "3", "", true},
		{"a chat of a local prefill with its role only", true, "none", "", rule(died, func(r *refengine.Rule) { r.AfterTokens, r.Role = 0, true }), "0", "", true},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			o := options{profile: mooncake.Profile{ChatResume: row.resume}, dirty: true}
			if row.local {
				o = conditional(nil)
				o.profile.ChatResume, o.dirty = row.resume, true
			}
			c := start(t, o)
			if row.local {
				defer func() { require.EqualValues(t, 2, c.sum("evenkeel_local_prefill_requests_total")) }()
			}
			path, bodyOf := completionPath, completion
			if row.chat {
				path, bodyOf = chatPath, chat
			}
			var body string
			var rendered reftext.Prompt
			for seed := uint64(0); len(rendered.IDs) == 0 || reftext.NaturalLength(rendered.Answer) > 40 || reftext.NaturalLength(rendered.Answer) < 12; seed++ { // slowly sent
				body = bodyOf(reftext.MakePrompt(seed, 40), row.more)
				var err error
				rendered, err = reftext.Render(row.chat, []byte(body))
				require.NoError(t, err)
			}
			stream := strings.Replace(body, "{", `{"stream":true,"stream_options":{"include_usage":true},`, 1)
			for i, body := range []string{stream, body} {
				require.NoError(t, c.decode[0].SetFaults(row.rule, slow, slowLocal))
				r := c.post(path, body)
				require.NoError(t, r.err)
				if row.fail != "" {
					if i == 1 {
						continue // an answer that nobody has seen begins anew
					}
					require.Equal(t, row.fail, readSeamless(t, r.body).fail, r.body)
					require.EqualValues(t, 1, c.metric(lossOf(row.rule, row.tier)))
					continue
				}
				require.Equal(t, 200, r.status, r.body)
				got := readSeamless(t, r.body)
				require.Empty(t, got.fail, r.body)
				n := rightText(t, rendered.Answer, got.text)
				require.Len(t, got.finishes, 1)
				require.Len(t, got.heads, 1, "one answer has one id, creation time and model: %v", got.heads)
				require.Len(t, got.usage, 1, r.body)
				require.Equal(t, usage{rendered.Tokens(), n, rendered.Tokens() + n}, got.usage[0])
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
					wholeText(t, rendered.Answer, got.text)
					require.Equal(t, "stop", got.finishes[0])
				}
				if strings.Contains(row.more, "return_token_ids") {
					require.Len(t, got.ids, n)
					require.Equal(t, rendered.Tokens(), got.prompts, "the client's own prompt, once")
					for i, id := range got.ids {
						require.Equal(t, reftext.TokenID(rendered.Answer, i), id)
					}
					require.Equal(t, n, got.probs)
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
				c.settledRequests(i + 1)
				last := c.records()[i]
				require.Equal(t, "ok", last.Outcome)
				require.Equal(t, n, last.OutputTokens)
				require.Equal(t, rendered.Tokens(), last.PromptTokens)
				if row.tier != "finished" {
					require.Equal(t, 1+row.rule.Count, last.Attempts)
				}
				if i == 0 {
					require.EqualValues(t, row.rule.Count, c.metric(lossOf(row.rule, row.tier)), c.get("/metrics").body)
				}
			}
			c.settled(true)
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
			e := refengine.Config{NoTokenIDs: !row.ids}
			c := start(t, options{prefill: []refengine.Config{e}, decode: []refengine.Config{e}, dirty: true, profile: mooncake.Profile{ChatResume: row.resume}})
			path, bodyOf := completionPath, completion
			if row.chat {
				path, bodyOf = chatPath, chat
			}
			var body, prompt string
			var rendered reftext.Prompt
			for seed := uint64(0); len(rendered.IDs) == 0 || reftext.NaturalLength(rendered.Answer) > 40 || reftext.NaturalLength(rendered.Answer) < 12; seed++ {
				prompt = reftext.MakePrompt(seed, 40)
				body = bodyOf(prompt, row.more)
				var err error
				rendered, err = reftext.Render(row.chat, []byte(body))
				require.NoError(t, err)
			}
			require.NoError(t, c.decode[0].SetFaults(refengine.Rule{Fault: refengine.Recomputed, AfterTokens: 5, Count: 1}, slow))
			r := c.post(path, strings.Replace(body, "{", `{"stream":true,"stream_options":{"include_usage":true},`, 1))
			require.NoError(t, r.err)
			got := read(t, r.body)
			c.settledRequests(1)
			require.EqualValues(t, 1, c.metric(fmt.Sprintf("evenkeel_recomputes_total{tier=%q}", row.tier)))
			require.Equal(t, row.tier == "3", c.records()[0].Inexact)
			if row.tier == "4" {
				require.Equal(t, "recompute_unresumable", got.fail)
				return
			}
			require.Empty(t, got.fail, r.body)
			text := got.text[0]
			if strings.Contains(row.more, "echo") {
				var whole bool
				text, whole = strings.CutPrefix(text, prompt)
				require.True(t, whole, "the prompt stands once, before the answer: %q", got.text[0])
			}
			wholeText(t, rendered.Answer, text)
		})
	}
}

// An engine that overlooks the answer so far would begin it again: the client
// must not read that.
func TestAnEngineThatIgnoresTheAnswerSoFar(t *testing.T) {
	t.Parallel()
	for name, o := range map[string]options{
		"prefill": {prefill: []refengine.Config{{NoResumeIDs: true}}},
		"decode":  {decode: []refengine.Config{{NoResumeIDs: true}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o.profile.ChatResume, o.dirty = mooncake.ChatResumeVLLM, true
			c := start(t, o)
			require.NoError(t, c.decode[0].SetFaults(refengine.Rule{Fault: refengine.Recomputed, AfterTokens: 5, Count: 1}, slow))
			prompt := reftext.MakePrompt(7, 40)
			r := c.post(chatPath, chat(prompt, `"stream":true,`))
			got := readSeamless(t, r.body)
			require.Equal(t, "recompute_unresumable", got.fail)
			require.Equal(t, 5, rightText(t, reftext.OfUser(prompt).Answer, got.text))
			require.EqualValues(t, 1, c.metric(`evenkeel_recomputes_total{tier="4"}`))
		})
	}
}

// Every leg of a fan-out goes on by itself.
func TestLegsGoOn(t *testing.T) {
	t.Parallel()
	c := start(t, options{profile: mooncake.Profile{ChatResume: mooncake.ChatResumeVLLM}, dirty: true})
	for i, more := range []string{`"stream":true,"stream_options":{"include_usage":true},"n":3,"seed":5,`, `"n":3,"seed":5,`} {
		require.NoError(t, c.decode[0].SetFaults(refengine.Rule{Fault: refengine.Reset, Phase: refengine.PhaseMidStream, AfterTokens: 4, Count: 3}, slow))
		prompt := reftext.MakePrompt(uint64(11+i), 30)
		r := c.post(chatPath, chat(prompt, more))
		require.Equal(t, 200, r.status, r.body)
		texts, total := map[int]string{}, 0
		if i == 0 {
			got := read(t, r.body)
			require.Empty(t, got.fail, r.body)
			texts = got.text
		} else {
			for k, text := range whole(t, r.body) {
				texts[k] = text
			}
		}
		require.Len(t, texts, 3)
		for k, text := range texts {
			p, err := reftext.Render(true, []byte(chat(prompt, fmt.Sprintf(`"seed":%d,`, 5+k))))
			require.NoError(t, err)
			wholeText(t, p.Answer, text)
			total += reftext.NaturalLength(p.Answer)
		}
		all := readUsage(t, r.body)
		require.Equal(t, usage{30, total, 30 + total}, all)
	}
}

func readUsage(t *testing.T, body string) usage {
	t.Helper()
	if !strings.HasPrefix(body, "{") {
		all := events(t, body)
		body = all[len(all)-2]
	}
	var e struct{ Usage usage }
	require.NoError(t, json.Unmarshal([]byte(body), &e), body)
	return e.Usage
}

// A decode engine dies under 200 streams. All that can go on does, to the last
// token.
func TestADecodeEngineDiesUnderManyStreams(t *testing.T) {
	t.Parallel()
	for name, resume := range map[string]string{"by token ids": mooncake.ChatResumeVLLM, "by text": mooncake.ChatResumeContinue, "none": mooncake.ChatResumeNone} {
		t.Run(name, func(t *testing.T) {
			// What the one that dies has begun is far from its end.
			dies, lives := refengine.Config{Slots: 128, DPSize: 2, C0: time.Second}, refengine.Config{Slots: 256, DPSize: 2, C0: 5 * time.Millisecond}
			c := start(t, options{
				decode: []refengine.Config{dies, lives}, dirty: true, profile: mooncake.Profile{ChatResume: resume},
				configure: func(cfg *config.Config) {
					cfg.Pool.Size, cfg.Dispatch.Policy = 1024, "prr"
					cfg.Prefill.Retry.Base = 50 * time.Millisecond // three attempts must outlast the news that the engine is down
				},
			})
			c.eventually("all ranks are up", func() bool {
				up := 0
				for _, w := range c.gw.Status(t.Context()).Dispatch.Models[0].Workers {
					if w.Up {
						up++
					}
				}
				return up == 4
			})
			streams := 200
			if race.Enabled {
				streams = 100
			}
			var wg sync.WaitGroup
			t.Cleanup(wg.Wait) // they fail the test, so they end before it
			fails := make(chan string, streams)
			for i := range streams {
				wg.Go(func() {
					prompt := reftext.MakePrompt(uint64(i), 50)
					path, body := completionPath, completion(prompt, `"stream":true,"max_tokens":300,`)
					if i%2 == 1 {
						path, body = chatPath, chat(prompt, `"stream":true,`)
					}
					p, err := reftext.Render(i%2 == 1, []byte(body))
					if err != nil {
						t.Error(err)
						return
					}
					r := c.post(path, body)
					got := read(t, r.body)
					if got.fail != "" || r.status != 200 {
						fails <- fmt.Sprint(path, r.status, got.fail)
						if i%2 == 0 || resume != mooncake.ChatResumeNone {
							t.Error(path, r.status, got.fail)
						}
						return
					}
					if n, err := reftext.Check(p.Answer, 0, got.text[0]); err != nil || n != reftext.NaturalLength(p.Answer) {
						t.Errorf("%s: %d tokens of %d, %v", path, n, reftext.NaturalLength(p.Answer), err)
					}
				})
			}
			c.eventually("many have begun there", func() bool {
				dispatched := c.decodes()
				return c.metric("evenkeel_ttft_seconds_count") >= float64(dispatched) && c.decode[0].Stats().Running > int64(streams/8)
			})
			c.decode[0].Kill()
			wg.Wait()
			close(fails)
			if resume == mooncake.ChatResumeNone {
				require.NotEmpty(t, fails)
			}
			require.Positive(t, c.metric(`evenkeel_decode_losses_total{tier="1"}`))
		})
	}
}

// Under real want of KV memory the same requests are given back again and
// again, with text held back or none at all out yet. Every answer is right.
func TestAnswersThatDoNotFitGoOn(t *testing.T) {
	t.Parallel()
	c := start(t, options{
		decode:  []refengine.Config{{RecomputeEnable: true, KVTokens: 1024, Slots: 16, C0: 2 * time.Millisecond}},
		profile: mooncake.Profile{RecomputeMax: new(50)}, dirty: true,
		configure: func(cfg *config.Config) { cfg.Dispatch.Policy = "rr" },
	})
	var wg sync.WaitGroup
	for i := range 24 {
		wg.Go(func() {
			prompt := reftext.MakePrompt(uint64(i), 60)
			r := c.post(completionPath, completion(prompt, fmt.Sprintf(`"stream":%v,"max_tokens":300,`, i%3 > 0)))
			if r.status != 200 {
				t.Error(r.status, r.body)
				return
			}
			got := readSeamless(t, r.body)
			key := reftext.Of(prompt).Answer
			if n, err := reftext.Check(key, 0, got.text); err != nil || n != reftext.NaturalLength(key) || got.fail != "" {
				t.Errorf("%d tokens of %d, %v %s", n, reftext.NaturalLength(key), err, got.fail)
			}
		})
	}
	wg.Wait()
	require.Positive(t, c.metric(`evenkeel_recomputes_total{tier="1"}`))
}

// What is kept for resuming is bounded, and given back.
func TestWhatIsKeptIsBounded(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name  string
		bytes int
		tier  string
	}{{"room for one", 4096, "1"}, {"no room", 100, "4"}} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			c := start(t, options{dirty: true, configure: func(cfg *config.Config) { cfg.Limits.ResumeBytes = row.bytes }})
			for i := range 3 { // one after the other: each finds the room that the last one had
				require.NoError(t, c.decode[0].SetFaults(refengine.Rule{Fault: refengine.Recomputed, AfterTokens: 3, Count: 1}, slow))
				c.post(completionPath, completion(reftext.MakePrompt(uint64(i), 100), `"stream":true,"max_tokens":8,`))
				c.settledRequests(i + 1)
				require.EqualValues(t, i+1, c.metric(fmt.Sprintf("evenkeel_recomputes_total{tier=%q}", row.tier)))
			}
		})
	}
}
