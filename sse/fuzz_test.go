package sse

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/internal/rawjson"
)

func seeds(f *testing.F) [][]byte {
	files, err := filepath.Glob("testdata/streams/*.sse")
	require.NoError(f, err)
	var all [][]byte
	for _, file := range files {
		b, err := os.ReadFile(file)
		require.NoError(f, err)
		all = append(all, b)
	}
	return all
}

// FuzzFramer: no byte is lost or invented, and a cut changes nothing.
func FuzzFramer(f *testing.F) {
	for _, s := range seeds(f) {
		f.Add(s, uint16(len(s)/2), uint16(0))
	}
	f.Add([]byte("data: a\r\rdata: b\r\r\n\ndata: c\n\r\n"), uint16(8), uint16(9))
	f.Fuzz(func(t *testing.T, stream []byte, cut, limit uint16) {
		fr := NewFramer(int(limit))
		fr.Feed(stream)
		var raw []byte
		opaque := 0
		for e, ok := fr.Next(); ok; e, ok = fr.Next() {
			raw = append(raw, e.Raw...)
			if e.Kind == KindOpaque {
				opaque = len(raw)
			}
			require.NotEmpty(t, e.Raw)
		}
		require.True(t, bytes.HasPrefix(stream, raw))
		if opaque < len(raw) || opaque == 0 { // else Buffered counts pieces that are already out
			require.Equal(t, len(stream)-len(raw), fr.Buffered())
		}
		whole, left := replay(stream, nil, int(limit))
		split, splitLeft := replay(stream, []int{min(int(cut), len(stream))}, int(limit))
		require.Equal(t, whole, split)
		require.Equal(t, left, splitLeft)
	})
}

// FuzzMirror holds the edits against a plain reading of their rules over
// decoded JSON: the event stays valid, and nothing but our keys changes.
func FuzzMirror(f *testing.F) {
	for _, s := range seeds(f) {
		for _, e := range frames(f, string(s)) {
			f.Add(e.Data, uint8(0))
			f.Add(e.Data, uint8(0xff))
		}
	}
	f.Add([]byte(`{"usage":{"prompt_tokens_details":{"cached_tokens":1,"a":[]}},"choices":[{"token_ids":[[1],2]},3,null]}`), uint8(1))
	f.Fuzz(func(t *testing.T, data []byte, bits uint8) {
		options := Options{Usage: bits&1 > 0, ContinuousUsage: bits&2 > 0, TokenIDs: bits&4 > 0, Cached: -1, Choice: -1,
			DropFinalUsage: bits&8 > 0}
		if bits&16 > 0 {
			options.Cached = 77
		}
		if bits&32 > 0 {
			options.ID, options.Created, options.Choice = []byte(`a"b`), 12, 3
		}
		fr := NewFramer(0)
		fr.Feed(append(append([]byte("data: "), data...), "\n\n"...))
		e, ok := fr.Next()
		if !ok || e.Kind != KindData {
			return
		}
		out, end := NewFilter(options).Event(e, nil)
		a := NewAssembler(bits&64 > 0, 0)
		if a.Add(e.Data) == nil && json.Valid(e.Data) {
			if answer, err := a.JSON(nil); err == nil {
				require.True(t, json.Valid(answer), "%s", answer)
			}
		}
		var want map[string]any
		if out == nil || !json.Valid(e.Data) || !decode(e.Data, &want) || odd(e.Data) {
			return
		}
		back := NewFramer(0)
		back.Feed(out)
		got, ok := back.Next()
		require.True(t, ok)
		require.True(t, json.Valid(got.Data), "%s -> %s", e.Data, got.Data)
		if end == Refused && bytes.Equal(out, e.Raw) {
			return // an error event goes as it is
		}
		reference(want, options, end)
		var have map[string]any
		require.True(t, decode(got.Data, &have))
		require.Equal(t, want, have, "%s -> %s", e.Data, got.Data)
	})
}

func decode(b []byte, into *map[string]any) bool {
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	return d.Decode(into) == nil && *into != nil
}

// odd is JSON that no engine writes and that decoding would misrepresent: keys
// with escapes, and the same key twice in one object.
func odd(b []byte) bool {
	if bytes.Contains(b, []byte(`\`)) {
		return true
	}
	var walk func(i int) bool
	walk = func(i int) bool {
		switch b[i] {
		case '{':
			keys := map[string]bool{}
			for o := rawjson.ObjectAt(b, i); o.Next(); o.Pos = rawjson.ValueEnd(b, o.Val) {
				if keys[string(bytes.ToValidUTF8(o.Key, []byte("?")))] || walk(o.Val) {
					return true
				}
				keys[string(bytes.ToValidUTF8(o.Key, []byte("?")))] = true
			}
		case '[':
			for a := rawjson.ArrayAt(b, i); a.Next(); a.Pos = rawjson.ValueEnd(b, a.Val) {
				if walk(a.Val) {
					return true
				}
			}
		}
		return false
	}
	return walk(rawjson.Space(b, 0))
}

// counted tells whether a usage says how many tokens were generated.
func counted(usage map[string]any) bool {
	n, ok := usage["completion_tokens"].(json.Number)
	_, counts := rawjson.Int([]byte(n), 0, len(n))
	return ok && counts
}

// reference edits a decoded event in the obvious way.
func reference(event map[string]any, options Options, end End) {
	set := func(m map[string]any, key string, value any) {
		if _, ok := m[key]; ok {
			m[key] = value
		}
	}
	choices, listed := event["choices"].([]any)
	delete(event, "kv_transfer_params")
	if !options.TokenIDs {
		delete(event, "prompt_token_ids")
	}
	if options.ID != nil {
		set(event, "id", string(options.ID))
		set(event, "created", json.Number("12"))
	}
	final := listed && len(choices) == 0
	switch {
	case !options.Usage:
		delete(event, "usage")
	case !options.ContinuousUsage && !final:
		set(event, "usage", nil)
	}
	if usage, ok := event["usage"].(map[string]any); ok {
		if details, ok := usage["prompt_tokens_details"].(map[string]any); ok {
			if options.Cached >= 0 {
				set(details, "cached_tokens", json.Number("77"))
				if counted(usage) {
					details["cached_tokens"] = json.Number("77")
				}
			} else if _, ok := details["cached_tokens"]; ok {
				if delete(details, "cached_tokens"); len(details) == 0 {
					delete(usage, "prompt_tokens_details")
				}
			}
		}
	}
	if usage, ok := event["usage"].(map[string]any); ok && options.Cached >= 0 && counted(usage) {
		if details, there := usage["prompt_tokens_details"]; details == nil || !there {
			usage["prompt_tokens_details"] = map[string]any{"cached_tokens": json.Number("77")}
		}
	}
	for _, c := range choices {
		choice, ok := c.(map[string]any)
		if !ok {
			continue
		}
		delete(choice, "kv_transfer_params")
		if !options.TokenIDs {
			delete(choice, "token_ids")
			delete(choice, "prompt_token_ids")
		}
		if options.Choice >= 0 {
			set(choice, "index", json.Number("3"))
		}
		if end == Preempted {
			set(choice, "finish_reason", nil)
			set(choice, "stop_reason", nil)
		}
	}
}
