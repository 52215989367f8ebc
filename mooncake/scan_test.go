package mooncake

import (
	"bytes"
	"encoding/json"
	"errors"
	"go/build"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"evenkeel/internal/rawjson"
)

func TestImportsArePure(t *testing.T) { // bodies that can reach the network or the clock cannot be reasoned about
	pkg, err := build.ImportDir(".", 0)
	require.NoError(t, err)
	pure := []string{
		"bytes", "crypto/sha256", "encoding/hex", "encoding/json", "errors", "evenkeel/internal/rawjson", "evenkeel/internal/spelling", "fmt",
		"iter", "math", "net/netip", "slices", "strconv",
		"strings", "sync/atomic", "time", "unicode/utf8",
	}
	require.Subset(t, pure, pkg.Imports, "let the caller do it and pass the value in")
}

func nested(levels int) string {
	return `{"a":` + strings.Repeat("[", levels-1) + strings.Repeat("]", levels-1) + `}`
}

func TestScanBody(t *testing.T) {
	for _, tc := range []struct {
		name, raw string
		err       string // "" accepts
	}{
		{"an empty object", `{}`, ""},
		{"white space anywhere", " \n{ \"a\" :\t[ 1 , 2 ] , \"b\" : { } }\r\n", ""},
		{"numbers that no float holds", `{"a":1e400,"b":12345678901234567890123,"c":-0,"d":0.5E-07}`, ""},
		{"every escape", `{"a":"\"\\\/\b\f\n\r\t\u00e9\uD83D\uDE00"}`, ""},
		{"text beyond ASCII", `{"a":"héllo 世界 🙂"}`, ""},
		{"a control character that JSON allows", "{\"a\":\"\x7f\"}", ""},
		{"64 levels", nested(64), ""},
		{"65 levels", nested(65), "byte 68: nested deeper than 64 levels"},
		{"nothing", ``, "byte 0: the text ends where '{' should be"},
		{"an array", `[1]`, "byte 0: '[' where '{' should be"},
		{"a byte order mark", "\ufeff{}", "byte 0: 'ï' where '{' should be"},
		{"a second value", `{} {}`, "byte 3: more text after the closing '}'"},
		{"a missing end", `{"a":1`, "byte 6: the text ends where ',' or '}' should be"},
		{"a comma before the end", `{"a":1,}`, "byte 7: '}' where a key in double quotes should be"},
		{"a comma before the end of a list", `{"a":[1,]}`, "byte 8: ']' where a value should be"},
		{"a key without quotes", `{a:1}`, "byte 1: 'a' where a key in double quotes should be"},
		{"a key without a value", `{"a"}`, "byte 4: '}' where ':' should be"},
		{"brackets that do not match", `{"a":[1}`, "byte 7: '}' where ',' or ']' should be"},
		{"NaN, which Python's json reads", `{"a":NaN}`, "byte 5: NaN and Infinity are not JSON"},
		{"Infinity", `{"a":Infinity}`, "byte 5: NaN and Infinity are not JSON"},
		{"-Infinity", `{"a":-Infinity}`, "byte 6: NaN and Infinity are not JSON"},
		{"a word cut short", `{"a":tru}`, "byte 5: a word that JSON does not have; only true, false and null"},
		{"a leading zero", `{"a":01}`, "byte 5: a number with a leading zero"},
		{"a lonely minus", `{"a":-}`, "byte 6: '}' where a digit should be"},
		{"a point without digits", `{"a":1.}`, "byte 7: '}' where a digit should be"},
		{"an exponent without digits", `{"a":1e+}`, "byte 8: '}' where a digit should be"},
		{"a plus sign", `{"a":+1}`, "byte 5: '+' where a value should be"},
		{"a newline in a string", "{\"a\":\"x\ny\"}", "byte 7: control character 0x0a in a string; write it as \\u000a"},
		{"an unknown escape", `{"a":"\x41"}`, "byte 6: an escape that JSON does not have"},
		{"half an escape", `{"a":"\u12g4"}`, "byte 6: \\u without four hexadecimal digits"},
		{"an open string", `{"a":"x`, "byte 7: the text ends inside a string"},
		{"a string that ends in a backslash", `{"a":"x\`, "byte 7: the text ends inside a string"},
		{"a byte that is not UTF-8", "{\"a\":\"0123456789\xff\"}", "byte 16: a string is not valid UTF-8"},
		{"a surrogate in UTF-8", "{\"a\":\"\xed\xa0\x80\"}", "byte 6: a string is not valid UTF-8"},
		{"half a rune at the end", "{\"a\":\"\xe4\xb8\"}", "byte 6: a string is not valid UTF-8"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b, err := ScanBody([]byte(tc.raw), 0)
			if tc.err == "" {
				require.NoError(t, err)
				require.Equal(t, tc.raw, string(b.Raw()))
				return
			}
			var syntax *rawjson.SyntaxError
			require.ErrorAs(t, err, &syntax)
			require.Equal(t, "invalid JSON at "+tc.err, err.Error())
		})
	}
}

func TestScanBodyFindsWhatIsSpecialAtEveryOffset(t *testing.T) { // strings are read eight bytes at a time
	for before := range 20 {
		for after := range 20 {
			pad, rest := strings.Repeat("p", before), strings.Repeat("r", after)
			for _, ok := range []string{`\"`, `\\`, "é", "世", "\x7f", "!"} {
				_, err := ScanBody([]byte(`{"k":"`+pad+ok+rest+`","n":[]}`), 0)
				require.NoError(t, err, "%q after %d bytes, before %d", ok, before, after)
			}
			for _, bad := range []string{"\x00", "\x1f", "\n", "\x80", "\xff", `\q`, "\xc3"} {
				_, err := ScanBody([]byte(`{"k":"`+pad+bad+rest+`","n":[]}`), 0)
				var syntax *rawjson.SyntaxError
				require.ErrorAs(t, err, &syntax, "%q after %d bytes, before %d", bad, before, after)
				require.Equal(t, 6+before, syntax.Offset)
			}
		}
	}
}

func TestScanBodyBoundsTheMembersItRemembers(t *testing.T) {
	many := func(n int) []byte { return []byte("{" + strings.Repeat(`"":0,`, n-1) + `"":0}`) }
	_, err := ScanBody(many(maxMembers), 0)
	require.NoError(t, err)
	_, err = ScanBody(many(maxMembers+1), 0)
	require.ErrorContains(t, err, "more than 1024 keys")
}

func TestTheDepthLimitIsTheCallers(t *testing.T) {
	_, err := ScanBody([]byte(nested(3)), 2)
	require.ErrorContains(t, err, "nested deeper than 2 levels")
	_, err = ScanBody([]byte(nested(100)), 100)
	require.NoError(t, err)
}

// depth counts levels with encoding/json's tokens, independent of the scanner.
func depth(raw []byte) int {
	dec, level, most := json.NewDecoder(bytes.NewReader(raw)), 0, 0
	for {
		tok, err := dec.Token()
		if err != nil {
			return most
		}
		if d, ok := tok.(json.Delim); ok {
			if d == '{' || d == '[' {
				level++
			} else {
				level--
			}
			most = max(most, level)
		}
	}
}

func seeds(f *testing.F) {
	for _, s := range []string{
		`{}`, `{"a":1}`, ` { "a" : [ true , null , {"b":-1.5e+3} ] , "str\u0065am" : false } `, `{"a":"\ud800\\\"","a":2}`,
		`{"a":"` + strings.Repeat("x", 30) + `é世🙂"}`, `{"a":tru}`, `{"a":"\x"}`, `{"a":[1,2}}`, `{"a":01}`, "{\"a\":\"\xff\"}", nested(66),
		`{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true,"stream_options":{"include_usage":true},"max_tokens":5}`,
	} {
		f.Add([]byte(s))
	}
}

func FuzzScanBody(f *testing.F) {
	seeds(f)
	f.Fuzz(func(t *testing.T, raw []byte) {
		b, err := ScanBody(raw, 0)
		trimmed := bytes.TrimLeft(raw, " \t\r\n")
		want := json.Valid(raw) && bytes.HasPrefix(trimmed, []byte("{")) && utf8.Valid(raw) && depth(raw) <= rawjson.DefaultMaxDepth
		if want && errors.As(err, new(*rawjson.SyntaxError)) && strings.Contains(err.Error(), "keys") {
			return // the bound on members, which is ours
		}
		if (err == nil) != want {
			t.Fatalf("ScanBody(%q) = %v; encoding/json and the extras say %v", raw, err, want)
		}
		if err != nil {
			return
		}
		last := map[string]json.RawMessage{}
		require.NoError(t, json.Unmarshal(raw, &last))
		for key, value := range last {
			got, ok := b.Get(key)
			require.True(t, ok, "key %q", key)
			require.Equal(t, string(value), string(got))
			require.Positive(t, b.Count(key))
		}
		walk(t, b.Raw()[len(raw)-len(trimmed):b.closing+1])
	})
}

// walk checks that Elements and Members see what encoding/json sees, all the way down.
func walk(t *testing.T, v json.RawMessage) {
	switch v[0] {
	case '[':
		var want []json.RawMessage
		require.NoError(t, json.Unmarshal(v, &want))
		i := 0
		for e := range rawjson.Elements(v) {
			require.Equal(t, string(want[i]), string(e))
			walk(t, e)
			i++
		}
		require.Equal(t, len(want), i)
	case '{':
		want, got := map[string]json.RawMessage{}, map[string]string{}
		require.NoError(t, json.Unmarshal(v, &want))
		for key, e := range rawjson.Members(v) {
			got[key] = string(e)
			walk(t, e)
		}
		require.Len(t, got, len(want))
		for key := range want {
			require.Equal(t, string(want[key]), got[key])
		}
	default:
		for range rawjson.Elements(v) {
			t.Fatalf("%s has elements", v)
		}
		for range rawjson.Members(v) {
			t.Fatalf("%s has members", v)
		}
	}
}
