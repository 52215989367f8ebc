package sse

import (
	"go/build"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestImportsArePure(t *testing.T) { // framing that can reach the network or the clock is no longer framing
	pkg, err := build.ImportDir(".", 0)
	require.NoError(t, err)
	// time: types only, forbidigo keeps the clock out
	pure := []string{"bytes", "encoding/json", "errors", "evenkeel/internal/rawjson", "fmt", "math", "slices", "strconv", "time", "unicode",
		"unicode/utf8"}
	require.Subset(t, pure, pkg.Imports, "let the caller do it and pass the result in")
}

// nothing is a client that asked for nothing, where prefill reported no cache.
var nothing = Options{Cached: -1, Choice: -1}

// event frames data, as an engine would send it.
func event(t require.TestingT, data string) Event {
	f := NewFramer(0)
	f.Feed([]byte("data: " + data + "\n\n"))
	e, ok := f.Next()
	require.True(t, ok, "no complete event in %q", data)
	return e
}

// frames splits a whole stream into events that stay valid.
func frames(t require.TestingT, stream string) []Event {
	f := NewFramer(0)
	f.Feed([]byte(stream))
	var events []Event
	for {
		e, ok := f.Next()
		if !ok {
			require.Zero(t, f.Buffered(), "cut off")
			return events
		}
		events = append(events, e)
	}
}

// relay runs a stream through a filter and returns what the client gets, and a verdict on each
// event.
func relay(f *Filter, events []Event) (client []byte, verdicts []string) {
	for _, e := range events {
		out, end := f.Event(e, nil)
		client, verdicts = append(client, out...), append(verdicts, verdict(out, end))
	}
	return client, verdicts
}

// verdict says in a word what a filter made of an event. The golden files have these words.
func verdict(out []byte, end End) string {
	if end == NotEnded && out == nil {
		return "drop"
	}
	return [...]string{NotEnded: "forward", Complete: "ended", Short: "ended", Refused: "failed", Preempted: "recomputed", Broken: "overrun",
		Garbled: "unreadable"}[end]
}
