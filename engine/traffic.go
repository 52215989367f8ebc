package engine

import (
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// Traffic is what callers tell of their streams on an instance while they run,
// so that its gauges can be held against it. Every method may be called from
// any goroutine, for every event.
type Traffic struct {
	running atomic.Int64
	events  atomic.Uint64
	chunk   atomic.Uint64 // tokens of a chunk, a float64's bits
	beyond  atomic.Int64

	mu    sync.Mutex
	signs map[int]*Signs // by rank, as a Target has it

	computes atomic.Int64 // prompt tokens that the engine was to compute itself, at most
	open     atomic.Int64 // of these, tokens of requests that the engine may not have counted yet
}

// Begin reports a first event.
func (t *Traffic) Begin() { t.running.Add(1); t.events.Add(1) }

// OnEvent reports a later one.
func (t *Traffic) OnEvent() { t.events.Add(1) }

// Beyond tells of a request that was sent on purpose although its rank has no slot
// for it, and with -1 that it is gone: an engine may run it although the slots we
// count are taken.
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

// Lose says that KV may have been read too late, and that it is not known on which rank.
func (t *Traffic) Lose() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range t.signs {
		s.mu.Lock()
		s.resalt()
		s.mu.Unlock()
	}
}

// salted says whether requests to some rank need a salt.
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

// quiet is the share of its patience that the request which waits longest for a sign of life has used up.
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

// Sends tells of a request right before it is sent, and of how many tokens of its
// prompt the engine is to compute at most.
func (t *Traffic) Sends(tokens int64) { t.computes.Add(tokens); t.open.Add(tokens) }

// Settles tells that a request has its first event or will get none, and how many
// of the tokens that Sends was told the engine computed at most.
func (t *Traffic) Settles(tokens, computed int64) {
	t.open.Add(-tokens)
	t.computes.Add(computed - tokens)
}

// End tells that the stream is over.
func (t *Traffic) End() { t.running.Add(-1) }

// TokensPerChunk is how many tokens its chunks have on average, as Learn was told;
// 0: not known.
func (t *Traffic) TokensPerChunk() float64 { return math.Float64frombits(t.chunk.Load()) }

// Learn is called after a whole stream: next makes the new average from the old one.
func (t *Traffic) Learn(next func(before float64) float64) {
	for {
		old := t.chunk.Load()
		if t.chunk.CompareAndSwap(old, math.Float64bits(next(math.Float64frombits(old)))) {
			return
		}
	}
}

// Traffic of an instance. Streams that outlive the instance count on in theirs.
func (m *Monitor) Traffic(id string) *Traffic {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.trafficOf(id)
}

// forgetTraffic drops what was told of an instance that has left. Streams that outlive it hold theirs. One whose prefix cache
// may hold wrong KV may come back, and keeps its salts. It needs mu.
func (m *Monitor) forgetTraffic(id string) {
	if t := m.traffic[id]; t != nil && !t.salted() {
		delete(m.traffic, id)
	}
}

// trafficOf needs mu.
func (m *Monitor) trafficOf(id string) *Traffic {
	t := m.traffic[id]
	if t == nil {
		t = &Traffic{}
		m.traffic[id] = t
	}
	return t
}

// frozenScrapes is how many in a row must be alike for gauges to count as
// frozen.
const frozenScrapes = 3

// vitals are the gauges of which at least one moves while an engine computes.
type vitals struct{ generated, running, waiting, kv float64 }

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

// scrapes are what the scrapes of an instance showed; only run's goroutine has it.
type scrapes struct {
	at     time.Time // the last scrape began
	ranks  map[int]vitals
	last   vitals
	busy   bool // streams of ours ran at the last scrape
	alike  int  // scrapes that were as the one before, with streams of ours running
	frozen bool
	over   bool

	pulls pulls

	slots   int // may run without an alarm: those of the config, or more right after they were lowered
	settled int // scrapes in a row with no more than the config's while slots are more
}

// settledScrapes is how many in a row must show no more requests than the
// lowered slots before these count: what was admitted before may still pull its
// KV, and begins to run after a scrape that did not see it.
const settledScrapes = 2

// allow follows the configured slots: at once when they are raised, and when
// they are lowered once the requests that had been admitted before have ended.
func (p *scrapes) allow(slots int, running float64) {
	if running > float64(slots) {
		p.settled = 0
	} else {
		p.settled++
	}
	if slots > p.slots || p.settled >= settledScrapes {
		p.slots = slots
	}
}

// pulls compare two counts: the prompt tokens that an engine says it did not get
// from others, and those that it was to compute itself. A late count must not look
// like a pull that fell short. So the tokens of a request count as its own to
// compute from before it is sent, and for a base only once it has its first event.
type pulls struct {
	known   bool
	start   float64 // of the process that counts
	settled float64 // tokens that the engine was to compute and has counted, before the scrape
	base    float64 // tokens without an explanation, at the first scrape of this process
	told    float64 // since then
}

// before is called right before a scrape.
func (p *pulls) before(t *Traffic) { p.settled = float64(t.computes.Load() - t.open.Load()) }

// fellShort returns how many tokens more than at the scrapes before were not pulled.
func (p *pulls) fellShort(s *Sample, t *Traffic) float64 {
	n, ok := s.NotPulled(-1)
	switch {
	case !ok:
		return 0
	case !p.known || s.StartTime != p.start:
		p.known, p.start, p.base, p.told = true, s.StartTime, n-p.settled, 0
		return 0
	}
	more := n - float64(t.computes.Load()) - p.base - p.told
	if more <= 0 {
		return 0
	}
	p.told += more
	return more
}
