// Package tracetest is a collector for tests: it takes what is exported over
// OTLP/HTTP and hands it out again.
package tracetest

import (
	"compress/gzip"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	common "go.opentelemetry.io/proto/otlp/common/v1"
	"google.golang.org/protobuf/proto"
)

// Collector is a collector that runs until the test ends.
type Collector struct {
	URL string

	mu       sync.Mutex
	spans    []Span
	resource map[string]any
	headers  http.Header
	status   int
	hold     chan struct{} // exports are answered only once this channel is closed
}

// Span is a span that the collector received.
type Span struct {
	Trace, ID, Parent string // ids in hex digits
	Name              string
	Kind              string // server, client or internal
	Start, End        time.Time
	Attributes        map[string]any
	Events            []string
	EventAttributes   map[string]map[string]any
	Error             string // message of an error status; "-": the status has no message; empty: no error
	State             string // the W3C tracestate of the span
}

// Start starts a collector that stops at the end of the test.
func Start(t testing.TB) *Collector {
	c := &Collector{resource: map[string]any{}, hold: make(chan struct{})}
	close(c.hold)
	s := httptest.NewServer(c)
	t.Cleanup(s.Close)
	c.URL = s.URL
	return c
}

// Answer has the collector answer with a status from now on; 0: 200.
func (c *Collector) Answer(status int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.status = status
}

// Hold has the collector answer nothing until release is called.
func (c *Collector) Hold() (release func()) {
	hold := make(chan struct{})
	c.mu.Lock()
	defer c.mu.Unlock()
	c.hold = hold
	return sync.OnceFunc(func() { close(hold) })
}

// ServeHTTP implements http.Handler.
func (c *Collector) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c.mu.Lock()
	status, hold := c.status, c.hold
	c.mu.Unlock()
	select {
	case <-hold:
	case <-r.Context().Done():
		return
	}
	if status != 0 {
		w.WriteHeader(status)
		return
	}
	var body io.Reader = r.Body
	if r.Header.Get("Content-Encoding") == "gzip" {
		z, err := gzip.NewReader(body)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		body = z
	}
	text, err := io.ReadAll(body)
	var in collector.ExportTraceServiceRequest
	if err == nil {
		err = proto.Unmarshal(text, &in)
	}
	if err != nil || r.URL.Path != "/v1/traces" {
		http.Error(w, fmt.Sprint(r.URL.Path, err), http.StatusBadRequest)
		return
	}
	c.keep(&in, r.Header)
	w.Header().Set("Content-Type", "application/x-protobuf")
}

func (c *Collector) keep(in *collector.ExportTraceServiceRequest, h http.Header) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.headers = h
	for _, rs := range in.GetResourceSpans() {
		c.resource = values(rs.GetResource().GetAttributes())
		for _, ss := range rs.GetScopeSpans() {
			for _, s := range ss.GetSpans() {
				one := Span{
					Trace: hex.EncodeToString(s.GetTraceId()), ID: hex.EncodeToString(s.GetSpanId()), Parent: hex.EncodeToString(s.GetParentSpanId()),
					Name: s.GetName(), Kind: strings.ToLower(strings.TrimPrefix(s.GetKind().String(), "SPAN_KIND_")),
					Start: time.Unix(0, int64(s.GetStartTimeUnixNano())), End: time.Unix(0, int64(s.GetEndTimeUnixNano())),
					Attributes: values(s.GetAttributes()), EventAttributes: map[string]map[string]any{}, State: s.GetTraceState(),
				}
				if s.GetStatus().GetCode() == 2 {
					one.Error = s.GetStatus().GetMessage()
					if one.Error == "" {
						one.Error = "-"
					}
				}
				for _, e := range s.GetEvents() {
					one.Events = append(one.Events, e.GetName())
					one.EventAttributes[e.GetName()] = values(e.GetAttributes())
				}
				c.spans = append(c.spans, one)
			}
		}
	}
}

func values(list []*common.KeyValue) map[string]any {
	m := map[string]any{}
	for _, kv := range list {
		switch v := kv.GetValue().GetValue().(type) {
		case *common.AnyValue_StringValue:
			m[kv.GetKey()] = v.StringValue
		case *common.AnyValue_IntValue:
			m[kv.GetKey()] = v.IntValue
		case *common.AnyValue_DoubleValue:
			m[kv.GetKey()] = v.DoubleValue
		case *common.AnyValue_BoolValue:
			m[kv.GetKey()] = v.BoolValue
		case *common.AnyValue_ArrayValue:
			var all []string
			for _, x := range v.ArrayValue.GetValues() {
				all = append(all, x.GetStringValue())
			}
			m[kv.GetKey()] = all
		}
	}
	return m
}

// Spans returns the spans that the collector received, sorted by their beginning.
func (c *Collector) Spans() []Span {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := slices.Clone(c.spans)
	slices.SortStableFunc(all, func(a, b Span) int { return a.Start.Compare(b.Start) })
	return all
}

// Resource returns the attributes of the process that sent the last export.
func (c *Collector) Resource() map[string]any {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.resource
}

// Headers returns the HTTP headers of the last export.
func (c *Collector) Headers() http.Header {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.headers
}

// Tree writes spans as lines, each under its parent and in the order of their
// beginnings: name, kind, and ! where it failed.
func Tree(spans []Span) string {
	var b strings.Builder
	known := map[string]bool{}
	for _, s := range spans {
		known[s.ID] = true
	}
	var write func(parent string, depth int)
	write = func(parent string, depth int) {
		for _, s := range spans {
			isRoot := parent == "" && !known[s.Parent]
			if s.Parent != parent && !isRoot {
				continue
			}
			mark := ""
			if s.Error != "" {
				mark = " !"
			}
			fmt.Fprintf(&b, "%s%s (%s)%s\n", strings.Repeat("  ", depth), s.Name, s.Kind, mark)
			write(s.ID, depth+1)
		}
	}
	write("", 0)
	return b.String()
}
