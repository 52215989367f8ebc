package engine

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// endless is a connection on which the same bytes arrive for ever, some at a time.
type endless struct {
	net.Conn
	head  []byte // once
	event []byte // again and again
	left  []byte
}

func (e *endless) Read(p []byte) (int, error) {
	if len(e.left) == 0 {
		e.left = e.event
		if e.head != nil {
			e.left, e.head = e.head, nil
		}
	}
	n := copy(p, e.left)
	e.left = e.left[n:]
	return n, nil
}

func (e *endless) SetReadDeadline(time.Time) error { return nil }

func (e *endless) Close() error { return nil }

// streaming is a response in the middle of a stream of chunk-framed events.
func streaming() (*Response, []byte) {
	data := bytes.Repeat([]byte("x"), 245)
	raw := &endless{
		head:  []byte("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"),
		event: fmt.Appendf(nil, "%x\r\n%s\r\n", len(data), data),
	}
	c := newConn(raw, raw, key{}, newReaders(16<<10))
	k := &Call{conn: c}
	if err := c.readHead(); err != nil {
		panic(err)
	}
	c.awaitBody(time.Minute)
	k.resp.open(k, c, "POST", true)
	return &k.resp, data
}

func TestReadingAnEventAllocatesNothing(t *testing.T) {
	r, want := streaming()
	p := make([]byte, 4096)
	require.Zero(t, testing.AllocsPerRun(1000, func() {
		n, err := r.Read(p)
		if err != nil || !bytes.Equal(p[:n], want) {
			t.Fatalf("Read = %q, %v", p[:n], err)
		}
	}))
}

func BenchmarkReadEvent(b *testing.B) {
	r, want := streaming()
	p := make([]byte, 4096)
	b.ReportAllocs()
	b.SetBytes(int64(len(want)))
	for b.Loop() {
		if _, err := r.Read(p); err != nil {
			b.Fatal(err)
		}
	}
}

// A whole call on a kept-alive connection over loopback, answer read to its end.
func BenchmarkRoundTrip(b *testing.B) {
	for _, size := range []int{500, 400 << 10} {
		b.Run(fmt.Sprintf("%d bytes", size), func(b *testing.B) {
			c, tg := loopback(b, size)
			body := [][]byte{make([]byte, size/2), make([]byte, size-size/2)}
			hdr := []Header{{"Content-Type", "application/json"}}
			d := Deadlines{Connect: time.Second, FirstByte: time.Minute, Idle: time.Minute}
			p := make([]byte, 4096)
			b.ReportAllocs()
			for b.Loop() {
				r, err := c.NewCall(tg).Do("POST", "/v1/completions", hdr, body, d)
				if err != nil {
					b.Fatal(err)
				}
				for err == nil {
					_, err = r.Read(p)
				}
				if !errors.Is(err, io.EOF) {
					b.Fatal(err)
				}
				r.Close()
			}
		})
	}
}

// loopback is an engine that allocates nothing of its own: it counts bytes.
func loopback(b *testing.B, size int) (*Client, *Target) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(b, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		conn, err := l.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		br, reply := bufio.NewReaderSize(conn, 64<<10), []byte(chunkedHello)
		for {
			for line := []byte("-"); len(line) > 2 || line[0] == '-'; { // to the empty line
				if line, err = br.ReadSlice('\n'); err != nil {
					return
				}
			}
			if _, err := br.Discard(size); err != nil {
				return
			}
			if _, err := conn.Write(reply); err != nil {
				return
			}
		}
	}()
	c := NewClient(Options{})
	b.Cleanup(func() {
		c.Close()
		_ = l.Close()
		<-done
	})
	return c, target(b, "http://"+l.Addr().String())
}

func BenchmarkParseMetrics(b *testing.B) {
	page, err := os.ReadFile("testdata/metrics-dp2.txt")
	require.NoError(b, err)
	for i := range 2000 { // the buckets of a real page
		page = fmt.Appendf(page, "vllm:inter_token_latency_seconds_bucket{engine=\"0\",le=\"%d\",model_name=\"m\"} 12.0\n", i)
	}
	b.ReportAllocs()
	b.SetBytes(int64(len(page)))
	for b.Loop() {
		if _, err := (MetricNames{}).Parse(page); err != nil {
			b.Fatal(err)
		}
	}
}
