package sse

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// tokensStream is shaped like a stream of vLLM 0.32.0 at /inference/v1/generate, with logprobs.
const tokensStream = `data: {"request_id":"generate-tokens-a","usage":null,"output_mode":"tokens","choices":[{"index":0,"finish_reason":null,"stop_reason":null,"token_ids":[448],"routed_experts":null,"sampling_mask":null,"weight_versions":null,"logprobs":{"content":[{"token_id":448,"logprob":-6.1,"rank":1,"top_logprobs":[]}]}}]}

data: {"request_id":"generate-tokens-a","usage":null,"output_mode":"tokens","choices":[{"index":0,"finish_reason":"length","stop_reason":null,"token_ids":[622,91],"routed_experts":"AA==","sampling_mask":null,"weight_versions":[{"version":"default","start":0,"end":3}],"logprobs":{"content":[{"token_id":622,"logprob":-6.2,"rank":1,"top_logprobs":[]},{"token_id":91,"logprob":-6.3,"rank":1,"top_logprobs":[]}]}}]}

data: {"request_id":"generate-tokens-a","usage":{"prompt_tokens":9,"total_tokens":12,"completion_tokens":3},"output_mode":"tokens","choices":[]}

data: [DONE]

`

func TestAnAnswerOfTokensIsPutTogetherAsVLLMDoes(t *testing.T) {
	a := NewAssembler(false, 0).ByTokens("m", 7)
	f := NewFilter(Options{Form: Tokens, Usage: true, TokenIDs: true, Cached: OwnCached, Choice: -1})
	for _, e := range frames(t, tokensStream) {
		if out, end := f.Event(e, nil); end == NotEnded {
			require.NoError(t, a.Add(out))
		}
	}
	got, err := a.JSON(nil)
	require.NoError(t, err)
	require.Equal(t, `{"request_id":"generate-tokens-a","model":"m","created":7,"usage":{"prompt_tokens":9,"total_tokens":12,"completion_tokens":3},`+
		`"prompt_logprobs":null,"prompt_token_id_logprobs":null,"prompt_token_ids":null,"mm_placeholders":null,"metrics":null,"kv_transfer_params":null,"ec_transfer_params":null,`+
		`"output_mode":"tokens","choices":[{"index":0,"finish_reason":"length","stop_reason":null,"token_ids":[448,622,91],"routed_experts":"AA==","sampling_mask":null,`+
		`"weight_versions":[{"version":"default","start":0,"end":3}],"logprobs":{"content":[{"token_id":448,"logprob":-6.1,"rank":1,"top_logprobs":[]},`+
		`{"token_id":622,"logprob":-6.2,"rank":1,"top_logprobs":[]},{"token_id":91,"logprob":-6.3,"rank":1,"top_logprobs":[]}]}}]}`, string(got))
	require.Equal(t, 3, f.Tokens())
}

func TestAClientOfTokensGetsWhatItAskedFor(t *testing.T) {
	for _, row := range []struct {
		name    string
		options Options
		want    string // of the first event, and of the last
		ends    string
	}{
		{"nothing changes", Options{Usage: true}, `{"request_id":"generate-tokens-a","usage":null,`, `"choices":[]}`},
		{"the usage is for nobody", Options{}, `{"request_id":"generate-tokens-a","usage":null,`, `}]}}]}`},
		{"it has a name of its own", Options{Usage: true, ID: []byte("b")}, `{"request_id":"b","usage":null,`, `"choices":[]}`},
	} {
		t.Run(row.name, func(t *testing.T) {
			row.options.Form, row.options.TokenIDs, row.options.Cached, row.options.Choice = Tokens, true, OwnCached, -1
			f := NewFilter(row.options)
			all, _ := relay(f, frames(t, tokensStream))
			client := string(all)
			events := strings.Split(strings.TrimSuffix(client, "\n\ndata: [DONE]\n\n"), "\n\n")
			require.True(t, strings.HasPrefix(events[0], "data: "+row.want), client)
			require.True(t, strings.HasSuffix(events[len(events)-1], row.ends), client)
			require.True(t, f.Finished())
		})
	}
}

// What a resumed leg says of weights is of its own tokens.
func TestSpansOfWeightsCountFromTheFirstToken(t *testing.T) {
	f := NewFilter(Options{Form: Tokens, Usage: true, TokenIDs: true, Cached: OwnCached, Choice: -1, Continuation: &Continuation{Head: Head{ID: []byte(`"first"`)}, Prompt: 4, Tokens: 5}})
	all, _ := relay(f, frames(t, tokensStream))
	client := string(all)
	require.Contains(t, client, `"weight_versions":[{"version":"default","start":5,"end":8}]`)
	require.Contains(t, client, `"request_id":"first"`)
	require.NotContains(t, client, "generate-tokens-a")
	require.Contains(t, client, `{"prompt_tokens":4,"total_tokens":12,"completion_tokens":8}`)
}

func TestAnAbortIsTheEndOfWhatItsClientHasAborted(t *testing.T) {
	stream := strings.Replace(tokensStream, `"length"`, `"abort"`, 1)
	for _, row := range []struct {
		name    string
		aborted func() bool
		want    End
	}{
		{"the client has aborted it", func() bool { return true }, Complete},
		{"it has not, so that the caller decides", func() bool { return false }, Aborted},
		{"clients cannot abort it", nil, Refused},
	} {
		f := NewFilter(Options{Form: Tokens, TokenIDs: true, Cached: -1, Choice: -1, Aborted: row.aborted})
		last := NotEnded
		for _, e := range frames(t, stream) {
			if last == NotEnded {
				_, last = f.Event(e, nil)
			}
		}
		require.Equal(t, row.want, last, row.name)
		require.Equal(t, row.want == Complete, f.Finished(), row.name)
	}
}

// However an aborted stream is cut, a client whose engine was told to end the answer gets what it
// would get after an abort of its own.
func TestAnAbortIsAcceptedLater(t *testing.T) {
	const ofGenerate = `data: {"text":"a","output_ids":[1],"meta_info":{"id":"x","finish_reason":null,"prompt_tokens":3,"completion_tokens":1,"cached_tokens":0}}

data: {"text":"ab","output_ids":[1,2],"meta_info":{"id":"x","finish_reason":{"type":"abort","message":"Aborted","status_code":null,"err_type":null},"prompt_tokens":3,"completion_tokens":2,"cached_tokens":0}}

data: [DONE]

`
	for form, stream := range map[Form]string{Tokens: strings.Replace(tokensStream, `"length"`, `"abort"`, 1), Generated: ofGenerate} {
		for cut := range len(stream) {
			for _, byClient := range []bool{true, false} {
				accepted := byClient
				a := new(Answer)
				a.Reset(Options{Form: form, Usage: true, TokenIDs: true, Cached: OwnCached, Choice: -1, Aborted: func() bool { return accepted }})
				var out []byte
				end := NotEnded
				for _, piece := range []string{stream[:cut], stream[cut:]} {
					p := []byte(piece)
					var effects Effects
					if out, effects = a.Feed(out, p, time.Time{}); effects.End != NotEnded {
						end = effects.End
					}
					clear(p) // a loop reads into this memory again
				}
				if !byClient {
					require.Equal(t, Aborted, end)
					accepted = true
					var effects Effects
					out, effects = a.AcceptAbort(out)
					end = effects.End
					require.Equal(t, 2, map[Form]int{Tokens: effects.Tokens - 1, Generated: effects.Tokens}[form])
				}
				require.Equal(t, Complete, end)
				require.Equal(t, "abort", a.Filter.FinishReason())
				require.Equal(t, strings.TrimSuffix(stream, "data: [DONE]\n\n"), string(out), "cut at %d", cut)
			}
		}
	}
}

// An abort with the status of an error is SGLang's own.
func TestSGLangAbortsWithAStatusWhatHasFailed(t *testing.T) {
	for status, want := range map[string]End{"null": Aborted, "503": Refused} {
		f := NewFilter(Options{Form: Generated, Choice: -1, Cached: OwnCached, Aborted: func() bool { return false }})
		_, end := f.Event(frames(t, `data: {"text":"","output_ids":[],"meta_info":{"id":"x","finish_reason":{"type":"abort","message":"m","status_code":`+
			status+`},"prompt_tokens":3,"completion_tokens":0}}`+"\n\n")[0], nil)
		require.Equal(t, want, end)
		require.Equal(t, "m", f.Failure().Message)
	}
}

// What an engine tells of its weights with an abort counts up to the last token that the client has
// of it.
func TestSpansOfWeightsAreJoinedAcrossAnAbort(t *testing.T) {
	// Of each first part the client gets one token. Those of the event with the abort are lost.
	const first = `[{"version":"a","start":0,"end":1},{"version":"b","start":1,"end":3}]`
	stream := strings.NewReplacer(`"length"`, `"abort"`, `[{"version":"default","start":0,"end":3}]`, first).Replace(tokensStream)
	sofar := &Transcript{}
	for _, row := range []struct{ stream, want string }{
		{stream, ""},
		{strings.Replace(stream, `"start":1,"end":3`, `"start":1,"end":9`, 1), ""},
		{tokensStream, `"weight_versions":[{"version":"a","start":0,"end":2},{"version":"default","start":2,"end":5}]`},
		{strings.Replace(tokensStream, `[{"version":"default","start":0,"end":3}]`, "null", 1), `"weight_versions":[{"version":"a","start":0,"end":2}]`},
		{string(TokensEnding(nil, Head{ID: []byte(`"a"`)}, "length", Usage{})), `"weight_versions":[{"version":"a","start":0,"end":2}]`},
	} {
		options := Options{Form: Tokens, Cached: OwnCached, TokenIDs: true, Choice: -1, Transcript: &Transcript{},
			Aborted: func() bool { return false }}
		if sofar.Head.ID != nil {
			options.Continuation = &Continuation{Head: sofar.Head, Tokens: sofar.Completed, Spans: sofar.Spans}
		}
		a := new(Answer)
		a.Reset(options)
		all, _ := a.Feed(nil, []byte(row.stream), time.Time{})
		if row.want != "" {
			require.Contains(t, string(all), row.want)
			continue
		}
		if sofar.Join(options.Transcript); sofar.Head.ID == nil {
			sofar.Head = options.Transcript.Head
		}
	}
}

func TestTheEndOfAnAnswerOfTokensIsOne(t *testing.T) {
	for _, mode := range []string{`"tokens"`, `"text"`} {
		end := TokensEnding(nil, Head{ID: []byte(`"a"`), Mode: []byte(mode)}, "length", Usage{Prompt: 4, Completion: 2, Total: 6, Cached: -1})
		f := NewFilter(Options{Form: Tokens, Usage: true, TokenIDs: true, Cached: OwnCached, Choice: -1})
		_, _ = relay(f, frames(t, string(end)))
		require.Equal(t, "length", f.FinishReason())
		u, ok := f.Usage()
		require.True(t, ok)
		require.Equal(t, 6, u.Total)
	}
}

func TestAnAnswerOfGenerateIsNamedAndNumbered(t *testing.T) {
	const stream = `data: {"text":"a","output_ids":[1],"meta_info":{"id":"x","finish_reason":null,"prompt_tokens":3,"completion_tokens":1,"cached_tokens":0}}

data: {"text":"ab","output_ids":[1,2],"meta_info":{"id":"x","finish_reason":{"type":"length","length":2},"prompt_tokens":3,"completion_tokens":2,"cached_tokens":1}}

data: [DONE]

`
	f := NewFilter(Options{Form: Generated, ID: []byte("mine"), Choice: 1, Cached: OwnCached})
	client, _ := relay(f, frames(t, stream))
	require.Equal(t, strings.ReplaceAll(strings.ReplaceAll(stream, `"x"`, `"mine"`), `}}`+"\n", `},"index":1}`+"\n"), string(client))
	u, _ := f.Usage()
	require.Equal(t, Usage{Prompt: 3, Completion: 2, Total: 5, Cached: 1}, u)
	require.Equal(t, "length", f.FinishReason())

	f = NewFilter(Options{Form: Generated, ID: []byte("mine"), Choice: 1, Cached: OwnCached})
	client, _ = relay(f, frames(t, "data: {}\n\ndata: { }\n\n"+stream))
	require.True(t, strings.HasPrefix(string(client), "data: {\"index\":1}\n\ndata: { \"index\":1}\n\ndata: {\"text\":\"a\","), string(client))

	aborted := strings.Replace(stream, `{"type":"length","length":2}`, `{"type":"abort","message":"no memory","status_code":503}`, 1)
	f = NewFilter(Options{Form: Generated, Choice: -1, Cached: OwnCached})
	_, _ = relay(f, frames(t, aborted))
	require.Equal(t, Failure{Message: "no memory", Code: "503", Status: 503}, f.Failure())
}

// FuzzTokensMirror: an edited event is JSON if the engine's is, whatever is in it.
func FuzzTokensMirror(f *testing.F) {
	for _, s := range []string{tokensStream, `data: {"output_ids":[],"meta_info":{"id":"x","finish_reason":{"type":"abort"}}}` + "\n\n"} {
		for _, e := range frames(f, s) {
			f.Add(e.Data, true)
			f.Add(e.Data, false)
		}
	}
	f.Fuzz(func(t *testing.T, data []byte, tokens bool) {
		form := Generated
		if tokens {
			form = Tokens
		}
		fr := NewFramer(0)
		fr.Feed(append(append([]byte("data: "), data...), "\n\n"...))
		e, ok := fr.Next()
		if !ok || e.Kind != KindData || !json.Valid(e.Data) {
			return
		}
		options := Options{Form: form, Usage: true, TokenIDs: true, ID: []byte("mine"), Choice: 2, Cached: 3}
		if tokens {
			options.Continuation = &Continuation{Head: Head{ID: []byte(`"mine"`)}, Tokens: 3}
		}
		out, end := NewFilter(options).Event(e, nil)
		if end != NotEnded || len(out) == 0 {
			return
		}
		again := NewFramer(0)
		again.Feed(out)
		for got, ok := again.Next(); ok; got, ok = again.Next() {
			require.True(t, got.Kind != KindData || json.Valid(got.Data), string(out))
		}
	})
}
