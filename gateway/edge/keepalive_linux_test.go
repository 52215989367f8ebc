package edge

import (
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/valyala/fasthttp"
	"go.uber.org/zap"
)

// The head of an answer goes out once: with the first comment, or with the first event.
func TestTheHeadOfAnAnswerGoesOutOnce(t *testing.T) {
	for _, row := range []struct {
		is   headState
		head bool
		next headState
	}{{headNotSent, true, headSentByComment}, {headSentByComment, false, headSentByComment}, {headSentByAnswer, false, headSentByAnswer}} {
		head, next := row.is.afterComment()
		require.Equal(t, row.head, head)
		require.Equal(t, row.next, next)
		again, still := next.afterComment()
		require.False(t, again)
		require.Equal(t, next, still, "there is no way back")
	}
}

const comment = ": alive\n\n"

// waits is a handler whose client gets comments until it says that it has one, and then what answer
// does.
func waits(heard <-chan struct{}, answer func(ctx *fasthttp.RequestCtx)) fasthttp.RequestHandler {
	return func(ctx *fasthttp.RequestCtx) {
		ctx.Response.Header.Set("X-Request-Id", "mine")
		StartKeepAlive(ctx, time.Millisecond, time.Now(), []byte(comment), zap.NewNop())
		<-heard
		answer(ctx)
	}
}

// Whatever comes behind a comment is a part of the same answer, over TLS and to clients of
// HTTP/1.0, too.
func TestWhatComesBehindComments(t *testing.T) {
	for _, row := range []struct {
		name, request string
		tls           bool
	}{{"HTTP/1.1", get, false}, {"over TLS", get, true}, {"HTTP/1.0", "GET / HTTP/1.0\r\n\r\n", false},
		{"HTTP/1.0 over TLS", "GET / HTTP/1.0\r\n\r\n", true}} {
		t.Run(row.name, func(t *testing.T) {
			heard, parts := make(chan struct{}), make(chan string)
			s := serve(t, Options{Handler: waits(heard, func(ctx *fasthttp.RequestCtx) {
				require.True(t, StopKeepAlive(ctx))
				NewBodyStream(readFunc(func(b []byte) (int, error) {
					part, more := <-parts
					if !more {
						return 0, io.EOF
					}
					return copy(b, part), nil
				}), func(error) {}, zap.NewNop()).Answer(ctx)
			})}, ListenOptions{TLS: row.tls})
			c := s.dial(t)
			c.send(t, row.request)
			resp, err := http.ReadResponse(c.br, nil)
			require.NoError(t, err)
			require.Equal(t, http.StatusOK, resp.StatusCode)
			require.Equal(t, "mine", resp.Header.Get("X-Request-Id"))
			require.Equal(t, "text/event-stream; charset=utf-8", resp.Header.Get("Content-Type"))
			require.Equal(t, row.request == get, len(resp.TransferEncoding) == 1)
			require.Equal(t, row.name != "HTTP/1.1", resp.Close)
			expect := func(text string) {
				t.Helper()
				got := make([]byte, len(text))
				_, err := io.ReadFull(resp.Body, got)
				require.NoError(t, err)
				require.Equal(t, text, string(got))
			}
			expect(comment + comment)
			close(heard)
			parts <- "data: 1\n\n"
			rest := "" // with the comments that came between
			for !strings.HasSuffix(rest, "data: 1\n\n") {
				one := make([]byte, 1)
				_, err := io.ReadFull(resp.Body, one)
				require.NoError(t, err)
				rest += string(one)
			}
			require.Equal(t, "data: 1\n\n", strings.ReplaceAll(rest, comment, ""))
			expect(comment + comment) // the next event is late
			parts <- "data: 2\n\n"
			close(parts)
			all, err := io.ReadAll(resp.Body)
			require.NoError(t, err)
			require.Equal(t, "data: 2\n\n", strings.ReplaceAll(string(all), comment, ""))
			if row.name != "HTTP/1.1" {
				c.closed(t)
			}
		})
	}
}

// An answer that breaks off behind comments is never whole, and has no second head.
func TestWhatBreaksBehindComments(t *testing.T) {
	for name, answer := range map[string]func(*fasthttp.RequestCtx){
		"the handler panics": func(*fasthttp.RequestCtx) { panic("on purpose") },
		"the source fails": func(ctx *fasthttp.RequestCtx) {
			NewBodyStream(readFunc(func([]byte) (int, error) { return 0, io.ErrUnexpectedEOF }), func(error) {}, zap.NewNop()).Answer(ctx)
		},
		"the source panics": func(ctx *fasthttp.RequestCtx) {
			NewBodyStream(readFunc(func([]byte) (int, error) { panic("on purpose") }), func(error) {}, zap.NewNop()).Answer(ctx)
		},
	} {
		for _, tls := range []bool{false, true} {
			t.Run(name, func(t *testing.T) {
				heard := make(chan struct{})
				s := serve(t, Options{Handler: waits(heard, answer)}, ListenOptions{TLS: tls})
				c := s.dial(t)
				c.send(t, get)
				resp, err := http.ReadResponse(c.br, nil)
				require.NoError(t, err)
				first := make([]byte, len(comment))
				_, err = io.ReadFull(resp.Body, first)
				require.NoError(t, err)
				close(heard)
				rest, err := io.ReadAll(resp.Body)
				require.Error(t, err)
				require.Empty(t, strings.ReplaceAll(string(rest), comment, ""))
				require.Eventually(t, func() bool { return s.ln.Stats().Open == 0 }, 10*time.Second, time.Millisecond, "it is off the books")
			})
		}
	}
}

// A client that waits for a shorter time than the interval has an answer like any other.
func TestAQuickAnswerHasNoComments(t *testing.T) {
	s := serve(t, Options{Handler: func(ctx *fasthttp.RequestCtx) {
		StartKeepAlive(ctx, time.Hour, time.Now(), []byte(comment), zap.NewNop())
		require.False(t, StopKeepAlive(ctx))
		ctx.SetStatusCode(http.StatusTeapot)
		ctx.SetBodyString("a pot")
	}}, ListenOptions{})
	c := s.dial(t)
	for range 2 { // on one connection
		c.send(t, get)
		resp, body := c.answer(t)
		require.Equal(t, http.StatusTeapot, resp.StatusCode)
		require.Equal(t, "a pot", body)
	}
}
