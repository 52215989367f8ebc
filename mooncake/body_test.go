package mooncake

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func scan(t testing.TB, raw string) *Body {
	t.Helper()
	b, err := ScanBody([]byte(raw), 0)
	require.NoError(t, err)
	return &b
}

func join(segments [][]byte) string { return string(bytes.Join(segments, nil)) }

func TestKeysCompareAsTheEnginesCompareThem(t *testing.T) {
	b := scan(t, `{"stream":1,"Stream":2,"str\u0065am":3,"STREAM":4}`)
	v, ok := b.Get("stream")
	require.True(t, ok)
	require.Equal(t, "3", string(v), "the last one, whatever its spelling")
	require.Equal(t, 2, b.Count("stream"))
	v, _ = b.Get("Stream")
	require.Equal(t, "2", string(v))
	_, ok = b.Get("sTREAM")
	require.False(t, ok)
	var all []string
	for key, value := range b.All() {
		all = append(all, key+"="+string(value))
	}
	require.Equal(t, []string{"stream=1", "Stream=2", "stream=3", "STREAM=4"}, all)
}

func TestAValueCannotGrowIntoItsNeighbour(t *testing.T) {
	raw := `{"a":[1],"b":2}`
	b := scan(t, raw)
	v, _ := b.Get("a")
	_ = append(v, "XXXXX"...)
	require.Equal(t, raw, string(b.Raw()))
}

func TestSplice(t *testing.T) {
	drop := func(keys ...string) func(string) bool {
		return func(key string) bool {
			for _, k := range keys {
				if k == key {
					return true
				}
			}
			return false
		}
	}
	set := []Member{{"x", []byte("1")}, {"y", []byte(`{"z":2}`)}}
	for _, tc := range []struct {
		name, raw string
		drop      func(string) bool
		set       []Member
		want      string
	}{
		{"nothing to do keeps every byte", " {\"a\" : 1e400 ,\n\"b\":[ ] } \n", nil, nil, " {\"a\" : 1e400 ,\n\"b\":[ ] } \n"},
		{"the first goes", `{ "a":1, "b":2 }`, drop("a"), nil, `{ "b":2 }`},
		{"the last goes", `{"a":1 , "b":2 }`, drop("b"), nil, `{"a":1 }`},
		{"one in the middle goes", `{"a":1,"b":2, "c":3}`, drop("b"), nil, `{"a":1, "c":3}`},
		{"neighbours go", `{"a":1,"b":2,"c":3,"d":4}`, drop("b", "c"), nil, `{"a":1,"d":4}`},
		{"every second goes", `{"a":1,"b":2,"c":3,"d":4,"e":5}`, drop("a", "c", "e"), nil, `{"b":2,"d":4}`},
		{"all go", `{ "a":1 }`, drop("a"), nil, `{}`},
		{"ours come last", `{"a":1}`, nil, set, `{"a":1,"x":1,"y":{"z":2}}`},
		{"ours alone", `{ }`, nil, set, `{ "x":1,"y":{"z":2}}`},
		{"ours after all went", `{"a":1}`, drop("a"), set, `{"x":1,"y":{"z":2}}`},
		{"ours replace theirs", `{"x":9,"a":1,"y":8}`, nil, set, `{"a":1,"x":1,"y":{"z":2}}`},
		{"every spelling and every copy goes", `{"str\u0065am":1,"stream":2,"Stream":3,"stream":4}`, drop("stream"), nil, `{"Stream":3}`},
		{"text that looks like a key stays", `{"a":"\",\"stream\":true","stream":1}`, drop("stream"), nil, `{"a":"\",\"stream\":true"}`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b := scan(t, tc.raw)
			got := join(b.Splice(nil, tc.drop, tc.set))
			require.Equal(t, tc.want, got)
			require.True(t, json.Valid([]byte(got)))
			require.Equal(t, tc.raw, string(b.Raw()), "the client's text is not written to")
		})
	}
}

func TestSpliceDoesNotCopyLargeValues(t *testing.T) {
	large := []byte(`"` + strings.Repeat("k", 10_000) + `"`)
	segments := scan(t, `{"a":1}`).Splice(nil, nil, []Member{{"n", []byte("1")}, {"large", large}, {"m", []byte("2")}})
	require.Equal(t, `{"a":1,"n":1,"large":`+string(large)+`,"m":2}`, join(segments))
	shared := false
	for _, s := range segments {
		shared = shared || &s[0] == &large[0]
	}
	require.True(t, shared)
}

func TestSpliceAppendsToItsDestination(t *testing.T) {
	dst := [][]byte{[]byte("before ")}
	require.Equal(t, `before {"a":1}`, join(scan(t, `{"a":1}`).Splice(dst, nil, nil)))
}

func TestSpliceIsDroppingMembersFromAList(t *testing.T) { // against a model that joins the members' text
	space := rapid.SampledFrom([]string{"", " ", "\n\t", "  "})
	key := rapid.SampledFrom([]string{`"a"`, `"\u0061"`, `"b"`, `"stream"`, `"str\u0065am"`, `"Stream"`, `"x"`, `""`})
	value := rapid.SampledFrom([]string{`1`, `-0.0e+7`, `"}"`, `"\\"`, `{"a":[{}]}`, `[ ]`, `null`, `"a\",\"b"`, `123456789012345678901234567890`})
	rapid.Check(t, func(t *rapid.T) {
		head, tail := space.Draw(t, "head"), space.Draw(t, "tail")
		dropped := rapid.SliceOfDistinct(rapid.SampledFrom([]string{"a", "b", "stream", "Stream", ""}), rapid.ID[string]).Draw(t, "dropped")
		drop := func(key string) bool {
			for _, d := range dropped {
				if d == key {
					return true
				}
			}
			return false
		}
		var all, want []string
		for range rapid.IntRange(0, 8).Draw(t, "members") {
			k := key.Draw(t, "key")
			text := space.Draw(t, "s") + k + space.Draw(t, "s") + ":" + space.Draw(t, "s") + value.Draw(t, "value") + space.Draw(t, "s")
			all = append(all, text)
			var plain string
			require.NoError(t, json.Unmarshal([]byte(k), &plain))
			if !drop(plain) && plain != "x" {
				want = append(want, text)
			}
		}
		var set []Member
		if rapid.Bool().Draw(t, "set") {
			set = []Member{{"x", []byte("7")}}
			want = append(want, `"x":7`)
		} else {
			was := drop
			drop = func(key string) bool { return key == "x" || was(key) }
		}
		raw := head + "{" + strings.Join(all, ",") + "}" + tail
		b, err := ScanBody([]byte(raw), 0)
		require.NoError(t, err)
		require.Equal(t, head+"{"+strings.Join(want, ",")+"}"+tail, join(b.Splice(nil, drop, set)))
	})
}

func FuzzSplice(f *testing.F) {
	seeds(f)
	drop := func(key string) bool { return len(key) > 0 && (key[0] == 's' || key == "a") }
	set := []Member{{"stream", []byte("true")}, {"kv", []byte(`{"n":[[1]]}`)}}
	f.Fuzz(func(t *testing.T, raw []byte) {
		b, err := ScanBody(raw, 0)
		if err != nil {
			return
		}
		spliced := []byte(join(b.Splice(nil, drop, set)))
		require.True(t, json.Valid(spliced), "%q became %q", raw, spliced)
		after, err := ScanBody(spliced, 0)
		require.NoError(t, err)
		var want, got []string
		for key, v := range b.All() {
			if !drop(key) && key != "kv" {
				want = append(want, key+string(v))
			}
		}
		want = append(want, "stream"+"true", `kv{"n":[[1]]}`)
		for key, v := range after.All() {
			got = append(got, key+string(v))
		}
		require.Equal(t, want, got)
	})
}

// chatBody is a chat of about size bytes, with the habits of real clients:
// escapes, text beyond ASCII, odd numbers and white space.
func chatBody(size int) []byte {
	turn := `{"role": "user", "content": "Line one.\nShe said \"no\" \u2014 caf\u00e9, 世界, <b>tags</b> & C:\\path\\to\\file; the rest of the paragraph is plain text."}`
	var b strings.Builder
	b.WriteString(`{"model":"dsv3", "temperature":0.70, "stream":false,"messages":[`)
	for i := 0; b.Len() < size; i++ {
		if i > 0 {
			b.WriteString(", ")
		}
		b.WriteString(turn)
	}
	b.WriteString("],\n\"seed\":12345678901234567890123,\"stream_options\":{\"include_usage\":true},\"max_tokens\":512,\"Stream\":1e400}\n")
	return []byte(b.String())
}

// What may differ between the client's, the prefill's and the decode's body.
var ownKeys = map[string]bool{
	"stream": true, "stream_options": true, "max_tokens": true, "min_tokens": true, "seed": true,
	"return_token_ids": true, "kv_transfer_params": true,
}

func TestBothEnginesGetTheClientsBytes(t *testing.T) {
	raw := chatBody(400 << 10)
	b := scan(t, string(raw))
	p := Profile{}.WithDefaults()
	probe := join(p.ProbeBody(b, Chat, nil, nil, nil))
	decode := join(p.DecodeBody(b, Chat, nil, json.RawMessage(`{"do_remote_prefill":true}`), "", true, nil))
	theirs := func(raw string) string {
		return join(scan(t, raw).Splice(nil, func(key string) bool { return ownKeys[key] }, nil))
	}
	want := theirs(string(raw))
	require.Greater(t, len(want), 400<<10)
	require.True(t, want == theirs(probe), "the prefill's body differs in more than our keys")
	require.True(t, want == theirs(decode), "the decode's body differs in more than our keys")
	require.Contains(t, decode, `"seed":12345678901234567890123`)
}

func TestABodyIsSplicedWithoutCopyingIt(t *testing.T) {
	raw := chatBody(400 << 10)
	p := Profile{}.WithDefaults()
	kv := json.RawMessage(`{"do_remote_prefill":true,"remote_block_ids":[[1,2,3]]}`)
	dst := make([][]byte, 0, 32)
	allocs := testing.AllocsPerRun(20, func() {
		b, err := ScanBody(raw, 0)
		if err != nil {
			t.Fatal(err)
		}
		dst = p.DecodeBody(&b, Chat, nil, kv, "", true, p.ProbeBody(&b, Chat, nil, nil, dst[:0]))
	})
	require.LessOrEqual(t, allocs, 8.0)
}

func BenchmarkScanBody(b *testing.B) {
	for _, size := range []int{2 << 10, 400 << 10} {
		raw := chatBody(size)
		b.Run(fmt.Sprintf("%dKB", size>>10), func(b *testing.B) {
			b.ReportAllocs()
			b.SetBytes(int64(len(raw)))
			for b.Loop() {
				if _, err := ScanBody(raw, 0); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkSpliceRatio runs a splice and a full encoding/json round trip of the
// same body by turns; the splice must cost less than a fifth.
func BenchmarkSpliceRatio(b *testing.B) {
	raw := chatBody(400 << 10)
	p := Profile{}.WithDefaults()
	kv := json.RawMessage(`{"do_remote_prefill":true,"remote_block_ids":[[1,2,3]]}`)
	dst := make([][]byte, 0, 32)
	var splice, roundTrip float64
	for b.Loop() {
		start := b.Elapsed()
		body, err := ScanBody(raw, 0)
		if err != nil {
			b.Fatal(err)
		}
		dst = p.DecodeBody(&body, Chat, nil, kv, "", true, dst[:0])
		middle := b.Elapsed()
		var m map[string]any
		if err := json.Unmarshal(bytes.Replace(raw, []byte("1e400"), []byte("1e300"), 1), &m); err != nil {
			b.Fatal(err)
		}
		m["stream"], m["kv_transfer_params"] = true, kv
		if _, err := json.Marshal(m); err != nil {
			b.Fatal(err)
		}
		splice += (middle - start).Seconds()
		roundTrip += (b.Elapsed() - middle).Seconds()
	}
	ratio := splice / roundTrip
	b.ReportMetric(ratio, "splice/roundtrip")
	b.ReportMetric(1e6*splice/float64(b.N), "splice-µs/op")
	if ratio > 0.2 {
		b.Errorf("a splice costs %.2f of a round trip, more than a fifth", ratio)
	}
}
