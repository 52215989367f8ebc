package sse

import (
	"encoding/json"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// What a client gets before its first event is whole lines, which tell of nothing. An error behind
// them is an event of its endpoint, and the last one.
func TestWhatComesBeforeAnEvent(t *testing.T) {
	for path, want := range map[string]string{
		"/v1/chat/completions": "data: {\"error\":{\"message\":\"no engine\",\"type\":\"server_error\",\"param\":null,\"code\":\"prefill_unavailable\"}}\n\ndata: [DONE]\n\n",
		"/v1/messages":         "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"server_error\",\"message\":\"no engine\"}}\n\n",
		"/v1/responses":        "event: error\ndata: {\"type\":\"error\",\"code\":\"prefill_unavailable\",\"message\":\"no engine\",\"param\":null,\"sequence_number\":0}\n\n",
	} {
		form := FormOf(path)
		frames := NewFramer(0)
		frames.Feed(append(slices.Clone(Silence(form)), '\n')) // in a stream, an event comes behind it
		f := NewFilter(Options{Form: form})
		for e, ok := frames.Next(); ok; e, ok = frames.Next() {
			out, _ := f.Event(e, nil)
			require.False(t, f.Started(), "%s: it is no token: %s", path, out)
		}
		require.Zero(t, frames.unreturned(), "it is whole")
		require.Equal(t, want, string(OnlyFailure(nil, form, "no engine", "server_error", "prefill_unavailable")), path)
	}
}

// An answer that is passed on as it came may be anything. Its end is the end of the body, or
// [DONE]; an error among its members ends it with an error of ours.
func TestAnAnswerIsPassedOnAsItCame(t *testing.T) {
	const one, done = "id: 7\r\ndata: {\"x\": 1}\r\n\r\n", "data:[DONE]\n\n"
	for _, row := range []struct {
		name, stream, out string
		end               End // where the body ends then
		usage             Usage
	}{
		{"nothing came", "", "", Short, Usage{}},
		{"comments before the first event are withheld, and later ones are not", ": a\n\n" + one + ": b\n\n", one + ": b\n", Complete, Usage{}},
		{"what is no JSON is passed on", "data: hello\n\ndata: {\"a\n\n", "data: hello\n\ndata: {\"a\n\n", Complete, Usage{}},
		{"behind [DONE] comes nothing", one + done + one, one + done, Complete, Usage{}},
		{"it is cut", one + "data: {", one, Short, Usage{}},
		{"it begins with an error", "data: {\"error\": \"secret\"}\n\n" + one, "", Refused, Usage{}},
		{"it ends with one", one + "data: {\"error\": {\"message\": \"secret\"}}\n\n", one, Refused, Usage{}},
		{"no error is none", "data: {\"error\": null}\n\n", "data: {\"error\": null}\n\n", Complete, Usage{}},
		{
			"the last usage counts",
			"data: {\"usage\": {\"prompt_tokens\": 3}}\n\ndata: {\"usage\": {\"prompt_tokens\": 4, \"completion_tokens\": " +
				"5}}\n\ndata: {\"usage\": null}\n\n",
			"data: {\"usage\": {\"prompt_tokens\": 3}}\n\ndata: {\"usage\": {\"prompt_tokens\": 4, \"completion_tokens\": 5}}\n\ndata: " +
				"{\"usage\": null}\n\n",
			Complete, Usage{Prompt: 4, Completion: 5, Total: 9, Cached: -1},
		},
		{
			"a count that cannot be does not", "data: {\"usage\": {\"prompt_tokens\": 99999999999, \"completion_tokens\": 2}}\n\n",
			"data: {\"usage\": {\"prompt_tokens\": 99999999999, \"completion_tokens\": 2}}\n\n", Complete,
			Usage{Completion: 2, Total: 2, Cached: -1},
		},
	} {
		for pieces := 1; pieces < 5; pieces++ {
			out, end, a := feed(row.stream, Verbatim, Options{Choice: -1, Cached: OwnCached}, pieces)
			require.Equal(t, row.out, out, row.name)
			require.Equal(t, row.end, end, row.name)
			usage, told := a.Filter.Usage()
			require.Equal(t, row.usage, usage, row.name)
			require.Equal(t, row.usage != Usage{}, told, row.name)
			require.Zero(t, a.Filter.Tokens(), "%s: no token is told of", row.name)
		}
	}
}

// An event that is passed on goes out as it came, whatever an engine writes into it, and
// encoding/json agrees on which one says that the engine has failed.
func FuzzVerbatim(f *testing.F) {
	for _, seed := range []string{
		`{"usage":{"prompt_tokens":7,"completion_tokens":2}}`, `{"usage":{"prompt_tokens":-1,"completion_tokens":1e99}}`, `{"usage":[7]}`, `{"usage":`,
		`{"error":null}`, `{"error":{"message":"no"}}`, `{"error":"no"} x`, `[{"error":1}]`, `{"\u0065rror":1}`, `{`, `"`, ``, `[DONE]`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		framer := NewFramer(0)
		framer.Feed(append(append([]byte("data: "), data...), "\n\n"...))
		e, ok := framer.Next()
		if !ok || e.Kind != KindData {
			return
		}
		f := NewFilter(Options{Form: Verbatim, Choice: -1, Cached: OwnCached})
		out, end := f.Event(e, nil)
		require.Equal(t, string(e.Raw), string(out))
		if usage, told := f.Usage(); told {
			plausible := func(tokens int) bool { return tokens >= 0 && tokens <= maxPlausibleTokens }
			require.True(t, plausible(usage.Prompt) && plausible(usage.Completion), "%+v", usage)
		}
		var says map[string]json.RawMessage
		if json.Unmarshal(e.Data, &says) != nil || odd(e.Data) {
			return
		}
		failed := says["error"] != nil && string(says["error"]) != "null"
		require.Equal(t, failed, end == Refused, "%s", e.Data)
	})
}
