package request

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/mooncake"
)

// tokensOf is the body of a request for token ids, and its prompt, whose answer has between 12 and
// 40 tokens.
func tokensOf(t *testing.T, params, more string) (body string, rendered reftext.Prompt) {
	t.Helper()
	for seed := uint64(0); len(rendered.IDs) == 0 || reftext.NaturalLength(rendered.Answer) > 40 ||
		reftext.NaturalLength(rendered.Answer) < 12; seed++ {
		rendered = reftext.OfIDs(reftext.Of(reftext.MakePrompt(seed, 40)).IDs, nil)
	}
	ids, err := json.Marshal(rendered.IDs)
	require.NoError(t, err)
	return fmt.Sprintf(`{%s"model":%q,"token_ids":%s,"sampling_params":{%s}}`, more, refModel, ids, params), rendered
}

// An answer of tokens, in events or in one piece.
type tokensAnswer struct {
	ids      map[int][]int32 // of the choices
	texts    map[int]string
	probs    map[int]int // tokens with logprobs
	finishes []string
	names    map[string]bool // request_id and output_mode
	usage    []usage
	prompts  int
	spans    string
	rows     int // of the prompt's logprobs
	fail     string
}

func readTokens(t *testing.T, r reply) *tokensAnswer {
	t.Helper()
	a := &tokensAnswer{ids: map[int][]int32{}, texts: map[int]string{}, probs: map[int]int{}, names: map[string]bool{}}
	all := []string{strings.TrimSpace(r.body)}
	if !strings.HasPrefix(r.body, "{") {
		all = eventsOf(r.body)
		require.Equal(t, "data: [DONE]", all[len(all)-1], r.body)
		all = all[:len(all)-1]
	}
	for _, data := range all {
		var e struct {
			ID      *string `json:"request_id"`
			Mode    *string `json:"output_mode"`
			Choices []struct {
				Index    int
				IDs      []int32 `json:"token_ids"`
				Text     string
				Finish   string          `json:"finish_reason"`
				Spans    json.RawMessage `json:"weight_versions"`
				Logprobs struct{ Content []json.RawMessage }
			}
			Usage  *usage
			Prompt []int32           `json:"prompt_token_ids"`
			Rows   []json.RawMessage `json:"prompt_logprobs"`
			Error  *struct{ Code any }
		}
		data = strings.TrimPrefix(data, "data: ")
		require.NoError(t, json.Unmarshal([]byte(data), &e), data)
		if e.Error != nil {
			a.fail = fmt.Sprint(e.Error.Code)
			continue
		}
		require.NotNil(t, e.ID, data)
		require.NotNil(t, e.Mode, data)
		a.names[*e.ID+" "+*e.Mode] = true
		a.prompts += len(e.Prompt)
		a.rows += len(e.Rows)
		if e.Usage != nil {
			a.usage = append(a.usage, *e.Usage)
		}
		for _, c := range e.Choices {
			a.ids[c.Index] = append(a.ids[c.Index], c.IDs...)
			a.texts[c.Index] += c.Text
			a.probs[c.Index] += len(c.Logprobs.Content)
			if c.Finish != "" {
				a.finishes = append(a.finishes, c.Finish)
				a.spans = string(c.Spans)
			}
		}
	}
	return a
}

// expect fails unless the ids are the beginning of the answer to key.
func expect(t *testing.T, key uint64, ids []int32) {
	t.Helper()
	for i, id := range ids {
		require.Equal(t, reftext.TokenID(key, i), id, "token %d of %d", i, len(ids))
	}
}

func TestTokensAreAnsweredWithTokens(t *testing.T) {
	t.Parallel()
	rule := func(r refengine.Rule, change func(*refengine.Rule)) refengine.Rule { change(&r); return r }
	const isMixed = "mixed"
	for _, row := range []struct {
		name         string
		params, more string
		rules        []refengine.Rule // of the decode engine
		tier         string           // of an answer that is lost and streamed; empty: none is
		fail         string
		way          string // isMixed or the connector
	}{
		{"nothing happens", "", "", nil, "", "", ""},
		{"nothing happens on a rank that does both", `"logprobs":1`, "", nil, "", "", isMixed},
		{"the text is asked for, too", `"logprobs":1`, `"output_mode":"text",`, nil, "", "", ""},
		{"the engine dies", `"logprobs":1`, "", []refengine.Rule{died}, "1", "", ""},
		{"the engine dies twice", `"logprobs":1`, "", []refengine.Rule{rule(died, func(r *refengine.Rule) { r.Count = 2 })}, "1", "", ""},
		{"a rank that does both dies", `"logprobs":1`, "", []refengine.Rule{died}, "1", "", isMixed},
		{"the engine dies while it writes text", "", `"output_mode":"text",`, []refengine.Rule{died}, "1", "", ""},
		{"the answer ends in silence", "", "", []refengine.Rule{{Fault: refengine.SilentEnd, AfterTokens: 4, Count: 1}}, "1", "", ""},
		{"the answer ends with an error", "", "", []refengine.Rule{{Fault: refengine.ErrorEvent, AfterTokens: 4, Count: 1}}, "1", "", ""},
		{"the limits count both parts", `"max_tokens":7,"min_tokens":7`, "", []refengine.Rule{died}, "1", "", ""},
		{"no token is left to go", `"max_tokens":5,"ignore_eos":true`, "", []refengine.Rule{died}, "finished", "", ""},
		{"a stop string has no way back", `"stop":["zzz"]`, "", []refengine.Rule{died}, "4", "upstream_broken", ""},
		{"an engine that pushes dies", "", "", []refengine.Rule{died}, "1", "", mooncake.NIXLPush},
		{"an engine of vllm-mooncake dies", "", "", []refengine.Rule{died}, "1", "", mooncake.VLLMMooncake},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			o := setup{configure: func(c *config.Config, _ *Deps) { c.Bind.Confirm = patience }}
			if o.profile.Connector = row.way; row.way == isMixed {
				o = setup{mixed: []refengine.Config{{}, {}}, groups: []string{"a", "b"}}
			}
			b := start(t, o)
			body, rendered := tokensOf(t, row.params, row.more)
			for i, body := range []string{withUsage(body), body, strings.Replace(body, "{", `{"return_token_ids":true,"stream":true,`, 1)} {
				for _, e := range b.d {
					require.NoError(t, e.SetFaults(row.rules...))
				}
				if row.fail != "" && i > 0 {
					continue // what nobody has seen begins anew
				}
				r := b.post(mooncake.Tokens.Path(), body)
				got := readTokens(t, r)
				b.over()
				if row.fail != "" {
					require.Equal(t, row.fail, got.fail, r.body)
					continue
				}
				require.Equal(t, http.StatusOK, r.status, r.body)
				require.Empty(t, got.fail, r.body)
				expect(t, rendered.Answer, got.ids[0])
				n := len(got.ids[0])
				require.Len(t, got.names, 1, "one answer has one name: %v", got.names)
				require.Len(t, got.finishes, 1)
				switch {
				case strings.Contains(row.params, `"min_tokens":7`):
					require.Equal(t, 7, n)
				case strings.Contains(row.params, `"max_tokens":5`):
					require.Equal(t, 5, n)
					require.Equal(t, "length", got.finishes[0])
				default:
					require.Equal(t, reftext.NaturalLength(rendered.Answer), n)
				}
				if row.tier != "finished" { // no leg has said it
					var spans []struct{ Start, End int }
					require.NoError(t, json.Unmarshal([]byte(got.spans), &spans), r.body)
					require.Len(t, spans, 1)
					require.Equal(t, n, spans[0].End, "the weights that made the last token")
					require.True(t, len(row.rules) > 0 || spans[0].Start == 0, "the weights that made the first: %s", got.spans)
				}
				if strings.Contains(row.more, "text") {
					require.Equal(t, reftext.Text(rendered.Answer, n), got.texts[0])
				}
				if strings.Contains(row.params, "logprobs") {
					require.Equal(t, n, got.probs[0])
				}
				want := []usage{{rendered.Tokens(), n, rendered.Tokens() + n}}
				if i == 2 {
					want = nil
					require.Equal(t, rendered.Tokens(), got.prompts, "the client's own prompt, once")
				} else {
					require.Zero(t, got.prompts, "the client has not asked for them")
				}
				require.Equal(t, want, got.usage, r.body)
				last := b.asked[len(b.asked)-1].Record
				require.Equal(t, "ok", last.Outcome)
				require.Equal(t, n, last.OutputTokens)
				require.Equal(t, rendered.Tokens(), last.PromptTokens)
				if i == 0 && row.tier != "" {
					require.GreaterOrEqual(t, b.metric(t, lossOf(row.rules[0]), row.tier), 1.0)
				}
			}
			b.settle()
		})
	}
}

func TestSeveralAnswersOfTokens(t *testing.T) {
	t.Parallel()
	for _, rule := range []refengine.Rule{{Fault: refengine.CRLF}, died} {
		t.Run(string(rule.Fault), func(t *testing.T) {
			t.Parallel()
			b := start(t, setup{})
			body, rendered := tokensOf(t, `"n":3,"seed":7,"logprobs":1`, `"request_id":"mine",`)
			for _, body := range []string{withUsage(body), body} {
				require.NoError(t, b.d[0].SetFaults(rule))
				r := b.post(mooncake.Tokens.Path(), body)
				require.Equal(t, http.StatusOK, r.status, r.body)
				got := readTokens(t, r)
				require.Empty(t, got.fail, r.body)
				require.Equal(t, map[string]bool{"generate-tokens-mine tokens": true}, got.names)
				require.Len(t, got.ids, 3)
				made := 0
				for i := range 3 {
					seed := int64(7 + i)
					key := reftext.OfIDs(rendered.IDs, &seed).Answer
					expect(t, key, got.ids[i])
					require.Len(t, got.ids[i], reftext.NaturalLength(key))
					require.Equal(t, len(got.ids[i]), got.probs[i])
					made += len(got.ids[i])
				}
				require.Equal(t, []usage{{rendered.Tokens(), made, rendered.Tokens() + made}}, got.usage)
				b.over()
			}
			b.settle()
		})
	}
}

// A client that ends its request gets what there is of the answer, wherever the request is.
func TestARequestIsEndedByItsName(t *testing.T) {
	t.Parallel()
	const name = "generate-tokens-mine"
	for _, row := range []struct {
		name   string
		params string
		more   string
		mixed  bool
		rules  []refengine.Rule // of the prefill engine, and of the decode engine
		begun  bool             // the answer has begun
	}{
		{"while a rank decodes", "", "", false, []refengine.Rule{{}, {}}, true},
		{"while a rank decodes and writes text", "", `"output_mode":"text",`, false, []refengine.Rule{{}, {}}, true},
		{"while a rank that does both decodes", "", "", true, []refengine.Rule{{}, {}}, true},
		{"of which there are several", `"n":2`, "", false, []refengine.Rule{{}, {}}, true},
		{"while it is prefilled", "", "", false, []refengine.Rule{{Fault: refengine.Hang, Phase: refengine.PhaseBeforeHeaders}, {}}, false},
		{"while several are prefilled", `"n":2`, "", false, []refengine.Rule{{Fault: refengine.Hang, Phase: refengine.PhaseBeforeHeaders}, {}}, false},
	} {
		for _, stream := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, streamed %t", row.name, stream), func(t *testing.T) {
				t.Parallel()
				slowly := []refengine.Config{{Steps: refengine.Steps{C0: 100 * time.Millisecond}}} // per token, of 12 to 40
				o := setup{decode: slowly}
				if row.mixed {
					o = setup{mixed: slowly}
				}
				b := start(t, o)
				for i, e := range [][]*refengine.Engine{b.p, b.d} {
					if row.rules[i].Fault != "" && len(e) > 0 {
						require.NoError(t, e[0].SetFaults(row.rules[i]))
					}
				}
				body, rendered := tokensOf(t, row.params, row.more+`"request_id":"mine",`)
				if stream {
					body = withUsage(body)
				}
				said := make(chan reply, 1)
				go func() { said <- b.post(mooncake.Tokens.Path(), body) }()
				running := func() bool {
					for _, e := range append(b.p, b.d...) {
						if st := e.Stats(); row.begun && st.Tokens > 3*st.Probes+8 || !row.begun && st.Requests > 0 {
							return true
						}
					}
					return false
				}
				b.eventually("it is under way", running)
				require.Zero(t, b.Running.End("another caller", func(string) bool { return true }))
				require.Equal(t, 1, b.Running.End("", func(has string) bool { return has == name }))
				r := <-said
				require.Equal(t, http.StatusOK, r.status, r.body)
				got := readTokens(t, r)
				require.Empty(t, got.fail, r.body)
				require.Contains(t, got.finishes, "abort", r.body)
				require.Len(t, got.names, 1)
				if row.begun && row.params == "" {
					expect(t, rendered.Answer, got.ids[0])
					require.NotEmpty(t, got.ids[0])
					require.Less(t, len(got.ids[0]), reftext.NaturalLength(rendered.Answer))
				}
				require.Len(t, got.usage, 1, r.body)
				b.over()
				require.Zero(t, b.Running.End("", func(string) bool { return true }), "it is over")
				b.settle()
			})
		}
	}
}

// Whoever leaves is noticed although the request can be ended by its name, too.
func TestAClientOfTokensLeaves(t *testing.T) {
	t.Parallel()
	for _, path := range []string{mooncake.Tokens.Path(), mooncake.Generate.Path()} {
		for _, params := range []string{``, `"n":2`} {
			t.Run(path+" "+params, func(t *testing.T) {
				t.Parallel()
				o := setup{decode: []refengine.Config{{Steps: refengine.Steps{C0: 100 * time.Millisecond}}}}
				body, _ := tokensOf(t, params, `"stream":true,`)
				if path == mooncake.Generate.Path() {
					o.profile.Connector = mooncake.SGLang
					body = strings.Replace(body, "token_ids", "input_ids", 1)
				}
				b := start(t, o)
				ctx, leave := context.WithCancel(t.Context())
				defer leave()
				req, err := http.NewRequestWithContext(ctx, http.MethodPost, b.url+path, strings.NewReader(body))
				require.NoError(t, err)
				resp, err := http.DefaultClient.Do(req)
				require.NoError(t, err)
				require.Equal(t, http.StatusOK, resp.StatusCode)
				leave()
				_ = resp.Body.Close()
				b.over()
				require.Equal(t, "client_closed", b.asked[0].Record.Outcome)
				b.settle()
			})
		}
	}
}

func TestLogprobsOfAPromptOfTokens(t *testing.T) {
	t.Parallel()
	of := []refengine.Config{{Version: "0.32.0"}}
	b := start(t, setup{route: roster.Route{PromptLogprobs: true}, profile: mooncake.Profile{Connector: mooncake.NIXLPull}, prefill: of,
		decode: of})
	for _, most := range []string{`"max_tokens":1`, `"max_tokens":4`} {
		body, rendered := tokensOf(t, `"prompt_logprobs":1,`+most, "")
		r := b.post(mooncake.Tokens.Path(), body)
		require.Equal(t, http.StatusOK, r.status, r.body)
		got := readTokens(t, r)
		require.Equal(t, rendered.Tokens(), got.rows)
		expect(t, rendered.Answer, got.ids[0])
		streamed := readTokens(t, b.post(mooncake.Tokens.Path(), strings.Replace(body, "{", `{"stream":true,`, 1)))
		require.Zero(t, streamed.rows, "a stream has no place for them")
		require.Equal(t, got.ids, streamed.ids)
	}
	b.settle()
}

// The prefill engine refuses what the decode engine would refuse where it reads the body: there,
// nobody frees the KV.
func TestAModeThatThereIsNotIsRefusedBeforeThePrefill(t *testing.T) {
	t.Parallel()
	b := start(t, setup{profile: mooncake.Profile{Connector: mooncake.NIXLPull}})
	b.engines.frees = true
	for _, params := range []string{`"output_mode":"song","sampling_params":{}`, `"output_mode":"text","sampling_params":{"detokenize":false}`} {
		for _, stream := range []bool{true, false} {
			r := b.post(mooncake.Tokens.Path(), fmt.Sprintf(`{"model":%q,"stream":%t,"token_ids":[1,2,3],%s}`, refModel, stream, params))
			require.Equal(t, http.StatusBadRequest, r.status, r.body)
			require.Contains(t, r.body, "output_mode")
		}
	}
	require.Zero(t, b.pins())
	require.Zero(t, b.d[0].Stats().Requests)
	b.settle()
}

// A client ends its request by name, and the engine knows no such call. The client still reads: it
// gets an end that says so.
func TestAnAbortThatTheEngineRefusesEndsTheAnswerWithAnError(t *testing.T) {
	for _, row := range []struct {
		n      string
		stream bool
	}{{"", true}, {"", false}, {`"n":2`, true}, {`"n":2`, false}} {
		t.Run(fmt.Sprintf("%s streamed %t", row.n, row.stream), func(t *testing.T) {
			b := start(t, setup{
				decode: []refengine.Config{{Steps: refengine.Steps{C0: 20 * time.Millisecond}}},
				front: func(w http.ResponseWriter, r *http.Request, engine http.Handler) {
					if r.URL.Path == "/inference/v1/abort_requests" {
						http.Error(w, `{"detail":"Not Found"}`, http.StatusNotFound)
						return
					}
					engine.ServeHTTP(w, r)
				},
			})
			body, _ := tokensOf(t, row.n, `"request_id":"mine",`)
			if row.stream {
				body = withUsage(body)
			}
			said := make(chan reply, 1)
			go func() { said <- b.post(mooncake.Tokens.Path(), body) }()
			b.eventually("it is under way", func() bool { return b.d[0].Stats().Tokens > 20 })
			require.Equal(t, 1, b.Running.End("", func(has string) bool { return has == "generate-tokens-mine" }))
			r := <-said
			require.Contains(t, r.body, "upstream_incomplete")
			require.NotContains(t, r.body, "the client left")
			require.Equal(t, map[bool]int{true: http.StatusOK, false: http.StatusBadGateway}[row.stream], r.status)
			require.Equal(t, row.stream, strings.HasSuffix(strings.TrimSpace(r.body), "data: [DONE]"))
		})
	}
}

// However often a client ends a request, and by whichever of its names, each engine is told once
// for each answer.
func TestAnEngineIsToldOnceToEndARequest(t *testing.T) {
	for path, answers := range map[string]int32{mooncake.Tokens.Path(): 1, mooncake.Generate.Path(): 2} {
		t.Run(path, func(t *testing.T) {
			var told atomic.Int32
			o := setup{
				decode: []refengine.Config{{Steps: refengine.Steps{C0: 20 * time.Millisecond}}},
				front: func(w http.ResponseWriter, r *http.Request, engine http.Handler) {
					if strings.HasPrefix(r.URL.Path, "/inference/v1/abort") || r.URL.Path == "/abort_request" {
						told.Add(1)
						return // and goes on with the request
					}
					engine.ServeHTTP(w, r)
				},
			}
			body, _ := tokensOf(t, "", `"request_id":"mine",`)
			if path == mooncake.Generate.Path() {
				o.profile.Connector = mooncake.SGLang
				body = fmt.Sprintf(`{"model":%q,"rid":["one","two"],"input_ids":[[1,2,3,4,5,6,7,8,9],[9,8,7,6,5,4,3,2,1]]}`, refModel)
			}
			b := start(t, o)
			said := make(chan reply, 1)
			go func() { said <- b.post(path, body) }()
			b.eventually("it is under way", func() bool { return b.d[0].Stats().Tokens > 6 })
			all := func(string) bool { return true }
			for range 5 {
				require.NotZero(t, b.Running.End("", all))
			}
			<-said
			require.Equal(t, answers, told.Load())
		})
	}
}

// One of two answers is ended by name before a rank has it, the other one after that. The prompt is
// in the usage of both.
func TestUsageOfAnAnswerThatWasEndedBeforeItsFirstToken(t *testing.T) {
	for range 4 { // either of the two may be the one that hangs
		b := start(t, setup{decode: []refengine.Config{{Steps: refengine.Steps{C0: 20 * time.Millisecond}}}})
		require.NoError(t, b.p[0].SetFaults(refengine.Rule{Fault: refengine.Hang, Phase: refengine.PhaseBeforeHeaders, Count: 1}))
		body, rendered := tokensOf(t, `"n":2`, `"request_id":"mine",`)
		said := make(chan reply, 1)
		go func() { said <- b.post(mooncake.Tokens.Path(), withUsage(body)) }()
		b.eventually("one is under way", func() bool { return b.d[0].Stats().Tokens > 6 })
		require.Equal(t, 1, b.Running.End("", func(has string) bool { return has == "generate-tokens-mine" }))
		r := <-said
		require.Equal(t, http.StatusOK, r.status, r.body)
		require.Equal(t, rendered.Tokens(), readTokens(t, r).usage[0].Prompt)
	}
}

// A rank has refused a request that its client ends by name during its next attempt. No engine has
// it, so nothing is waited for.
func TestAnAbortBetweenTwoAttempts(t *testing.T) {
	var decodes, probes atomic.Int32
	b := start(t, setup{
		prefill: []refengine.Config{{}, {}}, decode: []refengine.Config{{KV: refengine.KV{RejectReleases: true}},
			{KV: refengine.KV{RejectReleases: true}}},
		front: func(w http.ResponseWriter, r *http.Request, engine http.Handler) {
			body, _ := io.ReadAll(r.Body)
			r.Body = io.NopCloser(bytes.NewReader(body))
			switch probe := bytes.Contains(body, []byte(`"do_remote_decode":true`)); {
			case r.URL.Path == "/inference/v1/abort_requests":
				t.Error("an engine that refused the request is told to end it")
			case r.URL.Path != mooncake.Tokens.Path():
			case probe && probes.Add(1) == 2:
				<-r.Context().Done()
				return
			case !probe && decodes.Add(1) == 1:
				w.WriteHeader(http.StatusServiceUnavailable)
				return
			}
			engine.ServeHTTP(w, r)
		},
	})
	body, _ := tokensOf(t, "", `"request_id":"mine",`)
	said := make(chan reply, 1)
	go func() { said <- b.post(mooncake.Tokens.Path(), withUsage(body)) }()
	b.eventually("the second probe is under way", func() bool { return probes.Load() == 2 })
	require.Equal(t, 1, b.Running.End("", func(has string) bool { return has == "generate-tokens-mine" }))
	<-said
}
