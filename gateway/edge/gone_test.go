//go:build linux

package edge

import (
	"io"
	"net"
	"runtime"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/valyala/fasthttp"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"
)

// leave is a way for a client to go.
var leave = map[string]func(t *testing.T, c *client){
	"FIN": func(t *testing.T, c *client) { require.NoError(t, c.tcp.Close()) },
	"RST": func(t *testing.T, c *client) {
		require.NoError(t, c.tcp.SetLinger(0))
		require.NoError(t, c.tcp.Close())
	},
	"half close": func(t *testing.T, c *client) { require.NoError(t, c.tcp.CloseWrite()) },
}

func TestALeavingClientIsNoticed(t *testing.T) {
	for transport, tls := range map[string]bool{"plain": false, "TLS": true} {
		for how, leave := range leave {
			for queued, pipelined := range map[string]string{"nothing queued": "", "a request queued": get} {
				t.Run(transport+", "+how+", handler blocked, "+queued, func(t *testing.T) {
					started, noticed := make(chan struct{}, 2), make(chan struct{}, 2)
					s := serve(t, Options{Handler: func(ctx *fasthttp.RequestCtx) {
						c, ok := ConnOf(ctx)
						if !ok {
							t.Error("no edge connection under this request")
							return
						}
						started <- struct{}{}
						<-c.Gone()
						noticed <- struct{}{}
					}}, ListenOptions{TLS: tls})
					c := s.dial(t)
					c.send(t, get+pipelined)
					await(t, started, "the handler")
					leave(t, c)
					await(t, noticed, "the handler to notice")
				})

				t.Run(transport+", "+how+", quiet stream, "+queued, func(t *testing.T) {
					ended := make(chan error, 1)
					s := serve(t, Options{Handler: func(ctx *fasthttp.RequestCtx) {
						c, _ := ConnOf(ctx)
						upstream := make(chan struct{}) // closed as an engine's connection would be
						first := true
						ctx.SetBodyStream(NewBodyStream(readFunc(func(p []byte) (int, error) {
							if first {
								first = false
								return copy(p, "data: 1\n\n"), nil
							}
							c.OnGone(func() { close(upstream) })
							<-upstream
							c.OnGone(nil)
							return 0, net.ErrClosed
						}), func(err error) { ended <- err }, zap.NewNop()), -1)
					}}, ListenOptions{TLS: tls})
					c := s.dial(t)
					c.send(t, get+pipelined)
					resp := make([]byte, 512)
					_, err := c.br.Read(resp) // head and first event come in one piece: the stream is quiet from here
					require.NoError(t, err)
					require.Contains(t, string(resp), "data: 1")
					leave(t, c)
					require.ErrorIs(t, await(t, ended, "the stream to end"), net.ErrClosed)
				})
			}
		}
	}
}

func TestAClientThatStaysIsNotGone(t *testing.T) {
	conns := make(chan *Conn, 3)
	s := serve(t, Options{Handler: func(ctx *fasthttp.RequestCtx) {
		c, _ := ConnOf(ctx)
		conns <- c
		hello(ctx)
	}}, ListenOptions{})
	c := s.dial(t)
	for range 3 {
		c.send(t, get)
		_, body := c.answer(t)
		require.Equal(t, "hello", body)
	}
	first := <-conns
	for range 2 {
		require.Same(t, first, <-conns, "one connection, one Conn")
	}
	select {
	case <-first.Gone():
		require.Fail(t, "gone, and still connected")
	default:
	}
	require.NoError(t, c.Close())
	await(t, first.Gone(), "the close of an idle connection")
}

func TestConnOfASocketThatIsNotOurs(t *testing.T) {
	var ctx fasthttp.RequestCtx
	a, b := net.Pipe()
	defer func() { _, _ = a.Close(), b.Close() }()
	ctx.Init2(a, nil, false)
	_, ok := ConnOf(&ctx)
	require.False(t, ok)
}

// pair returns both ends of a connection through a Listener.
func pair(t *testing.T, l *Listener) (*Conn, net.Conn) {
	t.Helper()
	out, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	in, err := l.Accept()
	require.NoError(t, err)
	return in.(*Conn), out
}

func listen(t *testing.T, o ListenOptions) *Listener {
	t.Helper()
	l, err := Listen("127.0.0.1:0", o)
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	return l
}

// Under -race this also fails when a callback runs beside what follows OnGone(nil).
func TestNoCallbackRunsAfterOnGoneNil(t *testing.T) {
	l := listen(t, ListenOptions{})
	fired := 0
	for round := range 1000 {
		in, out := pair(t, l)
		released, late, called := false, false, false
		in.OnGone(func() { called, late = true, released })
		var wg sync.WaitGroup
		wg.Go(func() { _ = out.Close() })
		for range round % 50 { // meet the FIN early and late
			runtime.Gosched()
		}
		in.OnGone(nil)
		released = true
		wg.Wait()
		await(t, in.Gone(), "the FIN")
		require.False(t, late)
		if called {
			fired++
		}
		require.NoError(t, in.Close())
	}
	t.Logf("%d of 1000 callbacks came before OnGone(nil)", fired)
}

func TestOnGoneNilWaitsForTheCallback(t *testing.T) {
	l := listen(t, ListenOptions{})
	in, out := pair(t, l)
	entered, finish := make(chan struct{}), make(chan struct{})
	in.OnGone(func() { close(entered); <-finish })
	require.NoError(t, out.Close())
	await(t, entered, "the callback")
	require.False(t, in.mu.TryLock(), "OnGone could return while the callback runs")
	close(finish)
	in.OnGone(nil)
	require.NoError(t, in.Close())
}

func TestOnGoneAfterTheClientLeftCallsAtOnce(t *testing.T) {
	l := listen(t, ListenOptions{})
	in, out := pair(t, l)
	calls := 0
	in.OnGone(func() { calls++ })
	require.NoError(t, out.Close())
	await(t, in.Gone(), "the FIN")
	in.OnGone(nil)
	require.Equal(t, 1, calls)
	in.OnGone(func() { calls++ })
	require.Equal(t, 2, calls)
	require.NoError(t, in.Close())
	require.Equal(t, 2, calls, "the connection was gone before")
	require.ErrorIs(t, in.Close(), net.ErrClosed)
}

func TestCloseOnOurSideIsGoneToo(t *testing.T) {
	l := listen(t, ListenOptions{})
	in, out := pair(t, l)
	called := make(chan struct{})
	in.OnGone(func() { close(called) })
	require.NoError(t, in.Close())
	await(t, called, "the callback")
	_, err := out.Read(make([]byte, 1))
	require.ErrorIs(t, err, io.EOF)
	require.NoError(t, out.Close())
}

func TestAPanickingCallbackHurtsNobodyElse(t *testing.T) {
	l := listen(t, ListenOptions{})
	bad, badOut := pair(t, l)
	good, goodOut := pair(t, l)
	bad.OnGone(func() { panic("callback") })
	require.NoError(t, badOut.Close())
	await(t, bad.Gone(), "the first client")
	require.NoError(t, goodOut.Close())
	await(t, good.Gone(), "the second client: the watcher goes on")
	require.NoError(t, bad.Close())
	require.NoError(t, good.Close())
}

func TestTheWatcherOutlivesTheListenerUntilTheLastConnection(t *testing.T) {
	l := listen(t, ListenOptions{})
	in, out := pair(t, l)
	require.NoError(t, l.Close())
	require.ErrorIs(t, l.Close(), net.ErrClosed)
	require.NoError(t, out.Close())
	await(t, in.Gone(), "a FIN while draining")
	require.NoError(t, in.Close()) // goleak sees whether the watcher ended
}

func TestTheKernelGivesUpOnASilentPeerAfterTheWriteTimeout(t *testing.T) {
	l := listen(t, ListenOptions{})
	in, out := pair(t, l)
	rc, err := in.Conn.(*net.TCPConn).SyscallConn()
	require.NoError(t, err)
	var ms int
	var optErr error
	require.NoError(t, rc.Control(func(fd uintptr) {
		ms, optErr = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT)
	}))
	require.NoError(t, optErr)
	require.Equal(t, 30_000, ms)
	require.NoError(t, out.Close())
	require.NoError(t, in.Close())
}
