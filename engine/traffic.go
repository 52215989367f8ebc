package engine

import (
	"maps"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Traffic has what callers report about their running streams on an instance, so that the monitor can compare it with the engine's
// gauges. Every method may be called from any goroutine, and is cheap enough to be called for every event.
type Traffic struct {
	running         atomic.Int64  // streams that have begun and not ended
	events          atomic.Uint64 // events of all streams so far
	tokensPerChunk  atomic.Uint64 // mean number of tokens in a chunk, as the bits of a float64
	sentWithoutSlot atomic.Int64  // running requests that were sent on purpose although their rank had no free slot

	mu             sync.Mutex
	livenessByRank map[int]*Liveness // the Liveness of each rank, by Target.Rank
	pulls          *Pulls            // of the instance's address

	computedTokens  atomic.Int64 // upper bound of the prompt tokens that the engine had to compute itself
	unsettledTokens atomic.Int64 // the part of computedTokens of requests before SettleComputed, which the engine may not have counted yet
}

// Begin reports the first event of a stream, which from then on counts as running until End.
func (t *Traffic) Begin() { t.running.Add(1); t.events.Add(1) }

// OnEvent reports a later event of a stream, which shows that the engine is not hanging.
func (t *Traffic) OnEvent() { t.events.Add(1) }

// AddSentWithoutSlot reports, with 1, that a request is sent on purpose although its rank has no free slot, and with -1 that it has ended.
// In between, the engine may run more requests than the rank has slots. Besides the requests that the dispatcher binds InEngineQueue, these
// are requests that never get a slot: canaries, and those that are passed through.
func (t *Traffic) AddSentWithoutSlot(n int64) { t.sentWithoutSlot.Add(n) }

// Liveness returns the Liveness of a rank, and creates it if there is none.
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

// maxSilenceShare returns the largest value of Liveness.silenceShare over all ranks. Above 1, some rank has been silent for longer than
// allowed.
func (t *Traffic) maxSilenceShare(now time.Time) (share float64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, l := range t.livenessByRank {
		share = max(share, l.silenceShare(now))
	}
	return share
}

// hasSignSince says whether any rank's core has given a sign of life at or after the time at.
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

// ExpectComputed reports a request right before it is sent. tokens is an upper bound of the prompt tokens that the engine must compute
// itself, because no hand-off has KV for them. Until SettleComputed the tokens are also unsettled: the engine's own counter may not have
// them yet.
func (t *Traffic) ExpectComputed(tokens int64) {
	t.computedTokens.Add(tokens)
	t.unsettledTokens.Add(tokens)
}

// SettleComputed replaces the estimate of ExpectComputed when a request got its first event, or will get none: by then the engine has
// counted what it computed. expected is the argument of ExpectComputed, and computed is an upper bound of the prompt tokens that the engine
// really computed.
func (t *Traffic) SettleComputed(expected, computed int64) {
	t.unsettledTokens.Add(-expected)
	t.computedTokens.Add(computed - expected)
}

// settledTokens is the part of computedTokens that the engine has surely counted already.
func (t *Traffic) settledTokens() float64 {
	return float64(t.computedTokens.Load() - t.unsettledTokens.Load())
}

// End reports that a stream has ended, so that it no longer counts as running.
func (t *Traffic) End() { t.running.Add(-1) }

// TokensPerChunk returns the average number of tokens in a chunk, as Learn has set it; 0: not known.
func (t *Traffic) TokensPerChunk() float64 { return math.Float64frombits(t.tokensPerChunk.Load()) }

// Learn is called after a complete stream. It replaces the average that TokensPerChunk returns by the result of next, whose argument is the
// old average; 0: there is none.
func (t *Traffic) Learn(next func(before float64) float64) {
	for { // until no other stream has replaced the average meanwhile
		old := t.tokensPerChunk.Load()
		if t.tokensPerChunk.CompareAndSwap(old, math.Float64bits(next(math.Float64frombits(old)))) {
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

// forgetTraffic removes the Traffic of instances that are not watched any more, and the Pulls of addresses that have no salt and get none.
// The caller holds mu.
func (m *Monitor) forgetTraffic(watched map[string]*watch) {
	maps.DeleteFunc(m.traffic, func(id string, _ *Traffic) bool { return watched[id] == nil })
	inUse := map[*Pulls]bool{}
	for _, t := range m.traffic {
		inUse[t.pulls] = true
	}
	now := time.Now()
	maps.DeleteFunc(m.pulls, func(_ string, p *Pulls) bool { return !inUse[p] && p.isIdle(now) })
}

// addressOf returns the address in the id of an instance, before which its role may stand.
func addressOf(id string) string { return id[strings.LastIndexByte(id, ' ')+1:] }

// Salt returns a cache_salt with which no request to an address finds KV in a prefix cache that may be wrong; empty: no request needs one.
func (m *Monitor) Salt(id string) string {
	m.mu.Lock()
	pulls := m.pulls[addressOf(id)]
	m.mu.Unlock()
	if pulls == nil {
		return ""
	}
	return pulls.Salt(time.Now())
}

// trafficOf returns the Traffic of an instance, and creates it if there is none. The caller holds mu.
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
