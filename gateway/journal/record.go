package journal

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"evenkeel/gateway/receipt"
	"evenkeel/gateway/tracing"
)

// Journal holds everything that facts are written to. The zero value writes nothing
// and serves tests.
type Journal struct {
	Receipts *receipt.Ring                  // nil: none are kept
	tracer   atomic.Pointer[tracing.Tracer] // nil: there are no traces
	flushes  sync.WaitGroup                 // of tracers that were replaced
	lines    *lines                         // nil: there is no request log
	recent   recent
	log      *zap.Logger

	requests   *prometheus.CounterVec
	whole      prometheus.Counter // the counter of requests whose outcome is ok
	spans      *prometheus.CounterVec
	stages     [stages]prometheus.Observer
	ttft, tpot prometheus.Observer
	cancels    map[Phase]prometheus.Counter
	released   map[Phase]prometheus.Observer
}

// A Request is the record of one request, or of one leg of a fan-out: its facts, and
// the attempt that is under way. Only the goroutine that serves the request writes here.
type Request struct {
	Facts
	Reached Phase // how far it is, or was when its client left

	journal *Journal
	path    string        // of its endpoint; empty before Witness
	leg     string        // which leg it is; empty: the whole request
	live    *receipt.Live // nil: no receipts are kept
	span    *tracing.Span // nil: there are no traces
	attempt attempt       // the present one, or the last one
	counted bool          // among the requests whose client left
}

// attempt is the try to serve a request that is under way: one attempt of its
// receipt, and the spans of it.
type attempt struct {
	open    bool      // an attempt is under way
	number  int       // number of this attempt, or of the last one
	index   int       // in the receipt; -1: not kept
	phase   Phase     // its present step; empty: no step is under way
	since   time.Time // when the step began, or when the last attempt failed
	retries bool      // the last attempt failed, and this is the next

	span      *tracing.Span
	call      *tracing.Span // to a decode engine or another region; nil: none is under way
	phaseSpan *tracing.Span
}
