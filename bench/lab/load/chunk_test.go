package load

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/internal/rawjson"
)

func TestScanKeepsWhatTheChecksNeed(t *testing.T) {
	var c chunk
	require.NoError(t, c.scan([]byte(` {"id":"x","object":"o","skip":[1,-2.5e+3,{"a":[true,false,null]}],"choices":[{"index":0,"delta":{"role":"assistant","content":"a\n\"\u00e9\ud83d\udea2\ud83d\/"},`+
		`"finish_reason":"length","stop_reason":"recomputed"},{"index":7,"text":"other"}],"usage":{"prompt_tokens":3,"completion_tokens":4,"total_tokens":7,"prompt_tokens_details":{"cached_tokens":1}}} `)))
	require.Equal(t, "x", string(c.id))
	require.Equal(t, "a\n\"é🚢\ufffd/", string(c.text))
	require.Equal(t, []any{2, 0, "length", "recomputed"}, []any{c.choices, c.index, string(c.finish), string(c.stopReason)})
	require.Equal(t, usage{3, 4, 7}, c.usage)
	require.True(t, c.hasUsage)
	require.False(t, c.failed)

	require.NoError(t, c.scan([]byte(`{"choices":[],"usage":null,"error":null}`)))
	require.Zero(t, c.choices)
	require.False(t, c.hasUsage || c.failed, "null is absent")
	require.Nil(t, c.finish)

	require.NoError(t, c.scan([]byte(`{"error":"plain words"}`)))
	require.True(t, c.failed)
	require.Equal(t, "plain words", string(c.message))
}

func TestScanRefusesWhatIsNoChunk(t *testing.T) {
	for _, s := range []string{
		``, `[]`, `null`, `{`, `{"a"}`, `{"a":}`, `{"a":1,}`, `{"a":01}`, `{"a":1.}`, `{"a":+1}`, `{"a":nul}`, `{a:1}`, `{"a":1}{}`, `{"a":NaN}`,
		"{\"a\":\"\n\"}", `{"a":"\x"}`, `{"a":"\u12g4"}`, "{\"a\":\"\xff\"}", `{"a":"`, `{"a":[1 2]}`,
		`{"choices":{}}`, `{"choices":[1]}`, `{"choices":[{"text":5}]}`, `{"choices":[{"index":"0"}]}`, `{"choices":[{"index":-1}]}`,
		`{"choices":[{"delta":{"content":[]}}]}`, `{"usage":[]}`, `{"usage":{"prompt_tokens":1.5}}`, `{"id":7}`,
		`{"a":` + strings.Repeat("[", 100) + strings.Repeat("]", 100) + `}`,
	} {
		var c chunk
		require.Error(t, c.scan([]byte(s)), s)
	}
}

func TestScanReadsWhatGoWrites(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		text, id := rapid.String().Draw(t, "text"), rapid.String().Draw(t, "id")
		text, id = strings.ToValidUTF8(text, ""), strings.ToValidUTF8(id, "")
		doc := map[string]any{
			"id": id, "other": rapid.MapOf(rapid.String(), rapid.Float64Range(-1e300, 1e300)).Draw(t, "other"),
			"choices": []any{map[string]any{"index": rapid.IntRange(0, 9).Draw(t, "index"), "text": text}},
		}
		var raw bytes.Buffer
		enc := json.NewEncoder(&raw)
		enc.SetEscapeHTML(rapid.Bool().Draw(t, "escape"))
		if rapid.Bool().Draw(t, "indent") {
			enc.SetIndent(" ", "\t")
		}
		require.NoError(t, enc.Encode(doc))
		var c chunk
		require.NoError(t, c.scan(raw.Bytes()))
		require.Equal(t, text, string(c.text))
		require.Equal(t, id, string(c.id))
	})
}

func FuzzScan(f *testing.F) {
	f.Add([]byte(`{"id":"x","choices":[{"index":0,"delta":{"content":"a\u00e9"},"finish_reason":null}],"usage":{"prompt_tokens":3}}`))
	f.Add([]byte(`{"error":{"message":"m","code":500}}`))
	f.Add([]byte(`{"a":[1,-0.5e-3,true,null,"\ud83d\udea2"]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		var c chunk
		if c.scan(data) == nil && !json.Valid(data) {
			t.Fatalf("scan(%q) takes what is no JSON", data)
		}
		var text string
		if err := json.Unmarshal(data, &text); err == nil && utf8.Valid(data) {
			require.NoError(t, c.scan([]byte(`{"id":`+string(data)+`}`)))
			if string(c.id) != text {
				t.Fatalf("text(%q) = %q, encoding/json says %q", data, c.id, text)
			}
		}
	})
}

func TestAScanErrorSaysWhere(t *testing.T) {
	var c chunk
	err := c.scan([]byte(`{"a":1,"b":x}`))
	var at *rawjson.SyntaxError
	require.True(t, errors.As(err, &at))
	require.Equal(t, 11, at.Offset)
}
