package refengine

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/reftext"
	"evenkeel/internal/rawjson"
)

func TestAnswersWithoutStream(t *testing.T) {
	e := start(t, Config{Answers: Answers{PromptTokensDetails: true}})
	c := client(t)
	r := do(c, "POST", e.URLs()[0]+"/v1/chat/completions", chatBody("a b c", `"return_token_ids":true,"logprobs":true,"top_logprobs":2,`), "X-Request-Id", "x")
	require.Equal(t, 200, r.status, r.body)
	require.NotEmpty(t, r.header.Get("Content-Length"))
	var got struct {
		ID      string `json:"id"`
		Choices []struct {
			Message struct {
				Content string `json:"content"`
			} `json:"message"`
			Finish   string  `json:"finish_reason"`
			IDs      []int32 `json:"token_ids"`
			Logprobs struct {
				Content []struct {
					Token string            `json:"token"`
					Bytes []byte            `json:"-"`
					Top   []json.RawMessage `json:"top_logprobs"`
				} `json:"content"`
			} `json:"logprobs"`
		} `json:"choices"`
		PromptIDs []int32 `json:"prompt_token_ids"`
		Usage     usage   `json:"usage"`
	}
	require.NoError(t, json.Unmarshal([]byte(r.body), &got), r.body)
	p := reftext.OfUser("a b c")
	n := reftext.NaturalLength(p.Answer)
	require.Equal(t, reftext.Text(p.Answer, n), got.Choices[0].Message.Content)
	require.Equal(t, "stop", got.Choices[0].Finish)
	require.Len(t, got.Choices[0].IDs, n)
	require.Len(t, got.Choices[0].Logprobs.Content, n)
	require.Len(t, got.Choices[0].Logprobs.Content[0].Top, 2)
	require.Equal(t, p.IDs, got.PromptIDs)
	require.Equal(t, "chatcmpl-x", got.ID)
	require.Equal(t, []int{3, n, 3 + n}, []int{got.Usage.Prompt, got.Usage.Completion, got.Usage.Total})
	require.NotNil(t, got.Usage.Details)

	r = do(c, "POST", e.URLs()[0]+"/v1/completions", completionBody("a b c", `"echo":true,"logprobs":1,`))
	require.Equal(t, 200, r.status, r.body)
	var text struct {
		Choices []struct {
			Text     string `json:"text"`
			Logprobs struct {
				Offsets []int    `json:"text_offset"`
				Tokens  []string `json:"tokens"`
			} `json:"logprobs"`
		} `json:"choices"`
	}
	require.NoError(t, json.Unmarshal([]byte(r.body), &text), r.body)
	require.Equal(t, "a b c"+reftext.Text(reftext.Of("a b c").Answer, min(16, reftext.NaturalLength(reftext.Of("a b c").Answer))),
		text.Choices[0].Text)
	require.Len(t, text.Choices[0].Logprobs.Tokens, len(text.Choices[0].Logprobs.Offsets))
}

func TestAStreamCarriesWhatWasAskedForAndNoMore(t *testing.T) {
	plain, mtp := start(t, Config{}), start(t, Config{Steps: Steps{TokensPerChunk: 3, StreamInterval: 2}})
	old := start(t, Config{Answers: Answers{NoContinuousUsage: true, NoTokenIDs: true}})
	forced := start(t, Config{Answers: Answers{ForceUsage: true}})
	const ask = `"stream":true,"ignore_eos":true,"max_tokens":20,`
	for _, row := range []struct {
		name   string
		engine *Engine
		more   string
		check  func(t *testing.T, s stream)
	}{
		{"nothing asked for, nothing extra", plain, "", func(t *testing.T, s stream) {
			require.Nil(t, s.usage)
			require.Empty(t, s.ids)
			require.Equal(t, 20, s.contentEvents)
		}},
		{"usage at the end only", plain, `"stream_options":{"include_usage":true},`, func(t *testing.T, s stream) {
			require.Equal(t, 1, s.usages)
			require.Contains(t, s.events[len(s.events)-1], `"choices":[]`)
		}},
		{"continuous usage needs include_usage", plain, `"stream_options":{"continuous_usage_stats":true},`, func(t *testing.T, s stream) { require.Zero(t, s.usages) }},
		{"several tokens a chunk, every second step", mtp, `"return_token_ids":true,`, func(t *testing.T, s stream) {
			require.Equal(t, 4, s.contentEvents, "3, 6, 6, 5")
			require.Len(t, s.ids, 20)
		}},
		{"an old engine ignores what it does not know", old, `"return_token_ids":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true},`, func(t *testing.T, s stream) {
			require.Equal(t, 1, s.usages)
			require.Empty(t, s.ids)
		}},
		{"usage nobody asked for", forced, "", func(t *testing.T, s stream) { require.Equal(t, 22, s.usages) }},
		{"logprobs", plain, `"logprobs":true,`, func(t *testing.T, s stream) { require.Equal(t, 20, s.logprobs) }},
	} {
		t.Run(row.name, func(t *testing.T) {
			s, r := streamOf(t, client(t), row.engine.URLs()[0]+"/v1/chat/completions", chatBody("a b", ask+row.more))
			require.NoError(t, r.err)
			require.Equal(t, reftext.Text(reftext.OfUser("a b").Answer, 20), s.content)
			require.Equal(t, "length", s.finish)
			require.True(t, s.done)
			if s.usage != nil {
				require.Equal(t, 20, s.usage.Completion)
			}
			row.check(t, s)
		})
	}
}

func TestCompletionStreams(t *testing.T) {
	e := start(t, Config{})
	c := client(t)
	url := e.URLs()[0] + "/v1/completions"
	s, _ := streamOf(t, c, url, completionBody("a b", `"stream":true,"echo":true,"logprobs":0,"seed":5,"max_tokens":4,`))
	p, err := reftext.Render(false, []byte(completionBody("a b", `"seed":5,`)))
	require.NoError(t, err)
	require.Equal(t, "a b"+reftext.Text(p.Answer, 4), s.content)
	require.Equal(t, 4, s.logprobs)
	require.False(t, s.role)

	s, _ = streamOf(t, c, url, `{"prompt":[1,2,3],"stream":true,"max_tokens":4,"return_token_ids":true}`)
	require.Equal(t, []int32{1, 2, 3}, s.promptIDs)

	ids := append([]int32{1, 2, 3}, s.ids...)
	body, err := json.Marshal(map[string]any{"prompt": ids, "stream": true, "max_tokens": 4})
	require.NoError(t, err)
	rest, _ := streamOf(t, c, url, string(body))
	require.Equal(t, reftext.Text(reftext.OfIDs([]int32{1, 2, 3}, nil).Answer, 8), s.content+rest.content, "resumed where it was cut")
}

func TestAChatResumedByIDs(t *testing.T) {
	e := start(t, Config{})
	p := reftext.OfUser("a b")
	ids, err := json.Marshal(append(p.IDs, reftext.TokenID(p.Answer, 0), reftext.TokenID(p.Answer, 1)))
	require.NoError(t, err)
	s, _ := streamOf(t, client(t), e.URLs()[0]+"/v1/chat/completions", chatBody("a b", `"stream":true,"max_tokens":3,"kv_transfer_params":{"prompt_token_ids":`+string(ids)+`},`))
	n, err := reftext.Check(p.Answer, 2, s.content)
	require.NoError(t, err)
	require.Equal(t, 3, n)
}

func TestToolCalls(t *testing.T) {
	e := start(t, Config{Steps: Steps{TokensPerChunk: 2}})
	c := client(t)
	const tools = `"tools":[{"type":"function","function":{"name":"f"}},{"type":"function","function":{"name":"g"}}],`
	for choice, name := range map[string]string{`"required"`: "f", `{"type":"function","function":{"name":"g"}}`: "g"} {
		body := chatBody("a b", tools+`"tool_choice":`+choice+`,"return_token_ids":true,"stream":true,`)
		s, _ := streamOf(t, c, e.URLs()[0]+"/v1/chat/completions", body)
		p, err := reftext.Render(true, []byte(body))
		require.NoError(t, err)
		n := reftext.NaturalLength(p.Answer)
		require.Equal(t, name, s.toolName)
		require.Equal(t, reftext.ToolArguments(p.Answer, n), s.arguments)
		require.Empty(t, s.content)
		require.Equal(t, "tool_calls", s.finish)
		require.Len(t, s.ids, n)

		r := do(c, "POST", e.URLs()[0]+"/v1/chat/completions", strings.Replace(body, `"stream":true,`, "", 1))
		var got struct {
			Choices []struct {
				Message struct {
					Content *string `json:"content"`
					Calls   []struct {
						Function struct{ Name, Arguments string }
					} `json:"tool_calls"`
				}
			}
		}
		require.NoError(t, json.Unmarshal([]byte(r.body), &got), r.body)
		require.Empty(t, *got.Choices[0].Message.Content)
		require.Equal(t, s.arguments, got.Choices[0].Message.Calls[0].Function.Arguments)
	}
	s, _ := streamOf(t, c, e.URLs()[0]+"/v1/chat/completions", chatBody("a b", tools+`"stream":true,"max_tokens":4,`))
	require.NotEmpty(t, s.content, "auto answers with text")
}

// A call that max_tokens cuts is a piece of a call in a stream, and text in an answer in one piece.
func TestToolCallsThatAreCut(t *testing.T) {
	const body = `"tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"required","max_tokens":4,`
	for version, finish := range map[string]string{"0.30.0": "tool_calls", "0.31.0": "length"} {
		e := start(t, Config{Steps: Steps{TokensPerChunk: 2}, Version: version})
		s, _ := streamOf(t, client(t), e.URLs()[0]+"/v1/chat/completions", chatBody("a b", body+`"stream":true,`))
		require.Equal(t, finish, s.finish, version)
		require.False(t, json.Valid([]byte(s.arguments)), "cut off")
		r := do(client(t), "POST", e.URLs()[0]+"/v1/chat/completions", chatBody("a b", body))
		require.Contains(t, r.body, `"finish_reason":"length"`, version)
		require.Contains(t, r.body, `"content":"<tool_call>`, version)
		require.NotContains(t, r.body, `"tool_calls"`, version)
	}
}

func TestReasoning(t *testing.T) {
	e := start(t, Config{Answers: Answers{ReasoningTokens: 5}, Steps: Steps{TokensPerChunk: 3}})
	key := reftext.OfUser("a b").Answer
	s, _ := streamOf(t, client(t), e.URLs()[0]+"/v1/chat/completions", chatBody("a b", `"stream":true,"return_token_ids":true,`))
	require.Equal(t, reftext.Text(key, 5), s.reasoning)
	_, err := reftext.Check(key, 5, s.content)
	require.NoError(t, err)
	require.Len(t, s.ids, reftext.NaturalLength(key))

	s, _ = streamOf(t, client(t), e.URLs()[0]+"/v1/chat/completions", chatBody("a b", `"stream":true,"return_token_ids":true,"include_reasoning":false,`))
	require.Empty(t, s.reasoning)
	require.Len(t, s.ids, reftext.NaturalLength(key)-5, "its ids are withheld with it")
	r := do(client(t), "POST", e.URLs()[0]+"/v1/chat/completions", chatBody("a b", ""))
	require.Contains(t, r.body, `"reasoning":"`)
}

func TestWhereAnAnswerStops(t *testing.T) {
	e := start(t, Config{})
	c := client(t)
	prompt := "a"
	for n := 0; n < 50 || n > 150; n = reftext.NaturalLength(reftext.Of(prompt).Answer) {
		prompt += " b"
	}
	key := reftext.Of(prompt).Answer
	fourth := string(reftext.AppendToken(nil, reftext.TokenID(key, 3)))
	spanning := fourth[len(fourth)-2:] + string(reftext.AppendToken(nil, reftext.TokenID(key, 4)))[:2]
	natural := reftext.NaturalLength(key)
	for _, row := range []struct {
		name, more   string
		text         string
		tokens       int
		finish, stop string
	}{
		{"naturally", `"max_tokens":500,`, reftext.Text(key, natural), natural, "stop", "null"},
		{"completions stop after 16 tokens by default", ``, reftext.Text(key, 16), 16, "length", "null"},
		{"not before min_tokens", fmt.Sprintf(`"max_tokens":500,"min_tokens":%d,`, natural+3), reftext.Text(key, natural+3), natural + 3, "stop", "null"},
		{"at max_tokens when EOS is ignored", `"max_tokens":300,"ignore_eos":true,`, reftext.Text(key, 300), 300, "length", "null"},
		{"at a stop token", fmt.Sprintf(`"stop_token_ids":[%d],`, reftext.TokenID(key, 2)), reftext.Text(key, 3), 3, "stop", fmt.Sprint(reftext.TokenID(key, 2))},
		{"before a stop string", fmt.Sprintf(`"stop":["never",%q],`, fourth), reftext.Text(key, 3), 4, "stop", quoted(fourth)},
		{"before a stop string across two tokens", fmt.Sprintf(`"stop":%s,`, quoted(spanning)), strings.TrimSuffix(reftext.Text(key, 4), spanning[:2]), 5, "stop", quoted(spanning)},
	} {
		t.Run(row.name, func(t *testing.T) {
			s, _ := streamOf(t, c, e.URLs()[0]+"/v1/completions", completionBody(prompt, row.more+`"stream":true,"stream_options":{"include_usage":true},`))
			require.Equal(t, row.text, s.content)
			require.Equal(t, row.tokens, s.usage.Completion)
			require.Equal(t, row.finish, s.finish)
			require.JSONEq(t, row.stop, s.stop)
		})
	}
}

func quoted(s string) string { return `"` + string(rawjson.AppendEscaped(nil, s)) + `"` }

func TestBadRequestsAreRefused(t *testing.T) {
	e := start(t, Config{Model: Model{MaxLen: 1000}, Server: Server{MaxBody: 10_000}, KV: KV{Tokens: 512}})
	c := client(t)
	for _, row := range []struct {
		name, body string
		status     int
		says       string
	}{
		{"no JSON", `{`, 400, "body"},
		{"a list", `[]`, 400, "body"},
		{"not UTF-8", "{\"a\":\"\xff\"}", 400, "UTF-8"},
		{"NaN", `{"temperature":NaN}`, 400, "body"},
		{"unknown model", `{"model":"nope","messages":[{"role":"user","content":"x"}]}`, 404, "nope"},
		{"no messages", `{}`, 400, "messages"},
		{"stream_options without stream", chatBody("x", `"stream":false,"stream_options":{"include_usage":true},`), 400, "stream_options"},
		{"min_tokens above max_tokens", chatBody("x", `"min_tokens":5,"max_tokens":4,`), 400, "min_tokens"},
		{"max_tokens 0", chatBody("x", `"max_tokens":0,`), 400, "max_tokens"},
		{"max_tokens 1.5", chatBody("x", `"max_tokens":1.5,`), 400, "max_tokens"},
		{"max_tokens as text", chatBody("x", `"max_tokens":"4",`), 400, "max_tokens"},
		{"beyond the context", chatBody("x", `"max_tokens":1000,`), 400, "maximum context length is 1000"},
		{"max_completion_tokens counts in a chat", chatBody("x", `"max_tokens":5,"max_completion_tokens":1000,`), 400, "maximum context length"},
		{"n 2", chatBody("x", `"n":2,`), 400, "n:"},
		{"temperature -1", chatBody("x", `"temperature":-1,`), 400, "temperature"},
		{"top_p 2", chatBody("x", `"top_p":2,`), 400, "top_p"},
		{"top_logprobs without logprobs", chatBody("x", `"top_logprobs":2,`), 400, "top_logprobs"},
		{"top_logprobs 21", chatBody("x", `"logprobs":true,"top_logprobs":21,`), 400, "top_logprobs"},
		{"an empty stop", chatBody("x", `"stop":[""],`), 400, "stop"},
		{"stop 7", chatBody("x", `"stop":7,`), 400, "stop"},
		{"stream as text", chatBody("x", `"stream":"yes",`), 400, "stream"},
		{"a tool that is not there", chatBody("x", `"tools":[{"function":{"name":"f"}}],"tool_choice":{"function":{"name":"g"}},`), 400, "tool_choice"},
		{"a streamed probe", chatBody("x", `"stream":true,"max_tokens":1,`+probeKV), 400, "stream"},
		{"a prompt larger than the KV cache", chatBody(reftext.MakePrompt(1, 600), `"max_tokens":1,`), 400, "KV cache"},
		{"a body that is too large", chatBody(strings.Repeat("x", 20_000), ""), 413, "10000 bytes"},
		{"out-of-vocabulary stop token with min_tokens kills the engine", chatBody("x", `"min_tokens":1,"stop_token_ids":[99999999],`), 500, "stop token id"},
	} {
		t.Run(row.name, func(t *testing.T) {
			r := do(c, "POST", e.URLs()[0]+"/v1/chat/completions", row.body)
			require.NoError(t, r.err)
			require.Equal(t, row.status, r.status, r.body)
			require.Contains(t, r.body, row.says)
			require.True(t, json.Valid([]byte(r.body)))
		})
	}
}

func TestErrorShapes(t *testing.T) {
	for shape, want := range map[ErrorShape]string{
		ShapeNew:     `{"error":{"message":"m\"","type":"BadRequestError","param":null,"code":400}}`,
		ShapeOld:     `{"object":"error","message":"m\"","type":"BadRequestError","param":null,"code":400}`,
		ShapeRust:    `{"error":{"message":"m\"","type":"invalid_request_error","param":null,"code":"invalid_request_error"}}`,
		ShapeFastAPI: `{"detail":"m\""}`,
		ShapeText:    `m"`,
		ShapeHTML:    "<html><body><h1>m\"</h1></body></html>\n",
	} {
		body, _ := refuse(400, "m\"").body(shape)
		require.Equal(t, want, string(body))
	}
}

func TestRanksAreAddressedByPortOrHeader(t *testing.T) {
	external, internal := start(t, Config{DPSize: 2}), start(t, Config{DPSize: 3, DPMode: "internal"})
	c := client(t)
	ask := func(url, rank string) int {
		h := []string{}
		if rank != "" {
			h = []string{"X-data-parallel-rank", rank}
		}
		return do(c, "POST", url+"/v1/completions", completionBody("a", `"max_tokens":1,`), h...).status
	}
	require.NotEqual(t, external.URLs()[0], external.URLs()[1])
	require.Equal(t, 200, ask(external.URLs()[1], "1"))
	require.Zero(t, external.Stats().RankMismatch)
	require.Equal(t, 200, ask(external.URLs()[0], "1"))
	require.EqualValues(t, 1, external.Stats().RankMismatch)
	require.Equal(t, 400, ask(external.URLs()[0], "2"))
	require.EqualValues(t, 1, external.Stats().Ranks[1].Concurrent)

	require.Equal(t, internal.URLs()[0], internal.URLs()[2])
	require.Equal(t, 200, ask(internal.URLs()[0], "2"))
	require.EqualValues(t, 1, internal.Stats().Ranks[2].Concurrent)
	require.Zero(t, internal.Stats().Unpinned)
	require.Equal(t, 200, ask(internal.URLs()[0], ""))
	require.Equal(t, 200, ask(internal.URLs()[0], "two"), "ignored")
	require.EqualValues(t, 2, internal.Stats().Unpinned)

	for version, pinned := range map[string]bool{"0.32.0": false, "0.33.0": true} {
		e := start(t, Config{DPSize: 3, DPMode: "internal", Version: version})
		status := func(rank string) int {
			return do(c, "POST", e.URLs()[0]+"/v1/responses", `{"input":"a","max_output_tokens":1}`, "X-data-parallel-rank", rank).status
		}
		require.Equal(t, 200, status("2"))
		require.Zero(t, e.Stats().Unpinned, "it did name a rank")
		require.Equal(t, pinned, e.Stats().Ranks[2].Concurrent == 1, version)
		require.Equal(t, pinned, status("3") == 400, "%s: nobody looks at the rank", version)
	}
}

func TestStreamsFrom33On(t *testing.T) {
	c := client(t)
	for version, new := range map[string]bool{"0.32.0": false, "0.33.0": true} {
		e := start(t, Config{Version: version})
		chat := do(c, "POST", e.URLs()[0]+"/v1/chat/completions", `{"messages":[{"role":"user","content":"a"}],"max_tokens":2,"stream":true}`)
		require.Equal(t, new, strings.Contains(chat.body, `"kv_transfer_params":null`), chat.body)
		response := do(c, "POST", e.URLs()[0]+"/v1/responses", `{"input":"a","max_output_tokens":1,"stream":true}`)
		require.Equal(t, new, strings.Contains(response.body, "event: response.incomplete"), response.body)
		require.Equal(t, !new, strings.Contains(response.body, "event: response.completed"))
	}
}

func TestRequestIDsSeenTwiceAreCounted(t *testing.T) {
	e := start(t, Config{})
	c := client(t)
	for _, id := range []string{"a", "b", "a"} {
		do(c, "POST", e.URLs()[0]+"/v1/completions", completionBody("a", `"max_tokens":1,`), "X-Request-Id", id)
	}
	require.EqualValues(t, 1, e.Stats().DuplicateIDs)
}

func TestThePrefixCacheReportsItsHits(t *testing.T) {
	e := start(t, Config{KV: KV{PrefixCache: 64}, Answers: Answers{PromptTokensDetails: true}})
	c := client(t)
	cached := func(tokens int) int {
		r := do(c, "POST", e.URLs()[0]+"/v1/chat/completions", chatBody(reftext.MakePrompt(1, tokens), `"max_tokens":1,`))
		var got struct{ Usage usage }
		require.NoError(t, json.Unmarshal([]byte(r.body), &got), r.body)
		return got.Usage.Details.Cached
	}
	require.Equal(t, 0, cached(300))
	require.Equal(t, 256, cached(300), "whole blocks")
	require.Equal(t, 256, cached(400), "a longer prompt with the same start")
	require.Equal(t, 200, do(c, "POST", e.URLs()[0]+"/reset_prefix_cache", "").status)
	require.Equal(t, 0, cached(300))
}

func FuzzParse(f *testing.F) {
	f.Add(true, chatBody("a", probeMore))
	f.Add(true, chatBody("a", `"stop":["x"],"tools":[{"function":{"name":"f"}}],"tool_choice":"required","seed":3,`))
	f.Add(false, completionBody("a", `"kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[[1,2]],"remote_port":7},`))
	l := &life{engine: &Engine{cfg: Config{}.WithDefaults()}}
	f.Fuzz(func(t *testing.T, chat bool, body string) {
		r, refused := l.parse(chat, 0, []byte(body))
		if refused != nil {
			return
		}
		p := r.plan(r.prompt.Answer)
		if p.want < 1 || p.want > r.maxTokens {
			t.Fatalf("parse(%q): an answer of %d tokens, %d are allowed", body, p.want, r.maxTokens)
		}
	})
}
