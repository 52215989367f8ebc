package engine

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net/http/httputil"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func read(raw io.Reader) ([]byte, error) {
	return io.ReadAll(&chunkedBody{br: bufio.NewReaderSize(raw, 4096)})
}

// chunkedBody is a chunked body on a connection.
type chunkedBody struct {
	chunked
	br *bufio.Reader
}

func (b *chunkedBody) Read(p []byte) (int, error) { return b.read(b.br, p) }

// arrivals hands its pieces out one a Read, as a socket would.
type arrivals struct{ pieces [][]byte }

func (a *arrivals) Read(p []byte) (int, error) {
	if len(a.pieces) == 0 {
		return 0, io.EOF
	}
	n := copy(p, a.pieces[0])
	if a.pieces[0] = a.pieces[0][n:]; len(a.pieces[0]) == 0 {
		a.pieces = a.pieces[1:]
	}
	return n, nil
}

func TestChunkedReadsWhatNetHTTPWrites(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var wire, want bytes.Buffer
		w := httputil.NewChunkedWriter(&wire)
		for _, b := range rapid.SliceOfN(rapid.SliceOfN(rapid.Byte(), 1, 300), 0, 20).Draw(t, "chunks") {
			_, _ = w.Write(b)
			want.Write(b)
		}
		_ = w.Close()
		wire.WriteString(rapid.SampledFrom([]string{"\r\n", "X-Trailer: 1\r\n\r\n"}).Draw(t, "trailer"))
		wire.WriteString("next") // belongs to whatever comes after the body

		var in arrivals
		for rest := wire.Bytes(); len(rest) > 0; {
			n := rapid.IntRange(1, min(len(rest), 400)).Draw(t, "arrival")
			in.pieces, rest = append(in.pieces, rest[:n]), rest[n:]
		}
		br := bufio.NewReaderSize(&in, 64)
		c := &chunkedBody{br: br}
		var got bytes.Buffer
		for {
			p := make([]byte, rapid.IntRange(1, 200).Draw(t, "room"))
			n, err := c.Read(p)
			got.Write(p[:n])
			if errors.Is(err, io.EOF) {
				break
			}
			require.NoError(t, err)
			require.NotZero(t, n, "a Read without bytes or error makes the caller spin")
		}
		require.Equal(t, want.String(), got.String())
		rest, err := io.ReadAll(br)
		require.NoError(t, err)
		require.Equal(t, "next", string(rest), "the body reader went beyond its end")
	})
}

func TestChunkedCutAnywhereIsAnError(t *testing.T) {
	const wire = "5;ext=1\r\nhello\r\n3\r\nyou\r\n0\r\nX-T: 1\r\n\r\n"
	for n := range len(wire) {
		got, err := read(strings.NewReader(wire[:n]))
		require.ErrorIs(t, err, io.ErrUnexpectedEOF, "cut after %q", wire[:n])
		whole := []byte("helloyou")
		require.True(t, bytes.HasPrefix(whole, got), "cut after %q gave %q", wire[:n], got)
	}
	got, err := read(strings.NewReader(wire))
	require.NoError(t, err)
	require.Equal(t, "helloyou", string(got))
}

func TestChunkedRefuses(t *testing.T) {
	for _, tt := range []struct {
		name, wire string
		want       error
	}{
		{"a size that is no number", "x\r\n", ErrMalformed},
		{"an empty size line", "\r\n", ErrMalformed},
		{"a signed size", "+5\r\nhello\r\n", ErrMalformed},
		{"a 0x prefix", "0x5\r\nhello\r\n", ErrMalformed},
		{"words behind the size", "5 hello\r\n", ErrMalformed},
		{"a chunk over a GiB", "40000001\r\n", ErrMalformed},
		{"a size that overflows", strings.Repeat("f", 40) + "\r\n", ErrMalformed},
		{"a bare LF behind the size", "5\nhello\r\n", ErrMalformed},
		{"nothing but LF", "\n", ErrMalformed},
		{"a bare CR in the size line", "5;a\rb\r\nhello\r\n", ErrMalformed},
		{"a chunk longer than it says", "5\r\nhello!\r\n", ErrMalformed},
		{"a chunk without CRLF behind it", "5\r\nhello0\r\n\r\n", ErrMalformed},
		{"a size line over the buffer", "5;" + strings.Repeat("a", 5000) + "\r\nhello\r\n", ErrTooLarge},
		{"trailers without end", "0\r\n" + strings.Repeat("X: "+strings.Repeat("a", 1000)+"\r\n", 100), ErrTooLarge},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := read(strings.NewReader(tt.wire))
			require.ErrorIs(t, err, tt.want)
		})
	}
}

func TestChunkedNeverWaitsWithBytesInHand(t *testing.T) {
	for _, tt := range []struct {
		name, arrived, want string
	}{
		{"the CRLF behind a chunk has not come", "5\r\nhello", "hello"},
		{"half of that CRLF has come", "5\r\nhello\r", "hello"},
		{"half of a chunk has come", "5\r\nhel", "hel"},
		{"the next size line is not whole", "5\r\nhello\r\n1", "hello"},
		{"two chunks came in one packet", "5\r\nhello\r\n3\r\nyou\r\n", "helloyou"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			silence := errors.New("read would block")
			c := &chunkedBody{br: bufio.NewReader(io.MultiReader(strings.NewReader(tt.arrived), iotest.ErrReader(silence)))}
			p := make([]byte, 100)
			n, err := c.Read(p)
			require.NoError(t, err)
			require.Equal(t, tt.want, string(p[:n]))
		})
	}
}

// Whatever comes, and however it is cut into arrivals, the outcome is the same;
// what is accepted net/http accepts with the same bytes.
func FuzzChunked(f *testing.F) {
	for _, s := range []string{
		"5\r\nhello\r\n0\r\n\r\n", "0\r\n\r\n", "5;a=b\r\nhello\r\n0\r\nX: 1\r\n\r\n", "5\r\nhel", "5\nhello\n", "A \r\n0123456789\r\n0\r\n\r\n",
		"", "\n", "\r\n", "ffffffffffffffffffffff\r\n", "1\r\na\r\n1\r\nb\r\n0\r\n\r\nHTTP/1.1 200 OK\r\n",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, wire []byte) {
		whole, err := read(bytes.NewReader(wire))
		dripped, errDripped := read(iotest.OneByteReader(bytes.NewReader(wire)))
		if (err == nil) != (errDripped == nil) || !bytes.Equal(whole, dripped) {
			t.Fatalf("%q: %q, %v at once; %q, %v byte by byte", wire, whole, err, dripped, errDripped)
		}
		if err != nil {
			if !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, ErrMalformed) && !errors.Is(err, ErrTooLarge) {
				t.Fatalf("%q: unclassified error %v", wire, err)
			}
			return
		}
		theirs, errTheirs := io.ReadAll(httputil.NewChunkedReader(bytes.NewReader(wire)))
		if errTheirs == nil && !bytes.Equal(whole, theirs) {
			t.Fatalf("%q: we read %q, net/http %q", wire, whole, theirs)
		}
	})
}
