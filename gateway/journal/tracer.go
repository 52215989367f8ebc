package journal

import (
	"context"
	"runtime/debug"
	"time"

	"go.uber.org/zap"

	"evenkeel/gateway/config"
	"evenkeel/gateway/tracing"
)

// flushTime bounds the export of the last spans, at the end of the proxy or after a reload.
const flushTime = 5 * time.Second

// exportTimeout bounds one export of spans, its retries included: OpenTelemetry's own default
// (OTEL_EXPORTER_OTLP_TIMEOUT).
const exportTimeout = 10 * time.Second

// PrepareTracing reads the config of traces and changes nothing. When begin is called, new requests
// are traced as the config says, and the old tracer exports its last spans.
func (g *Journal) PrepareTracing(c *config.Tracing) (begin func() error, err error) {
	if c.Endpoint == "" { // there is no collector, so requests are not traced
		return func() error { g.setTracer(nil); return nil }, nil
	}
	t := tracing.Config{
		Endpoint: c.Endpoint, Insecure: c.Insecure, Headers: c.Headers, Timeout: exportTimeout, Sample: c.Sample,
		Service: c.ServiceName, Version: moduleVersion(), Resource: c.Resource, Log: g.log,
		Count: func(outcome string, n int) { g.spans.WithLabelValues(outcome).Add(float64(n)) },
	}
	if t.TLS, err = c.ClientTLS(); err != nil {
		return nil, err
	}
	return func() error {
		next, err := tracing.New(t)
		if err == nil {
			g.setTracer(next)
		}
		return err
	}, nil
}

// setTracer makes t the tracer of new requests; t nil: they are not traced. The old tracer exports
// its last spans in the background.
func (g *Journal) setTracer(t *tracing.Tracer) {
	if old := g.tracer.Swap(t); old != nil {
		g.flushes.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), flushTime)
			defer cancel()
			if err := old.Shutdown(ctx); err != nil {
				g.log.Warn("the collector did not take the last spans", zap.Error(err))
			}
		})
	}
}

// moduleVersion returns the version of evenkeel in this binary; empty: the build has no such
// information.
func moduleVersion() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		return info.Main.Version
	}
	return ""
}
