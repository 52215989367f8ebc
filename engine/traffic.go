package engine

import (
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// Traffic has what callers report about their running streams on an instance, so that the monitor can compare it with the engine's
// gauges. Every method may be called from any goroutine, and is cheap enough to be called for every event.
type Traffic struct {
	running atomic.Int64  // streams that have begun and not ended
	events  atomic.Uint64 // events so far
	chunk   atomic.Uint64 // mean number of tokens in a chunk, as the bits of a float64
	beyond  atomic.Int64  // see Beyond

	mu       sync.Mutex
	liveness map[int]*Liveness // for each rank, by Target.Rank

	computes atomic.Int64 // upper bound of the prompt tokens that the engine had to compute itself
	open     atomic.Int64 // the part of them that the engine may not have counted yet
}

// Begin reports the first event of a stream.
func (t *Traffic) Begin() { t.running.Add(1); t.events.Add(1) }

// OnEvent reports a later event of a stream.
func (t *Traffic) OnEvent() { t.events.Add(1) }

// Beyond reports, with 1, that a request is sent on purpose although its rank has no free slot, and with -1 that it has ended. In
// between, the engine may run more requests than the rank has slots.
func (t *Traffic) AddSentWithoutSlot(n int64) { t.beyond.Add(n) }

// Signs returns the Liveness of a rank, and creates it if there is none.
func (t *Traffic) Liveness(rank int) *Liveness {
	t.mu.Lock()
	defer t.mu.Unlock()
	l := t.liveness[rank]
	if l == nil {
		if t.liveness == nil {
			t.liveness = map[int]*Liveness{}
		}
		l = NewLiveness()
		t.liveness[rank] = l
	}
	return l
}

// Lose records that some rank may have read KV too late. It is not known which rank, so later requests to all ranks get a new salt.
func (t *Traffic) ResaltAll() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, l := range t.liveness {
		l.mu.Lock()
		l.resalt()
		l.mu.Unlock()
	}
}

// mayNeedSalt says whether requests to any rank need a salt, or will need one if a request that waits there loses its KV.
func (t *Traffic) mayNeedSalt() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, l := range t.liveness {
		if l.mayNeedSalt() {
			return true
		}
	}
	return false
}

// quiet returns the largest value of Liveness.quiet over all ranks.
func (t *Traffic) quiet(now time.Time) (most float64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, l := range t.liveness {
		most = max(most, l.quiet(now))
	}
	return most
}

// seenSince says whether any rank's core has given a sign of life at or after the time at.
func (t *Traffic) seenSince(at time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, l := range t.liveness {
		if !l.at(l.last.Load()).Before(at) {
			return true
		}
	}
	return false
}

// Sends reports a request right before it is sent. tokens is an upper bound of the prompt tokens that the engine must compute.
func (t *Traffic) ExpectComputed(tokens int64) { t.computes.Add(tokens); t.open.Add(tokens) }

// Settles reports that a request got its first event, or will get none. tokens is the argument of Sends, and
// computed is an upper bound of the prompt tokens that the engine really computed.
func (t *Traffic) SettleComputed(tokens, computed int64) {
	t.open.Add(-tokens)
	t.computes.Add(computed - tokens)
}

// End reports that a stream has ended.
func (t *Traffic) End() { t.running.Add(-1) }

// TokensPerChunk returns the average number of tokens in a chunk, as Learn has set it; 0: not known.
func (t *Traffic) TokensPerChunk() float64 { return math.Float64frombits(t.chunk.Load()) }

// Learn is called after a complete stream. It replaces the average of TokensPerChunk by next(the old average).
func (t *Traffic) Learn(next func(before float64) float64) {
	for {
		old := t.chunk.Load()
		if t.chunk.CompareAndSwap(old, math.Float64bits(next(math.Float64frombits(old)))) {
			return
		}
	}
}

// Traffic returns the Traffic of an instance. A stream that outlives the instance continues to use the Traffic that it got.
func (m *Monitor) Traffic(id string) *Traffic {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.trafficOf(id)
}

// forgetTraffic removes the Traffic of instances that are not watched any more. It keeps a Traffic that has a salt or may still get
// one: if the instance comes back, its prefix cache may hold wrong KV, and its requests still need the salt. The caller holds mu.
func (m *Monitor) forgetTraffic(watched map[string]*watch) {
	for id, t := range m.traffic {
		if watched[id] == nil && !t.mayNeedSalt() {
			delete(m.traffic, id)
		}
	}
}

// trafficOf returns the Traffic of an instance, and creates it if there is none. The caller holds mu.
func (m *Monitor) trafficOf(id string) *Traffic {
	t := m.traffic[id]
	if t == nil {
		t = &Traffic{}
		m.traffic[id] = t
	}
	return t
}

// frozenScrapes is how many scrapes in a row must equal the scrape before them for the gauges to count as frozen.
const frozenScrapes = 3

// vitals are values of which at least one changes between two scrapes while an engine computes.
type vitals struct{ generated, running, waiting, kv float64 }

// noVitals are the vitals on a page that has none of them, as that of a vLLM with --disable-log-stats.
var noVitals = vitals{generated: -1, running: -1, waiting: -1, kv: -1}

// vitalsOf returns the vitals of a rank; for rank -1 those of all ranks together. A value that is not known is -1.
func vitalsOf(s *Sample, rank int) vitals {
	known := func(v float64, ok bool) float64 {
		if !ok {
			return -1
		}
		return v
	}
	return vitals{
		generated: known(s.Generated(rank)), running: known(s.Running(rank)), waiting: known(s.Waiting(rank)),
		kv: known(s.KVUsage(rank)),
	}
}

// scrapes has the results of the scrapes of an instance. Only run's goroutine uses it.
type scrapes struct {
	at        time.Time      // when the last scrape began
	ranks     map[int]vitals // of the last scrape, by rank
	last      vitals         // of the last scrape, of all ranks together
	busy      bool           // streams of this proxy ran at the last scrape
	unchanged int            // scrapes in a row that equal the one before although streams of this proxy ran
	frozen    bool           // see checkFrozen
	overfull  bool           // see checkOverfull

	pulls pulls

	slots   int // requests that may run without an alarm: the configured slots, or their old number for a while after they were lowered
	settled int // scrapes in a row with no more requests than the configured slots
}

// settledScrapes is how many scrapes in a row must show no more requests than the configured slots before a lowered number of slots
// applies. One scrape is not enough: a request that was admitted before may still pull its KV, and begin to run after this
// scrape.
const settledScrapes = 2

// followSlots updates the number of slots that checkOverfull uses to the configured one. It does so at once if the number was raised.
// If it was lowered, it waits until the requests that were admitted before have ended. running is how many requests the fullest rank
// runs.
func (p *scrapes) followSlots(slots int, running float64) {
	if running > float64(slots) {
		p.settled = 0
	} else {
		p.settled++
	}
	if slots > p.slots || p.settled >= settledScrapes {
		p.slots = slots
	}
}

// pulls finds prompt tokens whose KV an engine should have pulled, but did not. It compares two counts: the tokens that the engine
// says it did not get from other engines, and the tokens that it had to compute itself anyway. The two counts of a request do not
// change at the same moment, and such a difference must not be reported. Therefore newlyNotPulled subtracts the tokens that a request
// computes from before the request is sent, but base subtracts them only once the request has its first event.
type pulls struct {
	known    bool
	start    float64 // start time of the process that counts
	settled  float64 // tokens that the engine had to compute itself and has surely counted before the scrape
	base     float64 // the difference of the two counts at the first scrape of this process
	reported float64 // tokens that newlyNotPulled has returned since then
}

// before sets settled. It must be called right before a scrape.
func (p *pulls) before(t *Traffic) { p.settled = float64(t.computes.Load() - t.open.Load()) }

// newlyNotPulled returns how many tokens the engine should have pulled and did not, without those returned after earlier scrapes.
func (p *pulls) newlyNotPulled(s *Sample, t *Traffic) float64 {
	notPulled, ok := s.NotPulled(-1)
	if !ok {
		return 0
	}
	if !p.known || s.StartTime != p.start { // the first scrape of this process
		p.known, p.start, p.base, p.reported = true, s.StartTime, notPulled-p.settled, 0
		return 0
	}
	missing := notPulled - float64(t.computes.Load()) - p.base
	more := missing - p.reported
	if more <= 0 {
		return 0
	}
	p.reported = missing
	return more
}
