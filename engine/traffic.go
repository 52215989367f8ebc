package engine

import (
	"crypto/rand"
	"math"
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

	address string // the Target.ID of the instance, once it is watched; the Monitor's mu guards it

	mu             sync.Mutex
	livenessByRank map[int]*Liveness // the Liveness of each rank, by Target.Rank

	anyRankSalt atomic.Pointer[string] // see Liveness.anyRankSalt

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
		l = NewLiveness()
		l.anyRankSalt = &t.anyRankSalt
		// A reload may have given a new number to a rank that has read wrong KV, or that may still do so for a request which waits
		// under the old number. The requests that wait are not lost by this, so anyRankSalt stays.
		if t.mayNeedSaltLocked() {
			l.cacheSalt = rand.Text()
		}
		t.livenessByRank[rank] = l
	}
	return l
}

// ResaltAll records that some rank may have read KV too late, so that it may have another prompt's KV in its prefix cache. It is not known
// which rank, so later requests to all ranks get a new salt: a rank uses cached KV only for requests with the same salt.
func (t *Traffic) ResaltAll() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.anyRankSalt.Store(new(rand.Text())) // also if no rank is known yet, so that each begins with a salt (see Liveness)
	for _, l := range t.livenessByRank {
		l.mu.Lock()
		l.changeSalt()
		l.mu.Unlock()
	}
}

// stopRenewals makes later signs of life renew no hold of a request that waits now, because another process gives them.
func (t *Traffic) stopRenewals() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, l := range t.livenessByRank {
		l.mu.Lock()
		for _, p := range l.pendingPulls {
			p.hold.StopRenewals(l.fromNanos(l.lastSign.Load()))
		}
		l.mu.Unlock()
	}
}

// mayNeedSalt says whether requests to any rank need a salt, or may need one later. With a salt, a request does not use the KV that was in
// the rank's prefix cache before. It needs one if this KV may be wrong: a request that waited there may have lost its KV before the rank
// pulled it, and the rank may have pulled another prompt's KV instead. As long as a request waits, this may still happen.
func (t *Traffic) mayNeedSalt() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.mayNeedSaltLocked()
}

// mayNeedSaltLocked is mayNeedSalt for a caller that holds mu.
func (t *Traffic) mayNeedSaltLocked() bool {
	if t.anyRankSalt.Load() != nil {
		return true
	}
	for _, l := range t.livenessByRank {
		if l.mayNeedSalt() {
			return true
		}
	}
	return false
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
		if !l.fromNanos(l.lastSign.Load()).Before(at) {
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

// forgetTraffic removes the Traffic of instances that are not watched any more. It keeps a Traffic that has a salt or may still get
// one: if the instance comes back, its prefix cache may hold wrong KV, and its requests still need the salt. The caller holds mu.
func (m *Monitor) forgetTraffic(watched map[string]*watch) {
	for id, t := range m.traffic {
		if watched[id] == nil && !t.mayNeedSalt() {
			delete(m.traffic, id)
		}
	}
}

// Salt returns a cache_salt with which no request to an instance finds KV in the prefix cache of any rank that may be wrong; empty: no rank
// needs a salt.
func (m *Monitor) Salt(id string) string {
	m.mu.Lock()
	t := m.traffic[id]
	m.mu.Unlock()
	if t == nil {
		return ""
	}
	if salt := t.anyRankSalt.Load(); salt != nil {
		return *salt
	}
	return ""
}

// watchTraffic returns the Traffic of an instance that is watched from now on. If the instance at its address had another role before, it
// may have wrong KV in its prefix cache, or may still read it for a request that waits, so its requests need salts, too. Those of a prefill
// engine get the salt of its decode role (see Salt), so its own Traffic needs none. The caller holds mu.
func (m *Monitor) watchTraffic(in Instance) *Traffic {
	t := m.trafficOf(in.ID)
	t.address = in.Target.ID
	for _, other := range m.traffic {
		isSameAddress := other != t && other.address != "" && other.address == t.address // empty: it was never watched
		if isSameAddress && in.Role != "prefill" && t.anyRankSalt.Load() == nil && other.mayNeedSalt() {
			t.ResaltAll()
		}
	}
	return t
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

// allRanks in place of a rank means all ranks of an engine together (see Sample).
const allRanks = -1

// vitalsOf returns the vitals of a rank, or of allRanks. A value that is not known is -1.
func vitalsOf(s *Sample, rank int) vitals {
	return vitals{
		generated: orUnknown(s.Generated(rank)), running: orUnknown(s.Running(rank)), waiting: orUnknown(s.Waiting(rank)),
		kv: orUnknown(s.KVUsage(rank)),
	}
}

// scrapes has the results of the scrapes of an instance. Only run's goroutine uses it.
type scrapes struct {
	at        time.Time      // when the last scrape of this instance began
	start     float64        // last known Sample.StartTime
	ranks     map[int]vitals // vitals of the last scrape, by rank
	last      vitals         // vitals of the last scrape, of all ranks together
	busy      bool           // streams of this proxy ran at the last scrape
	unchanged int            // scrapes in a row that equal the one before although streams of this proxy ran
	frozen    bool           // the gauges do not change although requests run (checkFrozen)
	overfull  bool           // a rank runs more requests than it has slots (checkOverfull)

	pulls pullCheck

	// allowedRunning is how many requests a rank may run without an alarm: the configured slots, or their old number for a while after
	// they were lowered.
	allowedRunning int
	calmScrapes    int // scrapes in a row with no more requests than the configured slots
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
	hasBase       bool
	start         float64 // Sample.StartTime of the process to which base belongs
	settledTokens float64 // tokens that the engine had to compute itself and has surely counted before the scrape
	base          float64 // tokens that were not pulled, minus settledTokens, at the first scrape of this process
	reported      float64 // tokens that newlyNotPulled has returned since the first scrape of this process
}

// setSettledTokens sets settledTokens from t. It must be called right before a scrape, so that the scrape includes these tokens.
func (p *pullCheck) setSettledTokens(t *Traffic) {
	p.settledTokens = float64(t.computedTokens.Load() - t.unsettledTokens.Load())
}

// newlyNotPulled returns for how many prompt tokens the engine should have pulled KV from a prefill engine and did not, without those that
// earlier calls returned. The first scrape of an engine process only sets base. For example, the engine says that it did not pull 1,000
// tokens, and this proxy knows that it had to compute 200 of them itself, so base is 800. If a later scrape says 1,500, and the engine had
// to compute 300 by then, 1,500 - 300 - 800 = 400 tokens are missing. For base, only settledTokens count as computed, which the engine has
// surely counted by the scrape. Later, all computedTokens count, also those of requests that it may not have counted yet. So the results
// may be too small, but never too large: tokens that it had counted at the first scrape, and that were settled only later, stay in base.
func (p *pullCheck) newlyNotPulled(s *Sample, t *Traffic) float64 {
	notPulled, ok := s.NotPulledTokens(allRanks)
	if !ok {
		return 0
	}
	if firstScrape := !p.hasBase || s.StartTime != p.start; firstScrape { // a new start time: another process of the engine
		p.hasBase, p.start, p.reported = true, s.StartTime, 0
		p.base = notPulled - p.settledTokens
		return 0
	}
	hadToCompute := float64(t.computedTokens.Load())
	missing := notPulled - hadToCompute - p.base // since the first scrape
	more := missing - p.reported
	if more <= 0 { // 0: nothing new; below 0: hadToCompute has some tokens before the engine has counted them
		return 0
	}
	p.reported = missing
	return more
}
