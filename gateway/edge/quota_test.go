//go:build linux

package edge

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/valyala/fasthttp"
)

// named charges bodies to whoever the request says.
func named(h *fasthttp.RequestHeader) string { return string(h.Peek("Who")) }

func TestBodiesTogetherAreBounded(t *testing.T) {
	const limit = 200 << 10
	bodies := NewBodies(limit)
	inside, leave := make(chan struct{}, 8), make(chan struct{})
	refused := make(chan Refusal, 8)
	s := serve(t, Options{Bodies: bodies, Caller: named, Refused: func(_ *fasthttp.RequestHeader, r Refusal) { refused <- r },
		Handler: func(ctx *fasthttp.RequestCtx) {
			_, reservation := AcquireBody(ctx)
			defer reservation.Release()
			inside <- struct{}{}
			<-leave
		}}, ListenOptions{})
	post := func(who string, size int, body string) *client {
		c := s.dial(t)
		c.send(t, fmt.Sprintf("POST / HTTP/1.1\r\nHost: x\r\nWho: %s\r\nContent-Length: %d\r\n\r\n%s", who, size, body))
		return c
	}
	full := strings.Repeat("x", 40<<10)
	kept := post("a", len(full), full)
	await(t, inside, "a handler that keeps its body")
	upload := post("b", 80<<10, full[:5]) // takes some room, and not what it announces
	require.Eventually(t, func() bool { return bodies.Held() == (40+64)<<10 }, patience, time.Millisecond)

	over := post("a", len(full), full) // fits, and leaves less than a has
	resp, _ := over.answer(t)
	require.Equal(t, 503, resp.StatusCode)
	require.Equal(t, "1", resp.Header.Get("Retry-After"))
	require.Equal(t, "overloaded", await(t, refused, "word of it").Code)

	other := post("c", len(full), full)
	await(t, inside, "a caller for whom there is room")
	chunked := s.dial(t)
	chunked.send(t, "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"+strings.Repeat("400\r\n"+full[:1024]+"\r\n", 40))
	status, code := chunked.errorOf(t)
	require.Equal(t, 503, status)
	require.Equal(t, "overloaded", code)
	<-refused
	small := post("a", 5, "hello")
	await(t, inside, "a small body, which is always read")

	_ = upload.Close() // in the middle
	require.Eventually(t, func() bool { return bodies.Held() == 80<<10+5 }, patience, time.Millisecond)
	require.Equal(t, "bad_request", await(t, refused, "word of the upload").Code)
	close(leave)
	for _, c := range []*client{kept, small, other} {
		resp, _ := c.answer(t)
		require.Equal(t, 200, resp.StatusCode)
	}
	require.Zero(t, bodies.Held())
	require.Empty(t, bodies.callers)
}

// One caller with as many connections as it likes leaves room for another, and
// what it announces and does not send counts for nothing.
func TestNoCallerHoldsMoreThanItsShare(t *testing.T) {
	const limit, size = 8 << 20, 1 << 20
	bodies := NewBodies(limit)
	var served atomic.Int32
	s := serve(t, Options{Bodies: bodies, MaxBody: size, Caller: named, Handler: func(ctx *fasthttp.RequestCtx) { served.Add(1) }},
		ListenOptions{})
	head := func(who string) string {
		return fmt.Sprintf("POST / HTTP/1.1\r\nHost: x\r\nWho: %s\r\nContent-Length: %d\r\n\r\n", who, size)
	}
	var greedy []*client
	for range 32 {
		c := s.dial(t)
		c.send(t, head("greedy")+"hello")
		greedy = append(greedy, c)
	}
	require.Eventually(t, func() bool { return bodies.Held() == 32*firstBufferSize }, patience, time.Millisecond)
	var wg sync.WaitGroup
	for _, c := range greedy { // all but the last byte: none of them ends
		wg.Go(func() { _, _ = io.WriteString(c.Conn, strings.Repeat("x", size-6)) }) // most are refused meanwhile
	}
	wg.Wait()
	require.LessOrEqual(t, bodies.Held(), int64(limit/2))
	for range 3 {
		c := s.dial(t)
		c.send(t, head("other")+strings.Repeat("x", size))
		resp, _ := c.answer(t)
		require.Equal(t, 200, resp.StatusCode)
	}
	for _, c := range greedy {
		_ = c.Close()
	}
	require.Eventually(t, func() bool { return bodies.Held() == 0 }, patience, time.Millisecond)
	require.Equal(t, int32(3), served.Load())
}

func TestTheOnlyBodyOfACallerMayFillTheLimit(t *testing.T) {
	s := serve(t, Options{Bodies: NewBodies(64 << 10), MaxBody: 64 << 10, Handler: hello}, ListenOptions{})
	c := s.dial(t)
	c.send(t, post+"Content-Length: 65536\r\n\r\n"+strings.Repeat("x", 64<<10))
	_, body := c.answer(t)
	require.Equal(t, "hello", body)
}

func TestAHandlerThatPanicsKeepsNothingCharged(t *testing.T) {
	bodies := NewBodies(1 << 20)
	for _, take := range []bool{false, true} {
		s := serve(t, Options{Bodies: bodies, Handler: func(ctx *fasthttp.RequestCtx) {
			if take {
				AcquireBody(ctx)
			}
			panic("on purpose")
		}}, ListenOptions{})
		c := s.dial(t)
		c.send(t, post+"Content-Length: 5\r\n\r\nhello")
		status, _ := c.errorOf(t)
		require.Equal(t, 500, status)
		require.Zero(t, bodies.Held(), "taken %v", take)
	}
}

// An upload may end at any byte, by a FIN, a half close or a reset, and for any
// method: nothing stays charged.
func TestBrokenUploadsLeaveNothingCharged(t *testing.T) {
	const uploads = 10_000
	chunked := "Transfer-Encoding: chunked\r\n\r\n1000\r\n" + strings.Repeat("x", 4096) + "\r\n5;a=b\r\nhello\r\n2000\r\n" +
		strings.Repeat("y", 8192) + "\r\n0\r\nT: v\r\nU: w\r\n\r\n"
	announced := "Content-Length: 9000\r\n\r\n" + strings.Repeat("x", 9000)
	for _, tls := range []bool{false, true} {
		t.Run(fmt.Sprintf("tls %v", tls), func(t *testing.T) {
			bodies := NewBodies(1 << 30)
			s := serve(t, Options{Bodies: bodies, Handler: func(ctx *fasthttp.RequestCtx) {
				if string(ctx.Path()) == "/none" {
					ctx.SetStatusCode(404)
				}
			}}, ListenOptions{TLS: tls})
			n := uploads
			if tls {
				n /= 50 // handshakes are slow, and what is above them is the same
			}
			var next atomic.Int64
			var wg sync.WaitGroup
			for range 16 {
				wg.Go(func() {
					for i := int(next.Add(1)); i <= n; i = int(next.Add(1)) {
						rng := rand.New(rand.NewPCG(1, uint64(i)))
						line := []string{"POST /", "GET /", "HEAD /", "POST /none", "GET /none"}[rng.IntN(5)]
						whole := line + " HTTP/1.1\r\nHost: x\r\n" + []string{chunked, announced}[rng.IntN(2)]
						breakOff(t, s, whole[:boundary(whole, rng)], rng.IntN(3))
					}
				})
			}
			wg.Wait()
			require.Eventually(t, func() bool { return s.ln.Stats().Open == 0 }, patience, time.Millisecond)
			require.Zero(t, bodies.Held())
			require.Empty(t, bodies.callers)
		})
	}
}

// boundary is a place to break off: mostly within two bytes of where a line or
// a chunk ends.
func boundary(whole string, rng *rand.Rand) int {
	var ends []int
	for i, b := range whole {
		if b == '\n' {
			ends = append(ends, i+1)
		}
	}
	if rng.IntN(8) == 0 {
		return rng.IntN(len(whole) + 1)
	}
	return min(len(whole), max(0, ends[rng.IntN(len(ends))]+rng.IntN(5)-2))
}

// breakOff sends what there is and leaves by a close, a half close or a reset.
func breakOff(t *testing.T, s *testServer, sent string, how int) {
	raw, err := net.Dial("tcp", s.addr)
	if err != nil {
		t.Error(err)
		return
	}
	c := s.client(raw)
	defer func() { _ = raw.Close() }()
	_ = raw.SetDeadline(time.Now().Add(patience))
	_, _ = io.WriteString(c.Conn, sent)
	switch how {
	case 0:
		_ = c.tcp.CloseWrite()
		_, _ = io.Copy(io.Discard, raw) // until it is closed there, too
	case 1:
		_ = c.tcp.SetLinger(0)
	}
}

func BenchmarkUpload(b *testing.B) {
	for _, size := range []int{2 << 10, 400 << 10, 16 << 20} {
		b.Run(fmt.Sprintf("%dKiB", size>>10), func(b *testing.B) {
			ln, err := Listen("127.0.0.1:0", ListenOptions{})
			require.NoError(b, err)
			s := NewServer(Options{Bodies: NewBodies(2 << 30), Handler: func(ctx *fasthttp.RequestCtx) { ctx.Request.SwapBody(nil) }})
			go func() { _ = s.Serve(ln) }()
			defer func() { _ = ln.Close() }()
			c, err := net.Dial("tcp", ln.Addr().String())
			require.NoError(b, err)
			defer func() { _ = c.Close() }()
			in := []byte(fmt.Sprintf("%sContent-Length: %d\r\n\r\n%s", post, size, strings.Repeat("x", size)))
			answer := make([]byte, 4096)
			b.SetBytes(int64(size))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := c.Write(in); err != nil {
					b.Fatal(err)
				}
				if _, err := c.Read(answer); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func TestACallerLeavesPlacesToOthers(t *testing.T) {
	places := NewPlaces(12)
	taken := func(name string) (n int, all []*Reservation) {
		for {
			r := places.For(&Reservation{caller: caller{name: name}})
			if !r.Acquire(1) {
				return n, all
			}
			n, all = n+1, append(all, r)
		}
	}
	alone, greedy := taken("greedy")
	require.Equal(t, 6, alone, "half of them")
	require.False(t, places.Full())
	second, _ := taken("second")
	require.Equal(t, 3, second, "half of the rest")
	last, _ := taken("third")
	require.Equal(t, 1, last)
	for _, r := range greedy {
		r.Release()
		r.Release()
	}
	require.EqualValues(t, 4, places.Held())
	again, _ := taken("greedy")
	require.Equal(t, 4, again)
}

// If a caller has one request only, its answer may fill all the memory that its body leaves.
func TestTheAnswerToACallersOnlyRequestMayFillTheLimit(t *testing.T) {
	bodies := NewBodies(64 << 10)
	body := &Reservation{quota: bodies, caller: caller{name: "a"}}
	require.True(t, body.Acquire(10<<10))
	answer := bodies.For(body)
	require.Equal(t, 54<<10, answer.Most(64<<10))
	require.True(t, answer.Acquire(54<<10))
	body.Release()
	require.Equal(t, 64<<10, answer.Most(1<<20))
	require.False(t, bodies.For(body).Acquire(16<<10), "a second one leaves room")
	answer.Release()
	require.Zero(t, bodies.Held())
	require.Empty(t, bodies.callers)
}
