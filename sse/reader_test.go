package sse

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

var noon = time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)

// arrive feeds what came after a wait, and returns the kinds of its events.
func (r *Reader) arrive(now *time.Time, wait time.Duration, text string) (kinds string) {
	r.Wait(*now)
	*now = now.Add(wait)
	r.Feed([]byte(text), *now)
	for e, ok := r.Next(); ok; e, ok = r.Next() {
		kinds += string("dcDo"[e.Kind])
	}
	return kinds
}

func TestOnlyADataEventEndsAWait(t *testing.T) {
	const event, comment = "data: {}\n\n", ": keep-alive\n\n"
	for _, tt := range []struct {
		name  string
		parts []string // one a second
		ok    int      // how many of them are taken
		err   error
	}{
		{"data events come for ever", strings.Split(strings.Repeat(event+"|", 20), "|")[:20], 20, nil},
		{"comments do not extend the first wait", []string{comment, comment, comment, comment}, 2, ErrSilent},
		{"nor a later one", []string{event, comment, comment, comment, comment, comment, comment}, 5, ErrSilent},
		{"nor do the bytes of an event", []string{event, "d", "a", "t", "a", ":", "{"}, 5, ErrSilent},
		{"an event that ends in time is an event", []string{event, "data", ": {}", "\n", "\n", comment, comment, comment, comment, comment}, 9, ErrSilent},
		{"what comes too late is taken if it is an event", []string{comment, comment, event}, 3, nil},
		{"blank lines are nothing", []string{event, "\n", "\n", "\n", "\n", "\n"}, 5, ErrSilent},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r, now := NewReader(), noon
			r.Reset(Limits{First: 2500 * time.Millisecond, Gap: 4500 * time.Millisecond})
			for i, part := range tt.parts {
				r.arrive(&now, time.Second, part)
				if r.Err() != nil {
					require.Equal(t, tt.ok, i, "the part that was too much")
					break
				}
			}
			require.Equal(t, tt.err, r.Err())
		})
	}
}

func TestAWaitEndsByItself(t *testing.T) {
	r, now := NewReader(), noon
	r.Reset(Limits{First: time.Second, Gap: 5 * time.Second})
	require.Equal(t, time.Second, r.Wait(now))
	require.Equal(t, 300*time.Millisecond, r.Wait(now.Add(700*time.Millisecond)), "the wait goes on")
	require.Equal(t, "d", r.arrive(&now, 900*time.Millisecond, "data: a\n\n"))
	require.Equal(t, 5*time.Second, r.Wait(now))
	require.Equal(t, "c", r.arrive(&now, 2*time.Second, ": c\n\n"))
	require.Equal(t, 3*time.Second, r.Wait(now))
	require.NoError(t, r.Err())
	require.Positive(t, r.Wait(now.Add(3*time.Second)), "0 would be for ever")
	require.Equal(t, ErrSilent, r.Err())
	r.Reset(Limits{})
	require.Zero(t, r.Wait(now), "without limits for ever")
}

func TestAClientsTimeIsNotTheEngines(t *testing.T) {
	r, now := NewReader(), noon
	r.Reset(Limits{First: time.Second, Gap: time.Second})
	r.arrive(&now, 0, "data: a\n\n: c\n\n")
	for range 10 {
		now = now.Add(time.Hour) // the client reads slowly
		require.Positive(t, r.Wait(now))
		r.arrive(&now, 90*time.Millisecond, ": c\n\n")
		require.NoError(t, r.Err())
	}
	r.Wait(now)
	for range 10 {
		r.Pause(now) // the client does not take the proxy's comment
		now = now.Add(time.Hour)
		r.Pause(now)
		require.Equal(t, 100*time.Millisecond, r.Wait(now))
		require.NoError(t, r.Err())
	}
	r.arrive(&now, 200*time.Millisecond, ": c\n\n")
	require.Equal(t, ErrSilent, r.Err())
}

func TestAnAnswerHasSoManyBytes(t *testing.T) {
	const event = "data: 0123456789\n\n" // 18 bytes
	for _, size := range []int{1, 5, 18, 1000} {
		r, now, events := NewReader(), noon, 0
		r.Reset(Limits{Bytes: 3*18 + 17})
		for rest := []byte(strings.Repeat(event, 50)); len(rest) > 0 && r.Err() == nil; {
			n := min(size, len(rest))
			events += len(r.arrive(&now, 0, string(rest[:n])))
			rest = rest[n:]
		}
		require.Equal(t, ErrTooMuch, r.Err(), "parts of %d", size)
		require.Equal(t, 3, events, "parts of %d", size)
	}
}

func TestTheTailIsNotWaitedForForLong(t *testing.T) {
	start := func() (*Reader, *time.Time) {
		r, now := NewReader(), noon
		r.Reset(Limits{First: time.Hour, Gap: time.Hour, Bytes: 20})
		require.Equal(t, "D", r.arrive(&now, time.Minute, Done+": more\n\ndata: x\n\n"))
		require.True(t, r.Done())
		require.NoError(t, r.Err())
		require.Equal(t, tailTime, r.Wait(now))
		return r, &now
	}
	r, now := start()
	for range 4 {
		require.NoError(t, r.Err())
		require.Empty(t, r.arrive(now, 80*time.Millisecond, "\n"), "nothing behind [DONE] is an event")
		r.Wait(*now)
	}
	require.Equal(t, ErrTail, r.Err(), "a drip")
	r, now = start()
	for range 64 {
		require.NoError(t, r.Err())
		r.arrive(now, 0, strings.Repeat("x", 1024))
	}
	require.Equal(t, ErrTail, r.Err(), "a flood, with what came beside [DONE]")
}

func TestAPieceOfALargeEventEndsNoWait(t *testing.T) {
	r, now := NewReader(), noon
	r.Reset(Limits{Event: 16, First: time.Second, Gap: 2 * time.Second})
	require.Equal(t, "d", r.arrive(&now, 0, "data: a\n\n"))
	require.Equal(t, "o", r.arrive(&now, 1500*time.Millisecond, "data: 0123456789abcdef"))
	require.NoError(t, r.Err())
	require.Equal(t, "o", r.arrive(&now, 400*time.Millisecond, "0123456789\n\n"))
	require.Equal(t, "o", r.arrive(&now, 1500*time.Millisecond, "data: 0123456789abcdef"), "its end did")
	r.arrive(&now, time.Second, "x")
	require.Equal(t, ErrSilent, r.Err())
}

func TestResetReadsAnotherStream(t *testing.T) {
	r, now := NewReader(), noon
	r.Reset(Limits{Bytes: 5})
	r.arrive(&now, 0, "data: abcdef\n\n")
	require.Error(t, r.Err())
	r.Reset(Limits{Bytes: 50})
	require.NoError(t, r.Err())
	require.Zero(t, r.Buffered())
	require.Equal(t, "dD", r.arrive(&now, 0, "data: abcdef\n\n"+Done))
}

// verdicts are what a reader makes of a stream in the given cuts: its events, its
// error, and whether it was whole.
func verdicts(stream []byte, cuts []int, l Limits) (events []string, end string) {
	r := NewReader()
	r.Reset(l)
	cut := make([]bool, len(stream)+1)
	for _, c := range append(cuts, len(stream)) {
		cut[c] = true
	}
	f := NewFilter(Options{MaxTokens: 3, Context: 100, Cached: -1, Choice: -1})
	from, opaque := 0, ""
	for i := range cut {
		if !cut[i] {
			continue
		}
		r.Wait(noon)
		r.Feed(stream[from:i], noon)
		from = i
		for e, ok := r.Next(); ok; e, ok = r.Next() {
			if e.Kind == KindOpaque { // no promise says where it is cut
				opaque += string(e.Raw)
				continue
			}
			out, end := f.Event(e, nil)
			events = append(events, opaque, fmt.Sprint(e.Kind, verdict(out, end), f.Fault(), f.Tokens(), string(out)))
			opaque = ""
		}
	}
	if errors.Is(r.Err(), ErrTooMuch) {
		opaque = "" // how much of it came out depends on the cuts
	}
	return append(events, opaque), fmt.Sprint(r.Err(), r.Done())
}

func TestACutChangesNoVerdict(t *testing.T) {
	stream := strings.Repeat(`data: {"choices":[{"text":"a","token_ids":[1]}]}`+"\n\n: c\r\n\r\n", 3) +
		"data: " + strings.Repeat("x", 90) + "\n\n" +
		strings.Repeat(`data: {"choices":[{"text":"a","token_ids":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19]}]}`+"\r\r", 3) +
		`data: {"choices":[],"usage":{"prompt_tokens":132,"completion_tokens":1}}` + "\n\n" + Done + "tail"
	for _, l := range []Limits{{}, {Bytes: 300}, {Event: 80}, {Event: 60, Bytes: 400}} {
		events, end := verdicts([]byte(stream), nil, l)
		for i := range stream {
			cutEvents, cutEnd := verdicts([]byte(stream), []int{i}, l)
			require.Equal(t, events, cutEvents, "%+v cut at %d", l, i)
			require.Equal(t, end, cutEnd, "%+v cut at %d", l, i)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		l := Limits{Bytes: int64(rapid.IntRange(0, 700).Draw(t, "bytes")), Event: rapid.IntRange(0, 200).Draw(t, "event")}
		cuts := rapid.SliceOf(rapid.IntRange(0, len(stream))).Draw(t, "cuts")
		events, end := verdicts([]byte(stream), nil, l)
		cutEvents, cutEnd := verdicts([]byte(stream), cuts, l)
		require.Equal(t, events, cutEvents)
		require.Equal(t, end, cutEnd)
	})
}

// FuzzReader: a cut changes neither events nor verdicts, whatever the limits.
func FuzzReader(f *testing.F) {
	for _, s := range seeds(f) {
		for i := 0; i < len(s); i += max(1, len(s)/16) {
			f.Add(s, uint16(i), uint16(0), uint16(0))
			f.Add(s, uint16(i), uint16(60), uint16(len(s)/2))
		}
	}
	f.Add([]byte("data: a\n\n"+Done+"\r\n\r\n"), uint16(8), uint16(4), uint16(20))
	f.Fuzz(func(t *testing.T, stream []byte, cut, event, total uint16) {
		l := Limits{Event: int(event), Bytes: int64(total)}
		events, end := verdicts(stream, nil, l)
		cutEvents, cutEnd := verdicts(stream, []int{min(int(cut), len(stream))}, l)
		require.Equal(t, events, cutEvents)
		require.Equal(t, end, cutEnd)
	})
}

func TestReadingCostsNoAllocation(t *testing.T) {
	r, now := NewReader(), noon
	r.Reset(Limits{Bytes: 1 << 40, First: time.Second, Gap: time.Second})
	one := func() {
		r.Wait(now)
		now = now.Add(time.Millisecond)
		r.Feed(chunk, now)
		for _, ok := r.Next(); ok; _, ok = r.Next() {
		}
	}
	one()
	require.Zero(t, testing.AllocsPerRun(100, one))
	require.NoError(t, r.Err())
}

// BenchmarkReaderAlone is BenchmarkFramerAlone under all limits.
func BenchmarkReaderAlone(b *testing.B) {
	r, now := NewReader(), noon
	r.Reset(Limits{Bytes: 1 << 50, First: time.Second, Gap: time.Second})
	const batch = 64
	read := bytes.Repeat(plainChunk, batch)
	b.ReportAllocs()
	n := 0
	for b.Loop() {
		if n%batch == 0 {
			r.Wait(now)
			r.Feed(read, now)
		}
		r.Next()
		n++
	}
	b.ReportMetric(float64(n)/b.Elapsed().Seconds(), "events/s")
}

func TestAnEventInPiecesIsTornUntilItsEnd(t *testing.T) {
	r, now := NewReader(), noon
	r.Reset(Limits{Event: 20, Bytes: 200})
	for _, step := range []struct {
		part string
		torn bool
	}{
		{"data: x\n\n", false},
		{"data: yy", false}, // nothing of it has left
		{strings.Repeat("y", 40), true},
		{"y\n\n", false},
		{"data: " + strings.Repeat("z", 40) + "\n\n", false},
		{strings.Repeat("z", 40), true},
		{strings.Repeat("z", 100) + "\n\n", true}, // its end is too much
	} {
		r.arrive(&now, 0, step.part)
		require.Equal(t, step.torn, r.Torn(), step.part)
	}
	require.Equal(t, ErrTooMuch, r.Err())
}
