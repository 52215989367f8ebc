package pump

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"evenkeel/engine"
	"evenkeel/gateway/loop"
	"evenkeel/sse"
)

// flood is a stream whose engine has always sent more than is read at once.
type flood struct {
	Stream
	engine int // the engine's end of the socket
	reads  int
	most   int // reads, then the engine sends no more
	onRead func()
}

func (f *flood) Wait(time.Time) time.Duration { return 0 }

func (f *flood) Err() error { return nil }

func (f *flood) Arrive(dst, data []byte, _ time.Time) ([]byte, sse.End) {
	if f.reads++; f.reads < f.most {
		_, _ = unix.Write(f.engine, make([]byte, len(data)))
	}
	f.onRead()
	return dst, sse.NotEnded
}

// told is a handler that says when it is called.
type told func()

func (f told) Ready(*loop.Watch, bool, time.Time) { f() }
func (f told) Expired(*loop.Watch, time.Time)     {}

// sockets are the two ends of a connection that does not block.
func sockets(t *testing.T) (here, there int) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	t.Cleanup(func() { _, _ = unix.Close(fds[0]), unix.Close(fds[1]) })
	return fds[0], fds[1]
}

// chunked is the response to a request, whose body is one chunk that never ends.
func chunked(t *testing.T) *engine.Response {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = ln.Close() })
	go func() {
		if conn, err := ln.Accept(); err == nil {
			_, _ = http.ReadRequest(bufio.NewReader(conn))
			_, _ = fmt.Fprintf(conn, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\nx", 1<<29)
			_, _ = io.Copy(io.Discard, conn)
			_ = conn.Close()
		}
	}()
	client := engine.NewClient(engine.Options{})
	t.Cleanup(client.Close)
	u, err := url.Parse("http://" + ln.Addr().String())
	require.NoError(t, err)
	resp, err := client.NewCall(&engine.Target{ID: "e", URL: u, Rank: -1}).Do("POST", "/", nil, nil, engine.Deadlines{})
	require.NoError(t, err)
	t.Cleanup(resp.Close)
	_, err = resp.Read(make([]byte, 1))
	require.NoError(t, err)
	return resp
}

// An engine that sends faster than it is read does not hold up the other streams: after its turn
// they have theirs.
func TestAnEngineThatFloodsLeavesOthersTheirTurn(t *testing.T) {
	l, err := loop.New(zap.NewNop())
	require.NoError(t, err)
	defer l.Close()
	in, from := sockets(t)
	beside, other := sockets(t)
	f := &flood{engine: from, most: 10 * maxReadPerTurn / len(l.Buffer)}
	p := &pump{Stream: f, loop: l, resp: chunked(t)}
	var waited []int // how many reads of the flood the other socket waited for, each time
	since, ended := 0, make(chan struct{})
	f.onRead = func() {
		if since == 0 {
			since = f.reads
			_, _ = unix.Write(other, []byte("x"))
		}
		if f.reads == f.most {
			close(ended)
		}
	}
	for range 2 { // more than one read has
		_, err := unix.Write(from, make([]byte, len(l.Buffer)))
		require.NoError(t, err)
	}
	require.True(t, l.Post(func() {
		p.engineWatch, _ = l.Add(in, p, false)
		_, _ = l.Add(beside, told(func() {
			if since > 0 {
				_, _ = unix.Read(beside, make([]byte, 1))
				waited, since = append(waited, f.reads-since), 0
			}
		}), false)
	}))
	select {
	case <-ended:
	case <-time.After(20 * time.Second):
		t.Fatal("the flood is not read to its end")
	}
	l.Close()
	require.NotEmpty(t, waited, "nobody else had a turn")
	for _, reads := range waited {
		require.Less(t, reads, maxReadPerTurn/len(l.Buffer), "%v", waited)
	}
	require.GreaterOrEqual(t, len(waited), 9)
}

// silent is a stream that waits for its engine as long as the test says. A goroutine that gets it
// ends.
type silent struct {
	Stream
	wait time.Duration
}

func (s *silent) Wait(time.Time) time.Duration { return s.wait }

func (s *silent) LeaveLoop([]byte, sse.End) {}

func (s *silent) Next() ([]byte, error) {
	runtime.Goexit()
	return nil, nil
}

// alarm is a handler that says when its time has come.
type alarm func()

func (f alarm) Ready(*loop.Watch, bool, time.Time) {}
func (f alarm) Expired(*loop.Watch, time.Time)     { f() }

// The limit of a wait that the engine's bytes have ended says nothing about the next wait, which
// may last for ever.
func TestTheLimitOfAnEarlierWaitPassesNoStreamOn(t *testing.T) {
	s := &silent{wait: time.Millisecond}
	p := &pump{Stream: s, resp: chunked(t)}
	fd, ok := p.resp.Detach(func() {})
	require.True(t, ok)
	l, err := loop.New(zap.NewNop())
	require.NoError(t, err)
	defer l.Close()
	beside, _ := sockets(t)
	staysOnLoop := make(chan bool, 1)
	require.True(t, l.Post(func() {
		p.engineWatch, _ = l.Add(fd, p, forReading)
		now := time.Now()
		p.awaitEngine(now)
		s.wait = 0
		p.awaitEngine(now)
		later, _ := l.Add(beside, alarm(func() { staysOnLoop <- p.engineWatch != nil }), forReading)
		later.WakeAt(now.Add(100 * time.Millisecond)) // the loop calls in the order of the times, so p would have been called before
	}))
	select {
	case stays := <-staysOnLoop:
		require.True(t, stays, "a goroutine has the stream, although its engine may be silent")
	case <-time.After(20 * time.Second):
		t.Fatal("the loop wakes nobody")
	}
	l.Close()
	p.resp.Reattach(nil) // so that it can be closed
}
