package engine

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"runtime"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

const chunkedHello = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"

func TestAConnectionServesAgainOnlyAfterACleanEnd(t *testing.T) {
	all := func(t *testing.T, r *Response) { _, err := r.ReadAll(100); require.NoError(t, err) }
	some := func(t *testing.T, r *Response) { _, err := r.Read(make([]byte, 2)); require.NoError(t, err) }
	five := func(t *testing.T, r *Response) { _, err := io.ReadFull(r, make([]byte, 5)); require.NoError(t, err) }
	none := func(*testing.T, *Response) {}
	for _, tt := range []struct {
		name, raw string
		read      func(*testing.T, *Response)
		again     bool
	}{
		{"a length, all read", ok("hello"), all, true},
		{"a length, all bytes read but not the end", ok("hello"), five, true},
		{"chunks, all read", chunkedHello, all, true},
		{"chunks, all bytes read but not the end, which has arrived", chunkedHello, five, true},
		{"an empty body, not read", ok(""), none, true},
		{"no body", "HTTP/1.1 204 No Content\r\n\r\n", none, true},
		{"an unasked keep-alive", "HTTP/1.1 200 OK\r\nConnection: keep-alive\r\nContent-Length: 0\r\n\r\n", all, true},
		{"a length, some read", ok("hello"), some, false},
		{"chunks, some read", chunkedHello, some, false},
		{"chunks, none read", chunkedHello, none, false},
		{"Connection: close", "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n", all, false},
		{"Connection: Close among others", "HTTP/1.1 200 OK\r\nConnection: x, Close\r\nContent-Length: 0\r\n\r\n", all, false},
		{"HTTP/1.0", "HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n", all, false},
		{"bytes behind the body", ok("hello") + "HTTP/1.1 200 OK\r\n", all, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var conns atomic.Int32
			c, tg := listen(t, func(n int, conn net.Conn, br *bufio.Reader) {
				conns.Store(int32(n))
				answer(tt.raw)(n, conn, br)
			})
			for range 2 {
				r, err := post(c.NewCall(tg), "{}")
				require.NoError(t, err)
				tt.read(t, r)
				r.Close()
				r.Close()
			}
			want := int32(2)
			if tt.again {
				want = 1
			}
			require.Equal(t, want, conns.Load(), "connections made for two calls")
		})
	}
}

func TestAReadToItsEndByCloseIsNotKept(t *testing.T) {
	c, tg := listen(t, func(_ int, conn net.Conn, br *bufio.Reader) {
		swallow(br)
		_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\n\r\nhello")
		_ = conn.Close()
	})
	r, err := post(c.NewCall(tg), "{}")
	require.NoError(t, err)
	_, err = r.ReadAll(100)
	require.NoError(t, err)
	r.Close()
	require.Empty(t, c.idle.stacks)
}

// stale answers the first request of a connection and hangs up on the second,
// as an engine does whose keep-alive runs out while the request is on its way.
func stale(requests *atomic.Int32) script {
	return func(n int, conn net.Conn, br *bufio.Reader) {
		for first := true; swallow(br) != nil; first = false {
			requests.Add(1)
			if n == 1 && !first {
				break
			}
			_, _ = io.WriteString(conn, ok("x"))
		}
		_ = conn.Close()
	}
}

func TestStaleConnection(t *testing.T) {
	t.Run("a POST that may have been read is not sent twice, and the error says why", func(t *testing.T) {
		var requests atomic.Int32
		c, tg := listen(t, stale(&requests))
		require.NoError(t, run(c.NewCall(tg), 2, Deadlines{}))
		err := run(c.NewCall(tg), 2, Deadlines{})
		e := asError(t, err)
		require.Equal(t, Error{Target: "e0", Phase: PhaseHead, Sent: true, Reused: true, Err: e.Err}, *e)
		require.True(t, e.Stale())
		require.ErrorContains(t, err, "stale")
		require.EqualValues(t, 2, requests.Load())
		require.NoError(t, run(c.NewCall(tg).Fresh(), 2, Deadlines{}))
	})
	t.Run("a GET is repeated once, on a new connection", func(t *testing.T) {
		var requests atomic.Int32
		c, tg := listen(t, stale(&requests))
		require.NoError(t, run(c.NewCall(tg), 2, Deadlines{}))
		status, body, err := c.Get(t.Context(), tg, "/health", 10)
		require.NoError(t, err)
		require.Equal(t, 200, status)
		require.Equal(t, "x", string(body))
		require.EqualValues(t, 3, requests.Load())
	})
	t.Run("so is a POST that does no harm twice", func(t *testing.T) {
		var requests atomic.Int32
		c, tg := listen(t, stale(&requests))
		require.NoError(t, run(c.NewCall(tg), 2, Deadlines{}))
		require.NoError(t, run(c.NewCall(tg).Repeat(), 2, Deadlines{}))
		require.EqualValues(t, 3, requests.Load())
	})
	t.Run("so is a POST of which no byte was written, and its guard is asked again", func(t *testing.T) {
		var requests atomic.Int32
		hungUp := make(chan struct{})
		c, tg := pipe(t, func(n int, conn net.Conn, br *bufio.Reader) {
			if swallow(br) == nil {
				return
			}
			requests.Add(1)
			_, _ = io.WriteString(conn, ok("x"))
			if n == 1 {
				_ = conn.Close() // a pipe has no socket that would show it before it is written
				close(hungUp)
			}
		})
		require.NoError(t, run(c.NewCall(tg), 2, Deadlines{}))
		<-hungUp
		guarded := 0
		call := c.NewCall(tg)
		call.Guard(func() error { guarded++; return nil })
		require.NoError(t, run(call, 2, Deadlines{}))
		require.EqualValues(t, 2, requests.Load())
		require.Equal(t, 2, guarded)
	})
	t.Run("one that the engine has closed is not used at all", func(t *testing.T) {
		closed := make(chan struct{})
		c, tg := listen(t, func(n int, conn net.Conn, br *bufio.Reader) {
			if swallow(br) == nil {
				return
			}
			_, _ = io.WriteString(conn, ok("x"))
			if n == 1 {
				_ = conn.Close()
				close(closed)
			}
		})
		require.NoError(t, run(c.NewCall(tg), 2, Deadlines{}))
		<-closed
		for c.idle.stacks[tg.key()][0].hasNoInput() { // the end is on its way
			runtime.Gosched()
		}
		require.NoError(t, run(c.NewCall(tg), 2, Deadlines{}))
	})
}

func TestIdleConnectionsAge(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conns := 0
		c, tg := pipe(t, func(n int, conn net.Conn, br *bufio.Reader) {
			conns = n
			answer(ok("x"))(n, conn, br)
		})
		call := func() { require.NoError(t, run(c.NewCall(tg), 2, Deadlines{})) }
		call()
		time.Sleep(4*time.Second - 1)
		call()
		require.Equal(t, 1, conns, "just young enough")
		time.Sleep(4 * time.Second)
		call()
		require.Equal(t, 2, conns, "uvicorn closes at 5 s: one of 4 s is not risked")
		time.Sleep(10 * time.Second)
		synctest.Wait()
		require.Empty(t, c.idle.stacks, "old ones are closed though nobody asks")
		require.Nil(t, c.idle.timer)
		call()
		c.Close()
		require.Empty(t, c.idle.stacks)
		require.ErrorIs(t, run(c.NewCall(tg), 2, Deadlines{}), ErrClosed)
	})
}

// Connections that the client does not keep would be dialled for ever.
func TestAClientWarmsNoMoreConnectionsThanItKeeps(t *testing.T) {
	dials := 0
	c := NewClient(Options{MaxIdle: 2, Dial: func(context.Context, string, string) (net.Conn, error) {
		if dials++; dials > 9 {
			return nil, errors.New("dialled for ever")
		}
		ours, theirs := net.Pipe()
		t.Cleanup(func() { _ = theirs.Close() })
		return ours, nil
	}})
	defer c.Close()
	tg := target(t, "http://e")
	require.NoError(t, c.Warm(t.Context(), tg, 1))
	require.Equal(t, 1, dials)
	require.NoError(t, c.Warm(t.Context(), tg, 5))
	require.Equal(t, 3, dials, "the third has shown that no more are kept")
	require.Equal(t, 2, c.idle.count(tg.key()))
}

func TestTheNewestIdleConnectionIsTakenFirst(t *testing.T) {
	p := newIdlePool(time.Minute, 2)
	defer p.close()
	var conns []*conn
	for range 3 {
		ours, theirs := net.Pipe()
		defer theirs.Close()
		c := newConn(ours, ours, key{host: "e"}, newReaders(64))
		conns = append(conns, c)
		p.put(c)
	}
	require.Same(t, conns[1], p.take(key{host: "e"}), "the third found no room")
	require.Same(t, conns[0], p.take(key{host: "e"}))
	require.Nil(t, p.take(key{host: "e"}))
	require.Nil(t, p.take(key{host: "e", https: true}), "another key is another engine")
	_, err := conns[2].raw.Write([]byte("x"))
	require.ErrorIs(t, err, io.ErrClosedPipe)
}
