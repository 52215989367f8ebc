package engine

import (
	"cmp"
	"math"
	"time"

	"go.uber.org/zap"
)

// crossCheck compares the sample s of the engine's metrics with what this proxy knows of its own requests on the engine. It records signs
// of life, gives the sample to onSample, and stores it. It raises an alarm if the gauges do not change or if a rank runs too many requests.
// It counts prompt tokens whose KV the engine did not pull although it should have. at is when the scrape began.
func (w *watch) crossCheck(s *Sample, at time.Time) {
	if len(w.in.Canaries) == 0 { // only the gauges of engines that get canaries are watched
		return
	}
	w.recordSigns(s, at)
	if onSample := w.m.onSample; onSample != nil { // called after recordSigns, so that the signs of life in s are recorded
		onSample(w.in.ID, s, at)
	}
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	w.storeSample(s, at)
	checkFrozen(w, s)
	// The tokens are those whose KV the engine should have pulled from a prefill engine, but computed again itself.
	if tokens := w.scrapes.pulls.newlyNotPulled(s, w.traffic); tokens > 0 {
		w.m.metrics.shortPulls.WithLabelValues(w.in.ID).Add(tokens)
	}
	checkOverfull(w, s)
}

// checkFrozen makes an engine a suspect if its gauges do not change for frozenScrapes scrapes while it has requests of this proxy. A
// suspect gets a canary. The check is needed because an engine that hangs still reports healthy numbers. It sets the metric when
// the gauges freeze or move again, and logs when they freeze. The caller holds m.mu.
func checkFrozen(w *watch, s *Sample) {
	scrapes := &w.scrapes
	gauges := vitalsOf(s, allRanks)
	busy := w.traffic.running.Load() > 0
	mustChange := busy && scrapes.busy && gauges != noVitals // the engine had requests at both scrapes, so a gauge must have changed
	if mustChange && gauges == scrapes.last {
		scrapes.unchanged++
	} else {
		scrapes.unchanged = 0
	}
	scrapes.last, scrapes.busy = gauges, busy
	frozen := scrapes.unchanged >= frozenScrapes
	if frozen == scrapes.frozen { // nothing new to report
		return
	}
	scrapes.frozen = frozen
	w.m.metrics.frozen.WithLabelValues(w.in.ID).Set(gaugeValue(frozen))
	if !frozen {
		return
	}
	w.m.cfg.Log.Warn("ALARM: an engine's gauges do not change although it has requests of this proxy; a request of one token will tell "+
		"whether it computes", zap.String("engine", w.in.ID))
	if w.suspect.circuit.InService() { // an engine that is out of service gets a canary anyway
		w.suspect.canaryPending = true
		w.setStatus(w.status)
	}
}

// checkOverfull raises an alarm if a rank runs more requests than it has slots: either slots is configured wrong, or other clients use the
// engine. Requests that evenkeel sent although no slot was free do not count. The metric gets the excess of each scrape. The log gets one
// line, and another one only after a scrape without an excess. The caller holds m.mu.
func checkOverfull(w *watch, s *Sample) {
	scrapes := &w.scrapes
	running := runningOnFullestRank(s, w.in.Canaries) // each rank gets canaries, so these are all ranks of the engine
	// allowedRunning becomes the configured slots. If their number was lowered, it keeps the old number until the requests that were
	// admitted under it have ended.
	scrapes.updateAllowedRunning(w.in.Slots, running)
	excess := 0.0
	if w.in.Slots > 0 { // 0: the number of slots is not known
		allowed := float64(scrapes.allowedRunning)
		excess = math.Max(0, running-allowed-float64(w.traffic.sentWithoutSlot.Load()))
	}
	w.m.metrics.overSlots.WithLabelValues(w.in.ID).Set(excess)
	if excess > 0 && !scrapes.overfull {
		w.m.cfg.Log.Warn("ALARM: a rank runs more requests than it has slots; correct engines.decode[].slots, or keep other clients off the "+
			"engine", zap.String("engine", w.in.ID), zap.Int("slots", scrapes.allowedRunning), zap.Float64("running", running))
	}
	scrapes.overfull = excess > 0
}

// runningOnFullestRank returns how many requests the fullest of these ranks runs, by the sample. A rank that is not in it counts as 0.
func runningOnFullestRank(s *Sample, ranks []*Target) float64 {
	running := 0.0
	for _, rank := range ranks {
		if n, ok := s.Running(rank.Rank); ok {
			running = math.Max(running, n)
		}
	}
	return running
}

// recordSigns looks for ranks whose gauges have changed since the previous scrape. The core of such a rank made a step after that scrape.
// It is not known when, so the time of the previous scrape is recorded as the sign of life. at is when this scrape began.
func (w *watch) recordSigns(s *Sample, at time.Time) {
	scrapes := &w.scrapes
	previous, previousAt := scrapes.ranks, scrapes.at
	start := cmp.Or(s.StartTime, scrapes.start)       // 0: not known
	if scrapes.start != 0 && start != scrapes.start { // another process: it says nothing of requests that were sent to the one before
		previous = nil
	}
	scrapes.start = start
	scrapes.ranks = make(map[int]vitals, len(w.in.Canaries))
	for _, t := range w.in.Canaries { // all ranks of a decode engine, and none of a prefill engine
		gauges := vitalsOf(s, t.Rank)
		if old, known := previous[t.Rank]; known && gauges != old {
			w.traffic.Liveness(t.Rank).RecordSign(previousAt)
		}
		scrapes.ranks[t.Rank] = gauges
	}
	scrapes.at = at
}

// storeSample stores the values of a scrape that began at the time at. The caller holds m.mu.
func (w *watch) storeSample(s *Sample, at time.Time) {
	w.gauges = make(map[int]Gauges, len(w.in.Canaries))
	for _, t := range w.in.Canaries {
		w.gauges[t.Rank] = gaugesOf(w.sample, s, t.Rank)
	}
	w.sample, w.sampleAt = s, at
}
