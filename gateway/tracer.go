package gateway

import (
	"context"
	"reflect"
	"runtime/debug"
	"time"

	"go.uber.org/zap"

	"evenkeel/gateway/config"
	"evenkeel/gateway/receipt"
	"evenkeel/gateway/tracing"
)

// flushTime is how long the collector has for the last spans, at the end or
// after a reload.
const flushTime = 5 * time.Second

// tracerConfig reads what a config says of traces; ok is false when there are
// to be none.
func (g *Gateway) tracerConfig(c *config.Config) (t tracing.Config, ok bool, err error) {
	if c.Tracing.Endpoint == "" {
		return t, false, nil
	}
	t = tracing.Config{
		Endpoint: c.Tracing.Endpoint, Insecure: c.Tracing.Insecure, Headers: c.Tracing.Headers, Timeout: c.Tracing.Timeout, Sample: c.Tracing.Sample,
		Service: c.Tracing.ServiceName, Version: moduleVersion(), Resource: c.Tracing.Resource, Log: g.log,
		Count: func(outcome string, n int) { g.metrics.spans.WithLabelValues(outcome).Add(float64(n)) },
	}
	t.TLS, err = c.Tracing.TLS.Client()
	return t, true, err
}

// trace begins to trace as a config says, and ends what was before.
func (g *Gateway) trace(t tracing.Config, on bool) error {
	var next *tracing.Tracer
	if on {
		var err error
		if next, err = tracing.New(t); err != nil {
			return err
		}
	}
	if old := g.journal.Trace(next); old != nil {
		g.background.Go(func() { g.flush(old) })
	}
	return nil
}

func (g *Gateway) flush(t *tracing.Tracer) {
	ctx, cancel := context.WithTimeout(context.Background(), flushTime)
	defer cancel()
	if err := t.Shutdown(ctx); err != nil {
		g.log.Warn("tracing: the last spans were not taken", zap.Error(err))
	}
}

// retrace puts a config's traces in force that was found good, if they differ.
func (g *Gateway) retrace(old, next *config.Config, t tracing.Config, on bool) {
	if reflect.DeepEqual(old.Tracing, next.Tracing) {
		return
	}
	if err := g.trace(t, on); err != nil {
		g.log.Error("tracing stays as it was", zap.Error(err))
	}
}

func moduleVersion() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		return info.Main.Version
	}
	return ""
}

// Receipts are those of the last requests, and of all that run; nil: none are
// kept.
func (g *Gateway) Receipts() *receipt.Ring { return g.journal.Receipts }
