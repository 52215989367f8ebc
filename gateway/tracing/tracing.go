// Package tracing sends spans of requests to an OpenTelemetry collector, by OTLP over HTTP. No
// request waits for the collector: spans go through a bounded queue, and spans that do not fit are
// dropped and counted.
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
	Insecure bool              // if Endpoint is host:port, it is called without TLS
	Headers  map[string]string // headers of every export; nil: those of OTEL_EXPORTER_OTLP_HEADERS
	TLS      *tls.Config       // settings for an https endpoint; nil: trust the authorities of the system
	Timeout  time.Duration     // time limit of one export
	Sample   float64           // share of requests to trace, from 0 to 1, if no trusted caller has decided
	Service  string            // service.name; empty: that of OTEL_SERVICE_NAME, or evenkeel
	Version  string
	Resource map[string]string // further attributes of the process
	Log      *zap.Logger
	Count    func(outcome string, spans int) // counts spans that ended, by outcome: Exported, Dropped, Failed
}

// Outcomes of a span that ended.
const (
	Exported = "exported"
	Dropped  = "dropped" // the queue was full
	Failed   = "failed"  // the collector did not accept it
)

// A Tracer makes spans. A nil Tracer makes none.
type Tracer struct {
	sample   float64
	provider *sdktrace.TracerProvider
	tracer   trace.Tracer
}

// New returns a tracer that exports until Shutdown. The collector need not run yet. New also makes
// OpenTelemetry log its errors to cfg.Log, in the whole process.
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

// Endpoint returns the URL to which spans are posted, for a text that is a URL or host:port.
// insecure is for a host:port without TLS. A URL without a path gets the path of OTLP.
func Endpoint(text string, insecure bool) (string, error) {
	if !strings.Contains(text, "://") {
		scheme := "https://"
		if insecure {
			scheme = "http://"
		}
		text = scheme + text
	}
	u, err := url.Parse(text)
	// A user is refused, because the exporter would ignore it.
	usable := err == nil && (u.Scheme == "http" || u.Scheme == "https") && u.Host != "" && u.User == nil
	if !usable {
		return "", fmt.Errorf("%q is no address of a collector; write http://host:4318, https://host:4318, or host:4318", text)
	}
	if u.Path == "" || u.Path == "/" {
		u.Path = "/v1/traces"
	}
	return u.String(), nil
}

// describe returns the attributes of this process. Each source overrules those before it: the
// default, the host, the environment, and then the config.
func describe(cfg *Config) (*resource.Resource, error) {
	ownAttributes := []attribute.KeyValue{attribute.String("service.version", cfg.Version)}
	for k, v := range cfg.Resource {
		ownAttributes = append(ownAttributes, attribute.String(k, v))
	}
	opts := []resource.Option{
		resource.WithAttributes(attribute.String("service.name", "evenkeel")), resource.WithHost(), resource.WithFromEnv(),
		resource.WithAttributes(ownAttributes...),
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

// Shutdown exports the spans that have ended, until ctx ends, and then stops the tracer.
func (t *Tracer) Shutdown(ctx context.Context) error {
	if t == nil {
		return nil
	}
	return t.provider.Shutdown(ctx)
}

// traceHeaders are the headers that carry a trace from one process to the next (W3C Trace Context,
// Baggage).
var traceHeaders = []string{"traceparent", "tracestate", "baggage"}

var (
	traceContext = propagation.TraceContext{}
	baggages     = propagation.Baggage{}
)

// maxBaggage bounds each of a caller's traceHeaders, in bytes. A longer header is ignored.
const maxBaggage = 4 << 10

// Start begins the span of a request, which continues the caller's trace; a nil Tracer returns nil.
// header returns a header of the request, and arrival is when the request arrived. A trusted caller
// decides whether the trace is sampled, and its baggage goes on to other processes. Another caller
// can only decide against sampling, because anybody could set the sampled flag, and its baggage is
// dropped.
func (t *Tracer) Start(header func(name string) string, trusted bool, name string, arrival time.Time) *Span {
	if t == nil {
		return nil
	}
	headers := propagation.MapCarrier{}
	for _, key := range traceHeaders {
		if value := header(key); value != "" && len(value) <= maxBaggage {
			headers[key] = value
		}
	}
	ctx := traceContext.Extract(context.Background(), headers)
	if trusted {
		ctx = baggages.Extract(ctx, headers)
	}
	parent := trace.SpanContextFromContext(ctx)
	sampled := rand.Float64() < t.sample
	if parent.IsValid() { // the request belongs to a trace of its caller
		if trusted {
			sampled = parent.IsSampled()
		} else {
			sampled = sampled && parent.IsSampled()
		}
	}
	ctx, span := t.tracer.Start(context.WithValue(ctx, sampledKey{}, sampled), name, trace.WithSpanKind(trace.SpanKindServer),
		trace.WithTimestamp(arrival))
	return &Span{ctx: ctx, span: span, tracer: t.tracer}
}

// sampledKey is the context key of the decision of Start whether the request is sampled. The
// decision holds for all spans of the request.
type sampledKey struct{}

// sampler samples a span as Start has decided.
type sampler struct{}

// ShouldSample implements sdktrace.Sampler.
func (sampler) ShouldSample(p sdktrace.SamplingParameters) sdktrace.SamplingResult {
	r := sdktrace.SamplingResult{Decision: sdktrace.Drop, Tracestate: trace.SpanContextFromContext(p.ParentContext).TraceState()}
	if sampled, _ := p.ParentContext.Value(sampledKey{}).(bool); sampled {
		r.Decision = sdktrace.RecordAndSample
	}
	return r
}

// Description implements sdktrace.Sampler.
func (sampler) Description() string { return "evenkeel" }

// A Span is a step of a request. A nil Span records nothing, and neither does a Span of a request
// that is not sampled.
type Span struct {
	ctx    context.Context //nolint:containedctx // OpenTelemetry passes the parent span in a context
	span   trace.Span
	tracer trace.Tracer
}

// Recording says whether the span records attributes. Callers use it to avoid making attributes in
// vain.
func (s *Span) Recording() bool { return s != nil && s.span.IsRecording() }

// Child begins a step within this step. isCall says that the step is a call to another process. If
// the request is not sampled, Child returns the span itself, because neither is exported.
func (s *Span) Child(name string, isCall bool) *Span {
	if !s.Recording() {
		return s
	}
	kind := trace.SpanKindInternal
	if isCall {
		kind = trace.SpanKindClient
	}
	ctx, span := s.tracer.Start(s.ctx, name, trace.WithSpanKind(kind))
	return &Span{ctx: ctx, span: span, tracer: s.tracer}
}

// Rename gives the span a better name, when more is known about the request.
func (s *Span) Rename(name string) {
	if s.Recording() {
		s.span.SetName(validUTF8(name))
	}
}

// Set adds attributes. Callers should ask Recording first, because making attributes costs time.
func (s *Span) Set(attributes ...attribute.KeyValue) {
	if s.Recording() {
		s.span.SetAttributes(validAttributes(attributes)...)
	}
}

// Event adds an event to the span, with the present time.
func (s *Span) Event(name string, attributes ...attribute.KeyValue) {
	if s.Recording() {
		s.span.AddEvent(name, trace.WithAttributes(validAttributes(attributes)...))
	}
}

// Fail marks the span as failed. kind is from a fixed list, and message is for people.
func (s *Span) Fail(kind, message string) {
	if s.Recording() {
		s.span.SetAttributes(attribute.String("error.type", validUTF8(kind)))
		s.span.SetStatus(codes.Error, validUTF8(message))
	}
}

// validUTF8 makes a text valid UTF-8. Clients may send any bytes, and the exporter fails at other
// bytes, so that the spans of all requests in the batch would be lost.
func validUTF8(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }

// validAttributes makes all texts among the attributes valid UTF-8, in place, and returns the list.
func validAttributes(list []attribute.KeyValue) []attribute.KeyValue {
	for i := range list {
		switch v := &list[i].Value; v.Type() {
		case attribute.STRING:
			*v = attribute.StringValue(validUTF8(v.AsString()))
		case attribute.STRINGSLICE:
			all := v.AsStringSlice()
			for k := range all {
				all[k] = validUTF8(all[k])
			}
			*v = attribute.StringSliceValue(all)
		}
	}
	return list
}

// End ends the span at the present time. A sampled span is then exported.
func (s *Span) End() {
	if s != nil {
		s.span.End()
	}
}

// TraceID returns the trace id of the request; empty: the request is not traced.
func (s *Span) TraceID() string {
	if s == nil {
		return ""
	}
	return s.span.SpanContext().TraceID().String()
}

// EachHeader calls add for each header with which another process can continue the trace below this
// span. A nil Span has no headers.
func (s *Span) EachHeader(add func(name, value string)) {
	if s == nil {
		return
	}
	headers := propagation.MapCarrier{}
	traceContext.Inject(s.ctx, headers)
	baggages.Inject(s.ctx, headers)
	for _, name := range traceHeaders {
		if value := headers[name]; value != "" {
			add(name, value)
		}
	}
}
