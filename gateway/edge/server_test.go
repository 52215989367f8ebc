//go:build linux

package edge

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/valyala/fasthttp"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
)

const post = "POST / HTTP/1.1\r\nHost: x\r\n"

func TestRequestsThatCouldBeReadInTwoWaysAreRefused(t *testing.T) {
	body, chunked := "\r\nab", post+"Transfer-Encoding: chunked\r\n\r\n"
	for _, tt := range []struct{ name, in string }{
		{"two equal lengths", post + "Content-Length: 2\r\nContent-Length: 2\r\n" + body},
		{"two lengths", post + "Content-Length: 2\r\nContent-Length: 1\r\n" + body},
		{"a length with a sign", post + "Content-Length: +2\r\n" + body},
		{"a negative length", post + "Content-Length: -1\r\n" + body},
		{"a list of lengths", post + "Content-Length: 2, 2\r\n" + body},
		{"a length of 20 digits", post + "Content-Length: 20000000000000000000\r\n" + body},
		{"an unknown coding", post + "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n"},
		{"two codings", post + "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"},
		{"two coding headers", post + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"},
		{"a space before the colon", post + "Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n"},
		{"a length beside a coding", post + "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"},
		{"a coding before a length", post + "transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n"},
		{"a coding in HTTP/1.0", "POST / HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"},
		{"NUL in a value", post + "X: a\x00b\r\nContent-Length: 2\r\n" + body},
		{"a bare CR in a value", post + "X: a\rContent-Length: 0\r\nContent-Length: 2\r\n" + body},
		{"a folded header", post + "X: a\r\n b\r\nContent-Length: 2\r\n" + body},
		{"a folded length", post + "Content-Length:\r\n 2\r\n" + body},
		{"a space in a name", post + "X A: b\r\nContent-Length: 2\r\n" + body},
		{"a line that ends in LF", post + "X: a\nContent-Length: 2\r\n" + body},
		{"no host", "POST / HTTP/1.1\r\nContent-Length: 2\r\n" + body},
		{"two hosts", post + "Host: y\r\nContent-Length: 2\r\n" + body},
		{"a chunk size that is none", post + "Transfer-Encoding: chunked\r\n\r\nzz\r\nab\r\n0\r\n\r\n"},
		{"a chunk size beyond measure", post + "Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\nab\r\n0\r\n\r\n"},
		{"a chunk line that ends in LF", post + "Transfer-Encoding: chunked\r\n\r\n2\nab\r\n0\r\n\r\n"},
		{"a chunk extension without end", chunked + "2;" + strings.Repeat("x", 300) + "\r\nab\r\n0\r\n\r\n"},
		{"NUL in a chunk extension", chunked + "2;a\x00b\r\nab\r\n0\r\n\r\n"},
		{"a bare CR in a chunk extension", chunked + "2;a\rb\r\nab\r\n0\r\n\r\n"},
		{"much framing for little data", chunked + strings.Repeat("1;"+strings.Repeat("x", 200)+"\r\na\r\n", 200) + "0\r\n\r\n"},
		{"a chunk that is longer than its size", chunked + "1\r\nab\r\n0\r\n\r\n"},
		{"a trailer line that ends in LF", chunked + "0\r\nX: y\n\r\n"},
		{"a trailer that ends in LF", chunked + "0\r\nX: y\r\n\n"},
		{"a folded trailer", chunked + "0\r\nX: y\r\n z\r\n\r\n"},
		{"a space before the colon of a trailer", chunked + "0\r\nX : y\r\n\r\n"},
		{"a trailer without a colon", chunked + "0\r\nXy\r\n\r\n"},
		{"NUL in a trailer", chunked + "0\r\nX: a\x00b\r\n\r\n"},
		{"a trailer that frames", chunked + "0\r\ncontent-length: 5\r\n\r\n"},
		{"a trailer without end", chunked + "0\r\n" + strings.Repeat("X: y\r\n", 1000) + "\r\n"},
		{"the coding identity", post + "Transfer-Encoding: identity\r\n\r\n"},
		{"two keys", post + "Authorization: Bearer a\r\nAuthorization: Bearer b\r\nContent-Length: 2\r\n" + body},
		{"two keys of Anthropic's", post + "X-Api-Key: a\r\nx-api-key: b\r\nContent-Length: 2\r\n" + body},
		{"a key in a trailer", chunked + "0\r\nX-Api-Key: a\r\n\r\n"},
		{"a request line that ends in LF", "GET / HTTP/1.1\nHost: x\r\n\r\n"},
		{"a head that ends in LF", "GET / HTTP/1.1\r\nHost: x\r\n\n"},
		{"a protocol of another name", "GET / HTPT/1.1\r\nHost: x\r\n\r\n"},
		{"HTTP/2", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var handled atomic.Int32
			s := serve(t, Options{Handler: func(*fasthttp.RequestCtx) { handled.Add(1) }}, ListenOptions{})
			c := s.dial(t)
			c.send(t, tt.in+get) // the second must not be reached either
			status, code := c.errorOf(t)
			require.Equal(t, 400, status)
			require.Contains(t, code, "bad_request")
			c.closed(t)
			require.Zero(t, handled.Load(), "the handler saw it")
		})
	}
}

func TestOrdinaryRequestsPass(t *testing.T) {
	echo := func(ctx *fasthttp.RequestCtx) { ctx.SetBody(ctx.PostBody()) }
	s := serve(t, Options{Handler: echo}, ListenOptions{})
	c := s.dial(t)
	for _, in := range []string{
		post + "Content-Length: 2\r\n\r\nab",
		post + "Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n1;x=y\r\nb\r\n0\r\n\r\n",
		post + "Transfer-Encoding: CHUNKED\r\n\r\n2  \r\nab\r\n000;x\r\nX-Sum: 1\r\ny:\r\n\r\n",
		"\r\n" + post + "Content-Length: 2\r\n\r\nab",
		post + "content-length: 2\r\nX-Empty:\r\nx_under: a:b \tc\r\n\r\nab",
		"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nUser-Agent: \xc3\xa4\r\n\r\nab",
	} {
		c.send(t, in+in) // pipelined
		for range 2 {
			resp, body := c.answer(t)
			require.Equal(t, 200, resp.StatusCode, in)
			require.Equal(t, "ab", body, in)
			require.Empty(t, resp.Header.Get("Server"))
		}
	}
	c.send(t, post+"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n")
	line, err := c.br.ReadString('\n')
	require.NoError(t, err)
	require.Contains(t, line, "100")
	_, err = c.br.ReadString('\n')
	require.NoError(t, err)
	c.send(t, "ab")
	_, body := c.answer(t)
	require.Equal(t, "ab", body)
}

func TestAHeadTooBigIsRefused(t *testing.T) {
	s := serve(t, Options{Handler: hello}, ListenOptions{})
	c := s.dial(t)
	c.send(t, "GET / HTTP/1.1\r\nHost: x\r\nA: "+strings.Repeat("a", 15<<10)+"\r\n\r\n")
	_, body := c.answer(t)
	require.Equal(t, "hello", body, "15 KiB are fine")

	c.send(t, "GET / HTTP/1.1\r\nHost: x\r\nA: "+strings.Repeat("a", 17<<10)+"\r\n\r\n")
	status, code := c.errorOf(t)
	require.Equal(t, 431, status)
	require.Equal(t, "head_too_large", code)
	c.closed(t)

	c = s.dial(t)
	c.send(t, "GET /"+strings.Repeat("a", 17<<10)+" HTTP/1.1\r\nHost: x\r\n\r\n")
	status, _ = c.errorOf(t)
	require.Equal(t, 431, status, "a long request line is a head as well")
}

// The client of each row is still sending when it is refused, and gets its answer all the same.
func TestABodyTooBigIsRefused(t *testing.T) {
	const limit, sent = 64 << 10, 4 << 20
	for _, tt := range []struct{ name, head, body string }{
		{"announced", "Content-Length: 4194304\r\n\r\n", strings.Repeat("a", sent)},
		{"in chunks", "Transfer-Encoding: chunked\r\n\r\n", strings.Repeat("400\r\n"+strings.Repeat("a", 1024)+"\r\n", sent/1024)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := serve(t, Options{Handler: hello, MaxBody: limit}, ListenOptions{})
			c := s.dial(t)
			c.send(t, post+tt.head+tt.body)
			status, code := c.errorOf(t)
			require.Equal(t, 413, status)
			require.Equal(t, "body_too_large", code)
		})
	}

	s := serve(t, Options{Handler: hello, MaxBody: limit}, ListenOptions{})
	c := s.dial(t)
	c.send(t, post+fmt.Sprintf("Content-Length: %d\r\n\r\n", limit)+strings.Repeat("a", limit))
	_, body := c.answer(t)
	require.Equal(t, "hello", body, "the limit itself is allowed")
}

// fasthttp forgets the head when it cannot read a body, and the caller with it.
func TestABodyTooBigIsNotAStrangersBody(t *testing.T) {
	known := func(h *fasthttp.RequestHeader) *Refusal {
		if string(h.Peek("Authorization")) == "Bearer ek-known" {
			return nil
		}
		return &Refusal{Status: 401, Code: "invalid_api_key", Message: "who are you"}
	}
	s := serve(t, Options{Handler: hello, MaxBody: 64 << 10, Authenticate: known}, ListenOptions{})
	for _, head := range []string{"Transfer-Encoding: chunked\r\n\r\n" + strings.Repeat("400\r\n"+strings.Repeat("a", 1024)+"\r\n", 100),
		"Content-Length: 65537\r\n\r\n"} {
		c := s.dial(t)
		c.send(t, post+"Authorization: Bearer ek-known\r\n"+head)
		status, code := c.errorOf(t)
		require.Equal(t, 413, status)
		require.Equal(t, "body_too_large", code)
	}
}

// Who waits for a word before sending a body gets the refusal instead.
func TestContinueIsNotSaidToWhatIsRefused(t *testing.T) {
	bodies := NewBodies(1 << 20)
	require.True(t, (&Reservation{quota: bodies}).Acquire(1<<20-100<<10))
	s := serve(t, Options{Handler: hello, MaxBody: 1 << 20, Bodies: bodies, Authenticate: func(h *fasthttp.RequestHeader) *Refusal {
		if len(h.Peek("Authorization")) > 0 {
			return nil
		}
		return &Refusal{Status: 401, Code: "invalid_api_key", Message: "who are you"}
	}}, ListenOptions{})
	for _, tt := range []struct {
		name, head string
		want       int
	}{
		{"a stranger", "Content-Length: 2\r\n", 401},
		{"a stranger, in chunks", "Transfer-Encoding: chunked\r\n", 401},
		{"a length over the limit", "Authorization: Bearer x\r\nContent-Length: 1048577\r\n", 413},
		{"more than there is room for", "Authorization: Bearer x\r\nContent-Length: 204800\r\n", 503},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := s.dial(t)
			c.send(t, post+tt.head+"Expect: 100-continue\r\n\r\n")
			status, _ := c.errorOf(t)
			require.Equal(t, tt.want, status)
			c.closed(t)
		})
	}
}

// Whoever has no key gets no memory: a large body is refused from its head.
func TestTheBodyOfAStrangerIsNotRead(t *testing.T) {
	const sent = 4 << 20
	stranger := func(h *fasthttp.RequestHeader) *Refusal {
		if string(h.Peek("Authorization")) == "Bearer ek-known" {
			return nil
		}
		return &Refusal{Status: 401, Code: "invalid_api_key", Message: "who are you"}
	}
	handled := make(chan int, 1)
	o := Options{Authenticate: stranger, MaxBody: sent, Handler: func(ctx *fasthttp.RequestCtx) {
		handled <- len(ctx.PostBody())
		hello(ctx)
	}}
	announced := fmt.Sprintf("Content-Length: %d\r\n\r\n", sent)
	for _, tt := range []struct{ name, head, body string }{
		{"announced, not a byte sent", announced, ""},
		{"announced and sent", announced, strings.Repeat("a", sent)},
		{"in chunks", "Transfer-Encoding: chunked\r\n\r\n", strings.Repeat("400\r\n"+strings.Repeat("a", 1024)+"\r\n", sent/1024)},
		{"with Expect", "Expect: 100-continue\r\n" + announced, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := serve(t, o, ListenOptions{}).dial(t)
			c.send(t, post+tt.head+tt.body)
			status, code := c.errorOf(t)
			require.Equal(t, 401, status)
			require.Equal(t, "invalid_api_key", code)
			require.Empty(t, handled)
		})
	}

	c := serve(t, o, ListenOptions{}).dial(t)
	c.send(t, post+"Authorization: Bearer ek-known\r\n"+announced+strings.Repeat("a", sent))
	_, body := c.answer(t)
	require.Equal(t, "hello", body)
	require.Equal(t, sent, <-handled)
	c.send(t, post+"Content-Length: 2\r\n\r\nab")
	_, body = c.answer(t)
	require.Equal(t, "hello", body, "a small one is the handler's to refuse, and the connection stays")
	require.Equal(t, 2, <-handled)
}

func TestSlowRequestsTimeOut(t *testing.T) {
	for _, tt := range []struct{ name, in, drip string }{
		{"half a head", "GET / HTTP/1.1\r\nHo", ""},
		{"a head that drips", "GET / HTTP/1.1\r\n", "a: b\r\n"},
		{"half a body", post + "Content-Length: 10\r\n\r\nab", ""},
		{"a body that drips", post + "Content-Length: 100000\r\n\r\n", "a"},
		{"half a chunk", post + "Transfer-Encoding: chunked\r\n\r\na\r\nab", ""},
		{"a chunk size cut off", post + "Transfer-Encoding: chunked\r\n\r\n4", ""},
		{"a chunk size without its LF", post + "Transfer-Encoding: chunked\r\n\r\n4\r", ""},
		{"a chunk without its CRLF", post + "Transfer-Encoding: chunked\r\n\r\n2\r\nab", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := serve(t, Options{Handler: hello, ReadTimeout: 100 * time.Millisecond, MinUploadRate: 1 << 30}, ListenOptions{})
			c := s.dial(t)
			c.send(t, tt.in)
			stop := make(chan struct{})
			stopped := make(chan struct{})
			go func() {
				defer close(stopped)
				tick := time.NewTicker(10 * time.Millisecond)
				defer tick.Stop()
				for tt.drip != "" {
					select {
					case <-stop:
						return
					case <-tick.C:
						if _, err := io.WriteString(c.Conn, tt.drip); err != nil {
							return
						}
					}
				}
			}()
			status, code := c.errorOf(t)
			close(stop)
			<-stopped
			require.Equal(t, 408, status)
			require.Equal(t, "request_timeout", code)
		})
	}
}

func TestASilentConnectionIsClosedWithoutAWord(t *testing.T) {
	s := serve(t, Options{Handler: hello, ReadTimeout: 50 * time.Millisecond}, ListenOptions{})
	s.dial(t).closed(t) // it asked for nothing, so there is nothing to answer
}

func TestAnIdleConnectionIsClosedWithoutAWord(t *testing.T) {
	s := serve(t, Options{Handler: hello, IdleTimeout: 50 * time.Millisecond}, ListenOptions{})
	c := s.dial(t)
	c.send(t, get)
	c.answer(t)
	c.closed(t)
}

func TestBigUploadsGetMoreTime(t *testing.T) {
	o := Options{ReadTimeout: 30 * time.Second, MinUploadRate: 1 << 20, MaxBody: 32 << 20}.withDefaults()
	for _, tt := range []struct {
		name  string
		bytes int
		want  time.Duration
	}{
		{"an empty body", 0, 30 * time.Second},
		{"4 MiB", 4 << 20, 34 * time.Second},
		{"as much as is allowed", 32 << 20, 62 * time.Second},
	} {
		t.Run(tt.name, func(t *testing.T) { require.Equal(t, tt.want, o.uploadTime(tt.bytes)) })
	}
}

// The time is that of what has arrived: 32 MiB at this rate could take two minutes.
func TestAnUploadThatAnnouncesMuchAndSendsLittleTimesOut(t *testing.T) {
	for _, head := range []string{"Content-Length: 33554432\r\n\r\n", "Transfer-Encoding: chunked\r\n\r\n2000000\r\n"} {
		s := serve(t, Options{Handler: hello, ReadTimeout: 100 * time.Millisecond}, ListenOptions{})
		c := s.dial(t)
		c.send(t, post+head+"hello")
		status, code := c.errorOf(t)
		require.Equal(t, 408, status)
		require.Equal(t, "request_timeout", code)
	}
}

func TestAClientThatNeverReadsIsLetGo(t *testing.T) {
	ended := make(chan error, 1)
	gone := make(chan struct{})
	s := serve(t, Options{Handler: func(ctx *fasthttp.RequestCtx) {
		c, _ := ConnOf(ctx)
		c.OnGone(func() { close(gone) })
		endless := readFunc(func(p []byte) (int, error) { return len(p), nil })
		ctx.SetBodyStream(NewBodyStream(endless, func(err error) { ended <- err }, zap.NewNop()), -1)
	}}, ListenOptions{WriteTimeout: 200 * time.Millisecond})
	c := s.dial(t)
	c.send(t, get)
	require.ErrorIs(t, await(t, ended, "the stream to end"), ErrUnfinished)
	await(t, gone, "whoever waits for the client")
	_, err := io.Copy(io.Discard, c.br)
	require.ErrorIs(t, err, syscall.ECONNRESET, "what the kernel held for it is dropped")
}

func TestALargeAnswerArrivesWhole(t *testing.T) {
	want := strings.Repeat("0123456789abcdef", 300_000/16*16)
	s := serve(t, Options{Handler: func(ctx *fasthttp.RequestCtx) { ctx.SetBodyString(want) }}, ListenOptions{})
	c := s.dial(t)
	c.send(t, get)
	_, body := c.answer(t)
	require.Equal(t, len(want), len(body))
	require.True(t, want == body)
}

func TestAPanicInAHandlerIsA500(t *testing.T) {
	core, logs := observer.New(zap.ErrorLevel)
	var ends atomic.Int32
	s := serve(t, Options{Log: zap.New(core), Handler: func(ctx *fasthttp.RequestCtx) {
		switch string(ctx.Path()) {
		case "/early":
			panic("early")
		case "/late":
			ctx.SetStatusCode(201)
			ctx.Response.Header.Set("X-Late", "1")
			ctx.SetBodyStream(NewBodyStream(strings.NewReader("x"), func(error) { ends.Add(1) }, zap.NewNop()), -1)
			panic("late")
		case "/nil":
			var m *map[string]int
			(*m)["a"] = 1
		}
		hello(ctx)
	}}, ListenOptions{})
	for _, path := range []string{"/early", "/late", "/nil"} {
		c := s.dial(t)
		c.send(t, "GET "+path+"?key=secret HTTP/1.1\r\nHost: x\r\n\r\n")
		resp, body := c.answer(t)
		require.Equal(t, 500, resp.StatusCode)
		require.Contains(t, body, `"internal_error"`)
		require.Empty(t, resp.Header.Get("X-Late"), "nothing is left of the answer that failed")
		c.closed(t)
		entry := logs.TakeAll()[0]
		require.Contains(t, entry.ContextMap()["stack"].(string), "server_test.go")
		require.Equal(t, path, entry.ContextMap()["path"])
	}
	require.Equal(t, int32(1), ends.Load())
	c := s.dial(t)
	c.send(t, get)
	_, body := c.answer(t)
	require.Equal(t, "hello", body, "the process goes on")
}

func TestHowAStreamEnds(t *testing.T) {
	broken := errors.New("engine cut off")
	for _, tt := range []struct {
		name   string
		method string
		last   func() error // what the second Read does
		want   error        // what end gets
		whole  bool         // the client sees the end of the answer
	}{
		{"at its end", "GET", func() error { return io.EOF }, nil, true},
		{"by an error: never as if whole", "GET", func() error { return broken }, broken, false},
		{"by a panic: never as if whole", "GET", func() error { panic(broken.Error()) }, broken, false},
		{"by an end that was wrapped: a failure", "GET", func() error { return fmt.Errorf("engine: %w", io.EOF) }, io.EOF, false},
		{"before its start for HEAD", "HEAD", nil, ErrUnfinished, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ended := make(chan error, 2)
			s := serve(t, Options{Handler: func(ctx *fasthttp.RequestCtx) {
				first := true
				ctx.SetBodyStream(NewBodyStream(readFunc(func(p []byte) (int, error) {
					if first {
						first = false
						return copy(p, "x"), nil
					}
					return 0, tt.last()
				}), func(err error) { ended <- err; panic("and end panics too") }, zap.NewNop()), -1)
			}}, ListenOptions{})
			c := s.dial(t)
			c.send(t, strings.Replace(get, "GET", tt.method, 1)+get)
			got := await(t, ended, "end")
			switch {
			case tt.want == nil:
				require.NoError(t, got)
			case errors.Is(tt.want, broken):
				require.ErrorContains(t, got, broken.Error())
			default:
				require.ErrorIs(t, got, tt.want)
			}
			answer := make([]byte, 4096)
			n := 0
			for !strings.Contains(string(answer[:n]), "\r\n\r\n") || tt.method == "GET" && !strings.Contains(string(answer[:n]), "1\r\nx\r\n") {
				k, err := c.br.Read(answer[n:])
				require.NoError(t, err)
				n += k
			}
			if !tt.whole {
				rest, err := io.ReadAll(c.br)
				require.NotContains(t, string(answer[:n])+string(rest), "0\r\n\r\n")
				require.NoError(t, err)
			}
		})
	}
}

func TestPullEndsOnce(t *testing.T) {
	ends := 0
	p := NewBodyStream(strings.NewReader("x"), func(error) { ends++ }, zap.NewNop())
	require.NoError(t, p.Close())
	require.NoError(t, p.Close())
	require.Equal(t, 1, ends)
}

func TestDrainLetsStreamsFinish(t *testing.T) {
	first, finish := make(chan struct{}), make(chan struct{})
	s := serve(t, Options{Handler: func(ctx *fasthttp.RequestCtx) {
		n := 0
		ctx.SetBodyStream(NewBodyStream(readFunc(func(p []byte) (int, error) {
			switch n++; n {
			case 1:
				return copy(p, "a"), nil
			case 2:
				close(first)
				<-finish
				return copy(p, "b"), nil
			}
			return 0, io.EOF
		}), func(error) {}, zap.NewNop()), -1)
	}}, ListenOptions{})
	c := s.dial(t)
	c.send(t, get)
	await(t, first, "the stream")
	drained := make(chan error, 1)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	go func() { drained <- Drain(ctx, s.Server, s.ln) }()
	for { // new connections are refused from the start of the drain
		probe, err := net.Dial("tcp", s.addr)
		if err != nil {
			break
		}
		_ = probe.Close()
	}
	close(finish)
	_, body := c.answer(t)
	require.Equal(t, "ab", body)
	require.NoError(t, await(t, drained, "Drain"))
}

func TestDrainCutsWhatIsLeft(t *testing.T) {
	started, ended := make(chan struct{}), make(chan struct{})
	s := serve(t, Options{Handler: func(ctx *fasthttp.RequestCtx) {
		c, _ := ConnOf(ctx)
		close(started)
		<-c.Gone()
		close(ended)
	}}, ListenOptions{})
	c := s.dial(t)
	c.send(t, get)
	await(t, started, "the handler")
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
	defer cancel()
	err := Drain(ctx, s.Server, s.ln)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, "1 connections cut")
	await(t, ended, "the handler, which Drain should have waited for")
	c.closed(t)
}

func TestNothingOfARequestIsLogged(t *testing.T) {
	core, logs := observer.New(zap.DebugLevel)
	s := serve(t, Options{Handler: hello, Log: zap.New(core)}, ListenOptions{})
	c := s.dial(t)
	c.send(t, "GET / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-secret\r\nContent-Length: x\r\n\r\n")
	c.errorOf(t)
	c.closed(t)
	_ = c.Close()
	for s.ln.Stats().Open > 0 {
		await(t, closedChan, "the close")
	}
	require.NotZero(t, logs.Len(), "fasthttp reports the bad request")
	for _, e := range logs.All() {
		require.NotContains(t, e.Message, "sk-secret")
	}
}
