package sse

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write the golden files anew")

// TestStreamsReachTheClientAsRecorded runs the streams of testdata/streams, one
// for each engine's habits, past clients that ask for more and more.
func TestStreamsReachTheClientAsRecorded(t *testing.T) {
	asks := []struct {
		client  string
		options Options
	}{
		{"asked for nothing, prefill's cache unknown", nothing},
		{"asked for the usage, prefill had 1 token cached", Options{Usage: true, Cached: 1, Choice: -1}},
		{"asked for everything, prefill had 1 token cached", Options{Usage: true, ContinuousUsage: true, TokenIDs: true, Cached: 1, Choice: -1}},
		{"is choice 2 of a fan-out", Options{Usage: true, Cached: 0, ID: []byte("chatcmpl-one"), Created: 7, Choice: 2, DropFinalUsage: true, DropDone: true}},
	}
	files, err := filepath.Glob("testdata/streams/*.sse")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".sse"), func(t *testing.T) {
			stream, err := os.ReadFile(file)
			require.NoError(t, err)
			var got bytes.Buffer
			for _, a := range asks {
				f := NewFilter(a.options)
				client, verdicts := relay(f, frames(t, string(stream)))
				usage, known := f.Usage()
				fmt.Fprintf(&got, "=== a client that %s\n%s", a.client, client)
				fmt.Fprintf(&got, "--- verdicts %v, tokens %d, started %v, finish %q, usage %+v %v, failure %+v\n\n",
					verdicts, f.Tokens(), f.Started(), f.FinishReason(), usage, known, f.Failure())
			}
			fmt.Fprintf(&got, "=== a client that wants no stream\n%s\n", assembled(t, string(stream)))
			golden := strings.TrimSuffix(file, ".sse") + ".golden"
			if *update {
				require.NoError(t, os.WriteFile(golden, got.Bytes(), 0o600))
			}
			want, err := os.ReadFile(golden)
			require.NoError(t, err, "run go test -update, then read the new file")
			require.Equal(t, string(want), got.String())
		})
	}
}

// assembled is the answer of a client that wants no stream, or why it has none.
func assembled(t *testing.T, stream string) string {
	f := NewFilter(Options{Usage: true, Cached: 1, Choice: -1})
	a := NewAssembler(strings.Contains(stream, "chat.completion"), 0)
	for _, e := range frames(t, stream) {
		out, end := f.Event(e, nil)
		if end == Refused || end == Preempted {
			return fmt.Sprintf("no answer: %v %+v", verdict(out, end), f.Failure())
		}
		require.NoError(t, a.Add(out))
	}
	answer, err := a.JSON(nil)
	require.NoError(t, err)
	return string(answer)
}
