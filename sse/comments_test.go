package sse

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// dispatches reads a stream as openai-go before 3.43 does: each blank line ends an event, whose
// data must be JSON, whether or not there is any.
func dispatches(stream string) (events int, err error) {
	data := ""
	for line := range strings.Lines(stream) {
		line = strings.TrimRight(line, "\r\n")
		switch name, value, _ := strings.Cut(line, ":"); {
		case line == "":
			if data = strings.TrimSpace(data); data != "[DONE]" && !json.Valid([]byte(data)) {
				return events, fmt.Errorf("event %d is no JSON: %q", events, data)
			}
			events, data = events+1, ""
		case name == "data":
			data += value
		}
	}
	return events, nil
}

// Comments of engines reach clients without the blank line behind them: some clients take it for
// the end of an event.
func TestCommentsEndNoEvent(t *testing.T) {
	chat := func(finish string) string {
		return fmt.Sprintf(`data: {"id":"1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":"a"},"finish_reason":%s}]}`+"\n\n", finish)
	}
	const generated = `data: {"text":"a","output_ids":[1],"meta_info":{"id":"x","finish_reason":null,"prompt_tokens":3,"completion_tokens":1,"cached_tokens":0}}
|data: {"text":"ab","output_ids":[1,2],"meta_info":{"id":"x","finish_reason":{"type":"length","length":2},"prompt_tokens":3,"completion_tokens":2,"cached_tokens":0}}
`
	for name, row := range map[string]struct {
		form   Form
		events []string
	}{
		"chat":        {Chunks, []string{chat("null"), chat("null"), chat(`"stop"`)}},
		"a response":  {Responses, []string{created, delta, completed}},
		"a message":   {Messages, []string{messageStart, blockStart, blockDelta, ping, messageDelta, messageStop}},
		"generate":    {Generated, strings.Split(strings.ReplaceAll(generated, "}}\n", "}}\n\n"), "|")},
		"passed on":   {Verbatim, []string{"data: {\"text\":\"a\"}\n\n", "data: {\"text\":\"b\"}\n\n"}},
		"line by CRs": {Chunks, []string{strings.ReplaceAll(chat("null"), "\n", "\r\n"), strings.ReplaceAll(chat(`"stop"`), "\n", "\r\n")}},
	} {
		for between, kept := range map[string]string{
			": ping\n\n": ": ping\n", ": ping\r\n\r\n": ": ping\n", ":\n\n": ":\n", "\n": "", ": a\n: b\n\n\n": ": a\n: b\n", "event: ping\n: c\nretry: 9\n\n": ": c\n",
		} {
			for _, pieces := range []int{1, 7, 1 << 20} {
				out, _, a := feed(strings.Join(row.events, between), row.form, Options{Cached: OwnCached, Choice: -1}, pieces)
				plain, _, _ := feed(strings.Join(row.events, ""), row.form, Options{Cached: OwnCached, Choice: -1}, pieces)
				n, err := dispatches(out)
				require.NoError(t, err, "%s, %q: %q", name, between, out)
				want, err := dispatches(plain)
				require.NoError(t, err)
				require.Equal(t, want, n, "%s, %q: %q", name, between, out)
				isKept := kept == "" || strings.Contains(out, kept+"data: ") || strings.Contains(out, kept+"event: ")
				require.True(t, isKept, "%s, %q: %q", name, between, out)
				require.Equal(t, plain, strings.ReplaceAll(out, "\n"+kept, "\n"), "nothing else differs")
				require.NoError(t, a.Err())
			}
		}
		silence := string(Silence(row.form))
		_, err := dispatches(silence + silence + row.events[0] + silence + row.events[len(row.events)-1])
		require.NoError(t, err, name)
	}
}
