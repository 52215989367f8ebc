package edge

import (
	"io"
	"math"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/valyala/fasthttp"
	"go.uber.org/zap"
)

// outlet is one whose client reads as many bytes as limit, from the time on when reads is closed.
func outlet(t *testing.T, reads <-chan struct{}, limit int64) *Hijacked {
	ln, err := Listen("127.0.0.1:0", ListenOptions{})
	require.NoError(t, err)
	defer ln.Close()
	client, err := net.Dial("tcp", ln.Addr().String())
	require.NoError(t, err)
	read := make(chan struct{})
	go func() {
		defer close(read)
		<-reads
		_, _ = io.CopyN(io.Discard, client, limit)
	}()
	c, err := ln.Accept()
	require.NoError(t, err)
	t.Cleanup(func() {
		_ = c.Close()
		<-read
		_ = client.Close()
	})
	raw, err := c.(*Conn).Conn.(*net.TCPConn).SyscallConn()
	require.NoError(t, err)
	o := &Hijacked{client: c.(*Conn), log: zap.NewNop(), raw: raw}
	o.writeFunc = o.writeSocket
	return o
}

// Whoever writes the rest, the time for which the client kept it waiting counts.
func TestABlockedClientIsChargedForItsTime(t *testing.T) {
	for _, tt := range []struct {
		name string
		rest func(t *testing.T, o *Hijacked, rest []byte)
	}{
		{"on a loop", func(t *testing.T, o *Hijacked, rest []byte) {
			require.Eventually(t, func() bool {
				n, err := o.TryWrite(rest, time.Now())
				require.NoError(t, err)
				rest = rest[n:]
				return len(rest) == 0
			}, patience, time.Millisecond)
		}},
		{"on a goroutine", func(t *testing.T, o *Hijacked, rest []byte) { require.NoError(t, o.WriteRest(rest)) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			reads := make(chan struct{})
			o := outlet(t, reads, math.MaxInt64)
			answer := make([]byte, 32<<20)
			n, err := o.TryWrite(answer, time.Now().Add(-time.Hour))
			require.NoError(t, err)
			require.Less(t, n, len(answer))
			close(reads)
			tt.rest(t, o, answer[n:])
			require.GreaterOrEqual(t, time.Duration(o.client.writeWaitNanos.Load()), time.Hour)
		})
	}
}

// A client that reads slowly is not cut as long as it takes 64 KiB in WriteTimeout, even if a large
// event has to wait for longer.
func TestASlowClientHasTimeForEachPieceOfALargeEvent(t *testing.T) {
	reads := make(chan struct{})
	o := outlet(t, reads, 8<<20) // the rest of the event waits, however quickly the client reads these
	rest := make([]byte, 64<<20)
	began := time.Now()
	n, err := o.TryWrite(rest, began)
	require.NoError(t, err)
	require.Equal(t, began.Add(o.client.ln.options.WriteTimeout), o.GiveUpAt())
	close(reads)
	taken, later := 0, began.Add(10*time.Second)
	require.Eventually(t, func() bool {
		rest = rest[n:]
		n, err = o.TryWrite(rest, later)
		require.NoError(t, err)
		require.Less(t, n, len(rest))
		taken += n
		return taken >= writePieceSize
	}, patience, time.Millisecond)
	require.Equal(t, later.Add(o.client.ln.options.WriteTimeout), o.GiveUpAt())
	require.Equal(t, 10*time.Second, time.Duration(o.client.writeWaitNanos.Load()))
}

// A drain that ends cuts connections whose handlers run. An answer that is released then must be
// ended, too, because its request may hold a slot.
func TestAnAnswerOnAConnectionThatWasCutIsEnded(t *testing.T) {
	var s *testServer
	ended := make(chan error, 1)
	s = serve(t, Options{Handler: func(ctx *fasthttp.RequestCtx) {
		s.ln.CloseConns()
		released := Hijack(ctx, zap.NewNop(), func(o *Hijacked) {
			err := o.Send([]byte("data: 1\n\n"), true)
			o.End(err == nil)
			ended <- err
		})
		if !released {
			t.Error("not released")
		}
	}}, ListenOptions{})
	s.dial(t).send(t, get)
	require.ErrorIs(t, await(t, ended, "the end of the answer"), net.ErrClosed)
	require.Eventually(t, func() bool { return s.ln.Stats().Open == 0 }, patience, time.Millisecond)
}

func TestAChunkToAClientCostsNoAllocation(t *testing.T) {
	reads := make(chan struct{})
	close(reads)
	o := outlet(t, reads, math.MaxInt64)
	buf := make([]byte, ChunkRoom, 4<<10)
	now := time.Now()
	require.Zero(t, testing.AllocsPerRun(200, func() {
		frame := o.Frame(append(buf, "data: {\"text\":\"some words\"}\n\n"...))
		if n, err := o.TryWrite(frame, now); n < len(frame) || err != nil {
			t.Fatalf("%d of %d bytes, %v", n, len(frame), err)
		}
	}))
}

func TestAFrameIsAChunk(t *testing.T) {
	for _, size := range []int{1, 15, 16, 255, 70_000} {
		o := &Hijacked{}
		frame := o.Frame(make([]byte, ChunkRoom+size))
		length, rest, ok := cutLine(frame)
		require.True(t, ok)
		got, err := chunkSize(length)
		require.NoError(t, err)
		require.Equal(t, size, got)
		require.Equal(t, "\r\n", string(rest[size:]))
	}
	o := &Hijacked{pendingHead: []byte("HTTP/1.1 200 OK\r\n\r\n")}
	require.Equal(t, "HTTP/1.1 200 OK\r\n\r\n2\r\nab\r\n", string(o.Frame(append(make([]byte, ChunkRoom), "ab"...))),
		"the head goes with the first chunk")
	require.Equal(t, "1\r\nc\r\n", string(o.Frame(append(make([]byte, ChunkRoom), "c"...))))
}

func cutLine(b []byte) (line, rest []byte, ok bool) {
	for i := range len(b) - 1 {
		if b[i] == '\r' && b[i+1] == '\n' {
			return b[:i], b[i+2:], true
		}
	}
	return nil, nil, false
}
