package openai

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/mooncake"
)

func TestTokensAndGenerateAreChecked(t *testing.T) {
	lim := Limits{VocabSize: 1000, AnswersPerPrompt: 8, Answers: 16, StopStrings: 4}
	for _, row := range []struct {
		name string
		ep   mooncake.Endpoint
		body string
		code string // empty: it is let through
		at   string
	}{
		{"token ids", mooncake.Tokens, `{"model":"m","token_ids":[1,2],"sampling_params":{}}`, "", ""},
		{"what only engines know", mooncake.Tokens, `{"model":"m","token_ids":[1],"sampling_params":{"new":1},"newer":2}`, "", ""},
		{"a streamed answer with logprobs of the prompt, which engines leave out", mooncake.Tokens, `{"model":"m","token_ids":[1],"stream":true,"sampling_params":{"prompt_logprobs":2}}`, "", ""},
		{"no token", mooncake.Tokens, `{"model":"m","token_ids":[],"sampling_params":{}}`, CodeInvalidValue, "token_ids"},
		{"no tokens", mooncake.Tokens, `{"model":"m","sampling_params":{}}`, CodeMissing, "token_ids"},
		{"a text", mooncake.Tokens, `{"model":"m","token_ids":"a","sampling_params":{}}`, CodeInvalidType, "token_ids"},
		{"a token that there is not", mooncake.Tokens, `{"model":"m","token_ids":[1000],"sampling_params":{}}`, CodeInvalidValue, "token_ids[0]"},
		{"no sampling_params", mooncake.Tokens, `{"model":"m","token_ids":[1]}`, CodeMissing, "sampling_params"},
		{"sampling_params of another kind", mooncake.Tokens, `{"model":"m","token_ids":[1],"sampling_params":[]}`, CodeInvalidType, "sampling_params"},
		{"a member twice", mooncake.Tokens, `{"model":"m","token_ids":[1],"sampling_params":{"n":1,"n":2}}`, CodeDuplicateKey, "sampling_params.n"},
		{"a stop token that there is not", mooncake.Tokens, `{"model":"m","token_ids":[1],"sampling_params":{"stop_token_ids":[-1]}}`, CodeInvalidValue, "sampling_params.stop_token_ids[0]"},
		{"too many answers", mooncake.Tokens, `{"model":"m","token_ids":[1],"sampling_params":{"n":9}}`, CodeInvalidValue, "sampling_params.n"},
		{"more tokens than are allowed", mooncake.Tokens, `{"model":"m","token_ids":[1],"sampling_params":{"min_tokens":5,"max_tokens":4}}`, CodeInvalidValue, "sampling_params.min_tokens"},
		{"a place in the queue", mooncake.Tokens, `{"model":"m","token_ids":[1],"priority":-1,"sampling_params":{}}`, CodeInvalidValue, "priority"},
		{"a tensor", mooncake.Tokens, `{"model":"m","token_ids":[1],"features":{"mm_hashes":{}},"sampling_params":{}}`, CodeUnsupported, "features"},
		{"a medium inside of the cluster", mooncake.Tokens, `{"model":"m","token_ids":[1],"content_parts":[{"type":"image_url","url":"http://10.0.0.1/"}],"sampling_params":{}}`, CodeInvalidValue, "content_parts[0].url"},
		{"a stream that is parsed at its end", mooncake.Tokens, `{"model":"m","token_ids":[1],"stream":true,"output_mode":"derender","sampling_params":{}}`, CodeInvalidValue, "output_mode"},
		{"scores that no stream has", mooncake.Tokens, `{"model":"m","token_ids":[1],"stream":true,"sampling_params":{"prompt_logprob_token_ids":[[1]]}}`, CodeInvalidValue, "sampling_params.prompt_logprob_token_ids"},

		{"SGLang's token ids", mooncake.Generate, `{"model":"m","input_ids":[1,2]}`, "", ""},
		{"SGLang's text", mooncake.Generate, `{"model":"m","text":"a","sampling_params":{"max_new_tokens":4}}`, "", ""},
		{"SGLang's list", mooncake.Generate, `{"model":"m","input_ids":[[1],[2]]}`, "", ""},
		{"nothing", mooncake.Generate, `{"model":"m"}`, CodeMissing, "input_ids"},
		{"a list of parameters", mooncake.Generate, `{"model":"m","text":["a","b"],"sampling_params":[{}]}`, CodeInvalidType, "sampling_params"},
		{"code", mooncake.Generate, `{"model":"m","text":"a","sampling_params":{"custom_params":{"a":1}}}`, CodeUnsupported, "sampling_params.custom_params"},
		{"an image", mooncake.Generate, `{"model":"m","text":"a","image_data":"http://10.0.0.1/"}`, CodeUnsupported, "image_data"},
		{"too long an answer to ask for", mooncake.Generate, `{"model":"m","text":"a","sampling_params":{"max_new_tokens":"4"}}`, CodeInvalidType, "sampling_params.max_new_tokens"},
		{"more prompts than there may be answers", mooncake.Generate, `{"model":"m","text":["a","b","c"],"sampling_params":{"n":8}}`, CodeInvalidValue, "text"},
	} {
		t.Run(row.name, func(t *testing.T) {
			req, e := Parse(row.ep, []byte(row.body), lim)
			if row.code == "" {
				require.Nil(t, e)
				require.Equal(t, "m", req.Model)
				return
			}
			require.NotNil(t, e)
			require.Equal(t, row.code, e.Code, e.Message)
			require.Equal(t, row.at, e.Param, e.Message)
		})
	}
}

func TestLengthsOfTokenIDsAreKnown(t *testing.T) {
	req, e := Parse(mooncake.Tokens, []byte(`{"model":"m","token_ids":[1, 2,3],"sampling_params":{"max_tokens":7,"n":2}}`), Limits{})
	require.Nil(t, e)
	require.Equal(t, []int{3, 7, 2}, []int{req.PromptTokens, req.Limit, req.N})
	req, e = Parse(mooncake.Generate, []byte(`{"model":"m","input_ids":[[1,2],[3]],"rid":"x"}`), Limits{})
	require.Nil(t, e)
	require.Equal(t, []int{3, defaultNewTokens, 2}, []int{req.PromptTokens, req.Limit, len(req.Prompts)})
	require.True(t, req.AnswerIsList)
	require.Equal(t, "x", string(NameGenerate(&req.Body, "own")))
	req, e = Parse(mooncake.Generate, []byte(`{"model":"m","input_ids":[[1,2],[3]],"rid":["one","two"]}`), Limits{})
	require.Nil(t, e)
	require.Equal(t, [][]byte{[]byte("one"), []byte("two")}, req.Names)
	for _, more := range []string{`"input_ids":[[1],[2]],"rid":["one"]`, `"input_ids":[[1],[2]],"rid":["one","one"]`, `"input_ids":[1],"rid":["one"]`, `"input_ids":[1],"rid":7`,
		`"input_ids":[[1],[2]],"rid":["one",""]`, `"input_ids":[1],"return_hidden_states":true`} {
		_, e = Parse(mooncake.Generate, []byte(`{"model":"m",`+more+`}`), Limits{})
		require.NotNil(t, e, more)
		require.Equal(t, 400, e.Status, more)
	}
}

func TestAborts(t *testing.T) {
	for _, row := range []struct {
		path, body, name string
		takes            bool
		fails            string
	}{
		{AbortTokensPath, `{"request_ids":["a","b"]}`, "b", true, ""},
		{AbortTokensPath, `{"request_ids":["a"]}`, "ab", false, ""},
		{AbortTokensPath, `{}`, "", false, CodeMissing},
		{AbortTokensPath, `{"request_ids":"a"}`, "", false, CodeInvalidType},
		{AbortTokensPath, `{"request_ids":[1]}`, "", false, CodeInvalidType},
		{AbortGeneratePath, `{"rid":"a"}`, "a", true, ""},
		{AbortGeneratePath, `{"rid":"a_1"}`, "a", false, ""},
		{AbortGeneratePath, `{"rid":"a"}`, "b", false, ""},
		{AbortGeneratePath, `{"rid":""}`, "", false, ""},
		{AbortGeneratePath, `{"abort_all":true}`, "b", true, ""},
		{AbortGeneratePath, `{"rid":1}`, "", false, CodeInvalidType},
		{AbortGeneratePath, `[`, "", false, CodeInvalidJSON},
	} {
		takes, e := ParseAbort(row.path, []byte(row.body))
		if row.fails != "" {
			require.NotNil(t, e, row.body)
			require.Equal(t, row.fails, e.Code, row.body)
			continue
		}
		require.Nil(t, e, row.body)
		require.Equal(t, row.takes, takes(row.name), row.body)
	}
}

// A body of some megabytes may have a million names. Nothing that a request can use has as many, so
// they must not take memory.
func TestNamesThatNoRequestCanUseTakeNoMemory(t *testing.T) {
	var list, members strings.Builder
	for n := range 200_000 {
		fmt.Fprintf(&list, "%q,", strconv.Itoa(n))
		fmt.Fprintf(&members, "%q:0,", strconv.Itoa(n))
	}
	names := strings.TrimSuffix(list.String(), ",")
	for name, read := range map[string]func() *Error{
		"rid": func() *Error {
			_, e := Parse(mooncake.Generate, []byte(`{"model":"m","text":["a","b"],"rid":[`+names+`]}`), Limits{Answers: 128})
			return e
		},
		"request_ids": func() *Error {
			_, e := ParseAbort(AbortTokensPath, []byte(`{"request_ids":[`+names+`]}`))
			return e
		},
		"thinking": func() *Error {
			_, e := Parse(mooncake.Messages, []byte(`{"model":"m","max_tokens":5,"messages":[{"role":"user","content":"a"}],"thinking":{`+
				members.String()+`"type":"disabled"}}`), Limits{})
			return e
		},
	} {
		e := read()
		require.NotNil(t, e, name)
		require.Equal(t, []any{400, CodeInvalidValue, name}, []any{e.Status, e.Code, e.Param}, name)
		require.Less(t, testing.AllocsPerRun(1, func() { _ = read() }), 150_000.0, name)
	}
}

// Whatever is let through can be written for an engine, as JSON without what no client may set.
func FuzzTokens(f *testing.F) {
	for _, seed := range []string{
		`{"model":"m","token_ids":[1,2],"sampling_params":{"n":2,"extra_args":{"kv_transfer_params":{}},"_eos_token_id":1},"kv_transfer_params":{}}`,
		`{"model":"m","text":["a"],"rid":"a","sampling_params":{"max_new_tokens":4}}`, `{"model":"m","input_ids":[[1]],"sampling_params":null}`,
	} {
		f.Add(true, []byte(seed))
		f.Add(false, []byte(seed))
	}
	f.Fuzz(func(t *testing.T, tokens bool, raw []byte) {
		ep := mooncake.Generate
		if tokens {
			ep = mooncake.Tokens
		}
		req, e := Parse(ep, raw, Limits{})
		_, _ = ParseAbort(AbortTokensPath, raw)
		_, _ = ParseAbort(AbortGeneratePath, raw)
		if e != nil {
			return
		}
		p := mooncake.Profile{Connector: mooncake.NIXLPull}.WithDefaults()
		leg := req.Parts()[0]
		for _, body := range [][][]byte{
			p.DecodeBody(&req.Body, ep, &leg.Patch, json.RawMessage(`{"x":1}`), "salt", req.Stream, nil),
			p.ProbeBody(&req.Body, ep, &leg.Patch, nil, nil),
		} {
			var got, params map[string]json.RawMessage
			require.NoError(t, json.Unmarshal(bytes.Join(body, nil), &got))
			_ = json.Unmarshal(got["sampling_params"], &params)
			require.NotContains(t, got, "rid")
			if tokens {
				require.NotContains(t, params, "extra_args")
			}
		}
	})
}

// A number is written as an integer, and then dropped from a stream: what was set last counts,
// however the client wrote it.
func TestPromptLogprobsOfAStreamReachNoDecodeEngine(t *testing.T) {
	for _, v := range []string{"1", "1.0", "1e0"} {
		raw := []byte(`{"model":"m","token_ids":[1,2,3],"stream":true,"sampling_params":{"prompt_logprobs":` + v + `,"max_tokens":5}}`)
		r, fail := Parse(mooncake.Tokens, raw, Limits{VocabSize: 100})
		require.Nil(t, fail)
		require.Nil(t, r.CheckSplit(false))
		p := mooncake.Profile{Connector: mooncake.NIXLPull}.WithDefaults()
		body := bytes.Join(p.DecodeBody(&r.Body, mooncake.Tokens, nil, []byte(`{"x":1}`), "", true, nil), nil)
		require.NotContains(t, string(body), `"prompt_logprobs":1`, v)
	}
}

// An element of a list is named by the client's key, too, in the message as in param.
func TestAnElementHasTheClientsName(t *testing.T) {
	for ep, row := range map[mooncake.Endpoint][2]string{
		mooncake.Tokens:   {`{"model":"m","token_ids":[true],"sampling_params":{"max_tokens":2}}`, "token_ids[0]"},
		mooncake.Generate: {`{"model":"m","input_ids":[{}],"sampling_params":{"max_new_tokens":2}}`, "input_ids[0]"},
	} {
		_, fail := Parse(ep, []byte(row[0]), Limits{})
		require.NotNil(t, fail)
		require.Equal(t, row[1], fail.Param)
		require.Contains(t, fail.Message, row[1])
		require.NotContains(t, fail.Message, "prompt[")
	}
}
