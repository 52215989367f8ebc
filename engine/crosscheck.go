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

// scrapes has the results of the scrapes of an instance.
type scrapes struct {
	sample   *Sample        // the last one that was compared with this proxy's requests; nil: there was none
	sampleAt time.Time      // when its scrape began
	gauges   map[int]Gauges // gauges of each rank in sample, by rank

	at        time.Time      // when the last scrape of this instance began
	start     float64        // last known Sample.StartTime
	ranks     map[int]vitals // vitals of the last scrape, by rank
	last      vitals         // vitals of the last scrape, of all ranks together
	busy      bool           // streams of this proxy ran at the last scrape
	unchanged int            // scrapes in a row that equal the one before although streams of this proxy ran
	frozen    bool           // the gauges do not change although requests run (checkFrozen)
	running   float64        // requests on the fullest rank
	excess    float64        // those beyond the slots

	pulls pullCheck

	// allowedRunning is how many requests a rank may run without an alarm: the configured slots, or their old number for a while after
	// they were lowered.
	allowedRunning int
	calmScrapes    int // scrapes in a row with no more requests than the configured slots
}

// record stores the vitals of a scrape that began at the time at. It returns the ranks whose vitals
// have changed since the previous scrape of this process.
func (p *scrapes) record(s *Sample, at time.Time, ranks []*Target) (moved []int) {
	previous, start := p.ranks, cmp.Or(s.StartTime, p.start) // 0: not known
	if p.start != 0 && start != p.start {
		previous = nil // another process says nothing of requests that were sent to the one before
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

// checkFrozen says whether the gauges have not changed for frozenScrapes scrapes, while the engine
// had requests of this proxy. An engine that hangs still reports healthy numbers.
func (p *scrapes) checkFrozen(s *Sample, busy bool) bool {
	gauges := vitalsOf(s, allRanks)
	if busy && p.busy && gauges != noVitals && gauges == p.last {
		p.unchanged++ // the engine had requests at both scrapes, so a gauge must have changed
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

// frozenScrapes is how many scrapes in a row must equal the scrape before them for the gauges to count as frozen.
const frozenScrapes = 3

// vitals are values of which at least one changes between two scrapes while an engine computes.
type vitals struct{ generated, running, waiting, kv float64 }

// noVitals are the vitals on a page that has none of them, as that of a vLLM with --disable-log-stats.
var noVitals = vitals{generated: -1, running: -1, waiting: -1, kv: -1}

// allRanks in place of a rank means all ranks of an engine together (see Sample).
const allRanks = -1

// vitalsOf returns the vitals of a rank, or of allRanks. A value that is not known is -1.
func vitalsOf(s *Sample, rank int) vitals {
	return vitals{
		generated: orUnknown(s.Generated(rank)), running: orUnknown(s.Running(rank)), waiting: orUnknown(s.Waiting(rank)),
		kv: orUnknown(s.KVUsage(rank)),
	}
}

// minCalmScrapes is how many scrapes in a row must show no more requests than the configured slots before a lowered number of slots
// applies. One scrape is not enough: a request that was admitted before may still pull its KV, and begin to run after this
// scrape.
const minCalmScrapes = 2

// updateAllowedRunning sets allowedRunning to the configured slots. It does so at once if their number was raised. If it was lowered, it
// waits until the requests that were admitted before have ended. running is how many requests the fullest rank runs.
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

// pullCheck finds prompt tokens whose KV an engine should have pulled, but did not. It compares two counts: the tokens that the engine
// says it did not get from other engines, and the tokens that it had to compute itself anyway. The two counts of a request do not
// change at the same moment, and such a difference must not be reported. Therefore newlyNotPulled subtracts the tokens of a request even
// before the request is sent, but base subtracts them only once the request has its first event.
type pullCheck struct {
	hasBase  bool
	start    float64 // Sample.StartTime of the process to which base belongs
	base     float64 // tokens that were not pulled, minus settled, at the first scrape of this process
	reported float64 // tokens that newlyNotPulled has returned since the first scrape of this process
}

// newlyNotPulled returns for how many prompt tokens the engine should have pulled KV from a prefill engine and did not, without those that
// earlier calls returned. The first scrape of an engine process only sets base. For example, the engine says that it did not pull 1,000
// tokens, and this proxy knows that it had to compute 200 of them itself, so base is 800. If a later scrape says 1,500, and the engine had
// to compute 300 by then, 1,500 - 300 - 800 = 400 tokens are missing. For base, only settled tokens count as computed, which the engine has
// surely counted by the scrape. Later, all computed ones count, also those of requests that it may not have counted yet. So the results
// may be too small, but never too large: tokens that it had counted at the first scrape, and that were settled only later, stay in base.
func (p *pullCheck) newlyNotPulled(s *Sample, settled, computed float64) float64 {
	notPulled, ok := s.NotPulledTokens(allRanks)
	if !ok {
		return 0
	}
	if firstScrape := !p.hasBase || s.StartTime != p.start; firstScrape { // a new start time: another process of the engine
		p.hasBase, p.start, p.reported = true, s.StartTime, 0
		p.base = notPulled - settled
		return 0
	}
	missing := notPulled - computed - p.base // since the first scrape
	more := missing - p.reported
	if more <= 0 { // 0: nothing new; below 0: computed has some tokens before the engine has counted them
		return 0
	}
	p.reported = missing
	return more
}
