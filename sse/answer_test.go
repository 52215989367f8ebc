package sse

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// answered drives an answer through arrivals that all come in the same memory, as from a socket,
// and says what the client got, how many tokens it has, and how it ended.
func answered(options Options, arrivals [][]byte) (client string, tokens int, end End) {
	var a Answer
	a.Reset(options)
	var dst, memory []byte
	for _, p := range arrivals {
		memory = append(memory[:0], p...)
		var fx Effects
		dst, fx = a.Feed(dst, memory, noon)
		if fx.Events > 0 {
			tokens = fx.Tokens
		}
		for i := range memory { // the next arrival overwrites it
			memory[i] = 'X'
		}
		if end == NotEnded {
			end = fx.End
		}
	}
	if end == NotEnded {
		end = a.Closed()
	}
	return string(dst), tokens, end
}

// However an answer is cut on its way, and although the memory that it came in is used again, the
// client gets the same bytes, and the same is told.
func TestAnAnswerIsTheSameHoweverItArrives(t *testing.T) {
	const head, tail = `data: {"id":"a","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"`, `}]}`
	end := head + `!","finish_reason":"stop"` + tail + "\n\n"
	rapid.Check(t, func(t *rapid.T) {
		var b strings.Builder
		for range rapid.IntRange(1, 8).Draw(t, "events") {
			b.WriteString(head + rapid.StringMatching(`[a-z ]{0,40}`).Draw(t, "text") + `","finish_reason":null` + tail)
			b.WriteString(rapid.SampledFrom([]string{"\n\n", "\r\n\r\n", "\n\n: still there\n\n"}).Draw(t, "line ends"))
		}
		b.WriteString(rapid.SampledFrom([]string{end + Done, end, Done, "", `data: {"error":{"message":"no","code":500}}` + "\n\n", `data: {"error":{"message":"no","code":500}}` + "\n\n" + end + Done}).Draw(t, "end"))
		whole := []byte(b.String())
		client, tokens, ended := answered(nothing, [][]byte{whole})

		var cut [][]byte
		for rest := whole; len(rest) > 0; {
			n := rapid.IntRange(1, len(rest)).Draw(t, "arrival")
			cut, rest = append(cut, rest[:n]), rest[n:]
		}
		gotClient, gotTokens, gotEnded := answered(nothing, cut)
		require.Equal(t, client, gotClient)
		require.Equal(t, tokens, gotTokens)
		require.Equal(t, ended, gotEnded)
	})
}

func TestHowAnAnswerEnds(t *testing.T) {
	const text = `data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}` + "\n\n"
	const last = `data: {"choices":[{"index":0,"text":"b","finish_reason":"stop"}]}` + "\n\n"
	for _, tt := range []struct {
		name, stream string
		end          End
		client       string
	}{
		{"as it should", text + last + Done, Complete, text + last},
		{"without [DONE]", text + last, Complete, text + last},
		{"in the middle", text, Short, text},
		{"in the middle, as if it were whole", text + Done, Short, text},
		{"in the middle of an event", text + last + "data: {", Short, text + last},
		{"with a failure", text + `data: {"error":{"message":"no","type":"x","code":500}}` + "\n\n", Refused, text},
		{"because its KV memory is gone", text + `data: {"choices":[{"index":0,"text":"","stop_reason":"recomputed","finish_reason":"stop"}]}` + "\n\n", Preempted, text},
	} {
		t.Run(tt.name, func(t *testing.T) {
			client, _, end := answered(nothing, [][]byte{[]byte(tt.stream)})
			require.Equal(t, tt.end, end)
			require.Equal(t, tt.client, client)
		})
	}
	t.Run("with more tokens than it may have", func(t *testing.T) {
		var a Answer
		a.Reset(Options{Choice: -1, Cached: -1, MaxTokens: 1})
		_, fx := a.Feed(nil, []byte(`data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1000,"total_tokens":1001}}`+"\n\n"), noon)
		require.Equal(t, Broken, fx.End)
		require.ErrorIs(t, a.Err(), ErrBadCount)
	})
}

func TestAnArrivalCostsNoAllocation(t *testing.T) {
	ids, _, _ := strings.Cut(tokensStream, "\n\n") // its first event
	for _, row := range []struct {
		options Options
		event   []byte
	}{
		{nothing, chunk},
		{Options{Usage: true, ContinuousUsage: true, TokenIDs: true, Cached: 9, Choice: -1}, chunk},
		{Options{Form: Tokens, Usage: true, TokenIDs: true, Cached: 9, Choice: 2, ID: []byte("mine")}, []byte(ids + "\n\n")},
	} {
		var a Answer
		a.Reset(row.options)
		a.Reader.Reset(Limits{Bytes: 1 << 40, First: time.Second, Gap: time.Second})
		dst, now := make([]byte, 0, 4096), noon
		arrival := bytes.Repeat(row.event, 3)
		one := func() {
			a.Reader.Wait(now)
			now = now.Add(time.Millisecond)
			if _, fx := a.Feed(dst[:0], arrival, now); fx.End != NotEnded {
				t.Fatal("it ended")
			}
		}
		one()
		require.Zero(t, testing.AllocsPerRun(100, one))
	}
}

// A line that begins with a brace is no data line, so clients ignore it, and an answer in one piece
// has nothing of it.
func TestALineWithoutAFieldIsNoPartOfAnAnswer(t *testing.T) {
	const text = `data: {"choices":[{"index":0,"text":"a","finish_reason":"stop"}]}` + "\n\n"
	for _, line := range []string{`{"kv_transfer_params":{"remote_host":"h"}}`, `{"choices":[{"index":0,"text":"b"}]}`, `{"error":`} {
		for _, stream := range []string{line + "\n\n" + text, text + line + "\n\n"} {
			var a Answer
			a.Reset(nothing)
			a.Assembler = NewAssembler(false, 0)
			_, effects := a.Feed(nil, []byte(stream), noon)
			require.NotEqual(t, Broken, effects.End, stream)
			require.Equal(t, Complete, a.Closed())
			got, err := a.Assembler.JSON(nil)
			require.NoError(t, err)
			require.JSONEq(t, `{"object":"text_completion","choices":[{"index":0,"text":"a","finish_reason":"stop"}]}`, string(got), stream)
		}
	}
}

// Events without content do not show that an answer makes progress, however many come, before its
// first token or after it.
func TestAnEngineThatOnlySendsEventsWithoutContentIsSilent(t *testing.T) {
	const text = `data: {"choices":[{"index":0,"text":"a"}]}` + "\n\n"
	for _, row := range []struct {
		name, before, idle string
		form               Form
	}{
		{"empty data", "", "data:\n\n", Chunks},
		{"empty data after a token", text, "data: \n\n", Chunks},
		{"pings", "", ping, Messages},
		{"pings after a token", messageStart + blockStart + blockDelta, ping, Messages},
		{"empty data in a message", messageStart + blockStart + blockDelta, "data:\n\n", Messages},
	} {
		t.Run(row.name, func(t *testing.T) {
			var a Answer
			a.Reset(Options{Choice: -1, Form: row.form, Cached: -1})
			a.Reader.Reset(Limits{First: 5 * time.Second, Gap: 5 * time.Second})
			now, arrivals := noon, 0
			a.Reader.Wait(now)
			for a.Feed(nil, []byte(row.before), now); a.Err() == nil && arrivals < 20; arrivals++ {
				a.Reader.Wait(now)
				now = now.Add(time.Second)
				_, effects := a.Feed(nil, []byte(row.idle), now)
				require.Equal(t, NotEnded, effects.End)
			}
			require.ErrorIs(t, a.Err(), ErrSilent)
			require.Equal(t, 5, arrivals)
		})
	}
}

// An event with content ends the wait in which events without content came.
func TestAnEventAfterEventsWithoutContentIsInTime(t *testing.T) {
	var a Answer
	a.Reset(Options{Choice: -1, Form: Messages, Cached: -1})
	a.Reader.Reset(Limits{First: 5 * time.Second, Gap: 5 * time.Second})
	now := noon
	a.Feed(nil, []byte(messageStart+blockStart+blockDelta), now)
	for range 5 {
		for _, e := range []string{ping, ping + ": still there\n\n", ping + blockDelta} {
			a.Reader.Wait(now)
			now = now.Add(time.Second)
			a.Feed(nil, []byte(e), now)
			require.NoError(t, a.Err())
		}
		require.Equal(t, 5*time.Second, a.Reader.Wait(now))
	}
}

// No engine sends an event that is not a JSON object: the answer is damaged, and the client gets
// nothing of the event. What the client has until then is known, so that another engine can go on.
func TestAnEventThatIsNoObjectBreaksTheAnswer(t *testing.T) {
	const token = `{"choices":[{"delta":{"content":"x"},"token_ids":[1]}]}`
	const finish = `{"choices":[{"delta":{},"finish_reason":"stop"}]}`
	for _, row := range []struct {
		name, bad string
		form      Form
		before    string
		end       End
	}{
		{"half an object", `{"choices":[{"delta":{"con`, Chunks, token, Garbled},
		{"before the first token", `{"choices":`, Chunks, "", Garbled},
		{"a text", `"ok"`, Chunks, token, Garbled},
		{"a list", `[1]`, Chunks, token, Garbled},
		{"no JSON", `Internal Server Error`, Chunks, token, Garbled},
		{"two objects", `{}{}`, Chunks, token, Garbled},
		{"no JSON in a message", `x`, Messages, "", Garbled},
		{"no JSON in a response", `{"type":`, Responses, "", Garbled},
		{"nothing", ` `, Chunks, token, NotEnded},
		{"no JSON behind the end of the answer", `{"choices":`, Chunks, finish, NotEnded},
	} {
		for _, whole := range []bool{false, true} {
			t.Run(row.name, func(t *testing.T) {
				var a Answer
				var transcript Transcript
				options := Options{Choice: -1, Form: row.form, Transcript: &transcript}
				if row.form != Chunks {
					options.Transcript = nil
				}
				a.Reset(options)
				if whole && row.form == Chunks {
					a.Assembler = NewAssembler(true, 1<<20)
				}
				if row.before != "" {
					_, fx := a.Feed(nil, []byte("data: "+row.before+BlankLine), time.Unix(1, 0))
					require.Equal(t, NotEnded, fx.End)
				}
				exact := transcript.Exact()
				out, fx := a.Feed(nil, []byte("data: "+row.bad+BlankLine+Done), time.Unix(1, 0))
				require.NotContains(t, string(out), strings.TrimSpace(row.bad)+"\n")
				require.Equal(t, exact, transcript.Exact())
				if row.end == NotEnded {
					require.Equal(t, row.before == finish, fx.End == Complete)
					return
				}
				require.Equal(t, row.end, fx.End)
				require.ErrorIs(t, a.Err(), ErrNotJSON)
				require.Equal(t, row.before != "", a.Filter.Started())
			})
		}
	}
}
