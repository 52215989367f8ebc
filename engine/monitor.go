package engine

import (
	"cmp"
	"context"
	"errors"
	"sync"
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
		traffic: map[string]*Traffic{}, pulls: map[string]*Pulls{},
	}
}

// Run watches the instances until ctx ends and all checks have. In its goroutine it calls the
// function of OnChange.
func (m *Monitor) Run(ctx context.Context) {
	m.mu.Lock()
	m.ctx = ctx
	for _, w := range m.watches {
		m.startChecks(w)
	}
	m.mu.Unlock()
	for {
		select {
		case <-m.signal:
			m.reportChanges()
		case <-ctx.Done():
			m.mu.Lock()
			m.ctx = nil // startChecks now starts nothing
			m.mu.Unlock()
			m.wg.Wait()
			return
		}
	}
}

// Set replaces the watched instances. One that was watched before keeps its state, unless its
// target or another setting has changed (Instance.sameSettings).
func (m *Monitor) Set(instances []Instance) {
	m.mu.Lock()
	defer m.mu.Unlock()
	watches := make(map[string]*watch, len(instances))
	for _, in := range instances {
		w := m.watches[in.ID]
		if w == nil || !w.in.sameSettings(in) {
			w = newWatch(m, in)
		}
		if m.watches[in.ID] == w { // a new watch's first check will publish its status
			w.move(func(h *health, _ time.Time) {
				h.in.Slots, h.in.Canary = in.Slots, in.Canary // these two and Held need no new watch
				h.hold(in.Held)
			})
		}
		watches[in.ID] = w
	}
	for id, w := range m.watches {
		if watches[id] != w {
			w.removed = true
			w.stop()
			m.metrics.deleteSeries(w.in)
		}
	}
	m.forgetTraffic(watches)
	for id, w := range watches {
		if m.watches[id] != w { // after the series of an old one are deleted
			m.metrics.createSeries(w.in)
			m.startChecks(w)
		}
	}
	m.watches = watches
}

// Status is zero if the id is not known.
func (m *Monitor) Status(id string) Status { return m.health(id).Status.clone() }

// OnChange sets what is called after changes, one call at a time, with the last status. Call it
// before Run.
func (m *Monitor) OnChange(f func(id string, s Status)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.onChange = f
}

// OnSample sets what gets each sample of engines whose gauges are watched. asked is when the scrape
// began. Call it before Run; f must not block.
func (m *Monitor) OnSample(f func(id string, s *Sample, asked time.Time)) { m.onSample = f }

// ReportFailure records how a call failed. The first case that applies counts:
//
//   - A model that the list has is missing: the list is read again.
//   - The engine or rank takes no requests: it gets none from now on.
//   - Connecting timed out: the instance is checked at once, over a new connection.
//   - The proxy ended the call, or it is no call: nothing follows.
//   - Another timeout, or bytes that are no answer: the request may be at fault.
//   - The proxy itself can open no connection: nothing follows.
//   - A connection was refused: the instance is down until a good check; one begins at once.
//   - A connection broke: the instance is checked at once, and is down if that cannot connect.
func (m *Monitor) ReportFailure(id string, err error) {
	m.move(id, func(h *health, now time.Time) { h.recordFailure(err, now) })
}

// RecordOutcome records how a request ended. After several failures in a row the instance gets no
// new requests until a canary passes. Failures of the proxy itself, held instances, and those
// without canaries, whose callers detect failures in other ways, are ignored.
func (m *Monitor) RecordOutcome(id string, v Verdict, why error) {
	m.move(id, func(h *health, now time.Time) { h.recordOutcome(v, why, now) })
}

// Accuse counts a failed request while it is not known whether the engine or the request is at
// fault. Once it is known, the caller must call closeAccusation and then RecordOutcome.
func (m *Monitor) Accuse(id string) (closeAccusation func()) {
	add := func(n int) { m.move(id, func(h *health, _ time.Time) { h.addAccusations(n) }) }
	add(1)
	return sync.OnceFunc(func() { add(-1) })
}

// CheckNow returns why the instance does not work; nil: it works, although it may be paused. Calls
// during a check share the next one.
func (m *Monitor) CheckNow(ctx context.Context, id string) error {
	asked := time.Now()
	m.mu.Lock()
	defer m.mu.Unlock()
	for {
		w := m.watches[id]
		switch {
		case w == nil:
			return errNotWatched
		case !w.lastCheck.began.Before(asked):
			return w.lastCheck.found
		}
		ended := w.lastCheck.next
		w.move(func(h *health, _ time.Time) {
			h.rereadDue = true // the list shows whether the group re-forms
			h.askCheck(dueNow)
		})
		m.mu.Unlock()
		select {
		case <-ended:
		case <-ctx.Done():
		}
		m.mu.Lock()
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
}

var errNotWatched = errors.New("it is not one of the engines any more")

// Expiries is as of the last reading of the metrics.
func (m *Monitor) Expiries(id string) Expiries { return m.health(id).expiries }

// ExpiriesNow reads the metrics first, within a second. Calls during a reading share the next one.
func (m *Monitor) ExpiriesNow(ctx context.Context, id string) Expiries {
	asked := time.Now()
	m.mu.Lock()
	w := m.watches[id]
	m.mu.Unlock()
	if w == nil {
		return Expiries{}
	}
	w.expiredMu.Lock()
	defer w.expiredMu.Unlock()
	if w.expiredReadAt.After(asked) {
		return m.Expiries(id)
	}
	began := time.Now()
	s, err := w.scrape(ctx, time.Second)
	if err != nil {
		return Expiries{}
	}
	w.expiredReadAt = began
	return w.storeExpiries(s)
}

// maxSampleIntervals is for how many FactsIntervals a sample is used.
const maxSampleIntervals = 3

// Gauges are of the last sample; ok is false if there is none, or if it is too old.
func (m *Monitor) Gauges(id string, rank int) (g Gauges, ok bool) {
	p := m.health(id).scrapes
	if time.Since(p.sampleAt) > maxSampleIntervals*m.cfg.FactsInterval {
		return Gauges{}, false
	}
	g, ok = p.gauges[rank]
	return g, ok
}

// RTT is the mean of health checks over an open connection; 0: not known.
func (m *Monitor) RTT(id string) time.Duration { return m.health(id).facts.rtt }

// Answered makes the instance count as alive, even if its health check is late.
func (m *Monitor) Answered(id string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if w := m.watches[id]; w != nil {
		w.traffic.OnEvent()
	}
}

// The caller holds mu.
func (m *Monitor) startChecks(w *watch) {
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
		m.wg.Go(func() { w.runCanaries(ctx) })
	}
}

func (m *Monitor) health(id string) (h health) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if w := m.watches[id]; w != nil {
		h = w.health
	}
	return h
}

func (m *Monitor) move(id string, f func(h *health, now time.Time)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if w := m.watches[id]; w != nil {
		w.move(f)
	}
}
