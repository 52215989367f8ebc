package main

import (
	"errors"
	"net/http"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/rigs/asked"
	"evenkeel/mooncake"
)

// said is an answer with this body.
func said(t *testing.T, kind, text string) map[string]any {
	t.Helper()
	doc, err := documentOf(asked.Answer{Status: 200, Head: http.Header{"Content-Type": {kind}}, Body: []byte(text)})
	require.NoError(t, err)
	return doc
}

func object(t *testing.T, text string) map[string]any {
	return said(t, "application/json; charset=utf-8", text)
}

func TestEventsAreJoinedByChoiceAndToolCall(t *testing.T) {
	got := said(t, "text/event-stream", `data: {"id":"a","choices":[{"index":1,"delta":{"role":"assistant","content":"x"},"logprobs":{"content":[{"token":"x"}]},"finish_reason":null}]}

: a comment

data: {"id":"a","choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"name":"f","arguments":"{\"a"}}]}}],"usage":{"completion_tokens":1,"odd":2}}

data: {"id":"a","choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"\":1}"}}]},"finish_reason":"stop"},{"index":1,"delta":{"content":"y"},"logprobs":{"content":[{"token":"y"}]},"finish_reason":"length"}]}

data: {"id":"a","choices":[],"usage":{"completion_tokens":3}}

data: [DONE]

`)
	require.Empty(t, differences(t, object(t, `{"id":"b","done":true,"usage":{"completion_tokens":3},"choices":[
		{"index":0,"finish_reason":"stop","delta":{"tool_calls":[{"index":0,"function":{"name":"f","arguments":"{\"a\":1}"}}]}},
		{"index":1,"finish_reason":"length","delta":{"role":"assistant","content":"xy"},"logprobs":{"content":[{"token":"x"},{"token":"y"}]}}]}`), got, "content_type"))
}

// differences are the paths that differ, but for one that is meant to.
func differences(t *testing.T, plain, got map[string]any, but string) (paths []string) {
	t.Helper()
	different, _ := compare(plain, got)
	for _, d := range different {
		if d.Path != but {
			paths = append(paths, d.Path)
		}
	}
	return paths
}

func TestStreamsThatAreNoneAreErrors(t *testing.T) {
	for name, text := range map[string]string{
		"behind the end":     "data: [DONE]\n\ndata: {}\n\n",
		"not JSON":           "data: {\n\n",
		"not an object":      "data: 5\n\n",
		"a choice of no one": "data: {\"choices\":[{}]}\n\n",
	} {
		_, err := documentOf(asked.Answer{Status: 200, Head: http.Header{"Content-Type": {"text/event-stream"}}, Body: []byte(text)})
		require.Error(t, err, name)
	}
	_, err := documentOf(asked.Answer{Err: errors.New("cut off")})
	require.Error(t, err)
}

func TestEveryFieldIsCompared(t *testing.T) {
	plain := object(t, `{"id":"a","choices":[{"text":"one","logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens_details":{"cached_tokens":0}}}`)
	for name, tc := range map[string]struct {
		got  string
		want []string
	}{
		"what may differ does":       {`{"id":"b","choices":[{"text":"one","logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens_details":{"cached_tokens":9}}}`, nil},
		"one byte of a text":         {`{"id":"a","choices":[{"text":"onE","logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens_details":{"cached_tokens":0}}}`, []string{"body.choices[0].text"}},
		"a field that is not there":  {`{"id":"a","choices":[{"text":"one","logprobs":null}],"usage":{"prompt_tokens_details":{"cached_tokens":0}}}`, []string{"body.choices[0].finish_reason"}},
		"a field that is too many":   {`{"id":"a","x":[],"choices":[{"text":"one","logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens_details":{"cached_tokens":0}}}`, []string{"body.x"}},
		"a choice that is too many":  {`{"id":"a","choices":[{"text":"one","logprobs":null,"finish_reason":"stop"},{"text":"two"}],"usage":{"prompt_tokens_details":{"cached_tokens":0}}}`, []string{"body.choices[1].text"}},
		"a list for nothing at all":  {`{"id":"a","choices":[{"text":"one","logprobs":[],"finish_reason":"stop"}],"usage":{"prompt_tokens_details":{"cached_tokens":0}}}`, []string{"body.choices[0].logprobs"}},
		"a number for another shape": {`{"id":"a","choices":[{"text":5,"logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens_details":{"cached_tokens":0}}}`, []string{"body.choices[0].text"}},
	} {
		require.Equal(t, tc.want, differences(t, plain, object(t, tc.got), ""), name)
	}
}

func TestWhatThePlainEngineDoesNotDoTwice(t *testing.T) {
	one := object(t, `{"text":"a","stop":"x","p":[-1.50,-2.25]}`)
	two := object(t, `{"text":"b","stop":"x","p":[-1.51,-2.25]}`)
	for name, tc := range map[string]struct {
		got  string
		want verdict
	}{
		"one of its texts and a number within its spread": {`{"text":"b","stop":"x","p":[-1.505,-2.255]}`, unsteady},
		"a text of its own":                     {`{"text":"c","stop":"x","p":[-1.50,-2.25]}`, fail},
		"a number that is too far away":         {`{"text":"a","stop":"x","p":[-1.50,-2.29]}`, fail},
		"a field that the plain engine repeats": {`{"text":"a","stop":"y","p":[-1.50,-2.25]}`, fail},
	} {
		require.Equal(t, tc.want, judge(one, two, object(t, tc.got)).verdict, name)
	}
	require.Equal(t, pass, judge(one, one, one).verdict)
	require.Equal(t, fail, judge(one, one, two).verdict)
}

func TestRowsAreChosenByNameAndNamedOnce(t *testing.T) {
	rows := rowsOf(mooncake.NIXLPush)
	for connector, engines := range map[string][]string{
		mooncake.NIXLPush: {"plain", "p0", "d0", "d1", "dp"}, mooncake.NIXLPull: {"plain", "p0", "d0", "d1", "dp", embedding},
		mooncake.None: {"plain", "d0", "d1"},
	} {
		seen := map[string]bool{}
		for _, r := range rowsOf(connector) {
			require.False(t, seen[r.name], "%s stands twice", r.name)
			require.NotContains(t, r.name, "|", "a row's name is a cell of a table")
			seen[r.name] = true
			require.Subset(t, engines, r.engines)
		}
	}
	require.Len(t, choose(rows, regexp.MustCompile("^chat, greedy$")), 1)
	_, err := run(t.Context(), []string{"-row", "no such row", "-cache", t.TempDir()}, t.Output())
	require.ErrorContains(t, err, "chat, greedy")
	_, err = run(t.Context(), []string{"-row", "("}, t.Output())
	require.Error(t, err)
}

func TestATableWithAFailureHasFailed(t *testing.T) {
	table := &table{}
	table.add(row{name: "a"}, passed("%d fields", 3))
	require.False(t, table.failed())
	table.add(row{name: "b"}, failed("a | b"))
	require.True(t, table.failed())
}

func TestATableReplacesTheRowsThatRan(t *testing.T) {
	file := t.TempDir() + "/results/real.md"
	ran := func(connector string, part bool, o outcome, names ...string) string {
		table := &table{connector: connector, part: part}
		for _, name := range names {
			table.add(row{name: name}, o)
		}
		require.NoError(t, table.save(file))
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		return string(text)
	}
	ran(mooncake.NIXLPull, false, passed("3 fields"), "chat, greedy", "chat, n")
	ran(mooncake.NIXLPush, true, failed("a | b\nc"), "40 at once", "chat, n")
	text := ran(mooncake.NIXLPush, true, passed("4 fields"), "chat, n", "chat, greedy")
	require.Equal(t, 1, strings.Count(text, "\n| chat, greedy | pass | 3 fields |\n| chat, n | pass | 3 fields |\n"), text)
	require.Equal(t, 1,
		strings.Count(text, "\n| chat, greedy | pass | 4 fields |\n| chat, n | pass | 4 fields |\n| 40 at once | FAIL | a \\| b c |\n\n"+
			"3 rows: 2 pass, 1 FAIL,"), text)
	text = ran(mooncake.NIXLPush, false, passed("5 fields"), "chat, greedy")
	require.NotContains(t, text, "40 at once")
	text = ran(mooncake.None, true, passed("6 fields"), "chat, n")
	require.Contains(t, text, "<!-- rows: written by `make claim NAME=real-aggregated` -->")
	require.Contains(t, text, "| chat, n | pass | 6 fields |")
}

func TestOutputsOfClientsAreComparedWithoutWhatIsTheirOwn(t *testing.T) {
	one := `{"id": "chatcmpl-1", "object": "chat.completion.chunk", "content": "a\"b"}{"object": "chat.completion.chunk", "content": "c", "finish_reason": "stop"}`
	two := `{"id": "chatcmpl-ek-2-d1", "object": "chat.completion.chunk", "content": "a\"bc", "finish_reason": "stop"}`
	require.Equal(t, shorn(one), shorn(two))
	require.Equal(t, `a\"bcstop`, shorn(two))
	require.NotEqual(t, shorn(one), shorn(`{"object": "chat.completion.chunk", "content": "a\"b", "finish_reason": "stop"}`))
	require.Equal(t, shorn("created=5\ntext\nNone\n"), shorn("created=7\ntext\n938935082665b0a487e4144b4158f48b\n"))
	require.NotEqual(t, shorn("text"), shorn("texT"))
}
