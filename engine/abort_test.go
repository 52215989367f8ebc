package engine

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"net/url"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

var stuck = []struct {
	name  string
	url   string
	size  int // of the body
	phase Phase
	play  script
	want  Error // Target, Timeout, Aborted and Err aside
}{
	{"TLS handshake unanswered", "https://engine.test", 2, PhaseConnect,
		func(_ int, _ net.Conn, br *bufio.Reader) { _, _ = io.Copy(io.Discard, br) }, Error{}},
	{"small request not read", "http://engine.test", 2, PhaseWrite,
		func(_ int, c net.Conn, _ *bufio.Reader) { hold(c) }, Error{}},
	{"large request half read", "http://engine.test", 1 << 20, PhaseWrite,
		func(_ int, c net.Conn, br *bufio.Reader) { _, _ = br.Peek(1000); hold(c) }, Error{Sent: true}},
	{"no answer", "http://engine.test", 2, PhaseHead,
		func(_ int, _ net.Conn, br *bufio.Reader) { _, _ = io.Copy(io.Discard, br) }, Error{Sent: true}},
	{"no answer to a large request", "http://engine.test", 1 << 20, PhaseHead,
		func(_ int, _ net.Conn, br *bufio.Reader) { _, _ = io.Copy(io.Discard, br) }, Error{Sent: true}},
	{"half a head", "http://engine.test", 2, PhaseHead,
		func(_ int, c net.Conn, br *bufio.Reader) {
			swallow(br)
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nX-")
			_, _ = io.Copy(io.Discard, br)
		}, Error{Sent: true, Answered: true}},
	{"interim answers only", "http://engine.test", 2, PhaseHead,
		func(_ int, c net.Conn, br *bufio.Reader) {
			swallow(br)
			_, _ = io.WriteString(c, "HTTP/1.1 102 Processing\r\n\r\n")
			_, _ = io.Copy(io.Discard, br)
		}, Error{Sent: true, Answered: true}},
	{"silent stream", "http://engine.test", 2, PhaseBody,
		func(_ int, c net.Conn, br *bufio.Reader) {
			swallow(br)
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
			_, _ = io.Copy(io.Discard, br)
		}, Error{Sent: true, Answered: true}},
}

func hold(c net.Conn) {
	for c.SetDeadline(time.Time{}) == nil {
		time.Sleep(time.Second)
	}
}

func run(k *Call, size int, d Deadlines) error {
	r, err := k.Do("POST", "/", nil, [][]byte{make([]byte, size)}, d)
	if err != nil {
		return err
	}
	defer r.Close()
	_, err = io.Copy(io.Discard, r)
	return err
}

func TestAbortInEveryPhase(t *testing.T) {
	for _, tt := range stuck {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				defer time.Sleep(2 * time.Second) // for hold to see the end
				c, tg := pipe(t, tt.play)
				defer c.Close()
				tg.URL, _ = url.Parse(tt.url)
				k, res := c.NewCall(tg), make(chan error, 1)
				go func() { res <- run(k, tt.size, Deadlines{}) }()
				time.Sleep(time.Hour) // by now the call is stuck where the row says
				require.Empty(t, res)
				k.Abort()
				k.Abort()
				err := <-res
				e := asError(t, err)
				want := tt.want
				want.Target, want.Phase, want.Aborted, want.Err = "e0", tt.phase, true, ErrAborted
				require.Equal(t, want, *e)
			})
		})
	}
}

func TestDeadlineOfEveryPhase(t *testing.T) {
	for _, tt := range stuck {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				defer time.Sleep(2 * time.Second) // for hold to see the end
				c, tg := pipe(t, tt.play)
				defer c.Close()
				tg.URL, _ = url.Parse(tt.url)
				begin := time.Now()
				err := run(c.NewCall(tg), tt.size, Deadlines{Connect: 5 * time.Second, FirstByte: 7 * time.Second, Idle: 9 * time.Second})
				after := map[Phase]time.Duration{PhaseConnect: 5 * time.Second, PhaseWrite: 7 * time.Second, PhaseHead: 7 * time.Second,
					PhaseBody: 9 * time.Second}
				e := asError(t, err)
				want := tt.want
				want.Target, want.Phase, want.Timeout, want.Err = "e0", tt.phase, true, e.Err
				require.Equal(t, want, *e)
				require.Equal(t, after[tt.phase], time.Since(begin), "synctest's clock is exact")
			})
		})
	}
}

func TestAbortWhileDialling(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := NewClient(Options{Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}})
		k, res := c.NewCall(target(t, "http://blackhole.test")), make(chan error, 1)
		go func() { res <- run(k, 2, Deadlines{}) }()
		synctest.Wait()
		k.Abort()
		require.Equal(t, Error{Target: "e0", Phase: PhaseConnect, Aborted: true, Err: ErrAborted}, *asError(t, <-res))
		require.ErrorIs(t, run(c.NewCall(target(t, "http://blackhole.test")), 2, Deadlines{Connect: time.Second}), context.DeadlineExceeded)
	})
}

func TestAbortBeforeDo(t *testing.T) {
	c, tg := listen(t, answer(ok("x")))
	k := c.NewCall(tg)
	k.Abort()
	require.ErrorIs(t, run(k, 2, Deadlines{}), ErrAborted)
	require.ErrorIs(t, run(k, 2, Deadlines{}), ErrRefused, "a call is made once")
}

func TestIdleRunsBetweenReadsAndCanBeChanged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, tg := pipe(t, func(_ int, conn net.Conn, br *bufio.Reader) {
			swallow(br)
			_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
			for range 4 { // 32 s in all: longer than any one deadline
				time.Sleep(8 * time.Second)
				_, _ = io.WriteString(conn, "1\r\nx\r\n")
			}
			_, _ = io.Copy(io.Discard, br)
		})
		defer c.Close()
		r, err := c.NewCall(tg).Do("POST", "/", nil, nil, Deadlines{FirstByte: time.Second, Idle: 10 * time.Second})
		require.NoError(t, err)
		defer r.Close()
		p := make([]byte, 10)
		for range 4 {
			_, err := r.Read(p)
			require.NoError(t, err, "a stream that goes on has no total deadline")
		}
		r.SetIdle(3 * time.Second)
		begin := time.Now()
		_, err = r.Read(p)
		require.True(t, asError(t, err).Timeout)
		require.Equal(t, 3*time.Second, time.Since(begin))
	})
}

func TestAbortRacesHarmNobodyElse(t *testing.T) {
	c, tg := listen(t, answer("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"))
	for i := range 300 {
		victim, done := c.NewCall(tg), make(chan struct{})
		go func() {
			defer close(done)
			for range i % 50 * 20 {
				_ = victim.target // spin a little, another time each round
			}
			victim.Abort()
		}()
		if err := run(victim, 2, Deadlines{}); err != nil {
			require.ErrorIs(t, err, ErrAborted)
		}
		require.NoError(t, run(c.NewCall(tg), 2, Deadlines{}), "the next call, likely on the same connection")
		<-done
	}
}

func TestADeadlineEndsADrip(t *testing.T) {
	c, tg := listen(t, func(_ int, conn net.Conn, br *bufio.Reader) {
		if _, err := http.ReadRequest(br); err != nil {
			return
		}
		_, err := io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
		for ; err == nil; time.Sleep(5 * time.Millisecond) { // over a real socket, whose deadline is what ends it
			_, err = io.WriteString(conn, "x")
		}
	})
	r, err := post(c.NewCall(tg), "{}")
	require.NoError(t, err)
	defer r.Close()
	r.SetIdle(time.Minute)
	r.SetDeadline(time.Now().Add(50 * time.Millisecond))
	_, err = r.ReadAll(1 << 30)
	var e *Error
	require.ErrorAs(t, err, &e)
	require.True(t, e.Timeout)
}
