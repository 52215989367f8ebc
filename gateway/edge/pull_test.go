package edge

import (
	"bytes"
	"runtime/debug"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
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
	p := NewPull(a, nil, zap.NewNop())
	p.conn = &out
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
	require.LessOrEqual(t, len(out[0]), writePiece)
	require.Empty(t, read())
	require.Equal(t, "fc1\r\n"+strings.Repeat("c", smallChunk+1)+"\r\n", out[2])
}

// The collector is held meanwhile, for it empties the pool of buffers. The race detector drops one
// buffer in four from a pool, which is half an allocation a run and no more.
func TestALargeArrivalAllocatesNothing(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	text := strings.Repeat("x", 60_000)
	a := &arrivals{}
	p := NewPull(a, nil, zap.NewNop())
	p.conn, p.head = &bytes.Buffer{}, true
	buf, parts := make([]byte, 4096), []string{text}
	require.Less(t, testing.AllocsPerRun(1000, func() {
		p.conn.(*bytes.Buffer).Reset()
		a.parts = parts
		_, _ = p.Read(buf)
	}), 1.0)
}
