package engine

import (
	"cmp"
	"context"
	"errors"
	"time"

	"go.uber.org/zap"
)

// NewMonitor returns a monitor that watches nothing yet.
func NewMonitor(cfg MonitorConfig) *Monitor {
	cfg.HealthInterval = cmp.Or(cfg.HealthInterval, time.Second)
	cfg.FactsInterval = cmp.Or(cfg.FactsInterval, 10*time.Second)
	cfg.Timeout = cmp.Or(cfg.Timeout, 5*time.Second)
	if cfg.Log == nil {
		cfg.Log = zap.NewNop()
	}
	return &Monitor{
		cfg: cfg, metrics: newMetrics(cfg.Registerer), signal: make(chan struct{}, 1), watches: map[string]*watch{},
		traffic: map[string]*Traffic{},
	}
}

// Start watches until ctx ends, and returns when the last request of a check has ended. It calls the function of
// OnChange in this goroutine.
func (m *Monitor) Start(ctx context.Context) {
	m.mu.Lock()
	m.ctx = ctx
	for _, w := range m.watches {
		m.launch(w)
	}
	m.mu.Unlock()
	for {
		select {
		case <-m.signal:
			m.notify()
		case <-ctx.Done():
			m.mu.Lock()
			m.ctx = nil // no watch is started from now on
			m.mu.Unlock()
			m.wg.Wait()
			return
		}
	}
}

// Set replaces the watched instances. An instance that stays, with the same target, keeps its state; an instance with
// another target counts as new.
func (m *Monitor) Set(instances []Instance) {
	m.mu.Lock()
	defer m.mu.Unlock()
	stay := make(map[string]*watch, len(instances))
	for _, in := range instances {
		w := m.watches[in.ID]
		if w == nil || !w.in.same(in) {
			w = newWatch(m, in)
		}
		w.in.Slots, w.in.Canary = in.Slots, in.Canary
		w.hold(in.Held)
		stay[in.ID] = w
	}
	for id, w := range m.watches {
		if stay[id] != w {
			w.gone = true
			w.stop()
			m.metrics.forget(w.in)
		}
		if stay[id] == nil {
			m.forgetTraffic(id)
		}
	}
	for id, w := range stay {
		if m.watches[id] != w {
			m.metrics.createSeries(w.in)
			m.launch(w)
		}
	}
	m.watches = stay
}

// Status returns a copy of what is known of an instance; the zero Status for an unknown id.
func (m *Monitor) Status(id string) Status {
	m.mu.Lock()
	defer m.mu.Unlock()
	if w := m.watches[id]; w != nil {
		return w.status.clone()
	}
	return Status{}
}

// OnChange sets the function that is called after every change, one call at a time. Changes of one instance that come
// while it runs are reported in one call. Set it before Start.
func (m *Monitor) OnChange(f func(id string, s Status)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.onChange = f
}

// OnSample sets the function that receives each reading of an engine's metrics, for every engine whose gauges are
// watched. Call it before Start; f must not block.
func (m *Monitor) OnSample(f func(id string, s *Sample, asked time.Time)) { m.onSample = f }

// Report says how a call to an instance failed. If no connection could be made, the instance is down from now on
// until its next good check, and a check is made at once. If a connection broke, a check is made at once, too, and the
// instance is down if that check cannot connect either. If a connection could not be made in time, a check is made at
// once over a new connection. Any other failure (a timeout, bytes that are no answer) may be the request's own fault,
// and the checks find out in their time. An engine or a rank that says itself that it takes no requests gets none
// from now on. If an engine does not have a model that its list has, the list is read again.
func (m *Monitor) Report(id string, err error) {
	var e *Error
	if unlisted := errors.Is(err, ErrUnlisted); unlisted || IsWithheld(err) {
		m.mu.Lock()
		defer m.mu.Unlock()
		switch w := m.watches[id]; {
		case w == nil || !w.status.Up:
		case unlisted:
			w.unlisted(err)
		default:
			w.withheld(err)
		}
		return
	}
	// the engine's name may lead to a host that is gone, while kept-alive connections still answer
	if errors.As(err, &e) && e.Phase == PhaseConnect && e.Timeout {
		m.mu.Lock()
		defer m.mu.Unlock()
		if w := m.watches[id]; w != nil && w.status.Up {
			w.redial = true
			w.checkNow()
		}
		return
	}
	if !errors.As(err, &e) || e.Aborted || e.Timeout || errors.Is(err, ErrClosed) || errors.Is(err, ErrMalformed) ||
		errors.Is(err, ErrTooLarge) {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	w := m.watches[id]
	if w == nil {
		return
	}
	if unreachable(err) {
		w.reports++ // a check begun before this cannot take the instance up
	}
	if !w.status.Up {
		return
	}
	if unreachable(err) {
		next := w.status
		next.Up, next.Err = false, err
		w.setStatus(next)
		w.failed = misses
	} else {
		w.broke = true
	}
	w.checkNow()
}

// relistEvery is the least time between two readings of an engine's list because of its answers to requests.
const relistEvery = time.Second

// unlisted has the engine's list read again: now, or with the next check if it was read a moment ago for the same
// reason. It needs m.mu.
func (w *watch) unlisted(err error) {
	w.relist = true
	if time.Since(w.relisted) < relistEvery {
		return
	}
	w.relisted = time.Now()
	w.m.cfg.Log.Info("an engine answered that it does not have a model that its list has; the list is read again",
		zap.String("engine", w.in.ID), zap.Error(err))
	w.checkNow()
}

// Expired is how many hand-offs a prefill engine has given up before a decode engine had fetched them, by its gauges
// when they were last read.
func (m *Monitor) Expired(id string) (n float64, known bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	w := m.watches[id]
	if w == nil || w.expired < 0 {
		return 0, false
	}
	return w.expired, true
}

// ExpiredNow asks the engine for that number now, for at most a second. Callers that come meanwhile share the next
// answer.
func (m *Monitor) ExpiredNow(ctx context.Context, id string) (n float64, known bool) {
	asked := time.Now()
	m.mu.Lock()
	w := m.watches[id]
	m.mu.Unlock()
	if w == nil {
		return 0, false
	}
	w.counting.Lock()
	defer w.counting.Unlock()
	if w.countedAt.After(asked) { // another caller asked the engine after this call began
		return m.Expired(id)
	}
	w.countedAt = time.Now()
	s, err := w.scrape(ctx, time.Second)
	if err != nil {
		return 0, false
	}
	return w.countExpired(s)
}

// oldReadings is the number of intervals without a reading after which the last one no longer counts.
const oldReadings = 3

// Gauges is what a decode engine said of a rank when its metrics were last read; ok is false if that was too long
// ago, or never.
func (m *Monitor) Gauges(id string, rank int) (g Gauges, ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	w := m.watches[id]
	if w == nil || time.Since(w.readAt) > oldReadings*m.cfg.FactsInterval {
		return Gauges{}, false
	}
	g, ok = w.gauges[rank]
	return g, ok
}

// Answered reports that an instance answered something other than a check of the monitor. So it is alive, even if the
// answer to its health check comes late.
func (m *Monitor) Answered(id string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if w := m.watches[id]; w != nil {
		w.traffic.OnEvent()
	}
}

// launch begins the checks of an instance, if Start was called and its ctx has not ended. It needs mu.
func (m *Monitor) launch(w *watch) {
	if m.ctx == nil || m.ctx.Err() != nil {
		return
	}
	ctx, stop := context.WithCancel(m.ctx)
	w.stop = stop
	m.wg.Go(func() {
		defer stop()
		w.run(ctx)
	})
	if len(w.in.Canaries) > 0 {
		m.wg.Go(func() { w.tryOut(ctx) })
	}
}
