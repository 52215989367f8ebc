package index

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/mooncake"
)

// rendered is what a body's prompt is hashed as: blocks so small that the
// buffer itself is the text.
func rendered(t require.TestingT, body string) (string, Text) {
	b, err := mooncake.ScanBody([]byte(body), 0)
	require.NoError(t, err)
	var h Hasher
	text := func() Text {
		if p, ok := b.Get("prompt"); ok {
			return h.Prompt(nil, Key{}, p)
		}
		messages, _ := b.Get("messages")
		tools, _ := b.Get("tools")
		return h.Chat(nil, Key{}, messages, tools)
	}()
	require.Less(t, text.Bytes, BlockBytes, "too long for this test")
	return string(h.buf[parentKeyBytes:h.filled]), text
}

func TestRendering(t *testing.T) {
	for _, row := range []struct{ name, body, want string }{
		{"role, name, call id, content, calls", `{"messages":[{"role":"user","content":"hi"}]}`, "user|||hi|"},
		{"the order of members does not matter", `{"messages":[{"content":"hi","role":"user"}]}`, "user|||hi|"},
		{"a list of texts reads as the text it is joined to", `{"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"text":"b","type":"text"}]}]}`, "user|||a\nb|"},
		{"strings are written as they read", `{"messages":[{"role":"user","content":"\u00e9\/\n\t\"\\ \ud83d\ude00"}]}`, "user|||é/\n\t\"\\ 😀|"},
		{"half a surrogate is no character", `{"messages":[{"role":"user","content":"\ud83dx\ude00\ud83d\ud83d"}]}`, "user|||\ufffdx\ufffd\ufffd\ufffd|"},
		{"tools stand first, without white space", `{"tools":[ {"type" : "function","function":{"name":"f \"x\""}} ],"messages":[]}`, `{"type":"function","function":{"name":"f \"x\""}}|`},
		{"calls and their answers", `{"messages":[{"role":"assistant","content":null,"tool_calls":[ {"id":"c1"} ]},{"role":"tool","tool_call_id":"c1","content":"42"}]}`, `assistant|||[{"id":"c1"}]|tool||c1|42|`},
		{"names", `{"messages":[{"role":"user","name":"bo","content":"x"}]}`, "user|bo||x|"},
		{"reasoning of earlier turns is no part of it", `{"messages":[{"role":"assistant","reasoning_content":"hm","content":"x"}]}`, "assistant|||x|"},
		{"a completion's prompt is its text", `{"prompt":"once \"upon\"\n"}`, "once \"upon\"\n"},
		{"a list of prompts has none", `{"prompt":["a","b"]}`, ""},
		{"token ids have none", `{"prompt":[1,2]}`, ""},
		{"odd values are left out", `{"messages":[7,{"role":3,"content":{"a":1}},{"role":"user","content":[]}],"tools":{}}`, "||||" + "||||" + "user||||"},
	} {
		got, text := rendered(t, row.body)
		require.Equal(t, row.want, strings.ReplaceAll(got, string(separator), "|"), row.name)
		require.Equal(t, len(got), text.Bytes, row.name)
		require.False(t, text.Media, row.name)
	}
}

func TestMediaIsNamedByItsContent(t *testing.T) {
	picture := func(url string) string {
		return fmt.Sprintf(`{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":%q}},{"type":"text","text":"?"}]}]}`, url)
	}
	long := "data:image/png;base64," + strings.Repeat("iVBOR", 2000)
	a, text := rendered(t, picture(long))
	again, _ := rendered(t, picture(long))
	other, _ := rendered(t, picture(long[:len(long)-1]+"x"))
	require.True(t, text.Media)
	require.Equal(t, a, again)
	require.NotEqual(t, a, other)
	require.Less(t, text.Bytes, 32, "a picture's bytes are not its tokens")
}

func TestPromptTokens(t *testing.T) {
	for _, row := range []struct {
		name, prompt string
		ids          []int32
		ok           bool
	}{
		{"a list of ids", `[1, 2,30000]`, []int32{1, 2, 30000}, true},
		{"an empty list is no prompt", `[]`, nil, false},
		{"text", `"a"`, nil, false},
		{"a list of texts", `["a"]`, nil, false},
		{"a list of lists", `[[1],[2]]`, nil, false},
		{"what is no id", `[1,-2]`, nil, false},
		{"fractions", `[1.5]`, nil, false},
		{"nothing", ``, nil, false},
	} {
		ids, ok := PromptTokens(nil, json.RawMessage(row.prompt))
		require.Equal(t, row.ok, ok, row.name)
		require.Equal(t, row.ids, ids, row.name)
	}
}

// A conversation's next turn begins with this one's bytes, however the client
// writes its JSON.
func TestATurnBeginsWithTheTurnBefore(t *testing.T) {
	anyText := rapid.OneOf(rapid.String(), rapid.StringMatching(`[a-z \n"\\]{0,400}`))
	anyContent := rapid.Custom(func(t *rapid.T) any {
		switch rapid.IntRange(0, 3).Draw(t, "kind") {
		case 0:
			return nil
		case 1:
			return []any{map[string]any{"type": "text", "text": anyText.Draw(t, "part")},
				map[string]any{"type": "image_url", "image_url": map[string]any{"url": anyText.Draw(t, "url")}}}
		}
		return anyText.Draw(t, "content")
	})
	anyMessage := rapid.Custom(func(t *rapid.T) map[string]any {
		m := map[string]any{"role": rapid.SampledFrom([]string{"system", "user", "assistant", "tool"}).Draw(t, "role"),
			"content": anyContent.Draw(t, "content")}
		if rapid.Bool().Draw(t, "calls") {
			m["tool_calls"] = []any{map[string]any{"id": anyText.Draw(t, "id"),
				"function": map[string]any{"arguments": anyText.Draw(t, "arguments")}}}
		}
		return m
	})
	var h Hasher
	rapid.Check(t, func(t *rapid.T) {
		messages := rapid.SliceOfN(anyMessage, 1, 12).Draw(t, "messages")
		tools := []any{map[string]any{"type": "function", "function": map[string]any{"name": anyText.Draw(t, "tool")}}}
		var before Text
		for turn := 1; turn <= len(messages); turn++ {
			body := map[string]any{"messages": messages[:turn], "tools": tools}
			raw, err := json.Marshal(body)
			require.NoError(t, err)
			if turn%2 == 0 {
				var indented bytes.Buffer
				require.NoError(t, json.Indent(&indented, raw, "", "\t"))
				raw = indented.Bytes()
			}
			b, err := mooncake.ScanBody(raw, 0)
			require.NoError(t, err)
			m, _ := b.Get("messages")
			tl, _ := b.Get("tools")
			if turn%2 == 0 && bytes.Contains(m, []byte(`image_url`)) {
				return // media is named by its text
			}
			text := h.Chat(nil, Key{1, 2}, m, tl)
			require.Len(t, text.Keys, text.Bytes/BlockBytes)
			require.Greater(t, text.Bytes, before.Bytes)
			for i, k := range before.Keys {
				require.Equal(t, k, text.Keys[i], "turn %d", turn)
			}
			before = text
		}
	})
}

func FuzzRender(f *testing.F) {
	f.Add([]byte(`{"messages":[{"role":"user","content":"\ud83d\ude00"}],"tools":[{"a":"\\"}],"prompt":[1,2]}`))
	f.Add([]byte(`{"messages":[{"role":"user","content":[{"type":"text","text":"\u00e9"},{"type":"image_url"}],"tool_calls":[[]]}],"prompt":"\\\""}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		b, err := mooncake.ScanBody(body, 0)
		if err != nil {
			return
		}
		var h Hasher
		messages, _ := b.Get("messages")
		tools, _ := b.Get("tools")
		prompt, _ := b.Get("prompt")
		one, two := h.Chat(nil, Key{}, messages, tools), h.Chat(nil, Key{}, messages, tools)
		require.Equal(t, one, two)
		require.Len(t, one.Keys, one.Bytes/BlockBytes)
		text := h.Prompt(nil, Key{}, prompt)
		var want string
		if json.Unmarshal(prompt, &want) == nil && len(want) < BlockBytes && len(prompt) > 0 && prompt[0] == '"' {
			require.Equal(t, want, string(h.buf[parentKeyBytes:h.filled]))
		}
		require.Len(t, text.Keys, text.Bytes/BlockBytes)
		PromptTokens(nil, prompt)
	})
}
