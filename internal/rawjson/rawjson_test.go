package rawjson

import (
	"encoding/json"
	"errors"
	"go/build"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

func TestImportsArePure(t *testing.T) { // a scan that can reach the network or the clock is no longer a scan
	pkg, err := build.ImportDir(".", 0)
	require.NoError(t, err)
	pure := []string{"bytes", "encoding/binary", "encoding/json", "fmt", "iter", "math/bits", "unicode/utf16", "unicode/utf8"}
	require.Subset(t, pure, pkg.Imports, "let the caller do it and pass the value in")
}

func TestScanRefusesAtTheMemberItIsToldTo(t *testing.T) {
	var keys []string
	_, err := Scan([]byte(` {"a":1, "b":[2]}`), 0, func(at Place) string {
		keys = append(keys, ` {"a":1, "b":[2]}`[at.Key:at.ValEnd])
		if len(keys) == 2 {
			return "one is enough"
		}
		return ""
	})
	require.EqualError(t, err, "invalid JSON at byte 9: one is enough")
	require.Equal(t, []string{`"a":1`, `"b":[2]`}, keys)
}

func TestTheWalkEndsWhereTheStructureDoes(t *testing.T) {
	for _, text := range []string{``, `{`, `{"a"`, `{"a":`, `{"a":}`, `{"a":1`, `{"a":1 "b":2}`, `{a:1}`, `{"a":[1}`, `{"a":"x`} {
		o := ObjectAt([]byte(text), 0)
		for o.Next() {
			o.Pos = ValueEnd(o.Text, o.Val)
		}
		require.Equal(t, -1, o.Pos, text)
		for range Members(json.RawMessage(text)) {
			require.NotEmpty(t, text)
		}
	}
}

func TestTheWalkAllocatesNothing(t *testing.T) {
	text := []byte(`{"model":"m","messages":[{"role":"user","content":"a \"b\" c"},{"role":"user","content":[1,2,{"x":null}]}]}`)
	require.Zero(t, testing.AllocsPerRun(100, func() {
		if _, err := Scan(text, 0, nil); err != nil {
			t.Fail()
		}
		for _, value := range Members(text) {
			for message := range Elements(value) {
				for range Members(message) { //nolint:revive // what is counted is what the walk allocates
				}
			}
		}
	}))
}

func FuzzCheck(f *testing.F) {
	f.Add([]byte(`{"id":"x","choices":[{"index":0,"delta":{"content":"a\u00e9"},"finish_reason":null}],"usage":{"prompt_tokens":3}}`))
	f.Add([]byte(`[1,-0.5e-3,true,null,"\ud83d\udea2"]`))
	f.Add([]byte(`1,"b":[{}]`))
	f.Fuzz(func(t *testing.T, data []byte) {
		text := []byte(`{"a":` + string(data) + `}`)
		_, err := Scan(text, 0, nil)
		var syntax *SyntaxError
		if errors.As(err, &syntax) && strings.HasPrefix(syntax.Msg, "nested") {
			return
		}
		if valid := json.Valid(text) && utf8.Valid(text); valid != (err == nil) {
			t.Fatalf("Scan(%q) = %v, encoding/json says %v", text, err, valid)
		}
		if err == nil {
			require.Equal(t, len(text), ValueEnd(text, 0))
		}
	})
}

func FuzzUnquote(f *testing.F) {
	for _, s := range []string{`plain`, `a\n\"é🚢\ud83d\udea2\ud83d\/`, `\udea2\ud83d`, `\\\\`, `\u00E9\b\f\r\t`, `\0`, `a\`, `\u12`, `\ud83d\u`} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, inside string) {
		quoted := []byte(`"` + inside + `"`)
		_ = Unquote(quoted) // it need not be valid
		var want string
		if json.Unmarshal(quoted, &want) != nil || !utf8.Valid(quoted) {
			return
		}
		require.Equal(t, want, Unquote(quoted))
		require.Equal(t, want, Key(quoted[1:len(quoted)-1]))
		require.Equal(t, want, Unquote(AppendString(nil, want)))
	})
}

// The text of an engine may be no JSON: an escape that JSON does not have becomes U+FFFD, and never
// another character.
func TestEscapesThatJSONDoesNotHave(t *testing.T) {
	for escaped, text := range map[string]string{
		`\u00e4\u00E4`: "ää", `\ud83d\ude00`: "😀", `\ud83dx`: "\ufffdx",
		`\uZZZZ`: "\ufffdZZZZ", `\u00g1`: "\ufffd00g1", `\u00`: "\ufffd00",
		`\x`: "\ufffd", `a\`: "a\ufffd", `\ud83d\uZZZZ`: "\ufffd\ufffdZZZZ",
	} {
		require.Equal(t, text, string(AppendUnescaped(nil, []byte(escaped))), escaped)
	}
}
