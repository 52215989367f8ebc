package request

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/loop"
)

// eachDriver runs a test once with event loops and once with a goroutine per answer. Its engine is
// fast, and configure may be nil.
func eachDriver(t *testing.T, configure func(*config.Config), f func(t *testing.T, b *bed)) {
	t.Parallel()
	for name, loops := range map[string]int{"event loops": 2, "goroutines": 0} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f(t, start(t, setup{decode: []refengine.Config{{Steps: refengine.Steps{C0: 100 * time.Microsecond}}},
				configure: func(c *config.Config, deps *Deps) {
					deps.Loops = &loop.Set{}
					require.NoError(t, deps.Loops.Start(loops, deps.Log))
					t.Cleanup(deps.Loops.Close)
					if configure != nil {
						configure(c)
					}
				}}))
		})
	}
}

// streamed is a request for an answer of so many tokens, as it stands on the wire.
func streamed(prompt string, tokens int, header string) string {
	body := completion(prompt, fmt.Sprintf(`"stream":true,"ignore_eos":true,"max_tokens":%d,`, tokens))
	return fmt.Sprintf("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n%sContent-Length: %d\r\n\r\n%s", header,
		len(body), body)
}

// wire is a connection of a client that writes its own bytes, these first, and has room for so
// many.
func (b *bed) wire(first string, room int) (*net.TCPConn, *bufio.Reader) {
	b.t.Helper()
	conn, err := net.Dial("tcp", b.ln.Addr().String())
	require.NoError(b.t, err)
	b.t.Cleanup(func() { _ = conn.Close() })
	require.NoError(b.t, conn.SetDeadline(time.Now().Add(patience)))
	if room > 0 {
		require.NoError(b.t, conn.(*net.TCPConn).SetReadBuffer(room))
	}
	_, err = io.WriteString(conn, first)
	require.NoError(b.t, err)
	return conn.(*net.TCPConn), bufio.NewReader(conn)
}

// whole reads one answer of so many tokens and returns its text.
func (b *bed) whole(br *bufio.Reader, tokens int) (head *http.Response, text string) {
	b.t.Helper()
	r, err := http.ReadResponse(br, nil)
	require.NoError(b.t, err)
	body, err := io.ReadAll(r.Body)
	require.NoError(b.t, err)
	got := readSeamless(b.t, reply{r.StatusCode, r.Header, string(body)})
	require.Empty(b.t, got.fail)
	require.Equal(b.t, []string{"length"}, got.finishes)
	require.GreaterOrEqual(b.t, strings.Count(string(body), "\n\n"), tokens)
	return r, got.texts[0]
}

// atEnd holds that a connection ends without another word.
func atEnd(t *testing.T, br *bufio.Reader) {
	t.Helper()
	_, err := br.ReadByte()
	require.ErrorIs(t, err, io.EOF)
}

// A connection serves request after request, also those that are sent before they can be served.
func TestAConnectionOutlivesItsAnswers(t *testing.T) {
	eachDriver(t, nil, func(t *testing.T, b *bed) {
		conn, br := b.wire(streamed("first", 30, ""), 0)
		first, text := b.whole(br, 30)
		require.Equal(t, []string{"chunked"}, first.TransferEncoding)
		require.Equal(t, "text/event-stream; charset=utf-8", first.Header.Get("Content-Type"))
		require.NotEmpty(t, first.Header.Get("Date"))
		time.Sleep(20 * time.Millisecond) // it is idle: the next request finds it parked, which nothing tells
		_, err := io.WriteString(conn, streamed("first", 30, "")+streamed("other", 40, "")+streamed("first", 30, "Connection: close\r\n"))
		require.NoError(t, err)
		_, again := b.whole(br, 30)
		require.Equal(t, text, again)
		_, other := b.whole(br, 40)
		require.NotEqual(t, text, other)
		last, again := b.whole(br, 30)
		require.Equal(t, text, again)
		require.True(t, last.Close)
		atEnd(t, br)
		b.clean()
	})
}

func TestAnIdleConnectionIsClosedInItsTime(t *testing.T) {
	eachDriver(t, func(c *config.Config) { c.Limits.IdleTimeout = 50 * time.Millisecond }, func(t *testing.T, b *bed) {
		_, br := b.wire(streamed("a prompt", 30, ""), 0)
		b.whole(br, 30)
		atEnd(t, br) // without a word: nobody has asked anything
		b.clean()
	})
}

// little is a proxy that keeps little for a client that reads slowly, and for how long.
func little(d time.Duration) func(*config.Config) {
	return func(c *config.Config) { c.Limits.ClientBacklog, c.Limits.WriteTimeout = 32<<10, d }
}

func TestASlowClientGetsEveryToken(t *testing.T) {
	eachDriver(t, little(2*time.Second), func(t *testing.T, b *bed) {
		const tokens = 1500
		_, br := b.wire(streamed("a prompt", tokens, ""), 32<<10)
		_, want := b.whole(br, tokens)
		conn, br := b.wire(streamed("a prompt", tokens, ""), 32<<10)
		for range 5 { // it stops, so that what sockets hold is full, and reads on
			time.Sleep(60 * time.Millisecond)
			_, err := br.Peek(1)
			require.NoError(t, err)
		}
		_, got := b.whole(br, tokens)
		require.Equal(t, want, got)
		_, err := io.WriteString(conn, streamed("a prompt", 30, ""))
		require.NoError(t, err)
		b.whole(br, 30)
		b.clean()
	})
}

func TestAClientThatStopsReadingIsLetGo(t *testing.T) {
	eachDriver(t, little(200*time.Millisecond), func(t *testing.T, b *bed) {
		b.wire(streamed("a prompt", 100_000, ""), 32<<10)
		b.eventually("the client is let go", func() bool {
			s := b.ln.Stats()
			return s.CutStalled+s.CutLagging == 1 && b.Open() == 0
		})
		b.settle()
	})
}

// A connection that is idle behind an answer does not hold up a shutdown.
func TestAShutdownClosesIdleConnections(t *testing.T) {
	eachDriver(t, nil, func(t *testing.T, b *bed) {
		_, br := b.wire(streamed("a prompt", 30, ""), 0)
		b.whole(br, 30)
		require.NoError(t, b.drain())
		atEnd(t, br)
		b.clean()
	})
}

// Requests that wait behind an answer are not served once a shutdown has begun.
func TestAShutdownWaitsForTheAnswerOnly(t *testing.T) {
	eachDriver(t, nil, func(t *testing.T, b *bed) {
		require.NoError(t, b.d[0].SetFaults(refengine.Rule{Fault: refengine.Slow, DelayMS: 1, Leg: refengine.LegDecode}))
		_, br := b.wire(streamed("a prompt", 300, "")+streamed("another", 30, ""), 0)
		_, err := br.Peek(1)
		require.NoError(t, err)
		over := make(chan error)
		go func() { over <- b.drain() }()
		b.whole(br, 300)
		atEnd(t, br)
		require.NoError(t, <-over)
		b.clean()
		require.Len(t, b.asked, 1)
	})
}

// A client that reads a little now and then is within write_timeout for ever, and is cut in the
// end.
func TestAClientThatSipsIsCutInTheEnd(t *testing.T) {
	eachDriver(t, func(c *config.Config) { c.Limits.ClientLag, c.Limits.ClientBacklog = 500*time.Millisecond, 4096 },
		func(t *testing.T, b *bed) {
			_, br := b.wire(streamed("a story", 100_000, ""), 4096)
			p := make([]byte, 64)
			var err error
			for err == nil { // a read for every few tokens, until it is cut
				_, err = br.Read(p)
				tokens := b.d[0].Stats().Tokens
				b.eventually("it is decoded", func() bool { st := b.d[0].Stats(); return st.Tokens >= tokens+20 || st.Running == 0 })
			}
			b.eventually("it is counted", func() bool { return b.ln.Stats().CutLagging == 1 })
			b.clean()
			require.Equal(t, "client_closed", b.asked[0].Record.Outcome)
		})
}
