//go:build linux

package main

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"time"
)

// receipts is how many a proxy keeps by default.
const receipts = 10_000

// way is how evenkeel is watched.
type way struct {
	name         string
	receipts     int
	traced, page bool
}

// watched are the ways that are measured beside the plain proxy.
var watched = []way{
	{"evenkeel, no receipts", 0, false, false},
	{"evenkeel, page open", receipts, false, true},
	{"evenkeel, every request traced", receipts, true, false},
	{"evenkeel, page and traces", receipts, true, true},
}

// openPage reads the stream that the live page reads, until the proxy ends.
func openPage(ctx context.Context, admin string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, admin+"/live", nil)
	if err != nil {
		return err
	}
	req.Header.Set("Accept-Encoding", "gzip") // as browsers do; so this process does not unpack it
	resp, err := http.DefaultClient.Do(req)   //nolint:bodyclose // closed when it ends, below
	if err != nil {
		return err
	}
	go func() {
		_, _ = io.Copy(io.Discard, resp.Body)
		_ = resp.Body.Close()
	}()
	return nil
}

// collector takes traces and counts the exports.
type collector struct {
	url     string
	exports atomic.Int64
	server  *http.Server
}

func openCollector() (*collector, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	c := &collector{url: "http://" + ln.Addr().String()}
	c.server = &http.Server{Handler: c, ReadHeaderTimeout: 10 * time.Second}
	go func() { _ = c.server.Serve(ln) }() // until close
	return c, nil
}

// ServeHTTP takes an export.
func (c *collector) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if n, err := io.Copy(io.Discard, r.Body); err == nil && n > 0 {
		c.exports.Add(1)
	}
	w.Header().Set("Content-Type", "application/x-protobuf")
}

// close says so if nothing came: then what was measured is not tracing.
func (c *collector) close(wanted bool) error {
	err := c.server.Close()
	if wanted && c.exports.Load() == 0 {
		err = errors.Join(err, errors.New("the collector got no trace: what was measured was not tracing"))
	}
	return err
}
