// Package tracing sends spans of requests to an OpenTelemetry collector, by
// OTLP over HTTP. Nothing waits for the collector: spans go through a bounded
// queue, and what does not fit is dropped and counted.
package tracing

import (
	"context"
	"crypto/tls"
	"fmt"
	"math/rand/v2"
	"net/url"
	"strings"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"go.uber.org/zap"
)

// Config of a Tracer.
type Config struct {
	Endpoint string            // URL of the collector, or its host:port
	Insecure bool              // host:port speaks clear text
	Headers  map[string]string // of every export; nil: OTEL_EXPORTER_OTLP_HEADERS
	TLS      *tls.Config       // nil: the system's authorities
	Timeout  time.Duration     // of one export
	Sample   float64           // share of the requests that nobody has decided about
	Service  string            // service.name; empty: OTEL_SERVICE_NAME, else evenkeel
	Version  string
	Resource map[string]string // further attributes of the process
	Log      *zap.Logger
	Count    func(outcome string, spans int) // of all spans that ended: Exported, Dropped, Failed
}

// What becomes of a span that ended.
const (
	Exported = "exported"
	Dropped  = "dropped" // the queue was full
	Failed   = "failed"  // the collector did not take it
)

// A Tracer makes the spans. A nil one makes none.
type Tracer struct {
	sample   float64
	provider *sdktrace.TracerProvider
	tracer   trace.Tracer
}

// New returns a tracer that exports until Shutdown. The collector need not be
// there yet.
func New(cfg Config) (*Tracer, error) {
	target, err := Endpoint(cfg.Endpoint, cfg.Insecure)
	if err != nil {
		return nil, err
	}
	opts := []otlptracehttp.Option{otlptracehttp.WithEndpointURL(target), otlptracehttp.WithTimeout(cfg.Timeout)}
	if len(cfg.Headers) > 0 {
		opts = append(opts, otlptracehttp.WithHeaders(cfg.Headers))
	}
	if cfg.TLS != nil && strings.HasPrefix(target, "https:") {
		opts = append(opts, otlptracehttp.WithTLSClientConfig(cfg.TLS))
	}
	exporter, err := otlptracehttp.New(context.Background(), opts...)
	if err != nil {
		return nil, fmt.Errorf("tracing: %w", err)
	}
	about, err := describe(&cfg)
	if err != nil {
		return nil, err
	}
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) {
		cfg.Log.Warn("OpenTelemetry reports an error; spans may be lost",
			zap.Error(err))
	}))
	provider := sdktrace.NewTracerProvider(
		sdktrace.WithResource(about), sdktrace.WithSampler(sampler{}), sdktrace.WithSpanProcessor(newQueue(exporter, &cfg)),
	)
	return &Tracer{sample: cfg.Sample, provider: provider, tracer: provider.Tracer("evenkeel", trace.WithInstrumentationVersion(cfg.Version))},
		nil
}

// Endpoint is the URL that spans are posted to.
func Endpoint(text string, insecure bool) (string, error) {
	if !strings.Contains(text, "://") {
		scheme := "https://"
		if insecure {
			scheme = "http://"
		}
		text = scheme + text
	}
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil {
		return "", fmt.Errorf("%q is no address of a collector; write http://host:4318, https://host:4318, or host:4318", text)
	}
	if u.Path == "" || u.Path == "/" {
		u.Path = "/v1/traces"
	}
	return u.String(), nil
}

// describe is who the spans come from: the environment's word first, then ours.
func describe(cfg *Config) (*resource.Resource, error) {
	own := []attribute.KeyValue{attribute.String("service.version", cfg.Version)}
	for k, v := range cfg.Resource {
		own = append(own, attribute.String(k, v))
	}
	opts := []resource.Option{
		resource.WithAttributes(attribute.String("service.name", "evenkeel")), resource.WithHost(), resource.WithFromEnv(),
		resource.WithAttributes(own...),
	}
	if cfg.Service != "" {
		opts = append(opts, resource.WithAttributes(attribute.String("service.name", cfg.Service)))
	}
	about, err := resource.New(context.Background(), opts...)
	if err != nil {
		return nil, fmt.Errorf("tracing: %w; see OTEL_RESOURCE_ATTRIBUTES", err)
	}
	return about, nil
}

// Shutdown exports what has ended, as long as ctx lasts, and then stops.
func (t *Tracer) Shutdown(ctx context.Context) error {
	if t == nil {
		return nil
	}
	return t.provider.Shutdown(ctx)
}

// Names of the headers that carry a context (W3C Trace Context, Baggage).
var carried = []string{"traceparent", "tracestate", "baggage"}

var (
	traceContext = propagation.TraceContext{}
	baggages     = propagation.Baggage{}
)

// maxBaggage bounds what a caller may have carried through, in bytes.
const maxBaggage = 4 << 10

// Start begins the span of a request that arrived at a moment; header returns
// one of its headers. The caller's trace goes on. A trusted caller has decided
// whether it is sampled. Anybody else can decide against it only: a sampled
// flag, or a trace id that some sampler would take, is easily written.
func (t *Tracer) Start(header func(name string) string, trusted bool, name string, at time.Time) *Span {
	if t == nil {
		return nil
	}
	from := propagation.MapCarrier{}
	for _, k := range carried {
		if v := header(k); v != "" && len(v) <= maxBaggage {
			from[k] = v
		}
	}
	ctx := traceContext.Extract(context.Background(), from)
	if trusted {
		ctx = baggages.Extract(ctx, from)
	}
	parent := trace.SpanContextFromContext(ctx)
	sampled := rand.Float64() < t.sample
	if parent.IsValid() {
		if trusted {
			sampled = parent.IsSampled()
		} else {
			sampled = sampled && parent.IsSampled()
		}
	}
	ctx, span := t.tracer.Start(context.WithValue(ctx, decision{}, sampled), name, trace.WithSpanKind(trace.SpanKindServer),
		trace.WithTimestamp(at))
	return &Span{ctx: ctx, span: span, tracer: t.tracer}
}

// decision is the key of what Start decided, for all spans of the request.
type decision struct{}

// sampler does as Start decided.
type sampler struct{}

// ShouldSample implements sdktrace.Sampler.
func (sampler) ShouldSample(p sdktrace.SamplingParameters) sdktrace.SamplingResult {
	r := sdktrace.SamplingResult{Decision: sdktrace.Drop, Tracestate: trace.SpanContextFromContext(p.ParentContext).TraceState()}
	if sampled, _ := p.ParentContext.Value(decision{}).(bool); sampled {
		r.Decision = sdktrace.RecordAndSample
	}
	return r
}

// Description implements sdktrace.Sampler.
func (sampler) Description() string { return "evenkeel" }

// A Span is a step of a request. A nil one, and one of a request that is not
// sampled, takes note of nothing.
type Span struct {
	ctx    context.Context //nolint:containedctx // how OpenTelemetry hands a parent on
	span   trace.Span
	tracer trace.Tracer
}

// Recording says whether it is worth the while to put attributes together.
func (s *Span) Recording() bool { return s != nil && s.span.IsRecording() }

// Child begins a step within this one. Of a request that is not sampled it is
// the request's own span: nobody will see either.
func (s *Span) Child(name string, calls bool) *Span {
	if !s.Recording() {
		return s
	}
	kind := trace.SpanKindInternal
	if calls {
		kind = trace.SpanKindClient
	}
	ctx, span := s.tracer.Start(s.ctx, name, trace.WithSpanKind(kind))
	return &Span{ctx: ctx, span: span, tracer: s.tracer}
}

// Name gives the span another name, once more is known.
func (s *Span) Name(name string) {
	if s.Recording() {
		s.span.SetName(text(name))
	}
}

// Set adds attributes. Ask Recording first: they cost something.
func (s *Span) Set(attributes ...attribute.KeyValue) {
	if s.Recording() {
		s.span.SetAttributes(texts(attributes)...)
	}
}

// Event notes that something happened now.
func (s *Span) Event(name string, attributes ...attribute.KeyValue) {
	if s.Recording() {
		s.span.AddEvent(name, trace.WithAttributes(texts(attributes)...))
	}
}

// Fail makes it a failed step: kind is one of few, the message for people.
func (s *Span) Fail(kind, message string) {
	if s.Recording() {
		s.span.SetAttributes(attribute.String("error.type", text(kind)))
		s.span.SetStatus(codes.Error, text(message))
	}
}

// text is UTF-8: of anything else, and clients may send any bytes, the exporter
// makes nothing, and the spans of other requests in the batch are lost with it.
func text(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }

func texts(list []attribute.KeyValue) []attribute.KeyValue {
	for i := range list {
		switch v := &list[i].Value; v.Type() {
		case attribute.STRING:
			*v = attribute.StringValue(text(v.AsString()))
		case attribute.STRINGSLICE:
			all := v.AsStringSlice()
			for k := range all {
				all[k] = text(all[k])
			}
			*v = attribute.StringSliceValue(all)
		}
	}
	return list
}

// End ends it.
func (s *Span) End() {
	if s != nil {
		s.span.End()
	}
}

// TraceID is that of the request; empty without one.
func (s *Span) TraceID() string {
	if s == nil {
		return ""
	}
	return s.span.SpanContext().TraceID().String()
}

// Carry hands out the headers that continue the trace below this span.
func (s *Span) Carry(add func(name, value string)) {
	if s == nil {
		return
	}
	to := propagation.MapCarrier{}
	traceContext.Inject(s.ctx, to)
	baggages.Inject(s.ctx, to)
	for _, k := range carried {
		if v := to[k]; v != "" {
			add(k, v)
		}
	}
}
