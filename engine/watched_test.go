package engine

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
)

// fake is an engine's management side, over pipes.
type fake struct {
	mu       sync.Mutex
	fails    error             // of each dial; nil: none
	answers  map[string]string // raw, by path; an absent one is 404, an empty one is silence
	asked    map[string]int
	delay    time.Duration // before each answer
	inFlight int
	most     int // in flight at once
}

func newFake() *fake {
	return &fake{asked: map[string]int{}, answers: map[string]string{
		"/health":    ok(""),
		"/v1/models": ok(`{"object":"list","data":[{"id":"m","max_model_len":1024},{"id":"m-lora","parent":"m"}]}`),
		"/version":   ok(`{"version":"0.27.1"}`),
		"/metrics":   ok(metricsPage(100)),
	}}
}

func metricsPage(start int) string {
	return fmt.Sprintf("process_start_time_seconds %d\nvllm:cache_config_info{block_size=\"16\",engine=\"0\",num_gpu_blocks=\"%d\"} 1\n",
		start, start)
}

func (f *fake) set(path, raw string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.answers[path] = raw
}

func (f *fake) failDials(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fails = err
}

func (f *fake) count(path string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.asked[path]
}

func (f *fake) dial(context.Context, string, string) (net.Conn, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.fails != nil {
		return nil, f.fails
	}
	ours, theirs := net.Pipe()
	go f.serve(theirs)
	return ours, nil
}

func (f *fake) serve(c net.Conn) {
	defer c.Close()
	br := bufio.NewReader(c)
	for {
		req := swallow(br)
		if req == nil {
			return
		}
		f.mu.Lock()
		raw, known := f.answers[req.URL.Path]
		f.asked[req.URL.Path]++
		f.inFlight++
		f.most = max(f.most, f.inFlight)
		delay := f.delay
		f.mu.Unlock()
		time.Sleep(delay)
		switch {
		case !known:
			raw = "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
		case raw == "":
			_, _ = br.ReadByte() // until the asker gives up
		}
		f.mu.Lock()
		f.inFlight--
		f.mu.Unlock()
		_, _ = io.WriteString(c, raw)
	}
}

func status(code int) string {
	return fmt.Sprintf("HTTP/1.1 %d X\r\nContent-Length: 0\r\n\r\n", code)
}

// watched runs body beside a monitor of f as the prefill instance p0, in a bubble.
func watched(t *testing.T, f *fake,
	body func(t *testing.T, m *Monitor, logs *observer.ObservedLogs, reg *prometheus.Registry)) {
	watchedAs(t, f, Instance{ID: "p0", Role: "prefill", Target: target(t, "http://p0:8000")}, body)
}

func watchedAs(t *testing.T, f *fake, in Instance,
	body func(t *testing.T, m *Monitor, logs *observer.ObservedLogs, reg *prometheus.Registry)) {
	synctest.Test(t, func(t *testing.T) {
		core, logs := observer.New(zap.InfoLevel)
		reg := prometheus.NewPedanticRegistry()
		c := NewClient(Options{Dial: f.dial})
		m := NewMonitor(MonitorConfig{Client: c, Registerer: reg, Log: zap.New(core), Canary: 10 * time.Second})
		m.Set([]Instance{in})
		end := runs(t, m, c)
		synctest.Wait()
		body(t, m, logs, reg)
		end()
	})
}

// runs has a monitor run until end, which also closes its client.
func runs(t *testing.T, m *Monitor, c *Client) (end func()) {
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); m.Run(ctx) }()
	return func() {
		stop()
		<-done
		c.Close()
		time.Sleep(time.Hour) // no answer of the fake takes longer; the bubble waits for none that is under way
	}
}

// series is the value of the one whose labels have these values, in the order of their names; 0 if
// there is none.
func series(t *testing.T, reg *prometheus.Registry, name string, labels ...string) float64 {
	t.Helper()
	families, err := reg.Gather()
	require.NoError(t, err)
	for _, f := range families {
		for _, m := range f.GetMetric() {
			var values []string
			for _, l := range m.GetLabel() {
				values = append(values, l.GetValue())
			}
			if f.GetName() == name && (len(labels) == 0 || slices.Equal(values, labels)) {
				return m.GetGauge().GetValue() + m.GetCounter().GetValue()
			}
		}
	}
	return 0
}
