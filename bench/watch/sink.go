package main

import (
	"compress/gzip"
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/protobuf/proto"
)

// sink is a collector of traces that counts them.
type sink struct {
	url    string
	spans  atomic.Int64
	server *http.Server
}

func openSink() (*sink, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	s := &sink{url: "http://" + ln.Addr().String()}
	s.server = &http.Server{Handler: s, ReadHeaderTimeout: 10 * time.Second}
	go func() { _ = s.server.Serve(ln) }() // until close
	return s, nil
}

func (s *sink) close() { _ = s.server.Close() }

// ServeHTTP takes an export.
func (s *sink) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	n, err := count(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	s.spans.Add(int64(n))
	w.Header().Set("Content-Type", "application/x-protobuf")
}

func count(r *http.Request) (spans int, err error) {
	var body io.Reader = r.Body
	if r.Header.Get("Content-Encoding") == "gzip" {
		if body, err = gzip.NewReader(r.Body); err != nil {
			return 0, err
		}
	}
	text, err := io.ReadAll(body)
	if err != nil {
		return 0, err
	}
	var export collector.ExportTraceServiceRequest
	if err := proto.Unmarshal(text, &export); err != nil {
		return 0, err
	}
	for _, of := range export.GetResourceSpans() {
		for _, scope := range of.GetScopeSpans() {
			spans += len(scope.GetSpans())
		}
	}
	return spans, nil
}
