package tracing

import (
	"context"
	"sync"
	"time"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.uber.org/zap"
)

// Bounds of what waits to be exported: a thousand requests' worth, and no
// more memory than that, however long the collector is away.
const (
	queueSpans = 8 << 10
	batchSpans = 512
	batchDelay = time.Second // a batch that is not full goes after it
)

// queue is a span processor that never waits. The SDK's own drops what it has
// no room for without telling.
type queue struct {
	exporter sdktrace.SpanExporter
	timeout  time.Duration
	log      *zap.Logger
	count    func(outcome string, spans int)

	mu     sync.RWMutex // OnEnd holds it to read: nothing is sent once closed is true
	closed bool
	spans  chan sdktrace.ReadOnlySpan
	flush  chan chan struct{}
	done   chan struct{}
	stop   context.CancelFunc // ends an export under way
	ok     bool               // the last export was
}

func newQueue(exporter sdktrace.SpanExporter, cfg *Config) *queue {
	ctx, stop := context.WithCancel(context.Background())
	q := &queue{
		exporter: exporter, timeout: cfg.Timeout, log: cfg.Log, count: cfg.Count, ok: true, stop: stop,
		spans: make(chan sdktrace.ReadOnlySpan, queueSpans), flush: make(chan chan struct{}), done: make(chan struct{}),
	}
	go q.run(ctx)
	return q
}

// OnStart implements sdktrace.SpanProcessor.
func (q *queue) OnStart(context.Context, sdktrace.ReadWriteSpan) {}

// OnEnd takes a span, or drops it.
func (q *queue) OnEnd(s sdktrace.ReadOnlySpan) {
	if !s.SpanContext().IsSampled() {
		return
	}
	q.mu.RLock()
	defer q.mu.RUnlock()
	if !q.closed {
		select {
		case q.spans <- s:
			return
		default:
		}
	}
	q.count(Dropped, 1)
}

// run exports full batches, and at last after a moment what there is.
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
	var due <-chan time.Time // of the oldest in the batch; nil: it is empty
	for {
		select {
		case s, open := <-q.spans:
			if !open {
				export()
				return
			}
			if batch = append(batch, s); len(batch) == 1 {
				due = time.After(batchDelay)
			}
			if len(batch) < batchSpans {
				continue
			}
		case <-due:
		case flushed := <-q.flush:
			for n := len(q.spans); n > 0; n-- {
				if batch = append(batch, <-q.spans); len(batch) == batchSpans {
					export()
				}
			}
			export()
			close(flushed)
		}
		export()
		due = nil
	}
}

// export sends one batch; the exporter tries again by itself while there is time.
func (q *queue) export(ctx context.Context, batch []sdktrace.ReadOnlySpan) {
	ctx, cancel := context.WithTimeout(ctx, q.timeout)
	defer cancel()
	err := q.exporter.ExportSpans(ctx, batch)
	if err == nil {
		q.ok = true
		q.count(Exported, len(batch))
		return
	}
	if q.ok { // the first of a row
		q.log.Warn("the collector does not take spans, and they are lost; check tracing.endpoint", zap.Error(err))
	}
	q.ok = false
	q.count(Failed, len(batch))
}

// ForceFlush exports what has ended.
func (q *queue) ForceFlush(ctx context.Context) error {
	flushed := make(chan struct{})
	select {
	case q.flush <- flushed:
	case <-q.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
	select {
	case <-flushed:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Shutdown exports what has ended and stops; at ctx's end it gives that up.
func (q *queue) Shutdown(ctx context.Context) error {
	q.mu.Lock()
	again := q.closed
	q.closed = true
	if !again {
		close(q.spans)
	}
	q.mu.Unlock()
	if again {
		return nil
	}
	late := context.AfterFunc(ctx, q.stop)
	<-q.done
	q.stop()
	if !late() {
		_ = q.exporter.Shutdown(context.Background()) // it closes idle connections only
		return ctx.Err()
	}
	return q.exporter.Shutdown(ctx)
}
