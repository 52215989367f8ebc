package sse

import (
	"bytes"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestFramerCutsAtBlankLines(t *testing.T) {
	type ev struct {
		kind Kind
		data string
		raw  string
	}
	for _, tt := range []struct {
		name   string
		stream string
		want   []ev
	}{
		{"LF", "data: a\n\ndata: b\n\n", []ev{{KindData, "a", "data: a\n\n"}, {KindData, "b", "data: b\n\n"}}},
		{"CRLF", "data: a\r\n\r\ndata: b\r\n\r\n", []ev{{KindData, "a", "data: a\r\n\r\n"}, {KindData, "b", "data: b\r\n\r\n"}}},
		{"a lone CR ends a line too, and the last event need not wait for more", "data: a\r\rdata: b\r\r", []ev{{KindData, "a", "data: a\r\r"}, {KindData, "b", "data: b\r\r"}}},
		{"line ends may be mixed", "data: a\n\r\ndata: b\r\n\ndata: c\r\n\rdata: d\n\n", []ev{{KindData, "a", "data: a\n\r\n"}, {KindData, "b", "data: b\r\n\n"}, {KindData, "c", "data: c\r\n\r"}, {KindData, "d", "data: d\n\n"}}},
		{"the space after the colon is optional, and only one is taken", "data:a\n\ndata:  b\n\n", []ev{{KindData, "a", "data:a\n\n"}, {KindData, " b", "data:  b\n\n"}}},
		{"several data lines are one text with newlines", "data: a\ndata: b\ndata:\ndata\n\n", []ev{{KindData, "a\nb\n\n", "data: a\ndata: b\ndata:\ndata\n\n"}}},
		{"other fields stand beside the data", "event: x\nid: 7\ndata: a\nretry: 9\n\n", []ev{{KindData, "a", "event: x\nid: 7\ndata: a\nretry: 9\n\n"}}},
		{"without a data line it is a comment", ": ping\n\nretry: 9\n\nevent: x\nid: 1\n\n", []ev{{KindComment, "", ": ping\n\n"}, {KindComment, "", "retry: 9\n\n"}, {KindComment, "", "event: x\nid: 1\n\n"}}},
		{"a comment may share the event", ": ping\ndata: a\n\n", []ev{{KindData, "a", ": ping\ndata: a\n\n"}}},
		{"a field whose name only starts with data is none", "database: a\n\n", []ev{{KindComment, "", "database: a\n\n"}}},
		{"blank lines too many lose no byte", "\n\ndata: a\n\n\n", []ev{{KindComment, "", "\n"}, {KindComment, "", "\n"}, {KindData, "a", "data: a\n\n"}, {KindComment, "", "\n"}}},
		{"[DONE] ends the stream", "data: [DONE]\n\ndata:[DONE] \n\n", []ev{{KindDone, "[DONE]", "data: [DONE]\n\n"}, {KindDone, "[DONE] ", "data:[DONE] \n\n"}}},
		{"a colon in the text is text", "data: {\"a\":\"data: x\"}\n\n", []ev{{KindData, `{"a":"data: x"}`, "data: {\"a\":\"data: x\"}\n\n"}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var got []ev
			for _, e := range frames(t, tt.stream) {
				got = append(got, ev{e.Kind, string(e.Data), string(e.Raw)})
			}
			require.Equal(t, tt.want, got)
		})
	}
}

func TestAnEventWithoutItsBlankLineIsCutOff(t *testing.T) {
	for _, tail := range []string{"data: b", "data: b\n", "data: b\r\n\r", "data: b\r", ": pi"} {
		f := NewFramer(0)
		f.Feed([]byte("data: a\n\n" + tail))
		e, ok := f.Next()
		require.True(t, ok)
		require.Equal(t, "a", string(e.Data))
		_, ok = f.Next()
		require.False(t, ok, "%q is no complete event", tail)
		require.Equal(t, len(tail), f.Buffered())
		f.Reset()
		require.Zero(t, f.Buffered())
	}
}

func TestEventsOfOneFeedStayValidTogether(t *testing.T) {
	var got []string
	events := frames(t, "data: a\ndata: b\n\ndata: c\ndata: d\n\n") // joined data has to live somewhere
	for _, e := range events {
		got = append(got, string(e.Data))
	}
	require.Equal(t, []string{"a\nb", "c\nd"}, got)
}

func TestAnOversizedEventPassesInPieces(t *testing.T) {
	const limit = 64
	big := "data: " + strings.Repeat("x", 200) + "\ndata: more\n\n"
	stream := "data: a\n\n" + big + "data: b\n\n"
	for _, chunk := range []int{1, 7, 64, 1000} {
		f := NewFramer(limit)
		var opaque, kinds []byte
		held := 0
		for rest := []byte(stream); len(rest) > 0; {
			n := min(chunk, len(rest))
			f.Feed(rest[:n])
			rest = rest[n:]
			for e, ok := f.Next(); ok; e, ok = f.Next() {
				kinds = append(kinds, "dcDo"[e.Kind])
				if e.Kind == KindOpaque {
					opaque = append(opaque, e.Raw...)
					require.Nil(t, e.Data)
				}
			}
			held = max(held, len(f.buf))
		}
		require.Equal(t, big, string(opaque), "chunks of %d", chunk)
		require.Equal(t, "dod", string(squeeze(kinds)), "chunks of %d", chunk)
		require.LessOrEqual(t, held, max(limit, chunk)+chunk, "an oversized event is not gathered")
		require.Zero(t, f.Buffered())
	}
}

func TestAnOversizedEventThatIsCutOffIsNoticed(t *testing.T) {
	f := NewFramer(10)
	f.Feed([]byte("data: 0123456789"))
	e, ok := f.Next()
	require.True(t, ok)
	require.Equal(t, KindOpaque, e.Kind)
	require.Positive(t, f.Buffered())
}

func TestABigBufferDoesNotStay(t *testing.T) {
	f := NewFramer(0)
	f.Feed(append(bytes.Repeat([]byte("data: x\n"), maxKeptBuffer), '\n'))
	_, ok := f.Next()
	require.True(t, ok)
	f.Feed([]byte("data: a\n\n"))
	require.Less(t, cap(f.buf), maxKeptBuffer)
}

// TestASplitChangesNothing: TCP may cut anywhere, a client must not see where.
func TestASplitChangesNothing(t *testing.T) {
	pieces := []string{
		"data: ", "data:", "data", ": c", "event: e", "\n", "\n\n", "\r\n", "\r\n\r\n", "\r", "é", "[DONE]", "x", strings.Repeat("y", 40),
		`{"id":"a","choices":[{"index":0,"delta":{"content":"hï"},"finish_reason":null,"token_ids":[1,2]}],"usage":{"completion_tokens":2}}`,
		`{"choices":[],"usage":{"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":1}}}`,
	}
	rapid.Check(t, func(t *rapid.T) {
		stream := []byte(strings.Join(rapid.SliceOf(rapid.SampledFrom(pieces)).Draw(t, "pieces"), ""))
		cuts := rapid.SliceOf(rapid.IntRange(0, len(stream))).Draw(t, "cuts")
		limit := rapid.SampledFrom([]int{0, 30, 200}).Draw(t, "limit")
		whole, wholeLeft := replay(stream, nil, limit)
		split, splitLeft := replay(stream, cuts, limit)
		require.Equal(t, whole, split)
		require.Equal(t, wholeLeft, splitLeft)
	})
}

// replay is what framer and filter make of a stream fed in the given cuts. The
// pieces of one oversized event, whose cuts are nobody's promise, are joined.
func replay(stream []byte, cuts []int, limit int) (log []string, left int) {
	cut := make([]bool, len(stream)+1)
	for _, c := range cuts {
		cut[c] = true
	}
	cut[len(stream)] = true
	f, filter := NewFramer(limit), NewFilter(nothing)
	opaque := ""
	for from, i := 0, 0; i <= len(stream); i++ {
		if !cut[i] {
			continue
		}
		f.Feed(stream[from:i])
		from = i
		for e, ok := f.Next(); ok; e, ok = f.Next() {
			out, end := filter.Event(e, nil)
			if e.Kind == KindOpaque {
				opaque += string(out)
				continue
			}
			log = append(log, opaque, string([]byte{'0' + byte(e.Kind), ' '})+string(e.Data)+" -> "+verdict(out, end)+" "+string(out))
			opaque = ""
		}
	}
	return append(log, opaque), f.Buffered()
}

func squeeze(b []byte) []byte {
	var out []byte
	for i, c := range b {
		if i == 0 || c != b[i-1] {
			out = append(out, c)
		}
	}
	return out
}
