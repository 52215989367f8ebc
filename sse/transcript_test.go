package sse

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func follow(t *testing.T, o Options, datas ...string) (out string, filter *Filter) {
	t.Helper()
	f := NewFramer(0)
	filter = NewFilter(o)
	for _, data := range datas {
		f.Feed([]byte("data: " + data + "\n\n"))
		e, ok := f.Next()
		require.True(t, ok)
		b, end := filter.Event(e, nil)
		require.NotEqual(t, Refused, end)
		out += string(b)
	}
	return out, filter
}

func TestATrailHoldsWhatTheClientHas(t *testing.T) {
	transcript := Transcript{KeepText: true}
	_, f := follow(t, Options{Choice: -1, Transcript: &transcript},
		`{"id":"a","created":7,"model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":""}}],"prompt_token_ids":[1,2,3]}`,
		`{"id":"a","created":7,"model":"m","choices":[{"index":0,"delta":{"content":"h\u00e9\ud83d\ude80é\n"},"token_ids":[4,5]}]}`,
		`{"id":"a","created":7,"model":"m","choices":[{"index":0,"delta":{"content":""},"token_ids":[6]}]}`)
	require.Equal(t, []int32{4, 5, 6}, transcript.IDs)
	require.Equal(t, 2, transcript.Shown, "the last token has no text yet")
	require.Equal(t, `h\u00e9\ud83d\ude80é\n`, string(transcript.Text))
	require.Equal(t, 5, transcript.Runes)
	require.Equal(t, 3, transcript.Prompt)
	require.Equal(t, `"a"`, string(transcript.Head.ID))
	require.True(t, transcript.Exact())
	require.False(t, transcript.MoreThan)
	require.Equal(t, 3, f.Tokens())
	transcript.Cut()
	require.Equal(t, []int32{4, 5}, transcript.IDs)
	require.True(t, transcript.Exact())
}

func TestATrailKnowsWhatItMisses(t *testing.T) {
	for _, tc := range []struct {
		name, data string
		exact      bool
		moreThan   bool
	}{
		{"more tokens than ids", `{"choices":[{"delta":{"content":"x"},"token_ids":[1]}],"usage":{"prompt_tokens":1,"completion_tokens":3}}`, false, false},
		{"an id that is too large", `{"choices":[{"delta":{"content":"x"},"token_ids":[4294967297]}]}`, false, false},
		{"no ids at all", `{"choices":[{"delta":{"content":"x"}}]}`, false, false},
		{"reasoning", `{"choices":[{"delta":{"reasoning":"x"},"token_ids":[1]}]}`, true, true},
		{"a tool call", `{"choices":[{"delta":{"tool_calls":[{"index":0}]},"token_ids":[1]}]}`, true, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var transcript Transcript
			follow(t, Options{Choice: -1, Transcript: &transcript}, tc.data)
			require.Equal(t, tc.exact, transcript.Exact())
			require.Equal(t, tc.moreThan, transcript.MoreThan)
		})
	}
}

func TestASeamCannotBeSeen(t *testing.T) {
	continuation := &Continuation{Head: Head{ID: []byte(`"a"`), Created: []byte(`7`), Model: []byte(`"m"`)}, Prompt: 3, Tokens: 2, Runes: 10}
	options := Options{Choice: -1, Usage: true, ContinuousUsage: true, TokenIDs: true, Cached: 1, Continuation: continuation}
	const head = `{"id":"b","created":9,"model":"n","system_fingerprint":"f",`
	const same = `data: {"id":"a","created":7,"model":"m",`
	for _, tc := range []struct{ name, in, out string }{
		{"a second role is dropped", head + `"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null}],"prompt_token_ids":[1,2,3,4,5]}`, ""},
		{"or taken out of an event with text", head + `"choices":[{"index":0,"delta":{"role":"assistant","content":"x"}}]}`, same + `"choices":[{"index":0,"delta":{"content":"x"}}]}` + "\n\n"},
		{"usage is that of both", head + `"choices":[{"index":0,"text":"x","token_ids":[6],"prompt_token_ids":[1,2,3,4,5]}],"usage":{"prompt_tokens":5,"total_tokens":6,"completion_tokens":1}}`,
			same + `"choices":[{"index":0,"text":"x","token_ids":[6]}],"usage":{"prompt_tokens":3,"total_tokens":6,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":1}}}` + "\n\n"},
		{"positions run on", head + `"choices":[{"text":"xy","logprobs":{"text_offset":[0,1],"tokens":["x","y"]}}]}`, same + `"choices":[{"text":"xy","logprobs":{"text_offset":[10,11],"tokens":["x","y"]}}]}` + "\n\n"},
		{"the final usage too", head + `"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":4}}`, same + `"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":6,"prompt_tokens_details":{"cached_tokens":1}}}` + "\n\n"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			out, _ := follow(t, options, tc.in)
			require.Equal(t, tc.out, out)
		})
	}
}

// Only one choice is asked for. The transcript has the text of one choice, so an answer with
// another choice cannot go on.
func TestATrailOfSeveralChoicesMissesSome(t *testing.T) {
	transcript := Transcript{KeepText: true}
	one := `{"index":0,"delta":{"content":"x"},"token_ids":[1]}`
	follow(t, Options{Choice: -1, Transcript: &transcript}, `{"choices":[`+one+`]}`)
	require.False(t, transcript.Unread)
	follow(t, Options{Choice: -1, Transcript: &transcript}, `{"choices":[`+one+`,{"index":1,"delta":{"content":"y"},"token_ids":[2]}]}`)
	require.True(t, transcript.Unread)
}

// The head of the first engine's events is written into each event of the next engine, so a head of
// megabytes would be written thousands of times. An answer with such a head cannot go on.
func TestAHeadThatIsTooLongIsNotKept(t *testing.T) {
	for _, key := range []string{"id", "model", "system_fingerprint", "created"} {
		for length, kept := range map[int]bool{1000: true, maxHead: false} {
			var transcript Transcript
			head := fmt.Sprintf(`{"id":"a",%q:%q,`, key, strings.Repeat("x", length))
			follow(t, Options{Choice: -1, Transcript: &transcript}, head+`"choices":[{"index":0,"text":"x","token_ids":[1]}]}`)
			require.Equal(t, kept, transcript.Head.ID != nil, key)
			require.Equal(t, []int32{1}, transcript.IDs)
		}
	}
	for length, kept := range map[int]bool{1000: true, maxHead: false} {
		var transcript Transcript
		event := `{"output_ids":[1],"meta_info":{"id":"` + strings.Repeat("x", length) + `","completion_tokens":1}}`
		relayed(t, []string{event}, nil, &transcript)
		require.Equal(t, kept, transcript.Head.ID != nil)
	}
}

func TestATrailWithRoomDoesNotAllocate(t *testing.T) {
	transcript := Transcript{IDs: make([]int32, 0, 1<<16)}
	filter := NewFilter(Options{Choice: -1, Transcript: &transcript})
	f := NewFramer(0)
	event := []byte(`data: {"id":"a","created":7,"model":"m","choices":[{"index":0,"text":" word","token_ids":[123456]}]}` + "\n\n")
	dst := make([]byte, 0, 1<<10)
	next := func() {
		f.Feed(event)
		e, _ := f.Next()
		filter.Event(e, dst)
	}
	next() // the head
	require.Zero(t, testing.AllocsPerRun(1000, next))
	require.Greater(t, len(transcript.IDs), 1000)
}
