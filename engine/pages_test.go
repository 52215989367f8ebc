package engine

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap/zaptest/observer"
)

// bomb is an answer of a few KiB that would be larger than any page may be, if it was unpacked.
func bomb(t *testing.T) string {
	t.Helper()
	var b bytes.Buffer
	z, err := gzip.NewWriterLevel(&b, gzip.BestCompression)
	require.NoError(t, err)
	line := []byte(strings.Repeat("x", 1<<20))
	for range 2 * metricsLimit / len(line) {
		_, err = z.Write(line)
		require.NoError(t, err)
	}
	require.NoError(t, z.Close())
	require.Less(t, b.Len(), 256<<10)
	return fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%s", b.Len(),
		b.String())
}

// flood answers each request with a page that does not end before the reader leaves.
func flood(_ int, c net.Conn, br *bufio.Reader) {
	if swallow(br) == nil {
		return
	}
	_, err := io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n")
	chunk := fmt.Sprintf("%x\r\n%s\r\n", 1<<16, strings.Repeat("x", 1<<16))
	for err == nil {
		_, err = io.WriteString(c, chunk)
	}
}

// pages are read of engines, each with a bound.
var pages = map[string]func(ctx context.Context, c *Client, t *Target) error{
	"/metrics":   func(ctx context.Context, c *Client, t *Target) error { _, err := Scrape(ctx, c, t); return err },
	"/v1/models": func(ctx context.Context, c *Client, t *Target) error { _, err := Models(ctx, c, t); return err },
	"/query": func(ctx context.Context, c *Client, t *Target) error {
		port, err := strconv.Atoi(t.URL.Port())
		if err == nil {
			_, err = Bootstrap(ctx, c, t, port)
		}
		return err
	},
	"/server_info": func(ctx context.Context, c *Client, t *Target) error { // as the self-test, init and a monitor ask for all others
		_, _, err := c.Get(ctx, t, "/server_info", perRankLimit)
		return err
	},
}

// No answer is unpacked: an engine that sends what nobody asked for is refused before the body is
// read. And none is read without an end.
func TestNoPageOfAnEngineIsLargerThanItMayBe(t *testing.T) {
	packed := bomb(t)
	for page, read := range pages {
		t.Run(page+" packed", func(t *testing.T) {
			c, tg := listen(t, answer(packed))
			err := read(t.Context(), c, tg)
			require.ErrorIs(t, err, ErrMalformed)
			require.ErrorContains(t, err, "Content-Encoding")
			require.Empty(t, c.idle.stacks, "nor is the connection used again, on which the body waits")
		})
		t.Run(page+" without an end", func(t *testing.T) {
			c, tg := listen(t, flood)
			require.ErrorIs(t, read(t.Context(), c, tg), ErrTooLarge)
		})
	}
	t.Run("an answer in one piece", func(t *testing.T) {
		c, tg := listen(t, answer(packed))
		_, err := post(c.NewCall(tg), "{}")
		require.ErrorIs(t, err, ErrMalformed)
	})
}

// Pages that only help are unknown if they are bombs. Without its models an engine gets no
// requests.
func TestBombsAmongThePagesOfAnEngine(t *testing.T) {
	packed := bomb(t)
	for page, models := range map[string]int{"/metrics": 2, "/version": 2, "/v1/models": 0} {
		t.Run(page, func(t *testing.T) {
			f := newFake()
			f.set(page, packed)
			watched(t, f, func(t *testing.T, m *Monitor, _ *observer.ObservedLogs, _ *prometheus.Registry) {
				time.Sleep(time.Minute)
				s := m.Status("p0")
				require.True(t, s.Up)
				require.Len(t, s.Models, models)
				require.Equal(t, page != "/metrics", s.Memories != nil)
				require.Equal(t, page != "/version", s.Version != "")
			})
		})
	}
}
