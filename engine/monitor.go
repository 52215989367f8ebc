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

// Run watches the instances until ctx ends, and returns when the last request of a check has ended. It calls the function set by
// OnChange in this goroutine.
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
			m.ctx = nil // from now on startChecks starts nothing
			m.mu.Unlock()
			m.wg.Wait()
			return
		}
	}
}

// Set replaces the watched instances. An instance that was watched before keeps its state. If its target or another setting that
// Instance.sameSettings compares has changed, it counts as new.
func (m *Monitor) Set(instances []Instance) {
	m.mu.Lock()
	defer m.mu.Unlock()
	watches := make(map[string]*watch, len(instances))
	for _, in := range instances {
		w := m.watches[in.ID]
		if w == nil || !w.in.sameSettings(in) {
			w = newWatch(m, in)
		}
		if m.watches[in.ID] == w { // the first check of a new watch will publish its status
			w.move(func(h *health, _ time.Time) {
				h.in.Slots, h.in.Canary = in.Slots, in.Canary // these two and Held may change without a new watch
				h.hold(in.Held)
			})
		}
		watches[in.ID] = w
	}
	for id, w := range m.watches {
		if watches[id] != w { // the instance is not in the list any more, or counts as new
			w.removed = true
			w.stop()
			m.metrics.deleteSeries(w.in)
		}
	}
	m.forgetTraffic(watches)
	for id, w := range watches {
		if m.watches[id] != w { // a new watch; its series are created after those of the old one are deleted
			m.metrics.createSeries(w.in)
			m.startChecks(w)
		}
	}
	m.watches = watches
}

// Status returns a copy of an instance's status; the zero Status if the id is not known.
func (m *Monitor) Status(id string) Status { return m.health(id).Status.clone() }

// OnChange sets the function that is called after every change of a status, one call at a time. If an instance changes several times
// while f runs, one call reports the last status. Call OnChange before Run.
func (m *Monitor) OnChange(f func(id string, s Status)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.onChange = f
}

// OnSample sets the function that gets each sample of the metrics of each engine whose gauges are
// watched. asked is when the scrape began. Call OnSample before Run; f must not block.
func (m *Monitor) OnSample(f func(id string, s *Sample, asked time.Time)) { m.onSample = f }

// ReportFailure records how a call to an instance failed. What follows depends on err. The first of these cases that applies counts:
//
//   - The engine does not have a model that its list has: the list is read again.
//   - The engine or the rank said that it takes no requests: it gets none from now on.
//   - No connection could be made in time: the instance is checked at once, over a new connection.
//   - The proxy ended the call, or err is not about a call: nothing follows.
//   - Another timeout, or bytes that are no answer: the request itself may be at fault, so the regular checks will find out.
//   - The proxy itself can open no connection: nothing follows.
//   - A connection was refused: the instance is down from now on until its next good check, which begins at once.
//   - A connection broke: the instance is checked at once, and is down if that check cannot connect.
//
// If the instance is down already, nothing has to be done in most cases, because its checks go on until it is up again.
func (m *Monitor) ReportFailure(id string, err error) {
	m.move(id, func(h *health, now time.Time) { h.recordFailure(err, now) })
}

// RecordOutcome records how a request on an instance ended. After several failures in a row the instance gets no new requests until a
// canary passes. An instance that may hang gets a canary at once. RecordOutcome ignores failures of the proxy itself, instances to which an
// operator has stopped requests, and instances without canaries, whose callers detect failures in other ways.
func (m *Monitor) RecordOutcome(id string, v Verdict, why error) {
	m.move(id, func(h *health, now time.Time) { h.recordOutcome(v, why, now) })
}

// Accuse counts a failed request on an instance while it is not known whether the engine or the request is at fault. Once the caller
// knows, it must call closeAccusation, which takes the count back, and then RecordOutcome.
func (m *Monitor) Accuse(id string) (closeAccusation func()) {
	add := func(n int) { m.move(id, func(h *health, _ time.Time) { h.addAccusations(n) }) }
	add(1)
	return sync.OnceFunc(func() { add(-1) })
}

// CheckNow checks an instance at once, and returns why it does not work; nil: it works, although it may be paused. Calls that come during a
// check wait for its end and then share one more. The wait ends with ctx.
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
			h.rereadDue = true // the list of models shows whether the engine's group re-forms
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

// Expiries returns the Expiries of a prefill engine when its metrics were last read.
func (m *Monitor) Expiries(id string) Expiries { return m.health(id).expiries }

// ExpiriesNow returns the same as Expiries, but reads the metrics now, within at most a second. Calls that come during a reading wait for
// its end and then share one new reading.
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
	if w.expiredReadAt.After(asked) { // another call has read the metrics after this call began
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

// maxSampleIntervals is the number of FactsIntervals after which the last sample is too old, if no newer one has come.
const maxSampleIntervals = 3

// Gauges returns a rank's gauges from the last sample of the engine's metrics; ok is false if there is no sample,
// or if it is too old.
func (m *Monitor) Gauges(id string, rank int) (g Gauges, ok bool) {
	p := m.health(id).scrapes
	if time.Since(p.sampleAt) > maxSampleIntervals*m.cfg.FactsInterval {
		return Gauges{}, false
	}
	g, ok = p.gauges[rank]
	return g, ok
}

// RTT returns the mean time in which an instance answers a health check over an open connection; 0: not known.
func (m *Monitor) RTT(id string) time.Duration { return m.health(id).facts.rtt }

// Answered records that an instance answered a request. The instance then counts as alive, even if its answer to the health check is late.
func (m *Monitor) Answered(id string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if w := m.watches[id]; w != nil {
		w.traffic.OnEvent()
	}
}

// startChecks starts the checks of an instance, if Run was called and its ctx has not ended. The caller holds mu.
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

// health returns what is known of an instance; the zero health if the id is not known.
func (m *Monitor) health(id string) (h health) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if w := m.watches[id]; w != nil {
		h = w.health
	}
	return h
}

// move makes a move of an instance, if it is watched.
func (m *Monitor) move(id string, f func(h *health, now time.Time)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if w := m.watches[id]; w != nil {
		w.move(f)
	}
}
