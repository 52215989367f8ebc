package refengine

import (
	"strconv"
	"sync"
	"sync/atomic"
)

// counters live as long as the Engine, over crashes.
type counters struct {
	requests, probes, decodes, plain       atomic.Int64
	pulls, releases, leaks                 atomic.Int64
	replays, expiredPulls, wrongBlocks     atomic.Int64
	unknownHandoffs, keyMismatches         atomic.Int64
	failedPulls, localPrefills             atomic.Int64
	abortedInTransfer, aborted             atomic.Int64
	overAdmitted, preemptions, crashes     atomic.Int64
	duplicateIDs, rankMismatches, unpinned atomic.Int64
	generated, finished, nullHandoffs      atomic.Int64
	lostHandoffs, staleEpochs              atomic.Int64
	spentDrains, badHits, renewals         atomic.Int64
	epoch                                  atomic.Int64 // the highest that was seen
	turns                                  turns
}

// turns counts how often hand-offs to decode came with another credential than
// the one before: dispatchers that own an engine one after the other take few.
type turns struct {
	mu   sync.Mutex
	last string
	n    int64
}

func (t *turns) came(credential string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.last != "" && credential != t.last {
		t.n++
	}
	t.last = credential
}

func (t *turns) count() int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.n
}

// Stats is what GET /stats answers. Each event is counted on one engine: what
// happens to a pin on the prefill that holds it, the rest where the request runs.
type Stats struct {
	Requests int64 `json:"requests"` // generate requests that were read
	Probes   int64 `json:"probes"`
	Decodes  int64 `json:"decodes"`
	Plain    int64 `json:"plain"`    // without kv_transfer_params
	Finished int64 `json:"finished"` // answered to the last byte
	Aborted  int64 `json:"aborted"`  // the client left before the end
	Tokens   int64 `json:"generated_tokens"`

	Running       int64 `json:"running"`
	Waiting       int64 `json:"waiting"`
	Pins          int   `json:"pins"`
	PinnedTokens  int   `json:"pinned_tokens"`
	KVUsed        int64 `json:"kv_used_tokens"`        // in whole blocks
	Leaks         int64 `json:"leaks"`                 // pins nobody pulled before the timeout
	Pulls         int64 `json:"pulls"`                 // pins read once, in time
	Releases      int64 `json:"releases"`              // pins freed by a rejected decode
	Replays       int64 `json:"replays"`               // pulls of a pin that was consumed: wrong text
	ExpiredPulls  int64 `json:"expired_pulls"`         // pulls of a pin that timed out: wrong text
	Renewals      int64 `json:"renewals"`              // of pins, by decode engines that have the request in their queue
	SpentDrains   int64 `json:"spent_drains"`          // pulls of a pin that was consumed or timed out, by a drain: its text is thrown away
	BadHits       int64 `json:"bad_cache_hits"`        // requests that found another prompt's KV in the prefix cache: wrong text
	WrongBlocks   int64 `json:"wrong_blocks"`          // pulls that named other blocks: wrong text
	NullHandoffs  int64 `json:"null_handoffs"`         // probes that handed nothing off
	LostHandoffs  int64 `json:"lost_handoffs"`         // pins made in the moment their client left: nobody was told of them
	KeyMismatches int64 `json:"key_mismatches"`        // KV of another prompt: wrong text
	Unknown       int64 `json:"unknown_handoffs"`      // recomputed, right text
	FailedPulls   int64 `json:"failed_pulls"`          // the prefill could not be reached
	LocalPrefills int64 `json:"local_prefills"`        // on a decode rank: the whole group waited
	InTransfer    int64 `json:"aborted_in_transfer"`   // clients that left between admission and the first token's KV
	OverAdmitted  int64 `json:"over_admitted"`         // requests that found more than the rank's slots
	Preemptions   int64 `json:"preemptions"`           //
	Crashes       int64 `json:"crashes"`               // requests that would have killed a real engine
	DuplicateIDs  int64 `json:"duplicate_request_ids"` // X-Request-Id seen before
	RankMismatch  int64 `json:"rank_mismatches"`       // header for another rank than the port's
	Unpinned      int64 `json:"unpinned"`              // internal balancing without a header
	StaleEpochs   int64 `json:"stale_epochs"`          // decodes of a proxy that came after those of a later owner: two admit here
	Epoch         int64 `json:"epoch"`                 // of the last owner
	CallerTurns   int64 `json:"caller_turns"`          // decodes with another credential than the one before
	TraceDropped  int64 `json:"trace_dropped"`         // step trace entries lost to a slow writer

	Ranks []RankStats `json:"ranks"`
}

// RankStats is the part of a rank.
type RankStats struct {
	Running    int64 `json:"running"`
	Waiting    int64 `json:"waiting"`
	KVUsed     int64 `json:"kv_used_tokens"`
	Concurrent int64 `json:"max_concurrent"`   // most decode requests present at once
	KVBatches  int64 `json:"kv_event_batches"` // published since the rank started
}

// Stats reads the counters now.
func (e *Engine) Stats() Stats {
	e.mu.Lock()
	l := e.life
	trace := e.trace
	e.mu.Unlock()
	c := &e.count
	s := Stats{
		Requests: c.requests.Load(), Probes: c.probes.Load(), Decodes: c.decodes.Load(), Plain: c.plain.Load(),
		Finished: c.finished.Load(), Aborted: c.aborted.Load(), Tokens: c.generated.Load(),
		Leaks: c.leaks.Load(), Pulls: c.pulls.Load(), Releases: c.releases.Load(), Replays: c.replays.Load(),
		ExpiredPulls: c.expiredPulls.Load(), SpentDrains: c.spentDrains.Load(), Renewals: c.renewals.Load(), BadHits: c.badHits.Load(), WrongBlocks: c.wrongBlocks.Load(), NullHandoffs: c.nullHandoffs.Load(), LostHandoffs: c.lostHandoffs.Load(),
		KeyMismatches: c.keyMismatches.Load(), Unknown: c.unknownHandoffs.Load(), FailedPulls: c.failedPulls.Load(),
		LocalPrefills: c.localPrefills.Load(), InTransfer: c.abortedInTransfer.Load(), OverAdmitted: c.overAdmitted.Load(),
		Preemptions: c.preemptions.Load(), Crashes: c.crashes.Load(), DuplicateIDs: c.duplicateIDs.Load(),
		RankMismatch: c.rankMismatches.Load(), Unpinned: c.unpinned.Load(),
		StaleEpochs: c.staleEpochs.Load(), Epoch: c.epoch.Load(), CallerTurns: c.turns.count(),
	}
	if trace != nil {
		s.TraceDropped = trace.dropped.Load()
	}
	if l == nil {
		return s
	}
	s.Pins, s.PinnedTokens = l.pins.held()
	for i := range l.prefills {
		r := l.rankStats(i)
		s.Running, s.Waiting, s.KVUsed = s.Running+r.Running, s.Waiting+r.Waiting, s.KVUsed+r.KVUsed
		s.Ranks = append(s.Ranks, r)
	}
	return s
}

func (l *life) rankStats(rank int) RankStats {
	p, g := l.prefills[rank], &l.group.ranks[rank].gauges
	return RankStats{
		Running:    p.running.Load() + g.running.Load(),
		Waiting:    p.waiting.Load() + g.waiting.Load(),
		KVUsed:     (p.used.Load() + g.kvBlocks.Load()) * blockSize,
		Concurrent: g.most.Load(),
		KVBatches:  l.events[rank].published(),
	}
}

// ResetStats sets the counters to zero. Gauges and pins stay.
func (e *Engine) ResetStats() {
	c := &e.count
	for _, n := range []*atomic.Int64{&c.requests, &c.probes, &c.decodes, &c.plain, &c.pulls, &c.releases, &c.leaks, &c.replays,
		&c.expiredPulls, &c.wrongBlocks, &c.unknownHandoffs, &c.keyMismatches, &c.failedPulls, &c.localPrefills, &c.abortedInTransfer,
		&c.aborted, &c.overAdmitted, &c.preemptions, &c.crashes, &c.duplicateIDs, &c.rankMismatches, &c.unpinned, &c.generated,
		&c.finished, &c.nullHandoffs, &c.lostHandoffs, &c.spentDrains, &c.badHits, &c.renewals, &c.staleEpochs} {
		n.Store(0)
	}
}

// admitted notes whose decode request this is, by the epoch of its proxy's
// ownership; a request without one is nobody's.
func (c *counters) admitted(header string) {
	epoch, err := strconv.ParseInt(header, 10, 64)
	if err != nil {
		return
	}
	for {
		last := c.epoch.Load()
		if epoch < last {
			c.staleEpochs.Add(1)
			return
		}
		if c.epoch.CompareAndSwap(last, epoch) {
			return
		}
	}
}

// idMemory remembers the last request ids.
type idMemory struct {
	mu         sync.Mutex
	last, more map[string]struct{}
}

// repeated notes an id and says whether it was there.
func (m *idMemory) repeated(id string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	_, a := m.last[id]
	_, b := m.more[id]
	if m.last == nil || len(m.last) >= 1<<16 {
		m.more, m.last = m.last, map[string]struct{}{}
	}
	m.last[id] = struct{}{}
	return a || b
}
