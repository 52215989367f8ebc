//go:build linux

package edge

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/valyala/fasthttp"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if os.Getenv(lowLimitEnv) != "" {
		serveWithFewFiles()
		return
	}
	goleak.VerifyTestMain(m,
		goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.updateServerDate.func1"), // one for the process
		// asleep for 10 s before it looks whether it should end
		goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.(*workerPool).Start.func2"),
	)
}

// patience is how long a test waits for what should be there in milliseconds.
const patience = 20 * time.Second

// await fails the test if nothing comes.
func await[T any](t *testing.T, ch <-chan T, what string) T {
	t.Helper()
	select {
	case v := <-ch:
		return v
	case <-time.After(patience):
		require.FailNow(t, "timeout", "waiting for %s", what)
		panic("unreachable")
	}
}

type testServer struct {
	*Server
	ln   *Listener
	addr string
	tls  *tls.Config // the client's; nil: clear text
}

// serve runs a server on loopback until the test ends.
func serve(t *testing.T, o Options, lo ListenOptions) *testServer {
	t.Helper()
	ln, err := Listen("127.0.0.1:0", lo)
	require.NoError(t, err)
	s := &testServer{Server: NewServer(o), ln: ln, addr: ln.Addr().String()}
	var on net.Listener = ln
	if lo.TLS {
		ts := httptest.NewTLSServer(nil)
		cert := ts.TLS.Certificates[0]
		ts.Close()
		on = tls.NewListener(ln, &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12})
		s.tls = &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS12} // a certificate made a moment ago
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve(on) }()
	t.Cleanup(func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel() // nobody waits for what a test left open
		_ = Drain(ctx, s.Server, ln)
		require.NoError(t, await(t, served, "Serve to return"))
		require.Zero(t, ln.Stats().Open, "connections on the books after the end")
	})
	return s
}

// client is the raw end of a connection.
type client struct {
	net.Conn // TLS, where the server has it
	tcp      *net.TCPConn
	br       *bufio.Reader
}

func (s *testServer) dial(t *testing.T) *client {
	t.Helper()
	raw, err := net.Dial("tcp", s.addr)
	require.NoError(t, err)
	t.Cleanup(func() { _ = raw.Close() })
	require.NoError(t, raw.SetDeadline(time.Now().Add(patience)))
	return s.client(raw)
}

func (s *testServer) client(raw net.Conn) *client {
	c := &client{Conn: raw, tcp: raw.(*net.TCPConn)}
	if s.tls != nil {
		c.Conn = tls.Client(raw, s.tls)
	}
	c.br = bufio.NewReader(c.Conn)
	return c
}

func (c *client) send(t *testing.T, s string) {
	t.Helper()
	_, err := io.WriteString(c.Conn, s)
	require.NoError(t, err)
}

// answer reads one answer with its body.
func (c *client) answer(t *testing.T) (*http.Response, string) {
	t.Helper()
	resp, err := http.ReadResponse(c.br, nil)
	require.NoError(t, err)
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	return resp, string(body)
}

// closed reads to the end of the connection, which must come without more bytes.
func (c *client) closed(t *testing.T) {
	t.Helper()
	rest, err := io.ReadAll(c.br)
	require.Empty(t, string(rest))
	var ne net.Error
	require.False(t, errors.As(err, &ne) && ne.Timeout(), "the connection stayed open")
}

// errorOf reads an answer that must be an error object and returns its code.
func (c *client) errorOf(t *testing.T) (status int, code string) {
	t.Helper()
	resp, body := c.answer(t)
	require.Equal(t, "application/json", resp.Header.Get("Content-Type"))
	var e struct {
		Error struct {
			Message, Type, Code string
		}
	}
	require.NoError(t, json.Unmarshal([]byte(body), &e), body)
	require.NotEmpty(t, e.Error.Message)
	require.NotEmpty(t, e.Error.Type)
	return resp.StatusCode, e.Error.Code
}

const get = "GET / HTTP/1.1\r\nHost: x\r\n\r\n"

func hello(ctx *fasthttp.RequestCtx) { ctx.SetBodyString("hello") }

// readFunc is a source made of a function.
type readFunc func(p []byte) (int, error)

func (f readFunc) Read(p []byte) (int, error) { return f(p) }
