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

// maxQueuedSamples is the largest number of ended requests that wait until the learner learns from them. Further ones are dropped.
const maxQueuedSamples = 4096

// learner runs a board.Learner, which learns the lengths of answers, in a goroutine of its own.
type learner struct {
	log     *zap.Logger
	dropped prometheus.Counter

	mu       sync.Mutex
	calls    []func() // functions that the goroutine of run must call next
	finished []board.OutputSample
	wake     chan struct{} // wakes the goroutine of run; has room for one value

	// Only the goroutine of run uses predictors, so no lock guards it.
	predictors board.Learner

	// publish sends finished tables to the scheduler's goroutine, which owns the boards.
	publish func(board.TablesBuilt)
}

// newLearner returns a learner without predictors. The goroutine of run calls publish for each finished table.
func newLearner(log *zap.Logger, m *metrics, publish func(board.TablesBuilt)) *learner {
	return &learner{log: log, publish: publish, dropped: m.endingsDropped, wake: make(chan struct{}, 1)}
}

// addPredictor makes the learner learn for the predictor with this key. Learning starts from the fit; nil: from nothing. Until its first
// tables are built, the predictor predicts nothing.
func (l *learner) addPredictor(key board.PredictorKey, fit *predictor.Fit) {
	l.queueCall(func() { l.logRefused(key, l.predictors.Follow(key, fit)) })
}

// restart makes all predictors forget what they learned and start from a fit.
func (l *learner) restart(fit *predictor.Fit) {
	l.queueCall(func() {
		for key, err := range l.predictors.Load(fit) {
			l.logRefused(key, err)
		}
	})
}

// logRefused logs that a predictor could not use a fit; err nil: it could, and nothing is logged.
func (l *learner) logRefused(key board.PredictorKey, err error) {
	if err != nil {
		l.log.Error("dispatcher: the predictor could not learn, and stays as it was", zap.String("model", key.Model),
			zap.String("kind", string(key.Kind)), zap.Error(err))
	}
}

// queueCall queues a function for the goroutine of run, because only that goroutine may use l.predictors.
func (l *learner) queueCall(call func()) {
	l.mu.Lock()
	l.calls = append(l.calls, call)
	l.mu.Unlock()
	signal(l.wake)
}

// add queues an ended request, to be learned from. It never waits: if the queue is full, it drops the request and counts it.
func (l *learner) add(sample board.OutputSample) {
	l.mu.Lock()
	isFull := len(l.finished) == maxQueuedSamples
	if !isFull {
		l.finished = append(l.finished, sample)
	}
	l.mu.Unlock()
	if isFull {
		l.dropped.Inc()
		return
	}
	signal(l.wake)
}

// run learns from the queued requests whenever add or queueCall wakes it, until ctx ends.
func (l *learner) run(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	var spare []board.OutputSample // memory for the next queue; learn exchanges it for the queue that it reads, so that nothing is allocated
	for {
		var tablesComeDue bool
		spare, tablesComeDue = l.learn(spare, time.Now())
		if tablesComeDue {
			timer.Reset(time.Second) // new tables are due after a second at the latest, even if only a few requests have ended
		} else { // without new requests, no table becomes due
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

// learn makes the queued calls, learns from the queued requests, and publishes the tables that are due. more says whether tables will
// become due later even if no other request ends.
//
// The next requests are queued in the memory of spare. reusable is the queue that was just read: its memory can be the spare of the next
// call.
func (l *learner) learn(spare []board.OutputSample, now time.Time) (reusable []board.OutputSample, more bool) {
	l.mu.Lock()
	finished, calls := l.finished, l.calls
	l.finished, l.calls = spare[:0], nil
	l.mu.Unlock()
	for _, call := range calls {
		call()
	}
	for i := range finished {
		l.predictors.Learn(&finished[i])
	}
	built, more := l.predictors.Rebuild(now)
	for _, tables := range built {
		l.publish(tables)
	}
	return finished, more
}
