package admin

import (
	"bufio"
	"cmp"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// single is a listener with one connection.
type single chan net.Conn

func (s single) Accept() (net.Conn, error) {
	if c, ok := <-s; ok {
		return c, nil
	}
	return nil, net.ErrClosed
}

func (s single) Close() error   { close(s); return nil }
func (s single) Addr() net.Addr { return &net.TCPAddr{} }

// served sends a text to a server over a connection of its own, and returns the connection.
func served(t *testing.T, h http.Handler, text string) net.Conn {
	client, server := net.Pipe()
	ln := make(single, 1)
	ln <- server
	s := &http.Server{Handler: h, ReadHeaderTimeout: time.Second, IdleTimeout: time.Minute}
	go func() { _ = s.Serve(ln) }()
	t.Cleanup(func() {
		_, _ = s.Close(), client.Close()
	})
	_, err := io.WriteString(client, text)
	require.NoError(t, err)
	return client
}

// No token is asked for here, so any stranger could keep as many connections as the proxy may have
// open files.
func TestAClientThatDoesNotSendItsBodyIsCutOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := limitBodyTime(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok\n") }))
		conn := served(t, h, "GET /livez HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n")
		require.NoError(t, conn.SetReadDeadline(time.Now().Add(time.Hour)))
		_, err := io.ReadAll(conn)
		require.NoError(t, err, "the connection has ended")
	})
}

// A call to all engines may take minutes, and ends early only if the operator leaves.
func TestACallMayTakeLongOnceItsBodyIsRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := limitBodyTime(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if _, err := io.ReadAll(r.Body); err != nil {
				t.Error(err)
			}
			select {
			case <-r.Context().Done():
				t.Error("the call was given up")
			case <-time.After(5 * time.Minute):
			}
			_, _ = io.WriteString(w, "done\n")
		}))
		conn := served(t, h, "POST /reload HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n")
		time.Sleep(bodyTime / 2)
		_, err := io.WriteString(conn, "{}")
		require.NoError(t, err)
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		require.NoError(t, err)
		text, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		require.Equal(t, "done", strings.TrimSpace(string(text)))
	})
}

// An answer is not kept for ever for a client that does not read it.
func TestASlowReaderIsCut(t *testing.T) {
	for name, own := range map[string]time.Duration{"without a deadline of its route": 0, "with one": time.Second} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				cut := make(chan time.Duration, 1)
				client := served(t, limitWriteTime(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
					began := time.Now()
					if own > 0 {
						require.NoError(t, http.NewResponseController(w).SetWriteDeadline(began.Add(own)))
					}
					_, err := w.Write(make([]byte, 1<<20))
					require.Error(t, err)
					cut <- time.Since(began)
				})), "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
				select {
				case took := <-cut:
					require.Equal(t, cmp.Or(own, writeTime), took)
				case <-time.After(time.Hour):
					t.Error("the answer waits for ever")
				}
				_ = client.Close()
			})
		})
	}
}
