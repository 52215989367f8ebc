package reftext

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestPromptsThatMustDiffer(t *testing.T) {
	const base = `{"messages":[{"role":"user","content":"one two three"}]}`
	for _, row := range []struct{ name, body string }{
		{"another word", `{"messages":[{"role":"user","content":"one two four"}]}`},
		{"another space", `{"messages":[{"role":"user","content":"one two  three"}]}`},
		{"a space at the end", `{"messages":[{"role":"user","content":"one two three "}]}`},
		{"another role", `{"messages":[{"role":"system","content":"one two three"}]}`},
		{"a name", `{"messages":[{"role":"user","name":"x","content":"one two three"}]}`},
		{"two messages", `{"messages":[{"role":"user","content":"one two"},{"role":"user","content":"three"}]}`},
		{"an empty message at the end", `{"messages":[{"role":"user","content":"one two three"},{"role":"user","content":""}]}`},
		{"tools", `{"messages":[{"role":"user","content":"one two three"}],"tools":[]}`},
		{"template arguments", `{"messages":[{"role":"user","content":"one two three"}],"chat_template_kwargs":{"a":1}}`},
		{"an image", `{"messages":[{"role":"user","content":[{"type":"text","text":"one two three"},{"type":"image_url","image_url":{"url":"data:"}}]}]}`},
		{"a tool call", `{"messages":[{"role":"user","content":"one two three"},{"role":"assistant","content":null,"tool_calls":[{"id":"1"}]}]}`},
	} {
		t.Run(row.name, func(t *testing.T) {
			want, err := Render(true, []byte(base))
			require.NoError(t, err)
			got, err := Render(true, []byte(row.body))
			require.NoError(t, err)
			require.NotEqual(t, want.Key, got.Key)
			require.Equal(t, 3, got.Tokens(), "marks must not change the length")
		})
	}
}

func TestPromptsThatMustAgree(t *testing.T) {
	a, err := Render(true, []byte(`{"messages":[{"role":"user","content":"one two three"}],"tools":null,"max_tokens":4,"stream":true}`))
	require.NoError(t, err)
	require.Equal(t, OfUser("one two three"), a)
	b, err := Render(false, []byte(`{"prompt":"one two","prompt":"one two three"}`))
	require.NoError(t, err)
	require.Equal(t, Of("one two three"), b, "the last of two keys wins")
	ids, err := json.Marshal(b.IDs)
	require.NoError(t, err)
	c, err := Render(false, fmt.Appendf(nil, `{"prompt":%s}`, ids))
	require.NoError(t, err)
	require.Equal(t, b, c, "text and its ids")
}

func TestASeedChangesTheAnswerOnly(t *testing.T) {
	a, err := Render(false, []byte(`{"prompt":"x y","seed":7}`))
	require.NoError(t, err)
	require.Equal(t, Of("x y").Key, a.Key)
	require.NotEqual(t, Of("x y").Answer, a.Answer)
}

func TestBadPromptsSayWhy(t *testing.T) {
	for body, want := range map[string]string{
		`{}`:                             "messages: missing",
		`{"messages":[]}`:                "messages: empty list",
		`{"messages":7}`:                 "messages: not a list of objects",
		`{"messages":[{"content":"x"}]}`: "messages[0]: role",
		`{"messages":[{"role":"user","content":[{"type":"text"}]}]}`: "messages[0]: content",
		`{"messages":[{"role":"user"}],"seed":1.5}`:                  "seed",
		`{"Messages":[{"role":"user"}]}`:                             "messages: missing",
	} {
		_, err := Render(true, []byte(body))
		require.ErrorContains(t, err, want, body)
	}
	for body, want := range map[string]string{
		`{"prompt":["a","b"]}`:  "one by one",
		`{"prompt":[]}`:         "empty",
		`{"prompt":[-1]}`:       "out of vocabulary",
		`{"prompt":[99999999]}`: "out of vocabulary",
		`{"prompt":{}}`:         "not a string",
		`{"prompt":"\ud8`:       "body",
	} {
		_, err := Render(false, []byte(body))
		require.ErrorContains(t, err, want, body)
	}
}

func TestAnAnswerCutAnywhereIsTheSameAnswer(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		key, n := rapid.Uint64().Draw(t, "key"), rapid.IntRange(1, 60).Draw(t, "tokens")
		text := Text(key, n)
		require.True(t, utf8.ValidString(text))
		c := NewChecker(key)
		for rest := text; rest != ""; {
			k := rapid.IntRange(1, len(rest)).Draw(t, "piece")
			require.NoError(t, c.Feed(rest[:k]))
			rest = rest[k:]
		}
		require.Equal(t, n, c.Tokens())
		require.False(t, c.Partial())

		from := rapid.IntRange(0, n-1).Draw(t, "from")
		got, err := Check(key, from, text[len(Text(key, from)):])
		require.NoError(t, err)
		require.Equal(t, n-from, got)
	})
}

func TestWrongTextIsFound(t *testing.T) {
	text := Text(1, 5)
	n, err := Check(2, 0, text)
	require.Error(t, err)
	require.Zero(t, n)
	n, err = Check(1, 0, text[:len(text)-1])
	require.ErrorContains(t, err, "inside token 4")
	require.Equal(t, 4, n)
	_, err = Check(1, 1, text)
	require.Error(t, err, "a lost or doubled token moves the rest")
}

func TestAnAnswerIsResumedFromItsTokens(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		seed, n := rapid.Uint64().Draw(t, "seed"), rapid.IntRange(1, 30).Draw(t, "done")
		text := MakePrompt(seed, rapid.IntRange(1, 40).Draw(t, "tokens"))
		p := OfUser(text)
		ids := append([]int32(nil), p.IDs...)
		for i := range n {
			ids = append(ids, TokenID(p.Answer, i))
		}
		got := OfIDs(ids, nil)
		require.Equal(t, p.Answer, got.Answer)
		require.Equal(t, n, got.Resumed)
		require.NotEqual(t, p.Key, got.Key)

		body, err := json.Marshal(map[string]any{"continue_final_message": true, "add_generation_prompt": false, "messages": []any{
			map[string]any{"role": "user", "content": text}, map[string]any{"role": "assistant", "content": Text(p.Answer, n)}}})
		require.NoError(t, err)
		continued, err := Render(true, body)
		require.NoError(t, err)
		require.Equal(t, got, continued, "as ids and as an assistant message")

		ids[len(ids)-1] = FirstAnswerID + (ids[len(ids)-1]-FirstAnswerID+1)%answerWords
		require.Zero(t, OfIDs(ids, nil).Resumed, "one wrong token: a prompt like any other")
	})
}

func TestMakePromptHasTheTokensAskedFor(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		seed, n := rapid.Uint64().Draw(t, "seed"), rapid.IntRange(1, 3000).Draw(t, "tokens")
		text := MakePrompt(seed, n)
		require.Equal(t, n, Of(text).Tokens())
		require.Equal(t, n, len(strings.Fields(text)))
		require.NotEqual(t, Of(text).Key, Of(MakePrompt(seed+1, n)).Key)
		both := AppendPrompt([]byte(text), 3, n)
		require.Equal(t, 2*n, Of(string(both)).Tokens())
		require.Equal(t, Of(text).IDs, Of(string(both)).IDs[:n], "a common beginning has common ids")
	})
}

func TestTokensInsideJSON(t *testing.T) {
	var got struct{ Text string }
	require.NoError(t, json.Unmarshal([]byte(ToolArguments(9, 200)), &got))
	require.Equal(t, Text(9, 200), got.Text)
}

func TestNaturalLengthsSpread(t *testing.T) {
	low, high := 1000, 0
	for key := range uint64(5000) {
		n := NaturalLength(key)
		low, high = min(low, n), max(high, n)
	}
	require.Equal(t, []int{8, 200}, []int{low, high})
}

func FuzzRender(f *testing.F) {
	f.Add(true, []byte(`{"messages":[{"role":"user","content":"a b"}],"tools":[{}]}`))
	f.Add(false, []byte(`{"prompt":[1,2,1048577]}`))
	f.Add(false, []byte(`{"prompt":" a\n\nb ","seed":-3}`))
	f.Fuzz(func(t *testing.T, chat bool, body []byte) {
		p, err := Render(chat, body)
		if err == nil && (p.Tokens() == 0 || p.Resumed >= p.Tokens()) {
			t.Fatalf("Render(%v, %q) = %+v", chat, body, p)
		}
	})
}

func TestACompletionThatEndsWithItsAnswer(t *testing.T) {
	prompt := MakePrompt(3, 50)
	of := Of(prompt)
	for n := 1; n < 8; n++ {
		got, err := Render(false, fmt.Appendf(nil, `{"prompt":%q}`, prompt+Text(of.Answer, n)))
		require.NoError(t, err)
		require.Equal(t, n, got.Resumed)
		require.Equal(t, of.Answer, got.Answer)
		require.Equal(t, of.Tokens()+n, got.Tokens())
	}
}

func BenchmarkMakePrompt(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		MakePrompt(1, 2000)
	}
}

func BenchmarkRenderText(b *testing.B) {
	text := MakePrompt(1, 2000)
	b.SetBytes(int64(len(text)))
	for b.Loop() {
		Of(text)
	}
}

func BenchmarkCheckToken(b *testing.B) {
	c := NewChecker(5)
	word := make([]byte, 0, 40)
	for b.Loop() {
		word = AppendToken(word[:0], TokenID(5, c.Tokens()))
		_ = c.Feed(string(word))
	}
}
