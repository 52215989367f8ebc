package gateway_test

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

	"evenkeel/bench/refengine"
	"evenkeel/gateway/config"
)

// eachDriver runs a test once with event loops and once with a goroutine per answer.
func eachDriver(t *testing.T, f func(t *testing.T, driver func(*config.Config))) {
	for name, loops := range map[string]int{"event loops": 2, "goroutines": -1} {
		t.Run(name, func(t *testing.T) {
			f(t, func(cfg *config.Config) { cfg.EventLoops = loops })
		})
	}
}

// streamed is a request for an answer of so many tokens, as it stands on the wire.
func (c *cluster) streamed(prompt string, tokens int, header string) string {
	body := completion(prompt, fmt.Sprintf(`"stream":true,"ignore_eos":true,"max_tokens":%d,`, tokens))
	return fmt.Sprintf("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n%sContent-Length: %d\r\n\r\n%s", header, len(body), body)
}

// wire is a connection of a client that writes its own bytes.
func (c *cluster) wire() (*net.TCPConn, *bufio.Reader) {
	c.Helper()
	conn, err := net.Dial("tcp", c.gw.Addr())
	require.NoError(c, err)
	c.Cleanup(func() { _ = conn.Close() })
	require.NoError(c, conn.SetDeadline(time.Now().Add(patience)))
	return conn.(*net.TCPConn), bufio.NewReader(conn)
}

// whole reads one answer and returns its texts.
func (c *cluster) whole(br *bufio.Reader, tokens int) (head *http.Response, text string) {
	c.Helper()
	r, err := http.ReadResponse(br, nil)
	require.NoError(c, err)
	body, err := io.ReadAll(r.Body)
	require.NoError(c, err)
	all := events(c.T, string(body))
	require.Equal(c, "[DONE]", all[len(all)-1])
	require.GreaterOrEqual(c, len(all), tokens)
	for _, e := range all {
		if _, rest, ok := strings.Cut(e, `"text":"`); ok {
			said, _, _ := strings.Cut(rest, `"`)
			text += said
		}
	}
	return r, text
}

// A connection serves request after request, also those that are sent before they can be served.
func TestAConnectionOutlivesItsAnswers(t *testing.T) {
	t.Parallel()
	eachDriver(t, func(t *testing.T, driver func(*config.Config)) {
		c := start(t, options{configure: driver})
		conn, br := c.wire()
		_, err := io.WriteString(conn, c.streamed("first", 30, ""))
		require.NoError(t, err)
		first, text := c.whole(br, 30)
		require.Equal(t, []string{"chunked"}, first.TransferEncoding)
		require.Equal(t, "text/event-stream; charset=utf-8", first.Header.Get("Content-Type"))
		require.NotEmpty(t, first.Header.Get("Date"))
		time.Sleep(20 * time.Millisecond) // it is idle: the next request finds it parked, which nothing tells
		_, err = io.WriteString(conn, c.streamed("first", 30, "")+c.streamed("other", 40, "")+c.streamed("first", 30, "Connection: close\r\n"))
		require.NoError(t, err)
		_, again := c.whole(br, 30)
		require.Equal(t, text, again)
		_, other := c.whole(br, 40)
		require.NotEqual(t, text, other)
		last, again := c.whole(br, 30)
		require.Equal(t, text, again)
		require.True(t, last.Close)
		_, err = br.ReadByte()
		require.ErrorIs(t, err, io.EOF)
	})
}

func TestAnIdleConnectionIsClosedInItsTime(t *testing.T) {
	t.Parallel()
	eachDriver(t, func(t *testing.T, driver func(*config.Config)) {
		c := start(t, options{configure: func(cfg *config.Config) {
			driver(cfg)
			cfg.Limits.IdleTimeout = 50 * time.Millisecond
		}})
		conn, br := c.wire()
		_, err := io.WriteString(conn, c.streamed("a prompt", 30, ""))
		require.NoError(t, err)
		c.whole(br, 30)
		_, err = br.ReadByte()
		require.ErrorIs(t, err, io.EOF, "it is closed without a word: nobody has asked anything")
	})
}

// large is an engine that answers with more than sockets have room for.
func large(driver func(*config.Config)) options {
	return options{
		decode: []refengine.Config{{C0: 100 * time.Microsecond}},
		configure: func(cfg *config.Config) {
			driver(cfg)
			cfg.Limits.ClientBacklog = 32 << 10
			cfg.Limits.WriteTimeout = 2 * time.Second
		},
	}
}

// slowly is a connection that has room for little.
func (c *cluster) slowly(request string) (*net.TCPConn, *bufio.Reader) {
	c.Helper()
	conn, br := c.wire()
	require.NoError(c, conn.SetReadBuffer(32<<10))
	_, err := io.WriteString(conn, request)
	require.NoError(c, err)
	return conn, br
}

func TestASlowClientGetsEveryToken(t *testing.T) {
	t.Parallel()
	eachDriver(t, func(t *testing.T, driver func(*config.Config)) {
		const tokens = 1500
		c := start(t, large(driver))
		_, br := c.slowly(c.streamed("a prompt", tokens, ""))
		_, want := c.whole(br, tokens)
		conn, br := c.slowly(c.streamed("a prompt", tokens, ""))
		for range 5 { // it stops, and reads on
			time.Sleep(60 * time.Millisecond)
			_, err := br.Peek(1)
			require.NoError(t, err)
		}
		_, got := c.whole(br, tokens)
		require.Equal(t, want, got)
		_, err := io.WriteString(conn, c.streamed("a prompt", 30, ""))
		require.NoError(t, err)
		c.whole(br, 30)
	})
}

func TestAClientThatStopsReadingIsLetGo(t *testing.T) {
	t.Parallel()
	eachDriver(t, func(t *testing.T, driver func(*config.Config)) {
		o := large(driver)
		configure := o.configure
		o.configure = func(cfg *config.Config) {
			configure(cfg)
			cfg.Limits.WriteTimeout = 200 * time.Millisecond
		}
		c := start(t, o)
		c.slowly(c.streamed("a prompt", 100_000, ""))
		c.eventually("the client is let go", func() bool {
			return c.sum("evenkeel_clients_cut_total") == 1 && c.metric("evenkeel_requests_open") == 0
		})
	})
}

// A connection that is idle behind an answer does not hold up a shutdown.
func TestAShutdownClosesIdleConnections(t *testing.T) {
	t.Parallel()
	eachDriver(t, func(t *testing.T, driver func(*config.Config)) {
		c := start(t, options{configure: driver})
		conn, br := c.wire()
		_, err := io.WriteString(conn, c.streamed("a prompt", 30, ""))
		require.NoError(t, err)
		c.whole(br, 30)
		require.NoError(t, c.gw.Shutdown(t.Context()))
		_, err = br.ReadByte()
		require.ErrorIs(t, err, io.EOF)
	})
}

// Requests that wait behind an answer are not served once a shutdown has begun.
func TestAShutdownWaitsForTheAnswerOnly(t *testing.T) {
	t.Parallel()
	eachDriver(t, func(t *testing.T, driver func(*config.Config)) {
		c := start(t, options{configure: driver})
		conn, br := c.wire()
		_, err := io.WriteString(conn, c.streamed("a prompt", 300, "")+"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
		require.NoError(t, err)
		_, err = br.Peek(1)
		require.NoError(t, err)
		over := make(chan error)
		go func() { over <- c.gw.Shutdown(t.Context()) }()
		c.whole(br, 300)
		_, err = br.ReadByte()
		require.ErrorIs(t, err, io.EOF)
		require.NoError(t, <-over)
	})
}
