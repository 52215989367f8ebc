package engine

import (
	"maps"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Traffic is what callers report about their streams on an instance, to be compared with the
// engine's gauges. Every method may be called from any goroutine, and is cheap enough for every
// event.
type Traffic struct {
	running         atomic.Int64  // begun and not ended
	events          atomic.Uint64 // of all streams
	tokensPerChunk  atomic.Uint64 // mean, as the bits of a float64
	sentWithoutSlot atomic.Int64  // running requests that were sent on purpose without a free slot

	mu             sync.Mutex
	livenessByRank map[int]*Liveness // by Target.Rank
	pulls          *Pulls            // of the instance's address

	computedTokens atomic.Int64 // upper bound of prompt tokens that the engine had to compute itself
	// unsettledTokens are the part before SettleComputed, which the engine may not have counted.
	unsettledTokens atomic.Int64
}

// Begin reports the first event of a stream, which then runs until End.
func (t *Traffic) Begin() { t.running.Add(1); t.events.Add(1) }

// OnEvent reports a later event.
func (t *Traffic) OnEvent() { t.events.Add(1) }

// AddSentWithoutSlot reports, with 1, that a request is sent without a free slot, and with -1 its
// end. These are requests that the dispatcher binds InEngineQueue, canaries, and those that are
// passed through.
func (t *Traffic) AddSentWithoutSlot(n int64) { t.sentWithoutSlot.Add(n) }

// Liveness returns that of a rank, and creates it if there is none.
func (t *Traffic) Liveness(rank int) *Liveness {
	t.mu.Lock()
	defer t.mu.Unlock()
	l := t.livenessByRank[rank]
	if l == nil {
		if t.livenessByRank == nil {
			t.livenessByRank = map[int]*Liveness{}
		}
		if t.pulls == nil {
			t.pulls = newPulls()
		}
		l = &Liveness{traffic: t, pulls: t.pulls, epoch: time.Now()}
		t.pulls.addRank()
		t.livenessByRank[rank] = l
	}
	return l
}

// maxSilenceShare is the largest Liveness.silenceShare. Above 1, a rank has been silent for too
// long.
func (t *Traffic) maxSilenceShare(now time.Time) (share float64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, l := range t.livenessByRank {
		share = max(share, l.silenceShare(now))
	}
	return share
}

func (t *Traffic) hasSignSince(at time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, l := range t.livenessByRank {
		if !l.LastSign().Before(at) {
			return true
		}
	}
	return false
}

// ExpectComputed reports, right before a request is sent, an upper bound of the prompt tokens that
// the engine must compute itself, because no hand-off has their KV. Until SettleComputed its own
// counter may lack them.
func (t *Traffic) ExpectComputed(tokens int64) {
	t.computedTokens.Add(tokens)
	t.unsettledTokens.Add(tokens)
}

// SettleComputed is called when a request got its first event, or will get none: by then the engine
// has counted. expected is what ExpectComputed got; computed is an upper bound of what the engine
// really computed.
func (t *Traffic) SettleComputed(expected, computed int64) {
	t.unsettledTokens.Add(-expected)
	t.computedTokens.Add(computed - expected)
}

// settledTokens are those that the engine has surely counted.
func (t *Traffic) settledTokens() float64 {
	return float64(t.computedTokens.Load() - t.unsettledTokens.Load())
}

// End reports that a stream has ended.
func (t *Traffic) End() { t.running.Add(-1) }

// TokensPerChunk is an average; 0: not known.
func (t *Traffic) TokensPerChunk() float64 { return math.Float64frombits(t.tokensPerChunk.Load()) }

// Learn is called after a complete stream, with a function from the old average (0: none) to the
// new one.
func (t *Traffic) Learn(next func(before float64) float64) {
	for {
		old := t.tokensPerChunk.Load()
		if t.tokensPerChunk.CompareAndSwap(old, math.Float64bits(next(math.Float64frombits(old)))) {
			return
		}
	}
}

// Traffic of a removed instance may still be used by its streams.
func (m *Monitor) Traffic(id string) *Traffic {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.trafficOf(id)
}

// forgetTraffic removes the Traffic of instances that are not watched, and the Pulls of their
// addresses that have no salt and get none. The caller holds mu.
func (m *Monitor) forgetTraffic(watched map[string]*watch) {
	maps.DeleteFunc(m.traffic, func(id string, _ *Traffic) bool { return watched[id] == nil })
	inUse := map[*Pulls]bool{}
	for _, t := range m.traffic {
		inUse[t.pulls] = true
	}
	now := time.Now()
	maps.DeleteFunc(m.pulls, func(_ string, p *Pulls) bool { return !inUse[p] && p.isIdle(now) })
}

// addressOf cuts off the role, which may stand before the address.
func addressOf(id string) string { return id[strings.LastIndexByte(id, ' ')+1:] }

// Salt returns a cache_salt with which no request to the address finds KV that may be wrong; empty:
// none is needed.
func (m *Monitor) Salt(id string) string {
	m.mu.Lock()
	pulls := m.pulls[addressOf(id)]
	m.mu.Unlock()
	if pulls == nil {
		return ""
	}
	return pulls.Salt(time.Now())
}

// trafficOf: the caller holds mu.
func (m *Monitor) trafficOf(id string) *Traffic {
	t := m.traffic[id]
	if t == nil {
		address := addressOf(id)
		if m.pulls[address] == nil {
			m.pulls[address] = newPulls()
		}
		t = &Traffic{pulls: m.pulls[address]}
		m.traffic[id] = t
	}
	return t
}
