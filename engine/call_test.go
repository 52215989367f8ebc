package engine

import (
	"bufio"
	"crypto/tls"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestRoundTrip(t *testing.T) {
	got := make(chan *http.Request, 1)
	c, tg := listen(t, func(_ int, conn net.Conn, br *bufio.Reader) {
		req, err := http.ReadRequest(br)
		if err != nil {
			return
		}
		body, _ := io.ReadAll(req.Body)
		req.Body = io.NopCloser(strings.NewReader(string(body)))
		got <- req
		_, _ = io.WriteString(conn,
			"HTTP/1.1 201 Created\r\nContent-Type: text/x\r\nX-One: 1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n")
	})
	call, written := c.NewCall(tg), 0
	call.OnWritten(func() { written++ })
	r, err := call.Do("POST", "/v1/x", []Header{{"X-A", "b"}}, [][]byte{[]byte("{"), nil, []byte("}")}, Deadlines{})
	require.NoError(t, err)
	require.Equal(t, 1, written)
	defer r.Close()
	require.Equal(t, 201, r.StatusCode())
	require.Equal(t, "text/x", string(r.ContentType()))
	require.Equal(t, "1", string(r.Header("x-one")))
	require.Nil(t, r.Header("X-Two"))
	body, err := r.ReadAll(2)
	require.NoError(t, err)
	require.Equal(t, "hi", string(body))
	req := <-got
	sent, err := io.ReadAll(req.Body)
	require.NoError(t, err)
	require.Equal(t, "{}", string(sent))
	require.EqualValues(t, 2, req.ContentLength)
	require.Equal(t, "b", req.Header.Get("X-A"))
	r.Close()
	require.Equal(t, 201, r.StatusCode(), "the status outlives Close")
	require.Nil(t, r.Header("X-One"), "the header belongs to the connection's next call")
	_, err = r.Read(make([]byte, 1))
	require.Error(t, err, "read of a closed response")
}

func TestBodiesAndTheirEnds(t *testing.T) {
	const cut = "cut"
	for _, tt := range []struct {
		name, raw, body, want string
	}{
		{"a length", "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", "hello", ""},
		{"a length of 0", "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", "", ""},
		{"no body by status", "HTTP/1.1 204 No Content\r\n\r\n", "", ""},
		{"chunks", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", "hello", ""},
		{"chunks of no bytes", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "", ""},
		{"chunks win over a length", "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", "hello", ""},
		{"until close", "HTTP/1.1 200 OK\r\n\r\nhello", "hello", ""},
		{"until close, old engine", "HTTP/1.0 200 OK\r\n\r\nhello", "hello", ""},
		{"a 1xx is skipped", "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nX-A: 1\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", "hi", ""},
		{"cut in a length", "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhel", "hel", cut},
		{"cut before a length's first byte", "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", "", cut},
		{"cut in a chunk", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel", "hel", cut},
		{"cut between chunks", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", "hello", cut},
		{"cut in a size line", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n1", "hello", cut},
		{"cut behind the last chunk", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n", "hello", cut},
		{"cut before any chunk", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "", cut},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, tg := listen(t, func(_ int, conn net.Conn, br *bufio.Reader) {
				swallow(br)
				_, _ = io.WriteString(conn, tt.raw)
				_ = conn.Close()
			})
			r, err := post(c.NewCall(tg), "{}")
			require.NoError(t, err)
			defer r.Close()
			body, err := io.ReadAll(r)
			require.Equal(t, tt.body, string(body))
			if tt.want == "" {
				require.NoError(t, err)
				return
			}
			e := asError(t, err)
			require.ErrorIs(t, err, io.ErrUnexpectedEOF)
			require.NotErrorIs(t, err, io.EOF, "a cut body must not look like an end")
			require.Equal(t, Error{Target: "e0", Phase: PhaseBody, Sent: true, Answered: true, Err: e.Err}, *e)
			_, again := r.Read(make([]byte, 1))
			require.Equal(t, err, again, "the error stays")
		})
	}
}

func TestResponseHeadsThatAreRefused(t *testing.T) {
	for _, tt := range []struct {
		name, raw string
		want      error
	}{
		{"not HTTP", "SSH-2.0-OpenSSH_9.6\r\n\r\n", ErrMalformed},
		{"two lengths", "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello", ErrMalformed},
		{"a negative length", "HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n", ErrMalformed},
		{"an unknown transfer coding", "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", ErrMalformed},
		{"a compressed body", "HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 1\r\n\r\nx", ErrMalformed},
		{"another protocol", "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n", ErrMalformed},
		{"interim answers for ever", strings.Repeat("HTTP/1.1 102 Processing\r\n\r\n", 100), ErrMalformed},
		{"a head over the read buffer", "HTTP/1.1 200 OK\r\nX-A: " + strings.Repeat("a", 20<<10) + "\r\n\r\n", ErrTooLarge},
		{"cut in the head", "HTTP/1.1 200 OK\r\nX-A: ", io.ErrUnexpectedEOF},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, tg := listen(t, func(_ int, conn net.Conn, br *bufio.Reader) {
				swallow(br)
				_, _ = io.WriteString(conn, tt.raw)
				_ = conn.(*net.TCPConn).CloseWrite()
			})
			_, err := post(c.NewCall(tg), "secret prompt")
			require.ErrorIs(t, err, tt.want)
			e := asError(t, err)
			require.Equal(t, Error{Target: "e0", Phase: PhaseHead, Sent: true, Answered: true, Err: e.Err}, *e)
			require.NotContains(t, err.Error(), "OpenSSH", "an error must not quote the wire")
		})
	}
}

func TestHungUpBeforeAnAnswer(t *testing.T) {
	c, tg := listen(t, func(_ int, conn net.Conn, br *bufio.Reader) {
		swallow(br)
		_ = conn.Close()
	})
	_, err := post(c.NewCall(tg), "{}")
	e := asError(t, err)
	require.Equal(t, Error{Target: "e0", Phase: PhaseHead, Sent: true, Err: io.ErrUnexpectedEOF}, *e)
	require.False(t, e.Stale(), "a new connection cannot be stale")
}

func TestRefusedConnection(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, l.Close())
	c := NewClient(Options{})
	defer c.Close()
	_, err = post(c.NewCall(target(t, "http://"+l.Addr().String())), "{}")
	e := asError(t, err)
	require.Equal(t, Error{Target: "e0", Phase: PhaseConnect, Err: e.Err}, *e)
}

func TestAnEarlyAnswerEndsTheWrite(t *testing.T) {
	const refusal = "HTTP/1.1 413 Payload Too Large\r\nContent-Length: 3\r\n\r\nbig"
	head := func(br *bufio.Reader) { // reads no body byte on purpose
		for {
			if line, err := br.ReadString('\n'); err != nil || line == "\r\n" {
				return
			}
		}
	}
	for _, tt := range []struct {
		name string
		play script
	}{
		{"the engine stops reading and keeps the connection", func(_ int, c net.Conn, br *bufio.Reader) {
			head(br)
			_, _ = io.WriteString(c, refusal)
		}},
		{"the engine stops reading and closes", func(_ int, c net.Conn, br *bufio.Reader) {
			head(br)
			_, _ = io.WriteString(c, refusal)
			_ = c.Close() // unread bytes: a reset
		}},
		{"the engine answers before it has read anything", func(_ int, c net.Conn, _ *bufio.Reader) {
			_, _ = io.WriteString(c, refusal)
		}},
	} {
		early := func(t *testing.T, c *Client, tg *Target) {
			r, err := c.NewCall(tg).Do("POST", "/", nil, [][]byte{make([]byte, 64<<20)}, Deadlines{})
			require.NoError(t, err)
			defer r.Close()
			require.Equal(t, 413, r.StatusCode())
			body, err := r.ReadAll(100)
			require.NoError(t, err)
			require.Equal(t, "big", string(body))
			r.Close()
			require.Empty(t, c.idle.stacks, "half a request is still on that connection")
		}
		t.Run(tt.name, func(t *testing.T) {
			c, tg := listen(t, tt.play)
			early(t, c, tg)
		})
		t.Run(tt.name+", TLS", func(t *testing.T) {
			ours, theirs := certificates()
			c, tg := listen(t, func(n int, raw net.Conn, _ *bufio.Reader) {
				secure := tls.Server(raw, theirs)
				tt.play(n, secure, bufio.NewReader(secure))
			})
			tg.URL.Scheme, tg.TLS = "https", ours
			early(t, c, tg)
		})
	}
}

// What an engine sent beyond its answer is somebody else's, were the connection
// used again. A large read takes the answer past bufio's buffer, so the rest of
// the TLS record is seen neither there nor on the socket.
func TestBytesBehindAnAnswerInItsTLSRecordEndTheConnection(t *testing.T) {
	ours, theirs := certificates()
	body := strings.Repeat("x", 8<<10)
	c, tg := listen(t, func(n int, raw net.Conn, _ *bufio.Reader) {
		defer raw.Close()
		secure := tls.Server(raw, theirs)
		br := bufio.NewReader(secure)
		for swallow(br) != nil {
			head, rest, _ := strings.Cut(ok(body), "x")
			_, _ = io.WriteString(secure, head)
			_, _ = io.WriteString(secure, "x"+rest+ok("of another request")) // one record
		}
	})
	c.opts.ReadBuffer = 4 << 10
	tg.URL.Scheme, tg.TLS = "https", ours
	for range 3 {
		resp, err := post(c.NewCall(tg), "hi")
		require.NoError(t, err)
		got, err := resp.ReadAll(1 << 20)
		require.NoError(t, err)
		require.Equal(t, body, string(got))
		resp.Close()
	}
}

func TestAnIdleConnectionHoldsNoPrompt(t *testing.T) {
	ours, theirs := certificates()
	for _, secure := range []bool{false, true} {
		c, tg := listen(t, func(_ int, nc net.Conn, br *bufio.Reader) {
			if secure {
				nc = tls.Server(nc, theirs)
				br = bufio.NewReader(nc)
			}
			answer(ok("x"))(0, nc, br)
		})
		if secure {
			tg.URL.Scheme, tg.TLS = "https", ours
		}
		resp, err := post(c.NewCall(tg), "a prompt")
		require.NoError(t, err)
		_, err = resp.ReadAll(10)
		require.NoError(t, err)
		resp.Close()
		idle := c.idle.stacks[tg.key()]
		require.Len(t, idle, 1)
		for _, part := range idle[0].parts[:cap(idle[0].parts)] {
			require.Nil(t, part, "TLS %v", secure)
		}
	}
}

// certificates are TLS configs for a client and a server that trust each other.
func certificates() (client, server *tls.Config) {
	srv := httptest.NewTLSServer(nil)
	defer srv.Close()
	client = srv.Client().Transport.(*http.Transport).TLSClientConfig
	client.ServerName = "example.com"
	return client, &tls.Config{Certificates: srv.TLS.Certificates}
}

func TestAWriteThatFailsSaysSo(t *testing.T) {
	c, tg := listen(t, func(_ int, conn net.Conn, br *bufio.Reader) {
		_, _ = br.ReadByte()
		_ = conn.(*net.TCPConn).SetLinger(0)
		_ = conn.Close()
	})
	_, err := c.NewCall(tg).Do("POST", "/", nil, [][]byte{make([]byte, 64<<20)}, Deadlines{})
	e := asError(t, err)
	require.Equal(t, Error{Target: "e0", Phase: PhaseWrite, Sent: true, Err: e.Err}, *e)
}

// stuck are engines that get stuck, each in another phase of a call.
// hold keeps a pipe open without reading, until the other side closes it. To
// read for the end would let the other side's write go on.
// run makes one call and reads all of its answer.
// Aborts at any moment: a call either succeeds or is aborted, and no connection
// that another call uses is ever closed by a late Abort.
func TestReadAllStopsAtItsLimit(t *testing.T) {
	for _, raw := range []string{ok("hello"), "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"} {
		c, tg := listen(t, answer(raw))
		r, err := post(c.NewCall(tg), "{}")
		require.NoError(t, err)
		body, err := r.ReadAll(5)
		require.NoError(t, err)
		require.Equal(t, "hello", string(body))
		r.Close()
		r, err = post(c.NewCall(tg), "{}")
		require.NoError(t, err)
		_, err = r.ReadAll(4)
		require.ErrorIs(t, err, ErrTooLarge)
		r.Close()
	}
}

func TestReadUpToCutsAtItsLimit(t *testing.T) {
	for _, raw := range []string{ok("hello"), "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
		"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello"} {
		c, tg := listen(t, answer(raw))
		for limit, want := range map[int]string{1: "h", 4: "hell", 5: "hello", 9: "hello"} {
			r, err := post(c.NewCall(tg), "{}")
			require.NoError(t, err)
			r.SetDeadline(time.Now().Add(50 * time.Millisecond)) // the last one does not end
			require.Equal(t, want, string(r.ReadUpTo(limit)))
			r.Close()
		}
	}
}

// However often bytes come, a deadline is one.
// What net/http's server sends in any framing of its own choice arrives whole.
func TestAnswersOfNetHTTP(t *testing.T) {
	var plan atomic.Pointer[[][]byte]
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		for _, b := range *plan.Load() {
			_, _ = w.Write(b)
			if len(b)%3 == 0 {
				w.(http.Flusher).Flush()
			}
		}
	})
	for _, secure := range []bool{false, true} {
		t.Run(fmt.Sprintf("TLS %v", secure), func(t *testing.T) {
			var dials atomic.Int32
			srv := httptest.NewUnstartedServer(handler)
			srv.Config.ConnState = func(_ net.Conn, s http.ConnState) {
				if s == http.StateNew {
					dials.Add(1)
				}
			}
			start := srv.Start
			if secure {
				start = srv.StartTLS
			}
			start()
			defer srv.Close()
			c := NewClient(Options{})
			defer c.Close()
			tg := target(t, srv.URL)
			if secure {
				tg.TLS = srv.Client().Transport.(*http.Transport).TLSClientConfig
			}
			rapid.Check(t, func(t *rapid.T) {
				pieces := rapid.SliceOfN(rapid.SliceOfN(rapid.Byte(), 0, 5000), 0, 10).Draw(t, "pieces")
				plan.Store(&pieces)
				var want []byte
				for _, b := range pieces {
					want = append(want, b...)
				}
				r, err := c.NewCall(tg).Do("POST", "/", nil, [][]byte{make([]byte, rapid.IntRange(0, 100_000).Draw(t, "request"))}, Deadlines{})
				require.NoError(t, err)
				defer r.Close()
				got, err := r.ReadAll(1 << 20)
				require.NoError(t, err)
				require.Equal(t, string(want), string(got))
			})
			require.EqualValues(t, 1, dials.Load(), "one connection serves them all")
		})
	}
}

func TestTLSWithAnUntrustedCertificateIsRefused(t *testing.T) {
	srv := httptest.NewUnstartedServer(http.NotFoundHandler())
	srv.Config.ErrorLog = log.New(io.Discard, "", 0)
	srv.StartTLS()
	defer srv.Close()
	c := NewClient(Options{})
	defer c.Close()
	_, err := post(c.NewCall(target(t, srv.URL)), "{}")
	e := asError(t, err)
	require.Equal(t, PhaseConnect, e.Phase)
	require.False(t, e.Sent)
}

func TestAGuardHasTheLastWordBeforeTheRequestIsWritten(t *testing.T) {
	var asked atomic.Int32
	c, tg := listen(t, func(_ int, conn net.Conn, br *bufio.Reader) {
		for {
			if _, err := http.ReadRequest(br); err != nil {
				return
			}
			asked.Add(1)
			_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
		}
	})
	refusal := fmt.Errorf("it is another's")
	ask := func(word error) error {
		call, written := c.NewCall(tg), false
		call.Guard(func() error { return word })
		call.OnWritten(func() { written = true })
		r, err := call.Do("POST", "/v1/x", nil, nil, Deadlines{})
		require.Equal(t, word == nil, written)
		if err == nil {
			r.Close()
		}
		return err
	}
	for _, reused := range []bool{false, true} {
		err := ask(refusal)
		require.ErrorIs(t, err, refusal)
		var ee *Error
		require.ErrorAs(t, err, &ee)
		require.False(t, ee.Sent)
		require.False(t, ee.Stale(), "it is not sent again")
		require.Equal(t, reused, asked.Load() > 0)
		require.NoError(t, ask(nil), "the connection is as good as before")
	}
	require.EqualValues(t, 2, asked.Load())
}
