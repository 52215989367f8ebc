package engine

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// script plays an engine on one connection; n counts connections from 1.
type script func(n int, c net.Conn, br *bufio.Reader)

// listen plays s on a real socket. The connections stay open until the test
// ends, unless s closes them.
func listen(t *testing.T, s script) (*Client, *Target) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var (
		wg    sync.WaitGroup
		mu    sync.Mutex
		conns []net.Conn
	)
	wg.Go(func() {
		for n := 1; ; n++ {
			c, err := l.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			conns = append(conns, c)
			mu.Unlock()
			wg.Go(func() { s(n, c, bufio.NewReader(c)) })
		}
	})
	c := NewClient(Options{})
	t.Cleanup(func() {
		c.Close()
		_ = l.Close()
		mu.Lock()
		for _, c := range conns {
			_ = c.Close()
		}
		mu.Unlock()
		wg.Wait()
	})
	return c, target(t, "http://"+l.Addr().String())
}

// pipe plays s over net.Pipe, for tests whose time is synctest's: a pipe has no
// buffer, so a write blocks until the script reads.
func pipe(t *testing.T, s script) (*Client, *Target) {
	t.Helper()
	n := 0
	c := NewClient(Options{Dial: func(context.Context, string, string) (net.Conn, error) {
		ours, theirs := net.Pipe()
		n++
		go func(n int) {
			defer theirs.Close()
			s(n, theirs, bufio.NewReader(theirs))
		}(n)
		return ours, nil
	}})
	return c, target(t, "http://engine.test:8000")
}

func target(t testing.TB, base string) *Target {
	t.Helper()
	u, err := url.Parse(base)
	require.NoError(t, err)
	return &Target{ID: "e0", URL: u, Rank: -1}
}

// swallow reads one request; nil when the client hung up.
func swallow(br *bufio.Reader) *http.Request {
	req, err := http.ReadRequest(br)
	if err != nil {
		return nil
	}
	if _, err := io.Copy(io.Discard, req.Body); err != nil {
		return nil
	}
	return req
}

// answer answers every request with the same bytes.
func answer(raw string) script {
	return func(_ int, c net.Conn, br *bufio.Reader) {
		for swallow(br) != nil {
			_, _ = io.WriteString(c, raw)
		}
	}
}

// once answers one request and closes.
func once(raw string) script {
	return func(_ int, c net.Conn, br *bufio.Reader) {
		swallow(br)
		_, _ = io.WriteString(c, raw)
		_ = c.Close()
	}
}

func ok(body string) string {
	return fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
}

func asError(t *testing.T, err error) *Error {
	t.Helper()
	var e *Error
	require.ErrorAs(t, err, &e)
	return e
}

func post(k *Call, body ...string) (*Response, error) {
	var parts [][]byte
	for _, b := range body {
		parts = append(parts, []byte(b))
	}
	return k.Do("POST", "/v1/completions", nil, parts, Deadlines{})
}
