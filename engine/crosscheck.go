package engine

import (
	"cmp"
	"time"
)

// load is what this proxy knows of its own requests on an engine.
type load struct {
	running, withoutSlot int64   // see Traffic
	settled, computed    float64 // prompt tokens: settled before the scrape, computed after it
}

type scrapes struct {
	sample   *Sample   // last compared with this proxy's requests; or nil
	sampleAt time.Time // when its scrape began
	gauges   map[int]Gauges

	at        time.Time
	start     float64        // last known Sample.StartTime
	ranks     map[int]vitals // of the last scrape
	last      vitals         // of all ranks together
	busy      bool           // streams of this proxy ran at the last scrape
	unchanged int            // scrapes in a row that equal the one before although streams ran
	frozen    bool
	running   float64 // on the fullest rank
	excess    float64 // beyond the slots

	pulls pullCheck

	// allowedRunning is how many requests a rank may run without an alarm: the slots, or their old
	// number for a while after they were lowered.
	allowedRunning int
	calmScrapes    int // in a row, with no more requests than slots
}

// record returns the ranks whose vitals have changed since the previous scrape of this process.
func (p *scrapes) record(s *Sample, at time.Time, ranks []*Target) (moved []int) {
	previous, start := p.ranks, cmp.Or(s.StartTime, p.start)
	if p.start != 0 && start != p.start {
		previous = nil // another process says nothing of requests to the one before
	}
	p.at, p.start, p.ranks = at, start, make(map[int]vitals, len(ranks))
	for _, t := range ranks { // all ranks of a decode engine, none of a prefill engine
		gauges := vitalsOf(s, t.Rank)
		if old, known := previous[t.Rank]; known && gauges != old {
			moved = append(moved, t.Rank)
		}
		p.ranks[t.Rank] = gauges
	}
	return moved
}

// checkFrozen: an engine that hangs still reports healthy numbers, but they do not change.
func (p *scrapes) checkFrozen(s *Sample, busy bool) bool {
	gauges := vitalsOf(s, allRanks)
	if busy && p.busy && gauges != noVitals && gauges == p.last {
		p.unchanged++ // requests ran at both scrapes, so a gauge must have changed
	} else {
		p.unchanged = 0
	}
	p.last, p.busy, p.frozen = gauges, busy, p.unchanged >= frozenScrapes
	return p.frozen
}

func runningOnFullestRank(s *Sample, ranks []*Target) float64 {
	running := 0.0
	for _, rank := range ranks {
		if n, ok := s.Running(rank.Rank); ok {
			running = max(running, n)
		}
	}
	return running
}

// frozenScrapes is how many scrapes in a row must equal the one before.
const frozenScrapes = 3

// vitals are values of which at least one changes between two scrapes while an engine computes.
type vitals struct{ generated, running, waiting, kv float64 }

// noVitals are those of a vLLM with --disable-log-stats.
var noVitals = vitals{generated: -1, running: -1, waiting: -1, kv: -1}

const allRanks = -1

func vitalsOf(s *Sample, rank int) vitals {
	return vitals{
		generated: orUnknown(s.Generated(rank)), running: orUnknown(s.Running(rank)), waiting: orUnknown(s.Waiting(rank)),
		kv: orUnknown(s.KVUsage(rank)),
	}
}

// minCalmScrapes in a row must show no more requests than slots before a lowered number of slots
// applies. One is not enough: a request admitted before may still pull its KV, and begin to run
// later.
const minCalmScrapes = 2

func (p *scrapes) updateAllowedRunning(slots int, running float64) {
	if running > float64(slots) {
		p.calmScrapes = 0
	} else {
		p.calmScrapes++
	}
	earlierRequestsEnded := p.calmScrapes >= minCalmScrapes
	if slots > p.allowedRunning || earlierRequestsEnded {
		p.allowedRunning = slots
	}
}

// pullCheck compares the prompt tokens that the engine says it did not pull with those that it had
// to compute itself anyway. The two counts of a request do not change at the same moment. So
// newlyNotPulled subtracts a request's tokens even before it is sent, but base only once its first
// event came.
type pullCheck struct {
	hasBase  bool
	start    float64 // of the process to which base belongs
	base     float64 // tokens not pulled, minus settled, at the process's first scrape
	reported float64 // by newlyNotPulled since then
}

// newlyNotPulled returns the prompt tokens that were not pulled and not reported yet. If at first
// 1,000 were not pulled and 200 had to be computed, base is 800; at 1,500 and 300 later, 1,500 -
// 300 - 800 = 400 are missing. Results may be too small, never too large: base subtracts only
// settled tokens, which the engine has surely counted, and later all computed ones are subtracted.
func (p *pullCheck) newlyNotPulled(s *Sample, settled, computed float64) float64 {
	notPulled, ok := s.NotPulledTokens(allRanks)
	if !ok {
		return 0
	}
	if firstScrape := !p.hasBase || s.StartTime != p.start; firstScrape {
		p.hasBase, p.start, p.reported = true, s.StartTime, 0
		p.base = notPulled - settled
		return 0
	}
	missing := notPulled - computed - p.base
	more := missing - p.reported
	if more <= 0 { // below 0: computed has tokens that the engine has not counted yet
		return 0
	}
	p.reported = missing
	return more
}
