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

// Journal holds everything to which the records of requests are written. The zero value writes nothing, and is for tests.
type Journal struct {
	Receipts *receipt.Ring                  // nil: none are kept
	tracer   atomic.Pointer[tracing.Tracer] // nil: there are no traces
	flushes  sync.WaitGroup                 // of tracers that were replaced, while they export their last spans
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

// A Record is the record of one request, or of one part (leg) of a fanned-out request: its facts, and the attempt under way. Only the
// goroutine that serves the request may use it.
type Record struct {
	LogEntry
	Reached Phase // how far the request is, or was when its client left

	journal *Journal
	path    string        // path of the endpoint; empty before Witness
	leg     string        // name of the leg; empty: the record of the whole request
	live    *receipt.Live // nil: no receipts are kept
	span    *tracing.Span // nil: there are no traces
	attempt attempt       // the attempt under way, or the last attempt
	counted bool          // the request is already counted among those whose client left
}

// attempt is the state of the attempt under way, for the receipt and the spans.
type attempt struct {
	open    bool      // an attempt is under way
	number  int       // number of the attempt under way, or of the last attempt
	index   int       // index of the attempt in the receipt; -1: the receipt has too many
	phase   Phase     // the present phase; empty: none
	since   time.Time // when the phase began, or when the last attempt failed
	retries bool      // the last attempt failed, and another attempt follows

	span      *tracing.Span
	call      *tracing.Span // span of the call to a decode engine or another region; nil: no call is under way
	phaseSpan *tracing.Span
}
