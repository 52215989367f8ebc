package engine

import (
	"cmp"
	"time"
)

// load is what this proxy knows of its own requests on an engine.
type load struct {
	running, withoutSlot int64   // see Traffic
	settled, computed    float64 // prompt tokens: Traffic.settledTokens before the scrape, and all of them after it
}

// crossCheck compares the sample s of the engine's metrics with what this proxy knows of its own requests on the engine. It records signs
// of life, gives the sample to onSample, and stores it. at is when the scrape began, and settled Traffic.settledTokens before it.
func (w *watch) crossCheck(s *Sample, at time.Time, settled float64) {
	if len(w.in.Canaries) == 0 { // only the gauges of engines that get canaries are watched
		return
	}
	w.recordSigns(s, at)
	if onSample := w.m.onSample; onSample != nil { // called after recordSigns, so that the signs of life in s are recorded
		onSample(w.in.ID, s, at)
	}
	t, metrics := w.traffic, w.m.metrics
	ours := load{t.running.Load(), t.sentWithoutSlot.Load(), settled, float64(t.computedTokens.Load())}
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	w.move(func(h *health, _ time.Time) {
		metrics.shortPulls.WithLabelValues(w.in.ID).Add(h.compare(s, at, ours))
		metrics.overSlots.WithLabelValues(w.in.ID).Set(h.scrapes.excess)
	})
}

// recordSigns records as signs of life what has changed since the previous scrape. at is when this scrape began.
func (w *watch) recordSigns(s *Sample, at time.Time) {
	w.m.mu.Lock()
	previousAt := w.scrapes.at
	moved := w.scrapes.record(s, at, w.in.Canaries)
	w.m.mu.Unlock()
	for _, rank := range moved { // the core made a step, it is not known when, after the previous scrape
		w.traffic.Liveness(rank).RecordSign(previousAt)
	}
}

// record stores the vitals of a scrape that began at the time at. It returns the ranks whose vitals
// have changed since the previous scrape of this process.
func (p *scrapes) record(s *Sample, at time.Time, ranks []*Target) (moved []int) {
	previous, start := p.ranks, cmp.Or(s.StartTime, p.start) // 0: not known
	if p.start != 0 && start != p.start {                    // another process: it says nothing of requests that were sent to the one before
		previous = nil
	}
	p.at, p.start, p.ranks = at, start, make(map[int]vitals, len(ranks))
	for _, t := range ranks { // all ranks of a decode engine, and none of a prefill engine
		gauges := vitalsOf(s, t.Rank)
		if old, known := previous[t.Rank]; known && gauges != old {
			moved = append(moved, t.Rank)
		}
		p.ranks[t.Rank] = gauges
	}
	return moved
}

// compare records a sample, and whether it fits what this proxy knows of its own requests. It
// returns for how many prompt tokens the engine did not pull KV although it should have.
func (h *health) compare(s *Sample, at time.Time, ours load) (notPulled float64) {
	p := &h.scrapes
	p.gauges = make(map[int]Gauges, len(h.in.Canaries))
	for _, t := range h.in.Canaries {
		p.gauges[t.Rank] = gaugesOf(p.sample, s, t.Rank)
	}
	p.sample, p.sampleAt = s, at
	if wasFrozen := p.frozen; p.checkFrozen(s, ours.running > 0) && !wasFrozen {
		h.canaryPending = h.outage == nil // out of service, it gets canaries anyway
	}
	p.running = runningOnFullestRank(s, h.in.Canaries) // each rank gets canaries, so these are all ranks of the engine
	// allowedRunning becomes the configured slots. If their number was lowered, it keeps the old number until the requests that were
	// admitted under it have ended.
	p.updateAllowedRunning(h.in.Slots, p.running)
	p.excess = 0
	if h.in.Slots > 0 { // 0: the number of slots is not known
		p.excess = max(0, p.running-float64(p.allowedRunning)-float64(ours.withoutSlot))
	}
	return p.pulls.newlyNotPulled(s, ours.settled, ours.computed)
}

// checkFrozen says whether the gauges have not changed for frozenScrapes scrapes, while the engine
// had requests of this proxy. An engine that hangs still reports healthy numbers.
func (p *scrapes) checkFrozen(s *Sample, busy bool) bool {
	gauges := vitalsOf(s, allRanks)
	if busy && p.busy && gauges != noVitals && gauges == p.last { // it had requests at both scrapes, so a gauge must have changed
		p.unchanged++
	} else {
		p.unchanged = 0
	}
	p.last, p.busy, p.frozen = gauges, busy, p.unchanged >= frozenScrapes
	return p.frozen
}

// runningOnFullestRank returns how many requests the fullest of these ranks runs, by the sample. A rank that is not in it counts as 0.
func runningOnFullestRank(s *Sample, ranks []*Target) float64 {
	running := 0.0
	for _, rank := range ranks {
		if n, ok := s.Running(rank.Rank); ok {
			running = max(running, n)
		}
	}
	return running
}
