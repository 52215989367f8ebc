package edge

import (
	"bufio"
	"bytes"
	"cmp"
	"errors"
	"io"
	"net"
	"runtime/debug"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/valyala/fasthttp"
	"go.uber.org/zap"
)

// arrivals is an answer whose parts arrive one by one.
type arrivals struct {
	parts []string
	rest  string
}

func (a *arrivals) Pending() int { return len(a.rest) }

func (a *arrivals) Read(p []byte) (int, error) {
	if a.rest == "" {
		a.rest, a.parts = a.parts[0], a.parts[1:]
	}
	n := copy(p, a.rest)
	a.rest = a.rest[n:]
	return n, nil
}

// written are the writes to a client.
type written []string

func (w *written) Write(p []byte) (int, error) {
	*w = append(*w, string(p))
	return len(p), nil
}

func TestAnArrivalLeavesAsOneWrite(t *testing.T) {
	large, huge := strings.Repeat("a", 60_000), strings.Repeat("b", 100_000)
	a := &arrivals{parts: []string{"head", large, "small", huge, strings.Repeat("c", smallChunk+1)}}
	var out written
	p := NewBodyStream(a, nil, zap.NewNop())
	p.chunkConn = &out
	buf := make([]byte, 4096)
	read := func() string {
		n, err := p.Read(buf)
		require.NoError(t, err)
		return string(buf[:n])
	}
	require.Equal(t, "head", read(), "fasthttp writes it behind the answer's head")
	require.Empty(t, read(), "written already")
	require.Equal(t, written{"ea60\r\n" + large + "\r\n"}, out)
	require.Equal(t, "small", read())
	out = nil
	require.Empty(t, read())
	require.Empty(t, read())
	require.Len(t, out, 2, "a write of more than 64 KiB is two")
	require.LessOrEqual(t, len(out[0]), writePieceSize)
	require.Empty(t, read())
	require.Equal(t, "fc1\r\n"+strings.Repeat("c", smallChunk+1)+"\r\n", out[2])
}

// whole is an answer that is there in whole, or breaks off behind its text.
type whole struct {
	text   string
	broken error
}

func (w *whole) Read(p []byte) (int, error) {
	if w.text == "" {
		return 0, cmp.Or(w.broken, io.EOF)
	}
	n := copy(p, w.text)
	w.text = w.text[n:]
	return n, nil
}

func (w *whole) Pending() int { return len(w.text) }
func (w *whole) Ended() bool  { return true }

// sink is a connection that is written to.
type sink struct {
	net.Conn
	written
}

func (c *sink) Write(p []byte) (int, error) { return c.written.Write(p) }

func TestAWholeAnswerLeavesAsOneWrite(t *testing.T) {
	for _, broken := range []error{nil, errors.New("the engine is gone")} {
		c := &sink{}
		h := &headConn{Conn: c}
		var ended []error
		p := NewBodyStream(&whole{"data: x\n\n", broken}, func(err error) {
			ended = append(ended, err)
			require.Empty(t, c.written)
		}, zap.NewNop())
		p.headConn = h
		var r fasthttp.Response
		r.SetBodyStream(p, -1)
		out := bufio.NewWriter(h)
		err := r.Write(out)
		require.Equal(t, []error{broken}, ended)
		if broken == nil {
			require.NoError(t, err)
			require.NoError(t, out.Flush())
		}
		require.Len(t, c.written, 1)
		require.Contains(t, c.written[0], "\r\n\r\n9\r\ndata: x\n\n\r\n")
		require.Equal(t, broken == nil, strings.HasSuffix(c.written[0], "\r\n0\r\n\r\n"))
		_, _ = h.Write([]byte("the next answer"))
		require.Len(t, c.written, 2, "nothing else is kept back")
	}
}

// The collector is held meanwhile, for it empties the pool of buffers. The race detector drops one
// buffer in four from a pool, which is half an allocation a run and no more.
func TestALargeArrivalAllocatesNothing(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	text := strings.Repeat("x", 60_000)
	a := &arrivals{}
	p := NewBodyStream(a, nil, zap.NewNop())
	p.chunkConn, p.headWritten = &bytes.Buffer{}, true
	buf, parts := make([]byte, 4096), []string{text}
	require.Less(t, testing.AllocsPerRun(1000, func() {
		p.chunkConn.(*bytes.Buffer).Reset()
		a.parts = parts
		_, _ = p.Read(buf)
	}), 1.0)
}

// half is a source that has given a part of an event if torn is set, or if its rest is pending. It
// says whether its client would get a comment while it waits.
type half struct {
	torn, comments bool
	pending        int
	keep           *KeepAlive
}

func (h *half) Torn() bool   { return h.torn }
func (h *half) Pending() int { return h.pending }

func (h *half) Read(p []byte) (int, error) {
	h.keep.mu.Lock()
	defer h.keep.mu.Unlock()
	h.comments = h.keep.isWaiting
	return copy(p, "data"), nil
}

func TestNoCommentIsDueInsideAnEvent(t *testing.T) {
	src := &half{keep: &KeepAlive{interval: time.Hour, headState: headSentByAnswer}}
	p := NewBodyStream(src, func(error) {}, zap.NewNop())
	p.headWritten, p.keepAlive = true, src.keep
	for _, src.torn = range []bool{false, true, false} {
		_, err := p.Read(make([]byte, 100))
		require.NoError(t, err)
		require.Equal(t, !src.torn, src.comments)
		require.False(t, src.keep.isWaiting)
	}
	src.pending = 1
	_, err := p.Read(make([]byte, 100))
	require.NoError(t, err)
	require.False(t, src.comments, "the rest of the event is there, but this machine may be slow")
}
