package dispatcher

import (
	"context"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"evenkeel/dispatcher/board"
	"evenkeel/predictor"
)

// endingsMost bounds the queue of ended requests that the learner has not learned from yet.
const maxQueuedSamples = 4096

// learner runs a board.Learner in a goroutine of its own.
type learner struct {
	log     *zap.Logger
	dropped prometheus.Counter

	mu       sync.Mutex
	calls   []func() // functions that the goroutine of run must call
	finished []board.OutputSample
	wake     chan struct{} // see ring

	// Only the goroutine of run uses it.
	predictors board.Learner

	// publish sends finished tables to the goroutine that owns the boards.
	publish func(board.TablesBuilt)
}

func newLearner(log *zap.Logger, m *metrics, publish func(board.TablesBuilt)) *learner {
	return &learner{log: log, publish: publish, dropped: m.endingsDropped, wake: make(chan struct{}, 1)}
}

// follow begins to learn a subject, from a fit if there is one. Before its first tables are built, the boards have no predictions for it.
func (l *learner) addPredictor(key board.PredictorKey, fit *predictor.Fit) {
	l.queueCall(func() { l.logRefused(key, l.predictors.Follow(key, fit)) })
}

// load makes all subjects start anew from a fit.
func (l *learner) restart(fit *predictor.Fit) {
	l.queueCall(func() {
		for key, err := range l.predictors.Load(fit) {
			l.logRefused(key, err)
		}
	})
}

// logRefused logs that a subject could not be learned from a fit. err nil: it could, so nothing is logged.
func (l *learner) logRefused(key board.PredictorKey, err error) {
	if err != nil {
		l.log.Error("dispatcher: the predictor could not learn, and stays as it was", zap.String("model", key.Model),
			zap.String("kind", string(key.Kind)), zap.Error(err))
	}
}

// queueOrder queues a function for the learner's goroutine, because only that goroutine may use l.learned.
func (l *learner) queueCall(order func()) {
	l.mu.Lock()
	l.calls = append(l.calls, order)
	l.mu.Unlock()
	ring(l.wake)
}

// add queues an ended request. It never waits: if the queue is full, it drops the request and counts it.
func (l *learner) add(sample board.OutputSample) {
	l.mu.Lock()
	full := len(l.finished) == maxQueuedSamples
	if !full {
		l.finished = append(l.finished, sample)
	}
	l.mu.Unlock()
	if full {
		l.dropped.Inc()
		return
	}
	ring(l.wake)
}

// run learns until ctx ends.
func (l *learner) run(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	var spare []board.OutputSample
	for {
		var more bool
		spare, more = l.learn(spare, time.Now())
		if more {
			timer.Reset(time.Second) // after a second, new tables are due even if only a few requests have ended
		} else { // nothing is due before the next order or the next ended request
			timer.Stop()
		}
		select {
		case <-l.wake:
		case <-timer.C:
		case <-ctx.Done():
			return
		}
	}
}

// learn runs the queued orders, learns from the queued endings, and sends the tables that are due to the boards. more says whether tables
// will become due later even if no other request ends.
//
// Endings that come meanwhile are queued in the memory of spare. learned is the old queue: its memory can be the spare of the next call.
func (l *learner) learn(spare []board.OutputSample, now time.Time) (learned []board.OutputSample, more bool) {
	l.mu.Lock()
	finished, orders := l.finished, l.calls
	l.finished, l.calls = spare[:0], nil
	l.mu.Unlock()
	for _, order := range orders {
		order()
	}
	for i := range finished {
		l.predictors.Learn(&finished[i])
	}
	built, more := l.predictors.Rebuild(now)
	for _, table := range built {
		l.publish(table)
	}
	return finished, more
}
