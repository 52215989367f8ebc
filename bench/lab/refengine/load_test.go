package refengine

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine/wire"
	"evenkeel/bench/lab/reftext"
)

// pump opens streams on raw sockets and reads them to their end.
func pump(tb testing.TB, e *Engine, streams, tokens int) (events int) {
	tb.Helper()
	var wg sync.WaitGroup
	var mu sync.Mutex
	for i := range streams {
		wg.Go(func() {
			prompt := reftext.MakePrompt(uint64(i), 200)
			conn, err := net.Dial("tcp", strings.TrimPrefix(e.URLs()[i%e.cfg.DPSize], "http://"))
			if err != nil {
				tb.Error(err)
				return
			}
			defer func() { _ = conn.Close() }()
			body := completionBody(prompt, fmt.Sprintf(`"stream":true,"ignore_eos":true,"max_tokens":%d,"stream_options":{"include_usage":true,"continuous_usage_stats":true},"return_token_ids":true,`, tokens))
			_, _ = fmt.Fprintf(conn, "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s", len(body),
				body)
			data, err := io.ReadAll(bufio.NewReaderSize(conn, 16<<10))
			n := strings.Count(string(data), "data: ")
			if err != nil || n != tokens+2 {
				tb.Errorf("stream %d: %d events, %v", i, n, err)
			}
			mu.Lock()
			events += n
			mu.Unlock()
		})
	}
	wg.Wait()
	return events
}

func TestManyStreamsAtOnce(t *testing.T) {
	e := start(t, Config{DPSize: 4, Slots: 50, Steps: Steps{C0: 2 * time.Millisecond}})
	pump(t, e, 200, 40)
	s := e.Stats()
	require.EqualValues(t, 200, s.Finished)
	require.EqualValues(t, 200*40, s.Tokens)
	require.Zero(t, s.Running+s.Waiting+s.KVUsed+s.OverAdmitted)
	for _, r := range s.Ranks {
		require.LessOrEqual(t, r.Concurrent, int64(50))
	}
}

// BenchmarkEvents reports how many events a second the engine writes, with
// their readers in the same process.
func BenchmarkEvents(b *testing.B) {
	e := start(b, Config{DPSize: 8, Slots: 125, Steps: Steps{C0: time.Microsecond, C1: 1}, Prompts: Prompts{Base: 1, PerToken: 1}})
	events := 0
	for b.Loop() {
		events += pump(b, e, 1000, 50)
	}
	b.ReportMetric(float64(events)/b.Elapsed().Seconds(), "events/s")
}

// BenchmarkChunk is the making of one event.
func BenchmarkChunk(b *testing.B) {
	r := &request{chat: true, id: "chatcmpl-1", logprobs: -1, returnIDs: true, continuousUsage: true, maxTokens: 100, ignoreEOS: true,
		prompt: reftext.OfUser("a b")}
	l := &life{engine: &Engine{cfg: Config{}.WithDefaults()}}
	x := &exchange{Exchange: &wire.Exchange{}}
	var event []byte
	a := l.newAnswer(x, r, r.plan(r.prompt.Answer))
	b.ReportAllocs()
	for b.Loop() {
		event = a.appendTokens(event[:0], 1, false, "")
	}
}

// A decode request of an owner that comes after one of a later owner is counted:
// two admit to the engine.
func TestAnEarlierOwnerIsSeen(t *testing.T) {
	var c counters
	for _, epoch := range []string{"7", "7", "", "9", "8", "nonsense", "9"} {
		c.admitted(epoch)
	}
	require.EqualValues(t, 1, c.StaleEpochs.Load())
	require.EqualValues(t, 9, c.Epoch.Load())
}
