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

// maxQueuedSamples bounds the ended requests that wait for the learner. Further ones are dropped.
const maxQueuedSamples = 4096

// learner runs a board.Learner in a goroutine of its own.
type learner struct {
	log     *zap.Logger
	dropped prometheus.Counter

	mu       sync.Mutex
	calls    []func() // calls for the goroutine of run
	finished []board.OutputSample
	wake     chan struct{} // wakes the goroutine of run; has room for one value

	// Only the goroutine of run uses predictors.
	predictors board.Learner

	// publish sends finished tables to the scheduler's goroutine.
	publish func(board.TablesBuilt)
}

func newLearner(log *zap.Logger, m *metrics, publish func(board.TablesBuilt)) *learner {
	return &learner{log: log, publish: publish, dropped: m.endingsDropped, wake: make(chan struct{}, 1)}
}

// addPredictor starts to learn from the fit; nil: from nothing. Until its first tables are built,
// the predictor predicts nothing.
func (l *learner) addPredictor(key board.PredictorKey, fit *predictor.Fit) {
	l.queueCall(func() { l.logRefused(key, l.predictors.Follow(key, fit)) })
}

// restart makes all predictors start anew from a fit.
func (l *learner) restart(fit *predictor.Fit) {
	l.queueCall(func() {
		for key, err := range l.predictors.Load(fit) {
			l.logRefused(key, err)
		}
	})
}

func (l *learner) logRefused(key board.PredictorKey, err error) {
	if err != nil {
		l.log.Error("dispatcher: the predictor could not learn, and stays as it was", zap.String("model", key.Model),
			zap.String("kind", string(key.Kind)), zap.Error(err))
	}
}

// queueCall queues f for the goroutine of run, because only it may use l.predictors.
func (l *learner) queueCall(call func()) {
	l.mu.Lock()
	l.calls = append(l.calls, call)
	l.mu.Unlock()
	signal(l.wake)
}

// add never waits: if the queue is full, it drops the request and counts it.
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

func (l *learner) run(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	var spare []board.OutputSample // the two queues take turns, so that nothing is allocated
	for {
		var tablesComeDue bool
		spare, tablesComeDue = l.learn(spare, time.Now())
		if tablesComeDue {
			timer.Reset(time.Second) // new tables are due after a second at the latest
		} else {
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

// learn publishes the tables that are due. more says whether some will become due even if no other
// request ends. The next requests are queued in the memory of spare. reusable is the queue that was
// just read, and can be the next spare.
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
