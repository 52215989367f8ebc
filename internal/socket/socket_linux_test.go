package socket

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// pair is a connection from both ends.
func pair(t *testing.T) (here, there *net.TCPConn) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { _ = ln.Close() }()
	c, err := net.Dial("tcp", ln.Addr().String())
	require.NoError(t, err)
	d, err := ln.Accept()
	require.NoError(t, err)
	t.Cleanup(func() {
		_ = c.Close()
		_ = d.Close()
	})
	return c.(*net.TCPConn), d.(*net.TCPConn)
}

func TestAConnectionWithoutASocketHasNone(t *testing.T) {
	c, d := net.Pipe()
	defer func() { _, _ = c.Close(), d.Close() }()
	require.False(t, Of(c).Exists())
}

func TestAQuestionIsWrittenAndItsAnswerAwaited(t *testing.T) {
	here, there := pair(t)
	s := Of(here)
	for _, question := range []string{"how long?", "and now?"} { // what is ready from an earlier answer means nothing
		go func() {
			b := make([]byte, len(question))
			_, _ = io.ReadFull(there, b)
			_, _ = there.Write(bytes.ToUpper(b))
		}()
		sent := false
		n, err := s.Ask([][]byte{[]byte(question[:3]), nil, []byte(question[3:])}, func() { sent = true })
		require.NoError(t, err)
		require.Equal(t, len(question), n)
		require.True(t, sent)
		require.False(t, s.Quiet(), "the answer is there")
		b := make([]byte, 100)
		n, err = s.Read(b)
		require.NoError(t, err)
		require.Equal(t, string(bytes.ToUpper([]byte(question))), string(b[:n]))
		require.True(t, s.Quiet())
	}
}

func TestAQuestionForWhichThereIsNoRoomIsCut(t *testing.T) {
	here, _ := pair(t)
	huge := make([]byte, 64<<20)
	n, err := Of(here).Ask([][]byte{huge, huge}, func() { t.Error("not all of it was sent") })
	require.NoError(t, err)
	require.Positive(t, n)
	require.Less(t, n, len(huge))
}

// What ends a wait is told by the next Read, and the question by Ask.
func TestHowAWaitEnds(t *testing.T) {
	for _, tt := range []struct {
		name string
		end  func(here, there *net.TCPConn)
		want error
	}{
		{"the other side closes", func(_, there *net.TCPConn) { _ = there.Close() }, io.EOF},
		{"we close", func(here, _ *net.TCPConn) { _ = here.Close() }, net.ErrClosed},
		{"its time is over", func(here, _ *net.TCPConn) { _ = here.SetReadDeadline(time.Unix(1, 0)) }, os.ErrDeadlineExceeded},
	} {
		t.Run(tt.name, func(t *testing.T) {
			here, there := pair(t)
			s := Of(here)
			sent, got := make(chan struct{}), make(chan struct{})
			go func() {
				defer close(got)
				<-sent
				_, _ = io.ReadFull(there, make([]byte, 1)) // else the close would be a reset
				tt.end(here, there)
			}()
			n, err := s.Ask([][]byte{[]byte("?")}, func() { close(sent) })
			require.NoError(t, err)
			require.Equal(t, 1, n)
			<-got
			_, err = s.Read(make([]byte, 1))
			require.ErrorIs(t, err, tt.want)
			if await := s.Await(); !errors.Is(tt.want, io.EOF) {
				require.ErrorIs(t, await, tt.want)
			} else {
				require.NoError(t, await, "the end is Read's to tell")
			}
			require.False(t, s.Quiet() && errors.Is(tt.want, io.EOF))
			if errors.Is(tt.want, net.ErrClosed) || errors.Is(tt.want, os.ErrDeadlineExceeded) {
				n, err = s.Ask([][]byte{[]byte("?")}, nil)
				require.ErrorIs(t, err, tt.want, "nothing can be asked")
				require.Zero(t, n)
			}
		})
	}
}

func TestAwaitTakesNothing(t *testing.T) {
	here, there := pair(t)
	s := Of(here)
	for range 2 {
		done := make(chan error, 1)
		go func() { done <- s.Await() }()
		_, err := there.Write([]byte("a"))
		require.NoError(t, err)
		require.NoError(t, <-done)
		require.NoError(t, s.Await())
		b := make([]byte, 10)
		n, err := s.Read(b)
		require.NoError(t, err)
		require.Equal(t, "a", string(b[:n]))
	}
}

func TestWriteWaitsForRoom(t *testing.T) {
	here, there := pair(t)
	size := 32 << 20
	read := make(chan int64, 1)
	go func() {
		n, _ := io.Copy(io.Discard, there)
		read <- n
	}()
	n, err := Of(here).Write(make([]byte, size))
	require.NoError(t, err)
	require.Equal(t, size, n)
	require.NoError(t, here.Close())
	require.EqualValues(t, size, <-read)
}

func TestAWriteThatIsBlockedEndsWithItsTime(t *testing.T) {
	here, _ := pair(t)
	huge := make([]byte, 64<<20)
	require.NoError(t, here.SetWriteDeadline(time.Now().Add(50*time.Millisecond)))
	n, err := Of(here).Write(huge)
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	require.Less(t, n, len(huge))
}

// Without the pool it would be three for each of five turns. The race detector drops every fourth
// thing from a pool.
func TestATurnAllocatesNothing(t *testing.T) {
	here, there := pair(t)
	s, peer := Of(here), Of(there)
	question, b := [][]byte{[]byte("a"), []byte("b")}, make([]byte, 10)
	answer := func() { _, _ = peer.Write(b[:1]) }
	require.Less(t, testing.AllocsPerRun(200, func() {
		_, _ = s.Ask(question, answer)
		_, _ = s.Read(b)
		_ = s.Quiet()
		_, _ = peer.Read(b)
	}), 5.0)
}
