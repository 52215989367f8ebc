package sse

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func follow(t *testing.T, a Options, datas ...string) (out string, m *Filter) {
	t.Helper()
	f := NewFramer(0)
	m = NewFilter(a)
	for _, data := range datas {
		f.Feed([]byte("data: " + data + "\n\n"))
		e, ok := f.Next()
		require.True(t, ok)
		b, end := m.Event(e, nil)
		require.NotEqual(t, Refused, end)
		out += string(b)
	}
	return out, m
}

func TestATrailHoldsWhatTheClientHas(t *testing.T) {
	trail := Transcript{KeepText: true}
	_, m := follow(t, Options{Choice: -1, Transcript: &trail},
		`{"id":"a","created":7,"model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":""}}],"prompt_token_ids":[1,2,3]}`,
		`{"id":"a","created":7,"model":"m","choices":[{"index":0,"delta":{"content":"h\u00e9\ud83d\ude80é\n"},"token_ids":[4,5]}]}`,
		`{"id":"a","created":7,"model":"m","choices":[{"index":0,"delta":{"content":""},"token_ids":[6]}]}`)
	require.Equal(t, []int32{4, 5, 6}, trail.IDs)
	require.Equal(t, 2, trail.Shown, "the last token has no text yet")
	require.Equal(t, `h\u00e9\ud83d\ude80é\n`, string(trail.Text))
	require.Equal(t, 5, trail.Runes)
	require.Equal(t, 3, trail.Prompt)
	require.Equal(t, `"a"`, string(trail.Head.ID))
	require.True(t, trail.Exact())
	require.False(t, trail.MoreThan)
	require.Equal(t, 3, m.Tokens())
	trail.Cut()
	require.Equal(t, []int32{4, 5}, trail.IDs)
	require.True(t, trail.Exact())
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
			var trail Transcript
			follow(t, Options{Choice: -1, Transcript: &trail}, tc.data)
			require.Equal(t, tc.exact, trail.Exact())
			require.Equal(t, tc.moreThan, trail.MoreThan)
		})
	}
}

func TestASeamCannotBeSeen(t *testing.T) {
	seam := &Continuation{Head: Head{ID: []byte(`"a"`), Created: []byte(`7`), Model: []byte(`"m"`)}, Prompt: 3, Tokens: 2, Runes: 10}
	ask := Options{Choice: -1, Usage: true, ContinuousUsage: true, TokenIDs: true, Cached: 1, Continuation: seam}
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
			out, _ := follow(t, ask, tc.in)
			require.Equal(t, tc.out, out)
		})
	}
}

// Only one choice is asked for. The trail has the text of one choice, so an answer with another choice cannot go on.
func TestATrailOfSeveralChoicesMissesSome(t *testing.T) {
	trail := Transcript{KeepText: true}
	one := `{"index":0,"delta":{"content":"x"},"token_ids":[1]}`
	follow(t, Options{Choice: -1, Transcript: &trail}, `{"choices":[`+one+`]}`)
	require.False(t, trail.Unread)
	follow(t, Options{Choice: -1, Transcript: &trail}, `{"choices":[`+one+`,{"index":1,"delta":{"content":"y"},"token_ids":[2]}]}`)
	require.True(t, trail.Unread)
}

// The head of the first engine's events is written into each event of the next engine, so a head of megabytes would be written thousands of
// times. An answer with such a head cannot go on.
func TestAHeadThatIsTooLongIsNotKept(t *testing.T) {
	for _, key := range []string{"id", "model", "system_fingerprint", "created"} {
		for length, kept := range map[int]bool{1000: true, maxHead: false} {
			var trail Transcript
			head := fmt.Sprintf(`{"id":"a",%q:%q,`, key, strings.Repeat("x", length))
			follow(t, Options{Choice: -1, Transcript: &trail}, head+`"choices":[{"index":0,"text":"x","token_ids":[1]}]}`)
			require.Equal(t, kept, trail.Head.ID != nil, key)
			require.Equal(t, []int32{1}, trail.IDs)
		}
	}
	for length, kept := range map[int]bool{1000: true, maxHead: false} {
		var trail Transcript
		event := `{"output_ids":[1],"meta_info":{"id":"` + strings.Repeat("x", length) + `","completion_tokens":1}}`
		relayed(t, []string{event}, nil, &trail)
		require.Equal(t, kept, trail.Head.ID != nil)
	}
}

func TestATrailWithRoomDoesNotAllocate(t *testing.T) {
	trail := Transcript{IDs: make([]int32, 0, 1<<16)}
	m := NewFilter(Options{Choice: -1, Transcript: &trail})
	f := NewFramer(0)
	event := []byte(`data: {"id":"a","created":7,"model":"m","choices":[{"index":0,"text":" word","token_ids":[123456]}]}` + "\n\n")
	dst := make([]byte, 0, 1<<10)
	next := func() {
		f.Feed(event)
		e, _ := f.Next()
		m.Event(e, dst)
	}
	next() // the head
	require.Zero(t, testing.AllocsPerRun(1000, next))
	require.Greater(t, len(trail.IDs), 1000)
}
