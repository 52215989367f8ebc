package dispatcher

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"evenkeel/predictor"
)

// endingsMost bounds what waits to be learned from.
const endingsMost = 4096

// learner turns requests that left into the tables predictions come from,
// in a goroutine of its own: a table takes longer to build than
// a tick may last. The goroutine owns every student's Online.
type learner struct {
	log      *zap.Logger
	dropped  prometheus.Counter
	censored *prometheus.CounterVec

	mu      sync.Mutex
	orders  []func() // for the goroutine to run
	endings []ending
	wake    chan struct{}

	students []*student // the goroutine's

	// tell has the owner of the boards take tables in that are done.
	tell func(key subjectKey, t *tables)
}

// student learns for one model, by one kind of predictor.
type student struct {
	subjectKey
	tables atomic.Pointer[tables] // for shadows; boards are told

	online *predictor.Online // the learner's goroutine's
	fresh  bool              // something finished since the last tables
}

func newLearner(log *zap.Logger, m *metrics, tell func(subjectKey, *tables)) *learner {
	return &learner{log: log, tell: tell, dropped: m.endingsDropped, censored: m.censored, wake: make(chan struct{}, 1)}
}

// follow has a subject learned, from a fit if there is one. Until its first
// tables are built nothing is known of it.
func (l *learner) follow(key subjectKey, fit *predictor.Fit) *student {
	s := &student{subjectKey: key}
	s.tables.Store(&tables{predictor: predictor.None{}})
	l.order(func() {
		l.students = append(l.students, s)
		l.start(s, fit)
	})
	return s
}

// load makes the students start anew from a fit.
func (l *learner) load(fit *predictor.Fit) {
	l.order(func() {
		for _, s := range l.students {
			l.start(s, fit)
		}
	})
}

func (l *learner) order(f func()) {
	l.mu.Lock()
	l.orders = append(l.orders, f)
	l.mu.Unlock()
	l.nudge()
}

// hear takes an ending in; it never waits, and drops what is too much.
func (l *learner) hear(e ending) {
	l.mu.Lock()
	full := len(l.endings) == endingsMost
	if !full {
		l.endings = append(l.endings, e)
	}
	l.mu.Unlock()
	if full {
		l.dropped.Inc()
		return
	}
	l.nudge()
}

func (l *learner) nudge() {
	select {
	case l.wake <- struct{}{}:
	default: // it is told already
	}
}

// run learns until ctx ends.
func (l *learner) run(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	var spare []ending
	for {
		var more bool
		spare, more = l.turn(spare, time.Now())
		if more {
			timer.Reset(time.Second)
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

// turn learns what has come and builds the tables that are due. It reports
// whether some will be later.
func (l *learner) turn(spare []ending, now time.Time) (read []ending, more bool) {
	l.mu.Lock()
	endings, orders := l.endings, l.orders
	l.endings, l.orders = spare[:0], nil
	l.mu.Unlock()
	for _, f := range orders {
		f()
	}
	for i := range endings {
		l.learn(&endings[i])
	}
	for _, s := range l.students {
		if t := s.rebuild(now); t != nil {
			s.tables.Store(t)
			l.tell(s.subjectKey, t)
		}
		more = more || s.fresh
	}
	return endings, more
}

func (l *learner) learn(e *ending) {
	if !e.finished {
		l.censored.WithLabelValues(e.model).Inc()
	}
	for _, s := range l.students {
		switch {
		case s.model != e.model:
		case e.finished:
			s.online.Finished(e.prompt, e.output, e.key)
			s.fresh = true
		default:
			s.online.Censored(1)
		}
	}
}

// start begins a student's learning. A fit that does not serve it was refused
// before, when the operator could be told.
func (l *learner) start(s *student, fit *predictor.Fit) {
	o, err := predictor.NewOnline(online(s.kind, fit))
	if err != nil {
		l.log.Error("dispatcher: the predictor stays as it was", zap.String("model", s.model), zap.String("kind", string(s.kind)), zap.Error(err))
		if s.online != nil {
			return
		}
		o, _ = predictor.NewOnline(predictor.OnlineConfig{Kind: predictor.KindSurvival}) // takes anything
	}
	s.online, s.fresh = o, false
}

// online is what to learn from finished requests. A learned predictor answers
// for the horizon of its fit.
func online(kind predictor.Kind, fit *predictor.Fit) predictor.OnlineConfig {
	c := predictor.OnlineConfig{Kind: kind, Fit: fit}
	if kind == predictor.KindLearned && fit != nil {
		c.Horizon = fit.Horizon
	}
	return c
}

// rebuild builds the tables if they are due; else nil.
func (s *student) rebuild(now time.Time) *tables {
	p, survival, due := s.online.Rebuild(now)
	if !due {
		return nil
	}
	s.fresh = false
	return &tables{predictor: p, survival: survival, counts: s.online.Counts(), drift: s.online.Drift(), fromFit: s.online.DriftFromFit()}
}
