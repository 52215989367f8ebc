package engine

import (
	"math"
	"time"

	"go.uber.org/zap"
)

// crossCheck compares a scrape with what this proxy knows itself.
func (w *watch) crossCheck(s *Sample, at time.Time) {
	if len(w.in.Canaries) == 0 { // no rank of this engine is watched
		return
	}
	w.noteSigns(s, at)
	if f := w.m.sampled; f != nil { // behind noteSigns: what has changed in the sample is a sign of life
		f(w.in.ID, s)
	}
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	w.keep(s, at)
	checkFrozen(w, s)
	if n := w.scrapes.pulls.fellShort(s, w.traffic); n > 0 {
		w.m.metrics.short.WithLabelValues(w.in.ID).Add(n)
	}
	checkOverfull(w, s)
}

// checkFrozen makes an engine a suspect whose gauges do not change for frozenScrapes scrapes while it has requests of this proxy, because
// a wedged engine goes on reporting healthy numbers.
func checkFrozen(w *watch, s *Sample) {
	p, now, busy := &w.scrapes, vitalsOf(s, -1), w.traffic.running.Load() > 0
	if busy && p.busy && now == p.last {
		p.unchanged++
	} else {
		p.unchanged = 0
	}
	p.last, p.busy = now, busy
	frozen := p.unchanged >= frozenScrapes
	if frozen == p.frozen {
		return
	}
	p.frozen = frozen
	w.m.metrics.frozen.WithLabelValues(w.in.ID).Set(truth(frozen))
	if !frozen {
		return
	}
	w.m.cfg.Log.Warn("ALARM: an engine's gauges do not change although it has requests of this proxy; a request of one token will tell "+
		"whether it computes", zap.String("engine", w.in.ID))
	if w.suspect.circuit.In() { // one that is out of service is tried anyway
		w.suspect.doubted = true
		w.judged()
	}
}

// checkOverfull raises an alarm if a rank runs more requests than it has slots, beyond those that were sent there on purpose: then slots is
// configured wrong, or other clients use the engine too.
func checkOverfull(w *watch, s *Sample) {
	p, excess, running := &w.scrapes, 0.0, 0.0
	for _, t := range w.in.Canaries {
		if n, ok := s.Running(t.Rank); ok {
			running = math.Max(running, n)
		}
	}
	p.allow(w.in.Slots, running)
	if w.in.Slots > 0 {
		excess = math.Max(0, running-float64(p.slots)-float64(w.traffic.beyond.Load()))
	}
	w.m.metrics.over.WithLabelValues(w.in.ID).Set(excess)
	if excess > 0 && !p.overfull {
		w.m.cfg.Log.Warn("ALARM: a rank runs more requests than it has slots; correct engines.decode[].slots, or keep other clients off the "+
			"engine", zap.String("engine", w.in.ID), zap.Int("slots", p.slots), zap.Float64("running", running))
	}
	p.overfull = excess > 0
}

// noteSigns looks for gauges that have changed since the scrape before. The core then made a step at some time after
// that scrape, so the time of that scrape counts as a sign of life of the rank's core. at is when this scrape began.
func (w *watch) noteSigns(s *Sample, at time.Time) {
	p := &w.scrapes
	before := p.ranks
	p.ranks = make(map[int]vitals, len(w.in.Canaries))
	for _, t := range w.in.Canaries {
		now := vitalsOf(s, t.Rank)
		signs := w.traffic.Signs(t.Rank)
		signs.gauge.Store(now != vitals{generated: -1, running: -1, waiting: -1, kv: -1})
		if old, known := before[t.Rank]; known && now != old {
			signs.Seen(p.at)
		}
		p.ranks[t.Rank] = now
	}
	p.at = at
}

// keep stores what an engine said in a scrape that began at the time at. It needs m.mu.
func (w *watch) keep(s *Sample, at time.Time) {
	w.gauges = make(map[int]Gauges, len(w.in.Canaries))
	for _, t := range w.in.Canaries {
		w.gauges[t.Rank] = gaugesOf(w.sample, s, t.Rank)
	}
	w.sample, w.readAt = s, at
}
