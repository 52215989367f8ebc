package tracing

import (
	"context"
	"sync"
	"time"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.uber.org/zap"
)

// Bounds of the spans that wait for export. The queue has room for the spans of about a thousand
// requests. While the collector is away, further spans are dropped.
const (
	queueSpans = 8 << 10     // most spans in the queue
	batchSpans = 512         // most spans in one export
	batchDelay = time.Second // a batch that is not full is exported after this time
)

// queue is a span processor that never blocks. Unlike the SDK's own processor, it counts the spans
// that it has to drop.
type queue struct {
	exporter sdktrace.SpanExporter
	timeout  time.Duration
	log      *zap.Logger
	count    func(outcome string, spans int)

	mu            sync.RWMutex // OnEnd holds it for reading, so that no span is sent after closed is set
	closed        bool
	spans         chan sdktrace.ReadOnlySpan
	done          chan struct{}
	stop          context.CancelFunc // cancels an export under way
	lastSucceeded bool               // the last export succeeded
}

// newQueue starts a queue that exports with the exporter until Shutdown.
func newQueue(exporter sdktrace.SpanExporter, cfg *Config) *queue {
	ctx, stop := context.WithCancel(context.Background())
	q := &queue{
		exporter: exporter, timeout: cfg.Timeout, log: cfg.Log, count: cfg.Count, lastSucceeded: true, stop: stop,
		spans: make(chan sdktrace.ReadOnlySpan, queueSpans), done: make(chan struct{}),
	}
	go q.run(ctx)
	return q
}

// OnStart implements sdktrace.SpanProcessor.
func (q *queue) OnStart(context.Context, sdktrace.ReadWriteSpan) {}

// OnEnd puts a span into the queue, or drops it if the queue is full or closed.
func (q *queue) OnEnd(s sdktrace.ReadOnlySpan) {
	if !s.SpanContext().IsSampled() { // OpenTelemetry also has spans that are recorded but not exported
		return
	}
	q.mu.RLock()
	defer q.mu.RUnlock()
	if !q.closed {
		select {
		case q.spans <- s:
			return
		default: // the queue is full
		}
	}
	q.count(Dropped, 1)
}

// run exports full batches until the queue is closed, then the rest. It exports a batch that is not
// full batchDelay after the first span of the batch.
func (q *queue) run(ctx context.Context) {
	defer close(q.done)
	batch := make([]sdktrace.ReadOnlySpan, 0, batchSpans)
	export := func() {
		if len(batch) > 0 {
			q.export(ctx, batch)
			clear(batch)
			batch = batch[:0]
		}
	}
	var due <-chan time.Time // when the batch must be exported; nil: the batch is empty
	for {
		select {
		case s, open := <-q.spans:
			if !open {
				export()
				return
			}
			batch = append(batch, s)
			if len(batch) == 1 {
				due = time.After(batchDelay)
			}
			if len(batch) < batchSpans { // the batch waits for more spans
				continue
			}
		case <-due: // the batch has waited long enough
		}
		export()
		due = nil
	}
}

// export sends one batch. The exporter repeats a failed try by itself until the timeout.
func (q *queue) export(ctx context.Context, batch []sdktrace.ReadOnlySpan) {
	ctx, cancel := context.WithTimeout(ctx, q.timeout)
	defer cancel()
	err := q.exporter.ExportSpans(ctx, batch)
	if err == nil {
		q.lastSucceeded = true
		q.count(Exported, len(batch))
		return
	}
	if q.lastSucceeded { // the first failure in a row
		q.log.Warn("the collector does not take spans, and they are lost; check tracing.endpoint", zap.Error(err))
	}
	q.lastSucceeded = false
	q.count(Failed, len(batch))
}

// ForceFlush implements sdktrace.SpanProcessor. Only TracerProvider.ForceFlush would call it, which
// the proxy does not call.
func (q *queue) ForceFlush(context.Context) error { return nil }

// Shutdown exports all spans that have ended, and stops the queue. If ctx ends first, it drops the
// rest and returns why ctx ended. A second call does nothing.
func (q *queue) Shutdown(ctx context.Context) error {
	q.mu.Lock()
	alreadyClosed := q.closed
	q.closed = true
	if !alreadyClosed {
		close(q.spans)
	}
	q.mu.Unlock()
	if alreadyClosed {
		return nil
	}
	stopWaiting := context.AfterFunc(ctx, q.stop)
	<-q.done
	q.stop()
	if !stopWaiting() { // ctx has ended first, and its end has cancelled the exports
		_ = q.exporter.Shutdown(context.Background()) // this only closes idle connections
		return ctx.Err()
	}
	return q.exporter.Shutdown(ctx)
}
