package openai

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/mooncake"
)

func TestMessages(t *testing.T) {
	r, e := Parse(mooncake.Messages, []byte(`{"model":"m","max_tokens":2000,"stream":true,"system":"ab","messages":[{"role":"user","content":[{"type":"image","source":{"type":"base64","media_type":"image/png","data":"AAAA"}},{"type":"text","text":"c"}]}],"tools":[],"thinking":{"type":"enabled","budget_tokens":1999},"vllm_xargs":{"a":1}}`), Limits{})
	require.Nil(t, e)
	require.Equal(t, "m", r.Model)
	require.True(t, r.Stream)
	require.False(t, r.Passthrough)
	require.Equal(t, 2000, r.Limit)
	require.Equal(t, "max_tokens", r.MaxTokensKey)
	messages, _ := r.Body.Get("messages")
	require.Equal(t, len(messages)+len(`"ab"`)+len("[]")-len(`"AAAA"`), r.PromptBytes)
	require.True(t, CannotResume(&r.Body, r.Endpoint))
	r, e = Parse(mooncake.Messages, []byte(`{"model":"m","max_tokens":5,"messages":[{"role":"user","content":"a"}],"system":null,"thinking":null,"stop_sequences":["x"]}`), Limits{})
	require.Nil(t, e)
	require.True(t, r.Passthrough, "the engine's own answer goes to the client")
	_, e = Parse(mooncake.Messages, []byte(`{"model":"m","max_tokens":5,"messages":[{"role":"user","content":[{"type":"image","source":{"type":"url","url":"https://cdn.example.com/a"}}]}]}`), Limits{MediaHosts: []string{"cdn.example.com"}})
	require.Nil(t, e)
	_, e = Parse(mooncake.Chat, []byte(`{"model":"m","messages":[{"role":"user","content":[{"type":"image","source":{}}]}]}`), Limits{})
	refusal(t, e, "messages[0].content[0].type", CodeUnsupported) // it is none of a chat's
}

func TestLeadsTellPromptsApart(t *testing.T) {
	for body, want := range map[string]string{
		`{}`:              ``,
		`{"system":"a"}`:  `"a"`,
		`{"system":null}`: `null`,
		`{"system":[{"type":"text","text":"a","cache_control":{}},{"type":"text","text":"b"}]}`:               `"a""b"`,
		`{"system":[{"type":"text","text":"x-anthropic-billing-header: cch=1;"},{"type":"text","text":"b"}]}`: `"b"`,
	} {
		b, err := mooncake.ScanBody([]byte(body), 0)
		require.NoError(t, err)
		require.Equal(t, want, TextBeforePrompt(&b, mooncake.Messages), body)
		require.Empty(t, TextBeforePrompt(&b, mooncake.Chat))
	}
}

func TestErrorsOfMessagesHaveAnthropicsShape(t *testing.T) {
	for status, kind := range map[int]string{
		400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
		415: "invalid_request_error",
		429: "rate_limit_error", 500: "api_error", 502: "api_error", 503: "overloaded_error", 504: "timeout_error",
	} {
		e := NewError(status, "x", "no")
		for _, path := range []string{"/v1/messages", CountPath} {
			require.JSONEq(t, `{"type":"error","error":{"type":"`+kind+`","message":"no"}}`, string(e.BodyFor(path)))
		}
		require.Equal(t, e.JSON(), e.BodyFor("/v1/chat/completions"))
		require.Equal(t, e.Type, e.TypeFor("/v1/responses"))
	}
	e := badRequest(CodeInvalidValue, "a.b", "it must be 1")
	require.Contains(t, string(e.BodyFor("/v1/messages")), `"a.b: it must be 1"`)
	e.Message = "a.b is 2"
	require.Contains(t, string(e.BodyFor("/v1/messages")), `"a.b is 2"`)
	for raw, want := range map[string]string{
		`{"type":"error","error":{"type":"BadRequestError","message":"no"}}`:         `{"type":"error","error":{"type":"BadRequestError","message":"no"}}`,
		`{"error":{"message":"1 validation error","type":"Bad Request","code":400}}`: `{"type":"error","error":{"type":"invalid_request_error","message":"1 validation error"}}`,
		`{"detail":"Not Found"}`: `{"type":"error","error":{"type":"invalid_request_error","message":"an engine refused"}}`,
		``:                       `{"type":"error","error":{"type":"invalid_request_error","message":"an engine refused"}}`,
	} {
		e := &Error{Status: 400, Message: "an engine refused", Raw: []byte(raw)}
		require.JSONEq(t, want, string(e.BodyFor("/v1/messages")), raw)
		require.Equal(t, raw, string(e.BodyFor("/v1/chat/completions")))
		e.ContentType = "text/html"
		_, contentType := e.BodyAndTypeFor("/v1/messages")
		require.Equal(t, contentType == "text/html", strings.HasPrefix(raw, `{"type"`))
	}
	require.Equal(t, "server_error", (&Error{Status: 502}).TypeFor("/v1/completions"))
}

func FuzzMessages(f *testing.F) {
	f.Add([]byte(`{"model":"m","max_tokens":2000,"system":[{"type":"text","text":"a"}],"messages":[{"role":"user","content":[{"type":"image","source":{"url":"http://x"}},{"type":"tool_result","content":[{"source":{"data":"A"}}]}]}],"thinking":{"type":"enabled","budget_tokens":1024}}`))
	p := mooncake.Profile{Connector: mooncake.NIXLPull}.WithDefaults()
	f.Fuzz(func(t *testing.T, raw []byte) {
		if r, e := ParseCount(raw, Limits{}); e == nil {
			require.NotEmpty(t, r.Model)
		} else {
			require.True(t, json.Valid(e.BodyFor(CountPath)))
		}
		r, e := Parse(mooncake.Messages, raw, Limits{})
		if e != nil {
			require.Equal(t, 400, e.Status)
			require.True(t, json.Valid(e.BodyFor("/v1/messages")))
			return
		}
		TextBeforePrompt(&r.Body, mooncake.Messages)
		legs := r.Parts()
		require.Len(t, legs, 1)
		kv := json.RawMessage(`{"a":1}`)
		for name, segments := range map[string][][]byte{
			"probe": p.ProbeBody(&r.Body, mooncake.Messages, &legs[0].Patch, nil, nil), "decode": p.DecodeBody(&r.Body, mooncake.Messages, &legs[0].Patch, kv, "", true, nil),
			"discard": p.DiscardBody(&r.Body, mooncake.Messages, &legs[0].Patch, kv, "s", nil),
		} {
			var sent []byte
			for _, s := range segments {
				sent = append(sent, s...)
			}
			b, err := mooncake.ScanBody(sent, 0)
			require.NoError(t, err, name)
			for _, key := range []string{"model", "messages", "stream", "max_tokens", "kv_transfer_params"} {
				require.Equal(t, 1, b.Count(key), "%s of %s", key, name)
			}
		}
	})
}
