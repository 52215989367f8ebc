package engine

import (
	"bufio"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

const chunkedHead = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

// parts is an engine that sends an answer in parts, one whenever the test says so.
func parts(t *testing.T, parts ...string) (*Client, *Target, chan<- struct{}) {
	next := make(chan struct{})
	c, tg := listen(t, func(_ int, c net.Conn, br *bufio.Reader) {
		for swallow(br) != nil {
			for _, p := range parts {
				if _, ok := <-next; !ok {
					return
				}
				_, _ = io.WriteString(c, p)
			}
		}
	})
	t.Cleanup(func() { close(next) })
	return c, tg, next
}

// lifted reads a lifted socket until there is data, as an event loop would.
func lifted(t *testing.T, r *Response, fd int) (data string, err error) {
	t.Helper()
	var buf [4 << 10]byte
	require.Eventually(t, func() bool {
		n, errno := unix.Read(fd, buf[:])
		if errors.Is(errno, unix.EAGAIN) {
			return false
		}
		require.NoError(t, errno)
		if n == 0 {
			err = io.EOF
			return true
		}
		for p := buf[:n]; len(p) > 0 && err == nil; {
			var d []byte
			var used int
			d, used, err = r.Unframe(p)
			data, p = data+string(d), p[used:]
		}
		return data != "" || err != nil
	}, 20*time.Second, time.Millisecond)
	return data, err
}

func TestALiftedSocketIsReadAndGivenBack(t *testing.T) {
	c, tg, next := parts(t, chunkedHead+"2\r\nab\r\n", "3\r\ncde\r\n1", "\r\nf", "\r\n0\r\n\r\n")
	for range 2 { // the second time on the same connection
		go func() { next <- struct{}{} }()
		r, err := post(c.NewCall(tg), "x")
		require.NoError(t, err)
		p := make([]byte, 100)
		n, err := r.Read(p)
		require.NoError(t, err)
		require.Equal(t, "ab", string(p[:n]))

		fd, ok := r.Detach(func() { t.Error("nobody touches it") })
		require.True(t, ok)
		next <- struct{}{}
		data, err := lifted(t, r, fd)
		require.NoError(t, err)
		require.Equal(t, "cde", data)
		r.Reattach(nil)

		next <- struct{}{}
		n, err = r.Read(p)
		require.NoError(t, err)
		require.Equal(t, "f", string(p[:n]), "the size line was split between loop and goroutine")

		fd, ok = r.Detach(func() {})
		require.True(t, ok, "again")
		next <- struct{}{}
		_, err = lifted(t, r, fd)
		require.ErrorIs(t, err, io.EOF)
		r.Reattach(nil)
		require.True(t, r.Ended())
		_, err = r.Read(p)
		require.ErrorIs(t, err, io.EOF)
		r.Close()
		require.Equal(t, 1, c.idle.count(tg.key()), "the connection is kept")
	}
}

func TestNotEverySocketIsLifted(t *testing.T) {
	for _, tt := range []struct{ name, answer string }{
		{"a body of a length", ok("hello")},
		{"a body until the close", "HTTP/1.1 200 OK\r\n\r\nhello"},
		{"bytes in hand", chunkedHead + "5\r\nhello\r\n5\r\nhello\r\n"},
		{"a body that is over", chunkedHead + "0\r\n\r\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, tg := listen(t, answer(tt.answer))
			r, err := post(c.NewCall(tg), "x")
			require.NoError(t, err)
			defer r.Close()
			_, lifts := r.Detach(func() {})
			require.False(t, lifts)
		})
	}
}

// What is wrong behind the data that was read is the next read's to say, which does not wait.
func TestABrokenBodyIsNotLifted(t *testing.T) {
	c, tg := listen(t, answer(chunkedHead+"5\r\nhello\r\nx"))
	r, err := post(c.NewCall(tg), "x")
	require.NoError(t, err)
	defer r.Close()
	var data [5]byte
	_, err = io.ReadFull(r, data[:])
	require.NoError(t, err)
	_, lifts := r.Detach(func() {})
	require.False(t, lifts)
	_, err = r.Read(data[:])
	require.ErrorIs(t, asError(t, err), ErrMalformed)
}

// liftedAfterItsFirstPart is a response of which the first part was read before it was detached.
func liftedAfterItsFirstPart(t *testing.T, c *Client, tg *Target, next chan<- struct{}) (r *Response, fd int) {
	go func() { next <- struct{}{} }()
	r, err := post(c.NewCall(tg), "x")
	require.NoError(t, err)
	_, err = r.Read(make([]byte, 100))
	require.NoError(t, err)
	fd, ok := r.Detach(func() {})
	require.True(t, ok)
	return r, fd
}

// Bytes behind the end of a lifted body belong to no request. A part of an answer among them would
// otherwise be lost here, and its rest would be read as the next answer.
func TestALiftedConnectionWithBytesBehindItsBodyIsNotUsedAgain(t *testing.T) {
	const stray = "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n"
	c, tg, next := parts(t, chunkedHead+"2\r\nab\r\n", "0\r\n\r\n"+stray)
	r, fd := liftedAfterItsFirstPart(t, c, tg, next)
	next <- struct{}{}
	_, err := lifted(t, r, fd)
	require.ErrorIs(t, err, io.EOF)
	r.Reattach(nil)
	require.True(t, r.Ended())
	r.Close()
	require.Zero(t, c.idle.count(tg.key()))
}

// Whatever ends the call is told at once, and found by whoever reads on.
func TestALiftedCallIsTouched(t *testing.T) {
	for _, tt := range []struct {
		name  string
		touch func(k *Call)
		want  func(t *testing.T, err *Error)
	}{
		{"aborted", (*Call).Abort, func(t *testing.T, err *Error) { require.True(t, err.Aborted) }},
		{"left", func(k *Call) { k.Disconnect(50 * time.Millisecond) }, func(t *testing.T, err *Error) { require.True(t, err.Aborted) }},
		{"its time is over", (*Call).Expire, func(t *testing.T, err *Error) { require.True(t, err.Timeout) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, tg, next := parts(t, chunkedHead+"2\r\nab\r\n", "never")
			go func() { next <- struct{}{} }()
			k := c.NewCall(tg)
			r, err := post(k, "x")
			require.NoError(t, err)
			p := make([]byte, 100)
			_, err = r.Read(p)
			require.NoError(t, err)
			touched := make(chan struct{}, 10)
			_, ok := r.Detach(func() { touched <- struct{}{} })
			require.True(t, ok)
			go tt.touch(k)
			select {
			case <-touched:
			case <-time.After(20 * time.Second):
				t.Fatal("not told")
			}
			r.Reattach(nil)
			_, err = r.Read(p)
			tt.want(t, asError(t, err))
			r.Close()
			require.Zero(t, c.idle.count(tg.key()), "a connection that was left is not used again")
		})
	}
}

func TestAnErrorOfALiftedSocketIsTheReads(t *testing.T) {
	c, tg, next := parts(t, chunkedHead+"2\r\nab\r\n", "never")
	r, _ := liftedAfterItsFirstPart(t, c, tg, next)
	r.Reattach(unix.ECONNRESET)
	_, err := r.Read(make([]byte, 100))
	require.ErrorIs(t, asError(t, err), unix.ECONNRESET)
	r.Close()
	require.Zero(t, c.idle.count(tg.key()))
}

func TestUnframingAllocatesNothing(t *testing.T) {
	r := &Response{conn: &conn{}}
	p := []byte("5;ext\r\nhello\r\n")
	require.Zero(t, testing.AllocsPerRun(100, func() {
		n := 0
		for rest := p; len(rest) > 0; {
			data, used, err := r.Unframe(rest)
			if err != nil {
				t.Fatal(err)
			}
			n, rest = n+len(data), rest[used:]
		}
		if n != len("hello") {
			t.Fatalf("%d bytes", n)
		}
	}))
}
