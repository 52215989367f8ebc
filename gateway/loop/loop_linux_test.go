package loop

import (
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"evenkeel/internal/socket"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const patience = 20 * time.Second

// ear is a handler that keeps what it reads.
type ear struct {
	heard   chan string
	expired chan time.Time
	ready   func(w *Watch) // instead of reading
}

func newEar() *ear { return &ear{heard: make(chan string, 1000), expired: make(chan time.Time, 10)} }

func (e *ear) Ready(w *Watch, ended bool, _ time.Time) {
	if e.ready != nil {
		e.ready(w)
		return
	}
	for {
		n, err := w.Read(w.Loop().Buffer[:])
		if errors.Is(err, io.EOF) {
			e.heard <- "EOF"
			w.Remove()
			return
		}
		if n == 0 {
			return
		}
		e.heard <- string(w.Loop().Buffer[:n])
		if !ended {
			return
		}
	}
}

func (e *ear) Expired(_ *Watch, now time.Time) { e.expired <- now }

// pair is a connection whose one end is in a loop.
func pair(t testing.TB) (here, there *net.TCPConn) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	c, err := net.Dial("tcp", ln.Addr().String())
	require.NoError(t, err)
	s, err := ln.Accept()
	require.NoError(t, err)
	t.Cleanup(func() { _, _ = c.Close(), s.Close() })
	return c.(*net.TCPConn), s.(*net.TCPConn)
}

func start(t testing.TB) *Loop {
	t.Helper()
	l, err := New(zap.NewNop())
	require.NoError(t, err)
	t.Cleanup(l.Close)
	return l
}

// watch has a loop watch a connection, on its goroutine.
func watch(t testing.TB, l *Loop, c *net.TCPConn, h Handler, write bool) (w *Watch) {
	t.Helper()
	raw, err := c.SyscallConn()
	require.NoError(t, err)
	on(t, l, func() {
		require.NoError(t, raw.Control(func(fd uintptr) { w, err = l.Add(int(fd), h, write) }))
	})
	require.NoError(t, err)
	return w
}

// on calls f on the loop's goroutine and waits for it.
func on(t testing.TB, l *Loop, f func()) {
	t.Helper()
	done := make(chan struct{})
	require.True(t, l.Post(func() { defer close(done); f() }))
	select {
	case <-done:
	case <-time.After(patience):
		t.Fatal("the loop does not call what was posted")
	}
}

func await[T any](t testing.TB, ch <-chan T) T {
	t.Helper()
	select {
	case v := <-ch:
		return v
	case <-time.After(patience):
		t.Fatal("nothing came")
		panic("unreachable")
	}
}

func TestALoopTellsWhatArrives(t *testing.T) {
	l, e := start(t), newEar()
	here, there := pair(t)
	watch(t, l, here, e, false)
	for _, s := range []string{"a", "bc", "def"} {
		_, _ = there.Write([]byte(s))
		require.Equal(t, s, await(t, e.heard))
	}
	_, _ = there.Write([]byte("last"))
	require.NoError(t, there.Close())
	require.Equal(t, "last", await(t, e.heard))
	require.Equal(t, "EOF", await(t, e.heard))
}

func TestWhatCameBeforeTheWatchIsTold(t *testing.T) {
	l, e := start(t), newEar()
	here, there := pair(t)
	_, _ = there.Write([]byte("early"))
	watch(t, l, here, e, false)
	require.Equal(t, "early", await(t, e.heard))
}

func TestAPausedWatchMissesNothing(t *testing.T) {
	l, e := start(t), newEar()
	here, there := pair(t)
	w := watch(t, l, here, e, false)
	for range 20 {
		on(t, l, func() { require.NoError(t, w.Pause()) })
		_, _ = there.Write([]byte("x"))
		on(t, l, func() {
			select {
			case s := <-e.heard:
				t.Errorf("%q was told to a paused watch", s)
			default:
			}
			require.NoError(t, w.Resume())
		})
		require.Equal(t, "x", await(t, e.heard))
	}
}

func TestRoomToWriteIsTold(t *testing.T) {
	l := start(t)
	here, there := pair(t)
	raw, err := here.SyscallConn()
	require.NoError(t, err)
	sent := 0
	require.NoError(t, raw.Control(func(fd uintptr) {
		for { // until the socket has no room
			n, err := socket.Write(fd, make([]byte, 64<<10))
			require.NoError(t, err)
			if sent += n; n < 64<<10 {
				return
			}
		}
	}))
	room := make(chan struct{}, 10)
	watch(t, l, here, &ear{ready: func(*Watch) { room <- struct{}{} }}, true)
	select {
	case <-room:
		t.Fatal("room was told of a socket that has none")
	case <-time.After(20 * time.Millisecond):
	}
	_, err = io.CopyN(io.Discard, there, int64(sent))
	require.NoError(t, err)
	await(t, room)
}

func TestTimeIsTold(t *testing.T) {
	l, e := start(t), newEar()
	here, _ := pair(t)
	w := watch(t, l, here, e, false)
	began := time.Now()
	on(t, l, func() {
		w.WakeAt(began.Add(time.Hour))
		w.WakeAt(began.Add(50 * time.Millisecond))
	})
	require.GreaterOrEqual(t, await(t, e.expired).Sub(began), 50*time.Millisecond)
	on(t, l, func() {
		w.WakeAt(time.Now().Add(20 * time.Millisecond))
		w.WakeAt(time.Time{})
	})
	select {
	case <-e.expired:
		t.Fatal("a time that was taken back has come")
	case <-time.After(150 * time.Millisecond):
	}
}

// A place in the loop's table is used again, and an event of the earlier watch is not told to the
// later.
func TestARemovedWatchHearsNothing(t *testing.T) {
	l := start(t)
	first, second := newEar(), newEar()
	a, fromA := pair(t)
	b, fromB := pair(t)
	w := watch(t, l, a, first, false)
	on(t, l, func() { w.Remove() })
	watch(t, l, b, second, false)
	_, _ = fromA.Write([]byte("for nobody"))
	_, _ = fromB.Write([]byte("for b"))
	require.Equal(t, "for b", await(t, second.heard))
	on(t, l, func() { w.Remove() }) // once more is nothing
	require.Empty(t, first.heard)
}

func TestAPanicIsOneHandlersOwn(t *testing.T) {
	core, logs := observer.New(zap.ErrorLevel)
	l, err := New(zap.New(core))
	require.NoError(t, err)
	defer l.Close()
	a, fromA := pair(t)
	b, fromB := pair(t)
	watch(t, l, a, &ear{ready: func(*Watch) { panic("of one") }}, false)
	e := newEar()
	watch(t, l, b, e, false)
	_, _ = fromA.Write([]byte("x"))
	_, _ = fromB.Write([]byte("y"))
	require.Equal(t, "y", await(t, e.heard))
	require.Eventually(t, func() bool { return logs.Len() == 1 }, patience, time.Millisecond)
}

// Everything at once, from many goroutines: nothing is lost.
func TestNothingIsLostBetweenManySockets(t *testing.T) {
	const sockets, lines = 300, 20
	l := start(t)
	var posts atomic.Int64
	var all sync.WaitGroup
	for range sockets {
		here, there := pair(t)
		e := newEar()
		watch(t, l, here, e, false)
		all.Go(func() {
			for range lines {
				l.Post(func() { posts.Add(1) })
				if _, err := there.Write([]byte("line\n")); err != nil {
					t.Error(err)
				}
			}
			_ = there.CloseWrite()
		})
		all.Go(func() {
			bytes := 0
			for s := await(t, e.heard); s != "EOF"; s = await(t, e.heard) {
				bytes += len(s)
			}
			if bytes != lines*len("line\n") {
				t.Errorf("%d bytes came", bytes)
			}
		})
	}
	all.Wait()
	on(t, l, func() {})
	require.EqualValues(t, sockets*lines, posts.Load())
	require.Len(t, l.free, len(l.watches), "places of removed watches")
}

// Sockets that have something to read all the time keep neither the time nor a post waiting.
func TestABusyLoopHearsOthers(t *testing.T) {
	l := start(t)
	busy := func(peer *net.TCPConn) func(w *Watch) {
		var b [1]byte
		return func(w *Watch) {
			if n, err := w.Read(b[:]); n == 1 && err == nil {
				_, _ = peer.Write(b[:])
			}
		}
	}
	peers := make([]*net.TCPConn, 2*len(l.events))
	for i := range peers {
		here, there := pair(t)
		watch(t, l, here, &ear{ready: busy(there)}, false)
		peers[i] = there
	}
	for _, there := range peers {
		_, _ = there.Write([]byte("x"))
	}
	here, _ := pair(t)
	e := newEar()
	w := watch(t, l, here, e, false)
	on(t, l, func() { w.WakeAt(time.Now()) })
	await(t, e.expired)
}

func TestAClosedLoopCallsNobody(t *testing.T) {
	l, err := New(zap.NewNop())
	require.NoError(t, err)
	l.Close()
	l.Close()
	require.False(t, l.Post(func() { t.Error("called") }))
}

func TestAnArrivalAllocatesNothing(t *testing.T) {
	l := start(t)
	here, there := pair(t)
	got := make(chan struct{}, 1)
	watch(t, l, here, &ear{ready: func(w *Watch) {
		for {
			if n, err := w.Read(l.Buffer[:]); n == 0 || err != nil {
				return
			}
			w.WakeAt(time.Now().Add(time.Minute))
			got <- struct{}{}
		}
	}}, false)
	x := []byte("x")
	require.Zero(t, testing.AllocsPerRun(200, func() {
		_, _ = there.Write(x)
		<-got
	}))
}

// A handler that has more to do goes on after the sockets that became ready meanwhile, however much
// it has to do, and it is told again that its socket has ended.
func TestWhoIsNotThroughGoesOnBehindTheOthers(t *testing.T) {
	l, busy, other := start(t), newEar(), newEar()
	const turns = 5
	var order []string
	ends := func() (fds [2]int) { // what one of them sends is there at once
		fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		require.NoError(t, err)
		t.Cleanup(func() { _, _ = unix.Close(fds[0]), unix.Close(fds[1]) })
		return fds
	}
	a, b := ends(), ends()
	done := make(chan struct{})
	busy.ready = func(w *Watch) {
		order = append(order, "busy")
		switch len(order) {
		case 2*turns - 1:
			close(done)
			return
		case 1:
			w.CallAgain(true)
			w.CallAgain(true) // is as good as once
		default:
			w.CallAgain(false)
		}
		_, _ = unix.Write(b[1], []byte("x"))
	}
	other.ready = func(w *Watch) {
		_, _ = w.Read(l.Buffer[:])
		order = append(order, "other")
	}
	on(t, l, func() {
		for h, fd := range map[Handler]int{busy: a[0], other: b[0]} {
			_, err := l.Add(fd, h, false)
			require.NoError(t, err)
		}
	})
	_, _ = unix.Write(a[1], []byte("x"))
	await(t, done)
	on(t, l, func() {
		for i, who := range order {
			require.Equal(t, []string{"busy", "other"}[i%2], who, "%v", order)
		}
	})
}

func TestAWatchThatIsRemovedHasNoTurnLeft(t *testing.T) {
	l, e := start(t), newEar()
	here, there := pair(t)
	turns := 0
	e.ready = func(w *Watch) {
		turns++
		w.CallAgain(false)
		w.Remove()
	}
	watch(t, l, here, e, false)
	_, _ = there.Write([]byte("x"))
	require.Eventually(t, func() bool {
		n := 0
		on(t, l, func() { n = turns })
		return n > 0
	}, patience, time.Millisecond)
	on(t, l, func() { require.Empty(t, l.nextRound) })
	on(t, l, func() { require.Equal(t, 1, turns) })
}
