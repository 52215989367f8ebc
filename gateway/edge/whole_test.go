//go:build linux

package edge

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/valyala/fasthttp"
)

// answers is a server that answers in one piece, with as many bytes as the path says.
type answers struct {
	*testServer
	bodies           *Quota
	written, dropped atomic.Int32 // answers that were written, and answers for which there was no room
}

func serveAnswers(t *testing.T, o ListenOptions) *answers {
	a := &answers{bodies: NewBodies(8 << 20)}
	o.SendBuffer = 128 << 10
	a.testServer = serve(t, Options{Bodies: a.bodies, Caller: named, Handler: func(ctx *fasthttp.RequestCtx) {
		var n int
		_, _ = fmt.Sscanf(string(ctx.Path()), "/%d", &n)
		memory, ok := ChargeAnswer(ctx, n)
		if !ok {
			a.dropped.Add(1)
			return
		}
		AnswerWhole(ctx, "text/plain", []byte(strings.Repeat("x", n)), memory)
		if unwritten := WholeOf(ctx); unwritten != nil {
			unwritten.OnWritten = func() { a.written.Add(1) }
			return
		}
		a.written.Add(1)
	}}, o)
	return a
}

func (a *answers) ask(t *testing.T, who string, n int) *client {
	c := a.dial(t)
	require.NoError(t, c.tcp.SetReadBuffer(128<<10))
	c.send(t, fmt.Sprintf("GET /%d HTTP/1.1\r\nHost: x\r\nWho: %s\r\n\r\n", n, who))
	return c
}

func TestAnAnswerIsChargedUntilItIsWritten(t *testing.T) {
	for name, secure := range map[string]bool{"in clear text": false, "over TLS": true} {
		t.Run(name, func(t *testing.T) {
			a := serveAnswers(t, ListenOptions{WriteTimeout: patience, TLS: secure})
			const n = 3 << 20
			reads := a.ask(t, "a", n)
			require.Eventually(t, func() bool { return a.bodies.Held() == n }, patience, time.Millisecond)
			require.Zero(t, a.written.Load())

			more, _ := a.ask(t, "a", n).answer(t)
			require.Equal(t, 200, more.StatusCode)
			require.EqualValues(t, 1, a.dropped.Load(), "the caller would hold more than is left for others")
			other := a.ask(t, "b", 2<<20)
			require.Eventually(t, func() bool { return a.bodies.Held() == n+2<<20 }, patience, time.Millisecond)

			_, body := reads.answer(t)
			require.Len(t, body, n)
			require.EqualValues(t, 1, a.written.Load(), "a client that has all of it finds nothing charged")
			require.EqualValues(t, 2<<20, a.bodies.Held())
			require.NoError(t, other.tcp.SetLinger(0))
			require.NoError(t, other.tcp.Close())
			require.Eventually(t, func() bool { return a.bodies.Held() == 0 && a.written.Load() == 2 }, patience, time.Millisecond)
		})
	}
}

func TestAnAnswerThatIsNotReadIsGivenUp(t *testing.T) {
	a := serveAnswers(t, ListenOptions{WriteTimeout: 50 * time.Millisecond})
	a.ask(t, "a", 4<<20)
	require.Eventually(t, func() bool { return a.ln.Stats().CutStalled == 1 }, patience, time.Millisecond)
	require.Eventually(t, func() bool { return a.bodies.Held() == 0 && a.written.Load() == 1 }, patience, time.Millisecond)
}

func TestAShortAnswerIsNotCharged(t *testing.T) {
	a := serveAnswers(t, ListenOptions{})
	c := a.dial(t)
	for _, n := range []int{0, 1, smallBody, smallBody + 1, 5000, 9000} { // around the sizes of fasthttp's buffer
		c.send(t, fmt.Sprintf("GET /%d HTTP/1.1\r\nHost: x\r\n\r\n", n))
		_, body := c.answer(t)
		require.Len(t, body, n)
		require.Zero(t, a.bodies.Held())
	}
	require.EqualValues(t, 6, a.written.Load())
}
