package engine

import (
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// Traffic is what callers report of their streams on an instance while these run, so that the monitor can compare its
// gauges with it. Every method may be called from any goroutine, for every event.
type Traffic struct {
	running atomic.Int64
	events  atomic.Uint64
	chunk   atomic.Uint64 // mean tokens of a chunk, as the bits of a float64
	beyond  atomic.Int64

	mu    sync.Mutex
	signs map[int]*Signs // by rank, as in Target.Rank

	computes atomic.Int64 // prompt tokens that the engine had to compute itself, at most
	open     atomic.Int64 // of these, tokens of requests that the engine may not have counted yet
}

// Begin reports the first event of a stream.
func (t *Traffic) Begin() { t.running.Add(1); t.events.Add(1) }

// OnEvent reports a later event of a stream.
func (t *Traffic) OnEvent() { t.events.Add(1) }

// Beyond reports, with 1, a request that was sent on purpose although its rank has no slot for it, and with -1 that
// this request is gone. The engine may run it although all slots that we count are taken.
func (t *Traffic) Beyond(n int64) { t.beyond.Add(n) }

// Signs returns the signs of life of a rank's core.
func (t *Traffic) Signs(rank int) *Signs {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.signs[rank]
	if s == nil {
		if t.signs == nil {
			t.signs = map[int]*Signs{}
		}
		s = NewSigns()
		t.signs[rank] = s
	}
	return s
}

// Lose says that KV may have been read too late on some rank, and that it is not known on which.
func (t *Traffic) Lose() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range t.signs {
		s.mu.Lock()
		s.resalt()
		s.mu.Unlock()
	}
}

// salted says whether requests to any rank need a salt.
func (t *Traffic) salted() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range t.signs {
		if s.salted() {
			return true
		}
	}
	return false
}

// quiet is the largest share of its patience that a request has used up while it waited for a sign of life of its
// rank.
func (t *Traffic) quiet(now time.Time) (most float64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range t.signs {
		most = max(most, s.quiet(now))
	}
	return most
}

// seenSince says whether the core of any rank has given a sign of life since at.
func (t *Traffic) seenSince(at time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range t.signs {
		if !s.at(s.last.Load()).Before(at) {
			return true
		}
	}
	return false
}

// Sends reports a request right before it is sent, with the most tokens of its prompt that the engine has to compute.
func (t *Traffic) Sends(tokens int64) { t.computes.Add(tokens); t.open.Add(tokens) }

// Settles reports that a request has its first event or will get none. tokens is what Sends was called with, and
// computed is how many of these the engine computed at most.
func (t *Traffic) Settles(tokens, computed int64) {
	t.open.Add(-tokens)
	t.computes.Add(computed - tokens)
}

// End reports that a stream is over.
func (t *Traffic) End() { t.running.Add(-1) }

// TokensPerChunk is how many tokens a chunk has on average, by Learn; 0: not known.
func (t *Traffic) TokensPerChunk() float64 { return math.Float64frombits(t.chunk.Load()) }

// Learn is called after a whole stream: next returns the new average for the old one.
func (t *Traffic) Learn(next func(before float64) float64) {
	for {
		old := t.chunk.Load()
		if t.chunk.CompareAndSwap(old, math.Float64bits(next(math.Float64frombits(old)))) {
			return
		}
	}
}

// Traffic returns the traffic of an instance. Streams that outlive the instance go on counting in the one that they
// hold.
func (m *Monitor) Traffic(id string) *Traffic {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.trafficOf(id)
}

// forgetTraffic drops the traffic of an instance that has left. Streams that outlive it hold theirs. If its prefix
// cache may hold wrong KV, it is kept, because the instance may come back and must keep its salts. It needs mu.
func (m *Monitor) forgetTraffic(id string) {
	if t := m.traffic[id]; t != nil && !t.salted() {
		delete(m.traffic, id)
	}
}

// trafficOf returns the traffic of an instance, and makes it if there is none. It needs mu.
func (m *Monitor) trafficOf(id string) *Traffic {
	t := m.traffic[id]
	if t == nil {
		t = &Traffic{}
		m.traffic[id] = t
	}
	return t
}

// frozenScrapes is how many scrapes in a row must not differ from the one before for gauges to count as frozen.
const frozenScrapes = 3

// vitals are the gauges of which at least one changes while an engine computes.
type vitals struct{ generated, running, waiting, kv float64 }

// vitalsOf returns the vitals of a rank, of all ranks together for -1. A value that the engine does not say is -1.
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

// scrapes is what the scrapes of an instance showed; only run's goroutine uses it.
type scrapes struct {
	at        time.Time // when the last scrape began
	ranks     map[int]vitals
	last      vitals
	busy      bool // streams of ours ran at the last scrape
	unchanged int  // scrapes in a row that did not differ from the one before while our streams ran
	frozen    bool
	overfull  bool

	pulls pulls

	slots   int // requests that may run without an alarm: the configured slots, or more for a while after these were lowered
	settled int // scrapes in a row with no more requests than the configured slots
}

// settledScrapes is how many scrapes in a row must show no more requests than lowered slots before the lower number
// counts. A request that was admitted before may still pull its KV, and begin to run after a scrape that did not
// count it.
const settledScrapes = 2

// followSlots has the alarm about too many requests follow the configured slots: at once if they are raised; if they are
// lowered, once the requests that were admitted before have ended. running is how many requests the fullest rank runs.
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

// pulls compares two counts: the prompt tokens that an engine says it did not get from other engines, and those that
// it had to compute itself. A count that comes late must not look like a pull that fell short. So the tokens of a
// request count as the engine's own to compute from before it is sent, but for a base only once the request has its
// first event.
type pulls struct {
	known    bool
	start    float64 // start time of the process that counts
	settled  float64 // tokens that the engine had to compute and that it had counted before the scrape
	base     float64 // tokens that have no explanation, at the first scrape of this process
	reported float64 // tokens reported as short since then
}

// before notes how many tokens the engine must have counted already. It must be called right before a scrape.
func (p *pulls) before(t *Traffic) { p.settled = float64(t.computes.Load() - t.open.Load()) }

// fellShort returns how many more tokens were not pulled, beyond those reported after earlier scrapes.
func (p *pulls) fellShort(s *Sample, t *Traffic) float64 {
	n, ok := s.NotPulled(-1)
	switch {
	case !ok:
		return 0
	case !p.known || s.StartTime != p.start:
		p.known, p.start, p.base, p.reported = true, s.StartTime, n-p.settled, 0
		return 0
	}
	more := n - float64(t.computes.Load()) - p.base - p.reported
	if more <= 0 {
		return 0
	}
	p.reported += more
	return more
}
