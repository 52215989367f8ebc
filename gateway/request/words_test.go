package request

import (
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// direct asks an engine itself.
func direct(t *testing.T, e *refengine.Engine, path, body string) reply {
	t.Helper()
	resp, err := http.Post(e.URLs()[0]+path, "application/json", strings.NewReader(body)) //nolint:noctx // of a reference engine
	require.NoError(t, err)
	defer func() { _ = resp.Body.Close() }()
	all, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return reply{resp.StatusCode, resp.Header, string(all)}
}

// What an engine refuses reaches the client as it came: status, type, words, and when to come back.
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
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			b := start(t, setup{decode: []refengine.Config{{KV: refengine.KV{RejectReleases: true}}},
				configure: func(c *config.Config, _ *Deps) { c.Prefill.Retry.Attempts = 1 }})
			b.engines.frees = true
			for _, stream := range []string{"true", "false"} {
				for side, e := range map[string]*refengine.Engine{"prefill": b.p[0], "decode": b.d[0]} {
					rule := row.rule
					rule.Cleanup = true // as engines of this version do
					require.NoError(t, e.SetFaults(rule))
					want := direct(t, e, mooncake.Chat.Path(), chat("a", ""))
					got := b.post(mooncake.Chat.Path(), chat("a", `"stream":`+stream+`,`))
					require.Equal(t, want.status, got.status, side)
					require.Equal(t, want.body, got.body, side)
					for _, header := range []string{"Content-Type", "Retry-After"} {
						require.Equal(t, want.header.Get(header), got.header.Get(header), side)
					}
					require.NoError(t, e.SetFaults())
				}
			}
			b.clean()
			for _, in := range b.asked {
				require.Equal(t, "engine_refused", in.Record.Outcome)
			}
		})
	}
}

// An engine's own bound is told in the engine's words, before anything is computed.
func TestABoundOfAnEngineIsToldInItsWords(t *testing.T) {
	t.Parallel()
	b := start(t, setup{})
	r := b.post(mooncake.Chat.Path(), chat("a", `"logprobs":true,"top_logprobs":21,`))
	require.Equal(t, http.StatusBadRequest, r.status)
	require.Contains(t, r.body, "top_logprobs")
	require.NotContains(t, r.body, `"invalid_value"`)
	b.clean()
	require.Zero(t, b.decodes())
}

// An engine that takes its client for gone (499) means this proxy. The client waits, and must not
// be taken for one that has left: of an answer that breaks off, such a client gets no error.
func TestAnEngineThatTakesItsClientForGone(t *testing.T) {
	t.Parallel()
	for _, begun := range []bool{true, false} {
		u := &unruly{profile: mooncake.Profile{ChatResume: mooncake.ChatResumeContinue}}
		var probes atomic.Int64
		u.probe = func(w http.ResponseWriter) { // the answer so far makes the second prompt longer
			_, _ = io.WriteString(w, handOff(strconv.FormatInt(6+probes.Add(1), 10), ""))
		}
		u.decode = func(w *script, _ *http.Request) {
			if begun && w.n == 1 {
				w.send(oneEvent)
				panic(http.ErrAbortHandler)
			}
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(499)
			w.send(`{"error":{"message":"the client left"}}`)
		}
		b := misled(t, u)
		r := b.post(mooncake.Chat.Path(), chat(short, `"stream":true,`))
		b.over()
		if begun {
			require.Equal(t, http.StatusOK, r.status)
			require.Contains(t, r.body, `"error"`)
		} else {
			require.Equal(t, http.StatusBadGateway, r.status, r.body)
		}
		require.NotEqual(t, "client_closed", b.asked[0].Record.LogEntry.Outcome)
	}
}

// An engine that refuses our credential tells the operator, and the client that it is not its
// fault.
func TestARefusedCredentialIsOurProblem(t *testing.T) {
	t.Parallel()
	for _, status := range []float64{401, 403} {
		t.Run(fmt.Sprint(status), func(t *testing.T) {
			t.Parallel()
			b := start(t, setup{decode: []refengine.Config{{KV: refengine.KV{RejectReleases: true}}}})
			b.engines.frees = true
			for side, e := range map[string]*refengine.Engine{"prefill": b.p[0], "decode": b.d[0]} {
				require.NoError(t, e.SetFaults(refengine.Rule{Fault: refengine.Status, Value: status, Cleanup: true}))
				require.Equal(t, side+"_failed", refused(t, b.post(mooncake.Chat.Path(), chat("a", "")), http.StatusBadGateway))
				require.NoError(t, e.SetFaults())
			}
			require.Len(t, b.logs.FilterLevelExact(zap.ErrorLevel).FilterMessageSnippet("ALARM").All(), 2)
			b.settle()
		})
	}
}

// An answer that breaks off in its middle ends properly, and what is wrong is said in it. No client
// takes it for a whole one.
func TestAnAnswerThatBreaksOffIsNotWhole(t *testing.T) {
	t.Parallel()
	prompt := reftext.MakePrompt(4, 30)
	key := reftext.OfUser(prompt).Answer
	for _, row := range []struct {
		name string
		rule refengine.Rule
		code string
	}{
		{"reset", refengine.Rule{Fault: refengine.Reset, Phase: refengine.PhaseMidStream}, "upstream_broken"},
		{"reset inside a chunk", refengine.Rule{Fault: refengine.Reset, Phase: refengine.PhaseInsideChunk}, "upstream_broken"},
		{"silence", refengine.Rule{Fault: refengine.Hang, Phase: refengine.PhaseMidStream}, "upstream_broken"},
		{"a clean end without a finish", refengine.Rule{Fault: refengine.SilentEnd}, "upstream_incomplete"},
		{"[DONE] without a finish", refengine.Rule{Fault: refengine.MissingFinish}, "upstream_incomplete"},
		{"an error event", refengine.Rule{Fault: refengine.ErrorEvent}, "500"},
		{"an error event of old engines", refengine.Rule{Fault: refengine.ErrorEvent, Shape: refengine.ShapeOld}, "500"},
		{"an error event of the Rust frontend", refengine.Rule{Fault: refengine.ErrorEvent, Shape: refengine.ShapeRust}, "server_error"},
		{"finish_reason error", refengine.Rule{Fault: refengine.FinishError}, "finish_error"},
		{"recomputed", refengine.Rule{Fault: refengine.Recomputed}, "recompute_unresumable"},
		{"recomputed, with the last text", refengine.Rule{Fault: refengine.Recomputed, Text: true}, "recompute_unresumable"},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			b := start(t, setup{configure: func(c *config.Config, _ *Deps) {
				if row.rule.Fault == refengine.Hang {
					c.Limits.EventTimeout = time.Second
				}
			}})
			row.rule.AfterTokens = 5
			require.NoError(t, b.d[0].SetFaults(row.rule))
			r := b.post(mooncake.Chat.Path(), chat(prompt, `"stream":true,`))
			got := readSeamless(t, r)
			require.Equal(t, 5, right(t, key, got.texts[0]))
			require.Equal(t, row.code, got.fail)
			require.Empty(t, got.finishes)

			got = readSeamless(t, b.post(mooncake.Chat.Path(), chat(prompt, `"stream":true,"n":2,`)))
			require.Equal(t, row.code, got.fail)
			require.Less(t, len(got.finishes), 2)

			refused(t, b.post(mooncake.Chat.Path(), chat(prompt, "")), http.StatusBadGateway)
			b.settle()
			for _, in := range b.asked {
				require.NotContains(t, []string{"ok", "500"}, in.Record.Outcome, "an engine's words are no label")
			}
			if row.rule.Fault == refengine.Recomputed {
				require.Contains(t, b.engines.gaveBack, "decode d0")
			} else {
				require.Empty(t, b.engines.gaveBack)
			}
		})
	}
}

// vLLM leaves the prompt out of an answer that also has token ids, so an echo must not be mixed
// with ids that only the proxy wants.
func TestEcho(t *testing.T) {
	t.Parallel()
	b := start(t, setup{})
	prompt := reftext.MakePrompt(3, 100)
	alone, err := refengine.Start(refengine.Config{}.Quick())
	require.NoError(t, err)
	t.Cleanup(alone.Close)
	for _, more := range []string{`"echo":true,`, `"echo":true,"stream":true,`, `"echo":true,"return_token_ids":true,`, `"echo":true,"stream":true,"return_token_ids":true,`} {
		body := completion(prompt, `"max_tokens":6,`+more)
		want := readSeamless(t, direct(t, alone, mooncake.Completions.Path(), body)).texts[0]
		got := readSeamless(t, b.post(mooncake.Completions.Path(), body))
		require.Empty(t, got.fail)
		require.Equal(t, want, got.texts[0], more)
		if !strings.Contains(more, "ids") {
			require.Equal(t, prompt+reftext.Text(reftext.Of(prompt).Answer, 6), got.texts[0], more)
		}
	}
	b.clean()
}

// A request may have more answers than the numbers of two letters. Each has its own text, in its
// place.
func TestMoreAnswersThanTwoLettersCanName(t *testing.T) {
	t.Parallel()
	b := start(t, setup{decode: []refengine.Config{{Slots: 64}}})
	r := b.post(mooncake.Chat.Path(), chat("one two", `"n":30,"max_tokens":3,"seed":1,`))
	require.Equal(t, http.StatusOK, r.status, r.body)
	require.Len(t, readSeamless(t, r).finishes, 30)
	require.Contains(t, r.body, `"completion_tokens":90`)
	prompts := make([]string, 700)
	for i := range prompts {
		prompts[i] = fmt.Sprintf("%q", fmt.Sprint("prompt ", i))
	}
	r = b.post(mooncake.Completions.Path(), fmt.Sprintf(`{"model":%q,"max_tokens":1,"prompt":[%s]}`, refModel, strings.Join(prompts, ",")))
	require.Equal(t, http.StatusOK, r.status, r.body)
	got := readSeamless(t, r)
	require.Len(t, got.texts, len(prompts))
	for i, text := range got.texts {
		require.Equal(t, 1, right(t, reftext.Of(fmt.Sprint("prompt ", i)).Answer, text))
	}
	b.clean()
}

// A prefill engine may refuse a request in an answer with status 200. The request is at fault then,
// and no other engine is asked.
func TestARefusalOfLogprobsOfAPromptIsTheRequestsFault(t *testing.T) {
	t.Parallel()
	b := start(t, setup{front: func(w http.ResponseWriter, r *http.Request, _ http.Handler) {
		body, _ := io.ReadAll(r.Body)
		const said = `{"error":{"message":"no such prompt","type":"BadRequestError","code":400}}`
		if strings.Contains(string(body), `"stream":true`) {
			w.Header().Set("Content-Type", "text/event-stream")
			_, _ = io.WriteString(w, "data: "+said+"\n\ndata: [DONE]\n\n")
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, said)
	}})
	for _, more := range []string{"", `"stream":true,`} {
		r := b.post(mooncake.Completions.Path(), completion("one two", `"echo":true,"logprobs":1,"max_tokens":1,`+more))
		b.over()
		require.Equal(t, http.StatusBadRequest, r.status, r.body)
		require.Contains(t, r.body, "no such prompt")
	}
	require.Zero(t, b.metric(t, "evenkeel_prefill_attempts_total", "failed"), "the engine has not failed")
	require.Equal(t, 1, b.asked[0].Record.Attempts)
}

// The stream of a prefill engine that answers alone may begin as any other: with a comment, or with
// the name of its first event. An answer that is no stream is of no use.
func TestHowThePrefillEnginesOwnStreamBeginsAndEnds(t *testing.T) {
	t.Parallel()
	const event = `data: {"id":"d","created":1,"model":"ref","choices":[{"index":0,"text":"hi","finish_reason":"length"}]}` + "\n\n"
	for stream, want := range map[string]int{
		event + doneEvent: 200, ": ping\n\n" + event + doneEvent: 200, "event: message\n" + event + doneEvent: 200,
		event:        200, // some engines leave [DONE] out
		`{"id":"d"}`: 502, "": 502, event[:len(event)-1]: 502,
		event + ": " + strings.Repeat("x", 1<<20) + "\n\n": 502, // more than an answer may have
	} {
		b := misled(t, &unruly{probe: tell, decode: func(w *script, _ *http.Request) { w.send(stream) },
			change: func(cfg *config.Config) { cfg.Limits.EventBytes = 1000 }})
		r := b.post(mooncake.Completions.Path(), completion("one two three", `"echo":true,"logprobs":1,"max_tokens":1,"stream":true,`))
		require.Equal(t, want, r.status, "%q: %s", stream, r.body)
		if want == 200 {
			require.Equal(t, event+doneEvent, strings.TrimPrefix(strings.TrimPrefix(r.body, ": ping\n"), "event: message\n"))
		}
		b.settle()
	}
}

// The logprobs of a prompt come from an engine that computes the prompt, or the request is refused
// before any engine has it. An engine that cannot compute them would end: settle holds that none
// did.
func TestLogprobsOfPromptsComeFromWhoComputesThem(t *testing.T) {
	t.Parallel()
	pair := func(connector, version string, rows bool) setup {
		e := refengine.Config{Version: version}
		o := setup{profile: mooncake.Profile{Connector: connector}, prefill: []refengine.Config{e}, decode: []refengine.Config{e, e}}
		o.route.PromptLogprobs = rows
		return o
	}
	const first, alone, decodes = "refused", "by the prefill engine", "by a decode engine"
	for _, row := range []struct {
		name      string
		o         setup
		one, many string
	}{
		{"vLLM before 0.31", pair(mooncake.NIXLPull, "0.30.2", false), alone, first},
		{"vLLM from 0.31 on", pair(mooncake.NIXLPull, "0.31.0", true), alone, decodes},
		{"likewise, with KV that is pushed", pair(mooncake.NIXLPush, "0.32.0", true), alone, decodes},
		{"vllm-ascend", pair(mooncake.AscendMooncakeV1, "0.32.0", false), alone, first},
		{"likewise, layer by layer", pair(mooncake.AscendLayerwise, "0.32.0", false), alone, first},
		{"ranks that do both", setup{mixed: []refengine.Config{does(2)}}, decodes, decodes},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			b := start(t, row.o)
			for name, ask := range map[string]struct{ path, body, want, param string }{
				"echo and one token":      {mooncake.Completions.Path(), completion("one two three", `"echo":true,"logprobs":1,"max_tokens":1,`), row.one, ""},
				"echo and none":           {mooncake.Completions.Path(), completion("one two three", `"echo":true,"logprobs":1,"max_tokens":0,`), row.one, ""},
				"echo, streamed":          {mooncake.Completions.Path(), completion("one two three", `"echo":true,"logprobs":1,"max_tokens":1,"stream":true,"stream_options":{"include_usage":true},`), row.one, ""},
				"prompt_logprobs":         {mooncake.Chat.Path(), chat("one two three", `"prompt_logprobs":2,"max_tokens":1,`), row.one, ""},
				"two prompts":             {mooncake.Completions.Path(), `{"model":"ref","prompt":["one two","three"],"prompt_logprobs":0,"max_tokens":1}`, row.one, ""},
				"echo and more":           {mooncake.Completions.Path(), completion("one two three", `"echo":true,"logprobs":1,"max_tokens":5,`), row.many, "echo"},
				"prompt_logprobs of more": {mooncake.Chat.Path(), chat("one two three", `"prompt_logprobs":2,"max_tokens":5,`), row.many, "prompt_logprobs"},
			} {
				prefilled, _ := counts(b.p)
				decoded, _ := counts(b.d)
				r := b.post(ask.path, ask.body)
				prefilledAfter, _ := counts(b.p)
				after, _ := counts(b.d)
				streamed := strings.Contains(ask.body, `"stream":true`)
				switch ask.want {
				case first:
					require.Equal(t, http.StatusBadRequest, r.status, name)
					require.Contains(t, r.body, fmt.Sprintf(`"param":%q,"code":"unsupported_parameter"`, ask.param))
					require.Equal(t, prefilled, prefilledAfter, name)
				case alone:
					require.Equal(t, http.StatusOK, r.status, "%s: %s", name, r.body)
					require.Greater(t, prefilledAfter, prefilled, name)
				default:
					require.Equal(t, http.StatusOK, r.status, "%s: %s", name, r.body)
					require.Greater(t, after, decoded, name)
				}
				if ask.want != decodes {
					require.Equal(t, decoded, after, "%s: no decode engine sees it", name)
				}
				if ask.want != decodes || r.status == http.StatusOK && !streamed {
					require.Equal(t, r.status == http.StatusOK && !streamed, strings.Contains(r.body, `"prompt_logprobs":[`), "%s: %s", name, r.body)
				}
				if streamed {
					require.Contains(t, r.body, `"text":"one two three`)
					require.Equal(t, 1, strings.Count(r.body, "[DONE]"))
					require.Equal(t, 1, strings.Count(r.body, `"finish_reason":"length"`))
					require.Equal(t, 1, strings.Count(r.body, `"completion_tokens":1`), r.body)
				}
			}
			b.settle()
		})
	}
}

// Several prompts whose logprobs are streamed: each answer comes in one piece from a prefill
// engine, which streams nothing.
func TestLogprobsOfSeveralPromptsAreStreamed(t *testing.T) {
	t.Parallel()
	b := start(t, setup{})
	r := b.post(mooncake.Completions.Path(), `{"model":"ref","prompt":["one two","three"],"echo":true,"logprobs":1,"max_tokens":1,"stream":true}`)
	require.Equal(t, http.StatusOK, r.status, r.body)
	got := readSeamless(t, r)
	require.Empty(t, got.fail)
	require.Len(t, got.finishes, 2, r.body)
	b.settle()
	require.Zero(t, b.decodes())
}

// An engine that dies behind its finish_reason has told no final usage. The client that asked for
// it gets it from evenkeel, also where chunks before had a usage that only evenkeel asked for.
func TestTheFinalUsageIsToldInTheEnginesPlace(t *testing.T) {
	t.Parallel()
	for _, connector := range []string{mooncake.SGLang, mooncake.NIXLPull, mooncake.AscendLayerwise} {
		for path, body := range map[string]string{
			mooncake.Chat.Path():        talk(`"stream":true,"max_tokens":3,"stream_options":{"include_usage":true},`, reftext.MakePrompt(1, 25)),
			mooncake.Completions.Path(): completion(reftext.MakePrompt(1, 25), `"stream":true,"max_tokens":3,"stream_options":{"include_usage":true},`),
		} {
			t.Run(connector+path, func(t *testing.T) {
				t.Parallel()
				b := start(t, setup{profile: mooncake.Profile{Connector: connector}})
				whole := b.post(path, body).body
				require.Len(t, usageOf(whole), 3)
				require.NoError(t, b.d[0].SetFaults(refengine.Rule{Fault: refengine.SilentEnd, AfterTokens: 3}))
				require.Equal(t, usageOf(whole), usageOf(b.post(path, body).body))
				b.settle()
			})
		}
	}
}

// usageOf are the counts of the final usage of a stream.
func usageOf(body string) []string {
	_, end, _ := strings.Cut(body, `"choices":[],"usage":`)
	return regexp.MustCompile(`"\w*_tokens":\d+`).FindAllString(end, 3)
}

// A prefill engine that gives a whole answer itself says that it gave the request back. There is no
// slot that it could have preempted.
func TestAPrefillEngineThatGivesARequestBackHasFailed(t *testing.T) {
	b := start(t, setup{front: func(w http.ResponseWriter, r *http.Request, engine http.Handler) {
		if r.URL.Path != mooncake.Completions.Path() {
			engine.ServeHTTP(w, r)
			return
		}
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"id":"x","object":"text_completion","created":1,"model":"ref","choices":[{"index":0,"text":"a",`+
			`"finish_reason":"stop","stop_reason":"recomputed"}],"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4}}`)
	}})
	r := b.post(mooncake.Completions.Path(), completion("one two three", `"max_tokens":1,"prompt_logprobs":1,`))
	require.Equal(t, http.StatusBadGateway, r.status, r.body)
	require.Contains(t, r.body, "prefill_failed")
	b.settle()
}
