package gateway_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refclient"
	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
	"evenkeel/internal/race"
)

// sip begins an endless stream and returns its connection, whose kernel takes
// little beyond what is read.
func (c *cluster) sip(body string) (net.Conn, *bufio.Reader) {
	c.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(c.URL, "http://"))
	require.NoError(c, err)
	c.Cleanup(func() { _ = conn.Close() })
	require.NoError(c, conn.(*net.TCPConn).SetReadBuffer(4096))
	_, err = fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s",
		refclient.ChatPath, len(body), body)
	require.NoError(c, err)
	br := bufio.NewReaderSize(conn, 256)
	resp, err := http.ReadResponse(br, nil)
	require.NoError(c, err)
	require.Equal(c, 200, resp.StatusCode)
	return conn, br
}

// A client that stops reading holds its slot no longer than write_timeout, and
// memory no more than a few buffers; others on the same ranks notice nothing. It
// runs by itself, for it measures the memory of all.
func TestClientsThatStopReadingInTheMiddle(t *testing.T) {
	if testing.Short() {
		t.Skip("needs some seconds of two cores")
	}
	streams := 500
	if race.Enabled {
		streams = 250
	}
	const ranks = 4
	c := start(t, options{
		decode: []refengine.Config{{DPSize: ranks, Slots: streams/ranks + 8,
			Steps: refengine.Steps{C0: 30 * time.Millisecond, TokensPerChunk: 4}}},
		configure: func(cfg *config.Config) {
			cfg.Limits.WriteTimeout, cfg.Limits.ClientBacklog = 2*time.Second, 4096
		},
	})
	heap := func() int64 {
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapInuse + m.StackInuse)
	}
	runtime.GC()
	before, most := heap(), int64(0)
	var begun sync.WaitGroup
	for n := range streams {
		begun.Go(func() {
			_, br := c.sip(chat(fmt.Sprint("story ", n), `"stream":true,"ignore_eos":true,`))
			_, _ = io.CopyN(io.Discard, br, 500)
		})
	}
	begun.Wait()
	reads := make(chan string, 1)
	go func() { reads <- c.Judge("who reads gets it all", `"stream":true,`) }()
	cut := `evenkeel_clients_cut_total{reason="stalled"}`
	c.Eventually("all are cut", func() bool {
		most = max(most, heap())
		return int(c.Metric(cut)) >= streams
	})
	require.EqualValues(t, streams, c.Metric(cut))
	require.Equal(t, "right", <-reads)
	c.Eventually("the engine has its slots back", func() bool { return c.Decode[0].Stats().Running == 0 })
	c.settled(false)
	require.Less(t, (most-before)/int64(streams), int64(256<<10), "bytes a stream, both ends and the engines included")
	gone := 0
	for _, o := range c.Outcomes() {
		if o == "client_closed" {
			gone++
		}
	}
	require.Equal(t, streams, gone)
	t.Logf("%d streams: %d KiB each at most", streams, (most-before)/int64(streams)>>10)
}
