//go:build linux

package edge

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"
)

// moody fails its first accepts.
type moody struct {
	net.Listener
	fails atomic.Int32
	tries atomic.Int32
}

func (m *moody) Accept() (net.Conn, error) {
	m.tries.Add(1)
	if m.fails.Add(-1) >= 0 {
		return nil, &net.OpError{Op: "accept", Net: "tcp", Err: os.NewSyscallError("accept4", syscall.EMFILE)}
	}
	return m.Listener.Accept()
}

func TestAcceptSurvivesRunningOutOfFiles(t *testing.T) {
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	m := &moody{Listener: inner}
	m.fails.Store(3)
	l, err := Wrap(m, ListenOptions{})
	require.NoError(t, err)
	in, out := pair(t, l)
	require.Equal(t, uint64(3), l.Stats().AcceptErrors)
	require.Equal(t, uint64(1), l.Stats().Accepted)
	require.NoError(t, out.Close())
	require.NoError(t, in.Close())

	m.fails.Store(1 << 30)
	failed := make(chan error, 1)
	go func() {
		_, err := l.Accept()
		failed <- err
	}()
	for tries := m.tries.Load(); m.tries.Load() == tries; { // in its backoff from here on
		await(t, closedChan, "a try")
	}
	require.NoError(t, l.Close())
	require.Equal(t, net.ErrClosed, await(t, failed, "Accept to end in its backoff"))
}

var closedChan = func() chan struct{} { c := make(chan struct{}); close(c); return c }()

func TestAConnectionWithoutASocketIsClosedAndTheNextAccepted(t *testing.T) {
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	near, far := net.Pipe()
	l, err := Wrap(&pipeFirst{Listener: inner, pipe: near}, ListenOptions{})
	require.NoError(t, err)
	in, out := pair(t, l)
	_, err = far.Read(make([]byte, 1))
	require.Error(t, err, "the pipe was closed")
	require.Equal(t, uint64(1), l.Stats().WatchErrors)
	require.NoError(t, out.Close())
	require.NoError(t, in.Close())
	require.NoError(t, l.Close())
}

type pipeFirst struct {
	net.Listener
	pipe net.Conn
}

func (p *pipeFirst) Accept() (net.Conn, error) {
	if c := p.pipe; c != nil {
		p.pipe = nil
		return c, nil
	}
	return p.Listener.Accept()
}

func TestLimitsOnConnections(t *testing.T) {
	for _, tt := range []struct {
		name   string
		opt    ListenOptions
		status int
	}{
		{"in all", ListenOptions{MaxConns: 1}, 503},
		{"from one address", ListenOptions{MaxConnsPerIP: 1}, 429},
		{"in all, over TLS: closed without a word", ListenOptions{MaxConns: 1, TLS: true}, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := serve(t, Options{Handler: hello}, tt.opt)
			first := s.dial(t)
			first.send(t, get)
			first.answer(t)

			second := s.dial(t)
			if tt.status == 0 {
				_, err := second.Write([]byte(get))
				require.Error(t, err, "no handshake")
				require.Equal(t, uint64(1), s.ln.Stats().RefusedTotal)
				return
			}
			status, code := second.errorOf(t)
			require.Equal(t, tt.status, status)
			require.Equal(t, "too_many_connections", code)
			second.closed(t)
			require.Equal(t, uint64(1), s.ln.Stats().RefusedTotal+s.ln.Stats().RefusedByAddr)

			require.NoError(t, first.Close())
			for { // as soon as the server has seen that the first is closed
				third := s.dial(t)
				if _, err := third.Write([]byte(get)); err == nil {
					if line, err := third.br.ReadString('\n'); err == nil && strings.Contains(line, "200") {
						break
					}
				}
				_ = third.Close()
			}
		})
	}
}

func TestWhomAConnectionCountsFor(t *testing.T) {
	for _, tt := range []struct{ name, remote, want string }{
		{"an IPv4 address", "192.0.2.7:99", "192.0.2.7"},
		{"an IPv4 address on an IPv6 socket", "[::ffff:192.0.2.7]:99", "192.0.2.7"},
		{"an IPv6 network of 64 bits", "[2001:db8:1:2:3:4:5:6]:99", "2001:db8:1:2::"},
		{"whatever its zone", "[fe80::1%eth0]:99", "fe80::"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := remote{addr: net.TCPAddrFromAddrPort(netip.MustParseAddrPort(tt.remote))}
			require.Equal(t, netip.MustParseAddr(tt.want), countedAddr(c))
		})
	}
	require.False(t, countedAddr(remote{addr: &net.UnixAddr{Name: "@"}}).IsValid())
}

type remote struct {
	net.Conn
	addr net.Addr
}

func (r remote) RemoteAddr() net.Addr { return r.addr }

func TestListenSaysWhichAddressIsTaken(t *testing.T) {
	l := listen(t, ListenOptions{})
	_, err := Listen(l.Addr().String(), ListenOptions{})
	require.ErrorIs(t, err, syscall.EADDRINUSE)
	require.ErrorContains(t, err, l.Addr().String())
}

func TestRaiseFileLimit(t *testing.T) {
	core, logs := observer.New(zap.InfoLevel)
	limit, err := RaiseFileLimit(zap.New(core), 1)
	require.NoError(t, err)
	require.Positive(t, limit)
	require.Equal(t, zap.InfoLevel, logs.TakeAll()[0].Level)

	_, err = RaiseFileLimit(zap.New(core), limit+1)
	require.NoError(t, err)
	require.Equal(t, zap.WarnLevel, logs.TakeAll()[0].Level)
}

const lowLimitEnv = "EVENKEEL_EDGE_LOW_LIMIT"

// The server process may open 64 files and gets 100 clients. Those it cannot
// accept wait in the kernel's queue, and are served once others are gone.
func TestServeGoesOnAfterTooManyOpenFiles(t *testing.T) {
	exe, err := os.Executable()
	require.NoError(t, err)
	child := exec.Command(exe)
	child.Env = append(os.Environ(), lowLimitEnv+"=64")
	child.Stderr = os.Stderr
	stdin, err := child.StdinPipe()
	require.NoError(t, err)
	stdout, err := child.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, child.Start())
	lines := bufio.NewReader(stdout)
	addr, err := lines.ReadString('\n')
	require.NoError(t, err)

	s := &testServer{addr: strings.TrimSpace(addr)}
	clients := make([]*client, 100)
	for i := range clients {
		clients[i] = s.dial(t)
		clients[i].send(t, get)
	}
	served := 0
	for _, c := range clients[:30] { // surely accepted: the queue is in order
		_, body := c.answer(t)
		require.Equal(t, "hello", body)
		served++
	}
	failure, err := lines.ReadString('\n') // logged while the rest waits
	require.NoError(t, err)
	require.Contains(t, failure, "could not be accepted")
	for i, c := range clients {
		if i >= 30 {
			c.answer(t)
			served++
		}
		require.NoError(t, c.Close())
	}
	require.Equal(t, len(clients), served)

	require.NoError(t, stdin.Close()) // tells it to end
	rest, err := lines.ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "served to the end\n", rest)
	require.NoError(t, child.Wait())
}

// serveWithFewFiles is the server process of that test.
func serveWithFewFiles() {
	fail := func(err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	fail(unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 64, Max: 64}))
	var once sync.Once
	core, _ := observer.New(zap.WarnLevel)
	log := zap.New(zapcore.RegisterHooks(core, func(e zapcore.Entry) error {
		once.Do(func() { fmt.Println(e.Message) })
		return nil
	}))
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	fail(err)
	l, err := Wrap(inner, ListenOptions{Log: log})
	fail(err)
	fmt.Println(l.Addr())
	served := make(chan error, 1)
	go func() { served <- NewServer(Options{Handler: hello}).Serve(l) }()
	_, _ = os.Stdin.Read(make([]byte, 1)) // until the parent closes it
	select {
	case err := <-served:
		fail(errors.Join(errors.New("Serve ended"), err))
	default:
	}
	fmt.Println("served to the end")
}
