// Package journal records what happens to requests. Each event is reported once (Record.Report),
// and goes into the request's facts, for the request log and the metrics, into its receipt and into
// its spans.
package journal

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"evenkeel/gateway/openai"
	"evenkeel/gateway/receipt"
	"evenkeel/gateway/tracing"
)

// Journal writes the records of requests. The zero value writes nothing, and is for tests.
type Journal struct {
	Receipts   *receipt.Ring                  // nil: none are kept
	tracer     atomic.Pointer[tracing.Tracer] // nil: new requests are not traced
	flushes    sync.WaitGroup                 // in which replaced tracers export their last spans
	requestLog *requestLog                    // nil: there is none
	recent     recent
	log        *zap.Logger

	requests   *prometheus.CounterVec
	okRequests prometheus.Counter // outcome ok
	spans      *prometheus.CounterVec
	stages     [stages]prometheus.Observer
	ttft, tpot prometheus.Observer
	cancels    map[Phase]prometheus.Counter
	released   map[Phase]prometheus.Observer
}

// Config says where a journal writes.
type Config struct {
	File       string // of the request log; "-": stdout; empty: none
	Receipts   *receipt.Ring
	Registerer prometheus.Registerer
	Buckets    []float64 // of histograms, in seconds
	Log        *zap.Logger
}

// New opens the request log and registers the metrics.
func New(c Config) (*Journal, error) {
	g := &Journal{Receipts: c.Receipts, log: c.Log, cancels: map[Phase]prometheus.Counter{}, released: map[Phase]prometheus.Observer{}}
	var err error
	if g.requestLog, err = openRequestLog(c.File, c.Log); err != nil {
		return nil, err
	}
	g.requests = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "evenkeel_requests_total", Help: "Client requests, by how they ended: ok, client_closed (the client left), engine_refused (an " +
			"engine's own 4xx), engine_error (an engine's error event), or the error.code that the client saw.",
	}, []string{"outcome"})
	// An alert on a rate needs the 0 before the first request.
	for _, outcome := range append([]string{"ok", "engine_error"}, outcomes...) {
		g.requests.WithLabelValues(outcome)
	}
	g.okRequests = g.requests.WithLabelValues("ok")
	g.spans = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "evenkeel_trace_spans_total", Help: "Spans of traced requests that have ended. exported: sent to the collector. dropped: the " +
			"queue was full. failed: the collector did not take them within 10 s.",
	}, []string{"outcome"})
	for _, outcome := range []string{tracing.Exported, tracing.Dropped, tracing.Failed} {
		g.spans.WithLabelValues(outcome)
	}
	spent := prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "evenkeel_stage_seconds", Help: "Time that a request spent in each stage. parse: it is read and checked. choose: it waits for a " +
			"place and a prefill engine. probe: the prefill runs. pool_wait: it waits in the pool. decide: the tick that decided, as a part of " +
			"pool_wait. transfer: from the decode request to its first event. relay: from the first event to the end.", Buckets: c.Buckets,
	}, []string{"stage"})
	for s, name := range stageNames {
		g.stages[s] = spent.WithLabelValues(name)
	}
	cancels := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "evenkeel_cancels_total", Help: "Requests whose client left, by how far they were. Each answer of a request counts, also answers " +
			"that end because another one failed.",
	}, []string{"phase"})
	released := prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "evenkeel_cancel_release_seconds", Help: "Time from a client's leaving until its request held nothing any more: no slot, no KV, " +
			"no hand-off. Hand-offs that wait for a hold timeout are only in evenkeel_drains_total.", Buckets: c.Buckets,
	}, []string{"phase"})
	for _, p := range phases {
		g.cancels[p], g.released[p] = cancels.WithLabelValues(string(p)), released.WithLabelValues(string(p))
	}
	ttft := prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "evenkeel_ttft_seconds", Help: "Time from a request's arrival to the first event of its answer. An answer that its engine sends " +
			"in one piece has no such time.", Buckets: c.Buckets,
	})
	tpot := prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "evenkeel_tpot_seconds", Help: "Mean time per token after the first token. Each complete answer is one sample.", Buckets: c.Buckets,
	})
	g.ttft, g.tpot = observeBoth{ttft, &g.recent.ttft}, observeBoth{tpot, &g.recent.tpot}
	c.Registerer.MustRegister(g.requests, g.spans, spent, cancels, released, ttft, tpot)
	return g, nil
}

// openViewsOf leaves an entry nil if receipts are off, or if the request is not traced.
func (g *Journal) openViewsOf(r *Record) (all [2]view) {
	if g.Receipts != nil {
		all[0] = openReceipt(g.Receipts, r)
	}
	if r.span.Recording() {
		all[1] = openSpans(r)
	}
	return all
}

// Close exports the last spans and closes the request log.
func (g *Journal) Close() error {
	g.setTracer(nil)
	g.flushes.Wait()
	return g.requestLog.close()
}

// CountRefused is for a request without a record. The last minute has it only if isProxyFailure,
// because a flood of malformed requests would hide that others fail.
func (g *Journal) CountRefused(fail *openai.Error) {
	g.requests.WithLabelValues(Outcome(fail)).Inc()
	if isProxyFailure(fail) {
		g.recent.count(fail)
	}
}

// stage is a label of evenkeel_stage_seconds.
type stage int

const (
	parse stage = iota
	choose
	probe
	poolWait
	decide
	transfer
	relay
	stages
)

var stageNames = [stages]string{"parse", "choose", "probe", "pool_wait", "decide", "transfer", "relay"}

func (g *Journal) observeStage(s stage, took time.Duration) { g.stages[s].Observe(took.Seconds()) }

// observeBoth is for the metric and the last minute.
type observeBoth struct{ metric, recent prometheus.Observer }

func (b observeBoth) Observe(v float64) {
	b.metric.Observe(v)
	b.recent.Observe(v)
}
