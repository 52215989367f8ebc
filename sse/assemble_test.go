package sse

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestAssemblerPutsAnAnswerTogether(t *testing.T) {
	for _, tt := range []struct {
		name   string
		chat   bool
		events []string
		want   string
	}{
		{"content is joined as written, half a surrogate with its other half", true,
			[]string{`{"choices":[{"index":0,"delta":{"content":"a\ud83d"}}]}`, `{"choices":[{"index":0,"delta":{"content":"\ude00\/"}}]}`},
			`{"object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"a\ud83d\ude00\/"},"finish_reason":null}]}`},
		{"both names of reasoning, refusal and unknown strings are joined; other unknowns take the last", true,
			[]string{`{"choices":[{"delta":{"role":"assistant","content":null,"reasoning":"a","reasoning_content":"c","refusal":"e","new":"x","n":1}}]}`,
				`{"choices":[{"delta":{"role":"tool","content":null,"reasoning":"b","reasoning_content":"d","refusal":"f","new":"y","n":2}}]}`},
			`{"object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":null,"reasoning":"ab","reasoning_content":"cd","refusal":"ef","new":"xy","n":2},"finish_reason":null}]}`},
		{"tool calls go by index: id, type and name from the first, arguments joined", true,
			[]string{`{"choices":[{"delta":{"content":"","tool_calls":[{"index":1,"id":"c2","type":"function","function":{"name":"g","arguments":""}}]}}]}`,
				`{"choices":[{"delta":{"tool_calls":[{"index":0,"id":"c1","function":{"name":"f"}},{"index":1,"id":"other","function":{"name":null,"arguments":"{\"a\""}}]}}]}`,
				`{"choices":[{"delta":{"tool_calls":[{"index":1,"id":null,"function":{"arguments":":1}"}}]},"finish_reason":"tool_calls"}]}`},
			`{"object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":null,"tool_calls":[{"id":"c1","type":"function","function":{"name":"f","arguments":""}},{"id":"c2","type":"function","function":{"name":"g","arguments":"{\"a\":1}"}}]},"finish_reason":"tool_calls"}]}`},
		{"the older function_call is joined too", true,
			[]string{`{"choices":[{"delta":{"function_call":{"name":"f","arguments":"{"}}}]}`, `{"choices":[{"delta":{"function_call":{"arguments":"}"}}}]}`},
			`{"object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":null,"function_call":{"name":"f","arguments":"{}"}},"finish_reason":null}]}`},
		{"no content at all is an empty text", true,
			[]string{`{"choices":[{"delta":{"role":"assistant"},"finish_reason":"stop"}]}`},
			`{"object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":""},"finish_reason":"stop"}]}`},
		{"chat logprobs are joined, null pieces skipped", true,
			[]string{`{"choices":[{"delta":{"content":"a"},"logprobs":{"content":[{"t":1.50}],"refusal":null}}]}`, `{"choices":[{"delta":{"content":"b"},"logprobs":null}]}`, `{"choices":[{"delta":{"content":"c"},"logprobs":{"content":[{"t":2},{"t":3}],"refusal":null}}]}`},
			`{"object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"abc"},"logprobs":{"content":[{"t":1.50},{"t":2},{"t":3}],"refusal":null},"finish_reason":null}]}`},
		{"token ids are joined, empty lists and white space included; prompt ids come once", false,
			[]string{`{"choices":[{"text":"a","token_ids":[ ],"prompt_token_ids":[1]}]}`, `{"choices":[{"text":"b","token_ids":[ 5 ],"prompt_token_ids":null}]}`, `{"choices":[{"text":"","token_ids":[]}]}`, `{"choices":[{"text":"c","token_ids":[6,7]}]}`},
			`{"object":"text_completion","choices":[{"index":0,"text":"abc","finish_reason":null,"token_ids":[ 5 ,6,7],"prompt_token_ids":[1]}]}`},
		{"lists and objects that nobody knows are put together, in the delta, the choice and the answer", true,
			[]string{`{"choices":[{"delta":{"notes":[1],"seen":[7],"part":{"a":1}},"experts":["x"],"same":{"b":1}}],"ext":{"routed":"q"},"rows":[null]}`,
				`{"choices":[{"delta":{"notes":[2,3],"seen":[7],"part":{"a":2,"b":3}},"experts":["y"],"same":{"b":1}}],"ext":{"spec":[4]},"rows":[{"1":2}]}`,
				`{"choices":[{"delta":{"notes":null},"experts":null}],"ext":null,"rows":null}`},
			`{"object":"chat.completion","ext":{"routed":"q","spec":[4]},"rows":[null,{"1":2}],"choices":[{"index":0,"message":{"role":"assistant","content":null,"notes":[1,2,3],"seen":[7],"part":{"a":2,"b":3}},"finish_reason":null,"experts":["x","y"],"same":{"b":1}}]}`},
		{"choices come by index, each with its own end", false,
			[]string{`{"choices":[{"index":1,"text":"b"},{"index":0,"text":"a"}]}`, `{"choices":[{"index":0,"text":"a","finish_reason":"stop","stop_reason":"x"}]}`, `{"choices":[{"index":1,"text":"b","finish_reason":"length","stop_reason":null}]}`},
			`{"object":"text_completion","choices":[{"index":0,"text":"aa","finish_reason":"stop","stop_reason":"x"},{"index":1,"text":"bb","finish_reason":"length","stop_reason":null}]}`},
		{"the first id, created, model and unknown stay; the last usage that is not null", false,
			[]string{`{"system_fingerprint":null,"model":"m","created":1,"id":"a","object":"x","service_tier":"t","choices":[],"usage":{"a":1.0}}`, `{"id":"b","created":2,"model":"n","system_fingerprint":"fp","choices":[],"usage":null}`},
			`{"id":"a","object":"text_completion","system_fingerprint":"fp","model":"m","created":1,"service_tier":"t","choices":[],"usage":{"a":1.0}}`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a := NewAssembler(tt.chat, 0)
			require.NoError(t, a.Add([]byte(": keep-alive\n\n")))
			for i, data := range tt.events {
				if i%2 == 0 { // framed and bare are the same
					data = "data: " + data + "\n\n"
				}
				require.NoError(t, a.Add([]byte(data)))
			}
			require.NoError(t, a.Add([]byte(Done)))
			require.NoError(t, a.Add(nil))
			got, err := a.JSON([]byte("x"))
			require.NoError(t, err)
			require.Equal(t, "x"+tt.want, string(got))
			require.True(t, json.Valid(got[1:]))
		})
	}
}

func TestAssemblerRefusesWhatIsNoAnswer(t *testing.T) {
	for _, data := range []string{"data: x\n\n", `{"choices":[{]}`, `{"choices":{}}`, `{"choices":[1]}`, `{"a"`, `{"choices":[{"delta":[]}]}`, `{"choices":[{"delta":{"tool_calls":{}}}]}`, `{"choices":[{"delta":{"tool_calls":[1]}}]}`, `{"choices":[{"logprobs":1}]}`} {
		require.ErrorContains(t, NewAssembler(true, 0).Add([]byte(data)), "not a JSON object with choices", "%s", data)
	}
	_, err := NewAssembler(true, 0).JSON(nil)
	require.ErrorIs(t, err, ErrNoAnswer)
}

// A client could not parse an answer whose parts are not JSON, although their brackets are right.
func TestAnAnswerThatIsNotJSONIsNone(t *testing.T) {
	for _, data := range []string{
		`{"choices":[{"delta":{"content":"a\x"}}]}`, "{\"choices\":[{\"delta\":{\"content\":\"a\nb\"}}]}", `{"choices":[],"more":nothing}`,
		`{"choices":[{"logprobs":{"content":[,]}}]}`, `{"choices":[],"usage":{"prompt_tokens":007}}`,
	} {
		a := NewAssembler(true, 0)
		require.NoError(t, a.Add([]byte(`{"choices":[{"delta":{"content":"x"}}]}`)), data)
		require.NoError(t, a.Add([]byte(data)), data)
		_, err := a.JSON([]byte("before"))
		require.ErrorContains(t, err, "not JSON", data)
	}
}

func TestMergeAnswersOfAFanOut(t *testing.T) {
	one := func(text, usage string) []byte {
		return []byte(`{"id":"a","created":1.0,"choices":[{"index":0,"text":"` + text + `","x":1e400}],"usage":` + usage + `}`)
	}
	for _, tt := range []struct {
		name  string
		parts []Part
		want  string
	}{
		{"n=2: the prompt is counted once",
			[]Part{{one("a", `{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7,"prompt_tokens_details":{"cached_tokens":4}}`), 0},
				{one("b", `{"prompt_tokens":5,"completion_tokens":3,"total_tokens":8,"prompt_tokens_details":{"cached_tokens":5}}`), 0}},
			`{"id":"a","created":1.0,"choices":[{"index":0,"text":"a","x":1e400},{"index":1,"text":"b","x":1e400}],"usage":{"prompt_tokens":5,"total_tokens":10,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":4}}}`},
		{"two prompts are both counted, details that are null are not",
			[]Part{{one("a", `{"prompt_tokens":5,"completion_tokens":2,"completion_tokens_details":{"reasoning_tokens":1}}`), 0},
				{one("b", `{"prompt_tokens":6,"completion_tokens":3,"prompt_tokens_details":null,"completion_tokens_details":{"reasoning_tokens":2,"audio_tokens":null}}`), 1}},
			`{"id":"a","created":1.0,"choices":[{"index":0,"text":"a","x":1e400},{"index":1,"text":"b","x":1e400}],"usage":{"prompt_tokens":11,"total_tokens":16,"completion_tokens":5,"completion_tokens_details":{"reasoning_tokens":3}}}`},
		{"details that are no counts are left out, as a newer engine may have them",
			[]Part{{one("a", `{"prompt_tokens":5,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4,"multimodal_tokens":{"image":3}},"completion_tokens_details":{"share":0.5,"tier":"x"}}`), 0}},
			`{"id":"a","created":1.0,"choices":[{"index":0,"text":"a","x":1e400}],"usage":{"prompt_tokens":5,"total_tokens":7,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}}`},
		{"details of another shape too",
			[]Part{{one("a", `{"prompt_tokens":5,"completion_tokens":2,"prompt_tokens_details":[1]}`), 0}},
			`{"id":"a","created":1.0,"choices":[{"index":0,"text":"a","x":1e400}],"usage":{"prompt_tokens":5,"total_tokens":7,"completion_tokens":2}}`},
		{"metrics are of one answer",
			[]Part{{[]byte(`{"metrics":{"t":1},"choices":[{}]}`), 0}, {[]byte(`{"metrics":{"t":2},"choices":[{}]}`), 0}}, `{"choices":[{"index":0},{"index":1}]}`},
		{"and stay where there is one", []Part{{[]byte(`{"metrics":{"t":1},"choices":[{}]}`), 0}}, `{"metrics":{"t":1},"choices":[{"index":0}]}`},
		{"no usage, no sum", []Part{{[]byte(`{"choices":[{},{"index":7}],"usage":null}`), 0}, {[]byte(`{"choices":[]}`), 0}}, `{"choices":[{"index":0},{"index":1}]}`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := MergeAnswers(tt.parts)
			require.NoError(t, err)
			require.Equal(t, tt.want, string(got))
		})
	}
	for _, bad := range []string{``, `[]`, `{}`, `{"choices":1}`, `{"choices":[1]}`, `{"choices":[{]}`, `{"choices":[],"usage":{"prompt_tokens":"x"}}`} {
		_, err := MergeAnswers([]Part{{JSON: []byte(`{"choices":[]}`)}, {JSON: []byte(bad)}})
		require.ErrorContains(t, err, "part 1", "%s", bad)
	}
	_, err := MergeAnswers(nil)
	require.Error(t, err)
}

func TestAnAnswerIsPutTogetherUpToALimit(t *testing.T) {
	const data = `{"choices":[{"index":0,"text":"0123456789"}]}`
	a := NewAssembler(false, 3*len(data))
	for range 3 {
		require.NoError(t, a.Add([]byte(data)))
	}
	require.ErrorIs(t, a.Add([]byte(data)), ErrTooLarge)
}

// Each member is looked for among the others, so there may not be any number.
func TestAnAnswerOfManyMembersIsNone(t *testing.T) {
	many := func(format string) string {
		var b strings.Builder
		for i := range 4 * maxMembers {
			if i > 0 {
				b.WriteByte(',')
			}
			fmt.Fprintf(&b, format, i)
		}
		return b.String()
	}
	for name, data := range map[string]string{
		"top":        `{"choices":[],` + many(`"k%d":0`) + `}`,
		"choices":    `{"choices":[` + many(`{"index":%d}`) + `]}`,
		"a choice":   `{"choices":[{` + many(`"k%d":0`) + `}]}`,
		"a message":  `{"choices":[{"delta":{` + many(`"k%d":0`) + `}}]}`,
		"tool calls": `{"choices":[{"delta":{"tool_calls":[` + many(`{"index":%d}`) + `]}}]}`,
		"a call":     `{"choices":[{"delta":{"tool_calls":[{` + many(`"k%d":0`) + `}]}}]}`,
		"logprobs":   `{"choices":[{"logprobs":{` + many(`"k%d":0`) + `}}]}`,
	} {
		require.Error(t, NewAssembler(true, 0).Add([]byte(data)), name)
	}
}
