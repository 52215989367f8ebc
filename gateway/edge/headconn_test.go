//go:build linux

package edge

import (
	"bufio"
	"bytes"
	"io"
	"net"
	"net/http/httputil"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/valyala/fasthttp"
)

// pieces is a connection that gives so many bytes at once.
type pieces struct {
	net.Conn
	in   []byte
	size int
}

func (p *pieces) Read(b []byte) (int, error) {
	if len(p.in) == 0 {
		return 0, io.EOF
	}
	n := copy(b[:min(len(b), p.size)], p.in)
	p.in = p.in[n:]
	return n, nil
}

// fasthttp and headConn must agree where a head ends, or bytes of a body are a head.
func FuzzHeadEnd(f *testing.F) {
	f.Add([]byte(get+"GET /2"), uint8(1))
	f.Add([]byte("\r\n\n"+post+"Content-Length: 2\r\n\r\nab"), uint8(7))
	f.Add([]byte("GET / HTTP/1.1\nHost: x\n\nab"), uint8(255))
	f.Add([]byte("GET / HTTP/1.1\r\n\r\nab"), uint8(3))
	f.Add([]byte("GET / HTTP/1.1\r\nA: b\r\r\n\r\nab"), uint8(3))
	f.Fuzz(func(t *testing.T, in []byte, size uint8) {
		conn := &headConn{Conn: &pieces{in: in, size: max(1, int(size))}}
		br := bufio.NewReader(conn)
		var h fasthttp.RequestHeader
		if h.Read(br) != nil {
			return
		}
		require.True(t, conn.head.ended)
		require.Zero(t, br.Buffered(), "bytes behind the head would be the next request")
		_, err := conn.Read(make([]byte, 1))
		require.ErrorIs(t, err, errBeyondHead)
		rest, err := io.ReadAll(body{conn})
		require.NoError(t, err)
		require.True(t, bytes.HasSuffix(in, rest))
	})
}

// A request that has come with its body costs one read beside the wait for it, and the body keeps
// no memory of the head.
func TestARequestIsReadAtOnce(t *testing.T) {
	in := post + "Content-Length: 2\r\n\r\nab"
	c := &Conn{Conn: &pieces{in: []byte(in), size: firstReadSize}}
	h := &headConn{Conn: c, client: c}
	var first [1]byte
	n, err := h.Read(first[:])
	require.NoError(t, err)
	require.Equal(t, in[:1], string(first[:n]))
	require.NotNil(t, h.pooledBuf)
	head := make([]byte, 100)
	n, err = h.Read(head)
	require.NoError(t, err)
	require.Equal(t, in[1:len(in)-2], string(head[:n]))
	require.Equal(t, "ab", string(h.unread))
	require.Nil(t, h.pooledBuf)
}

// What we take for a chunked body, net/http takes for the same.
func FuzzChunks(f *testing.F) {
	f.Add([]byte("2\r\nab\r\n0\r\n\r\n"))
	f.Add([]byte("02;x=\"y\"\r\nab\r\n0;z\r\nX: y\r\n\r\nmore"))
	f.Add([]byte("A \r\n0123456789\r\n0\r\n\r\n"))
	f.Add([]byte("2\r\nab\r\n0\r\nX : y\r\n\r\n"))
	f.Fuzz(func(t *testing.T, in []byte) {
		h := &headConn{Conn: &deaf{&pieces{in: in, size: 100}}}
		o := Options{}.withDefaults()
		u := upload{o: &o, headConn: h, framing: framing{chunked: true}, limit: 1 << 20, reservation: &Reservation{quota: o.Bodies}}
		if u.read() != nil {
			return
		}
		require.Equal(t, int64(cap(u.buf)), u.reservation.amount)
		whole := bytes.NewReader(in)
		want, err := io.ReadAll(httputil.NewChunkedReader(whole))
		require.NoError(t, err)
		require.Equal(t, string(want), string(u.buf))
		rest, err := io.ReadAll(body{h})
		require.NoError(t, err)
		read := string(in[:len(in)-len(rest)])
		require.True(t, strings.HasSuffix(read, "\r\n\r\n"), "%q", read)
	})
}

// deaf has no deadlines.
type deaf struct{ net.Conn }

func (deaf) SetReadDeadline(_ time.Time) error { return nil }
