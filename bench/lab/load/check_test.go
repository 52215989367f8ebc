package load

import (
	"slices"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/bench/lab/reftext"
	"evenkeel/sse"
)

// stream is a right answer as bytes, an event a token.
func stream(answer uint64, tokens int) (events [][]byte) {
	for i := range tokens {
		e := append([]byte(`data: {"id":"cmpl-7f3c","object":"text_completion","created":1790000000,"model":"ref","choices":[{"index":0,"text":"`),
			reftext.AppendTokenJSON(nil, reftext.TokenID(answer, i))...)
		e = append(e, `","logprobs":null,"finish_reason":`...)
		if i == tokens-1 {
			e = append(e, `"length"`...)
		} else {
			e = append(e, `null`...)
		}
		events = append(events, append(e, "}]}\n\n"...))
	}
	usage := `data: {"id":"cmpl-7f3c","choices":[],"usage":{"prompt_tokens":5,"completion_tokens":` + strconv.Itoa(tokens) + `,"total_tokens":` + strconv.Itoa(tokens+5) + `}}` + "\n\n"
	return append(events, []byte(usage), []byte(sse.Done))
}

func judge(want expected, events [][]byte) *fault {
	var f follower
	f.reset(want)
	framer := sse.NewFramer(0)
	framer.Feed(slices.Concat(events...))
	for e, ok := framer.Next(); ok; e, ok = framer.Next() {
		if fault := f.event(e); fault != nil {
			return fault
		}
	}
	return f.end()
}

func TestNoChangeOfAStreamGoesUnseen(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(2, 20).Draw(t, "tokens")
		want := expected{check: CheckText, answer: rapid.Uint64().Draw(t, "answer"), promptTokens: 5, tokens: n, usage: true}
		good := stream(want.answer, n)
		require.Nil(t, judge(want, good))
		i := rapid.IntRange(0, n-1).Draw(t, "at")
		for name, bad := range map[string][][]byte{
			"an event lost":    slices.Delete(slices.Clone(good), i, i+1),
			"an event twice":   slices.Insert(slices.Clone(good), i, good[i]),
			"cut after it":     good[:i+1],
			"usage lost":       slices.Delete(slices.Clone(good), n, n+1),
			"end lost":         good[:n+1],
			"another's answer": stream(want.answer+1, n),
			"one too few":      stream(want.answer, n-1),
			"one too many":     stream(want.answer, n+1),
		} {
			require.NotNil(t, judge(want, bad), name)
		}
	})
}

func TestAFollowerIsCleanAfterReset(t *testing.T) {
	var f follower
	for answer := range uint64(3) {
		f.reset(expected{check: CheckText, answer: answer, promptTokens: 5, tokens: 4, usage: true})
		framer := sse.NewFramer(0)
		framer.Feed(slices.Concat(stream(answer, 4)...))
		for e, ok := framer.Next(); ok; e, ok = framer.Next() {
			require.Nil(t, f.event(e))
		}
		require.Nil(t, f.end())
		require.Equal(t, 4, f.tokens())
	}
}

// BenchmarkCheck is the checking path: framing, scanning and comparing.
func BenchmarkCheck(b *testing.B) {
	const tokens = 256
	bytes := slices.Concat(stream(1, tokens)...)
	want := expected{check: CheckText, answer: 1, promptTokens: 5, tokens: tokens, usage: true}
	var f follower
	framer := sse.NewFramer(0)
	b.ReportAllocs()
	events := 0
	for b.Loop() {
		f.reset(want)
		framer.Reset()
		for rest := bytes; len(rest) > 0; rest = rest[min(len(rest), 400):] {
			framer.Feed(rest[:min(len(rest), 400)])
			for e, ok := framer.Next(); ok; e, ok = framer.Next() {
				if fault := f.event(e); fault != nil {
					b.Fatal(fault)
				}
				events++
			}
		}
	}
	b.ReportMetric(float64(events)/b.Elapsed().Seconds(), "events/s")
}
