package engine

import (
	"bufio"
	"context"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestDisconnect disconnects once the engine has the request, or has begun to answer.
func TestDisconnect(t *testing.T) {
	asked := make(chan struct{}, 1)
	hear := func(c net.Conn, br *bufio.Reader) { // until the client's half is closed
		asked <- struct{}{}
		_, _ = io.Copy(io.Discard, br)
	}
	const half = "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhello"
	for _, tt := range []struct {
		name string
		play script
		body string
		err  *Error // of Do or of the body; Target, Aborted and Err aside
		deaf bool   // the engine does not notice
	}{
		{"an answer that was on its way comes whole", func(_ int, c net.Conn, br *bufio.Reader) {
			swallow(br)
			hear(c, br)
			_, _ = io.WriteString(c, ok("hello"))
			_ = c.Close()
		}, "hello", nil, false},
		{"also from one that keeps its side open", func(_ int, c net.Conn, br *bufio.Reader) {
			swallow(br)
			hear(c, br)
			_, _ = io.WriteString(c, ok("hello"))
		}, "hello", nil, false},
		{"an engine that gives up ends the call", func(_ int, c net.Conn, br *bufio.Reader) {
			swallow(br)
			hear(c, br)
			_ = c.Close()
		}, "", &Error{Phase: PhaseHead, Sent: true}, false},
		{"one that does not notice is cut off", func(_ int, c net.Conn, br *bufio.Reader) {
			swallow(br)
			hear(c, br)
		}, "", &Error{Phase: PhaseHead, Sent: true}, true},
		{"an answer that has begun ends when the engine gives up", func(_ int, c net.Conn, br *bufio.Reader) {
			swallow(br)
			_, _ = io.WriteString(c, half)
			hear(c, br)
			_ = c.Close()
		}, "", &Error{Phase: PhaseBody, Sent: true, Answered: true}, false},
		{"and is cut off where it does not notice", func(_ int, c net.Conn, br *bufio.Reader) {
			swallow(br)
			_, _ = io.WriteString(c, half)
			hear(c, br)
		}, "", &Error{Phase: PhaseBody, Sent: true, Answered: true}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, tg := listen(t, tt.play)
			k := c.NewCall(tg)
			limit := time.Minute
			if tt.deaf {
				limit = 100 * time.Millisecond
			}
			go func() {
				<-asked
				k.Disconnect(limit)
				k.Disconnect(time.Hour) // changes nothing
			}()
			r, err := post(k, "{}")
			var body []byte
			if err == nil {
				body, err = r.ReadAll(100)
				require.True(t, r.Ended())
				r.Close()
			}
			if tt.err == nil {
				require.NoError(t, err)
				require.Equal(t, tt.body, string(body))
			} else {
				e := asError(t, err)
				tt.err.Target, tt.err.Aborted, tt.err.Err = "e0", true, ErrAborted
				require.Equal(t, *tt.err, *e)
			}
			require.Equal(t, tt.deaf, k.IgnoredClose())
			require.Nil(t, c.idle.take(tg.key()), "a connection we left is never another call's")
		})
	}
}

// A call is left when its client goes away and when the server gives up, so also after the
// engine has closed its side: what it sent is read all the same.
func TestDisconnectOnceMoreAfterTheEngineHasClosed(t *testing.T) {
	answer := strings.Repeat("a", 40<<10) // more than is read ahead
	left, closed := make(chan struct{}), make(chan struct{})
	c, tg := listen(t, func(_ int, c net.Conn, br *bufio.Reader) {
		swallow(br)
		_, _ = io.WriteString(c, ok(answer))
		<-left
		_, _ = io.Copy(io.Discard, br)
		_ = c.Close()
		close(closed)
	})
	k := c.NewCall(tg)
	r, err := post(k, "{}")
	require.NoError(t, err)
	k.Disconnect(time.Minute)
	close(left)
	<-closed
	k.Disconnect(time.Minute)
	body, err := r.ReadAll(1 << 20)
	require.NoError(t, err)
	require.Equal(t, answer, string(body))
	r.Close()
}

// Without a connection whose half can be closed, leaving is aborting.
func TestDisconnectWithoutHalves(t *testing.T) {
	asked := make(chan struct{})
	c, tg := pipe(t, func(_ int, _ net.Conn, br *bufio.Reader) {
		swallow(br)
		close(asked)
		_, _ = io.Copy(io.Discard, br)
	})
	defer c.Close()
	k := c.NewCall(tg)
	go func() {
		<-asked
		k.Disconnect(time.Hour)
	}()
	_, err := post(k, "{}")
	require.ErrorIs(t, err, ErrAborted)
	k = c.NewCall(tg)
	k.Disconnect(time.Hour)
	_, err = post(k, "{}")
	require.ErrorIs(t, err, ErrAborted, "left before it was made")
}

// abortsOnTimeout aborts the call as soon as a read has timed out, before the call learns of it.
type abortsOnTimeout struct {
	net.Conn
	abort func()
}

func (c *abortsOnTimeout) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if isTimeout(err) {
		c.abort()
	}
	return n, err
}

// evenkeel has not asked the engine to close its half, so the engine has ignored nothing.
func TestAnAbortRightAfterATimeoutIsNoIgnoredClose(t *testing.T) {
	var k *Call
	c := NewClient(Options{Dial: func(context.Context, string, string) (net.Conn, error) {
		ours, theirs := net.Pipe()
		go func() { _, _ = io.Copy(io.Discard, theirs) }()
		return &abortsOnTimeout{ours, func() { k.Abort() }}, nil
	}})
	defer c.Close()
	k = c.NewCall(target(t, "http://engine.test:8000"))
	_, err := k.Do("POST", "/", nil, nil, Deadlines{FirstByte: 10 * time.Millisecond})
	require.Equal(t, Error{Target: "e0", Phase: PhaseHead, Sent: true, Aborted: true, Err: ErrAborted}, *asError(t, err))
	require.False(t, k.IgnoredClose())
}

// A call that was ended before it is made sends nothing, also where a connection
// lies ready.
func TestACallEndedBeforehandSendsNothing(t *testing.T) {
	for _, tt := range []struct {
		name string
		end  func(*Call)
	}{
		{"aborted", (*Call).Abort},
		{"left", func(k *Call) { k.Disconnect(time.Hour) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var requests atomic.Int32
			c, tg := listen(t, func(_ int, c net.Conn, br *bufio.Reader) {
				for swallow(br) != nil {
					requests.Add(1)
					_, _ = io.WriteString(c, ok("hello"))
				}
			})
			r, err := post(c.NewCall(tg), "{}")
			require.NoError(t, err)
			_, err = r.ReadAll(100)
			require.NoError(t, err)
			r.Close()
			require.Equal(t, 1, c.idle.count(tg.key()))
			k := c.NewCall(tg)
			tt.end(k)
			_, err = post(k, "{}")
			require.Equal(t, Error{Target: "e0", Phase: PhaseConnect, Aborted: true, Err: ErrAborted}, *asError(t, err))
			require.EqualValues(t, 1, requests.Load())
		})
	}
}
