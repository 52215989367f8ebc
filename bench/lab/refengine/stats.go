package refengine

import (
	"reflect"
	"strconv"
	"sync/atomic"
)

// Events are counted over crashes, each on one engine: what happens to a pin on the
// prefill that holds it, the rest where the request runs.
type Events[N any] struct {
	Requests      N `json:"requests"` // generate requests that were read
	Probes        N `json:"probes"`
	Decodes       N `json:"decodes"`
	Plain         N `json:"plain"`    // without kv_transfer_params
	Finished      N `json:"finished"` // answered to the last byte
	Aborted       N `json:"aborted"`  // the client left before the end
	Tokens        N `json:"generated_tokens"`
	Leaks         N `json:"leaks"`                 // pins nobody pulled before the timeout
	Pulls         N `json:"pulls"`                 // pins read once, in time
	Releases      N `json:"releases"`              // pins freed by a rejected decode
	Replays       N `json:"replays"`               // pulls of a pin that was consumed: wrong text
	ExpiredPulls  N `json:"expired_pulls"`         // pulls of a pin that timed out: wrong text
	Renewals      N `json:"renewals"`              // of pins, by decode engines that have the request in their queue
	SpentDrains   N `json:"spent_drains"`          // pulls of a pin that was consumed or timed out, by a drain: its text is thrown away
	BadHits       N `json:"bad_cache_hits"`        // requests that found another prompt's KV in the prefix cache: wrong text
	WrongBlocks   N `json:"wrong_blocks"`          // pulls that named other blocks: wrong text
	NullHandoffs  N `json:"null_handoffs"`         // probes that handed nothing off
	LostHandoffs  N `json:"lost_handoffs"`         // pins made in the moment their client left: nobody was told of them
	KeyMismatches N `json:"key_mismatches"`        // KV of another prompt: wrong text
	Unknown       N `json:"unknown_handoffs"`      // recomputed, right text
	FailedPulls   N `json:"failed_pulls"`          // the prefill could not be reached
	LocalPrefills N `json:"local_prefills"`        // on a decode rank: the whole group waited
	InTransfer    N `json:"aborted_in_transfer"`   // clients that left between admission and the first token's KV
	OverAdmitted  N `json:"over_admitted"`         // requests that found more than the rank's slots
	Preemptions   N `json:"preemptions"`           //
	Crashes       N `json:"crashes"`               // requests that would have killed a real engine; one of SGLang they do
	DuplicateIDs  N `json:"duplicate_request_ids"` // X-Request-Id seen before
	RankMismatch  N `json:"rank_mismatches"`       // header for another rank than the port's
	Unpinned      N `json:"unpinned"`              // internal balancing without a header
	CallerTurns   N `json:"caller_turns"`          // decodes with another credential than the one before
	StaleEpochs   N `json:"stale_epochs"`          // decodes of a proxy that came after those of a later owner: two admit here
	Epoch         N `json:"epoch"`                 // of the last owner
	Adapted       N `json:"adapted"`               // requests to SGLang that run with a LoRA adapter
	Writes[N]
}

// Writes are counted where prefill engines write KV to decode engines that were chosen before.
type Writes[N any] struct {
	Callbacks    N `json:"callbacks"`     // that were answered, whatever the answer was
	Pushes       N `json:"pushes"`        // KV that workers of prefill engines wrote for requests that waited for it
	LostPushes   N `json:"lost_pushes"`   // KV that was written for a request that waits for none
	MixedPushes  N `json:"mixed_pushes"`  // requests with KV of two prefill engines: wrong text
	FreedWrites  N `json:"freed_writes"`  // requests whose pages were given to them while another's KV was written into them: wrong text
	SampledApart N `json:"sampled_apart"` // requests whose legs sample the first token differently: wrong text
	// OutlivedWrites began in time, and their pin timed out before they ended: wrong text. No proxy
	// can end a write. vLLM gives the blocks away all the same (0.32.0, nixl/base_worker.py,
	// _reap_expired_send_leases).
	OutlivedWrites N `json:"outlived_writes"`
	RankPosts      N `json:"rank_posts"`    // prefills of SGLang that told a bootstrap server first which rank has their room
	RoomTimeouts   N `json:"room_timeouts"` // legs of SGLang that waited too long for the other one
}

// counters live as long as the Engine.
type counters struct {
	Events[atomic.Int64]
	credential atomic.Pointer[string] // of the last decode
}

// read returns the counters as they are now.
func (c *counters) read() (now Events[int64]) {
	load(reflect.ValueOf(&c.Events).Elem(), reflect.ValueOf(&now).Elem())
	return now
}

func load(from, to reflect.Value) {
	for i := range to.NumField() {
		if to.Field(i).Kind() == reflect.Struct {
			load(from.Field(i), to.Field(i))
			continue
		}
		to.Field(i).SetInt(from.Field(i).Addr().Interface().(*atomic.Int64).Load())
	}
}

// decoded counts a decode of a caller with that credential: dispatchers that own an
// engine one after the other make few turns.
func (c *counters) decoded(credential string) {
	c.Decodes.Add(1)
	if last := c.credential.Swap(&credential); last != nil && *last != "" && *last != credential {
		c.CallerTurns.Add(1)
	}
}

// Stats is what GET /stats answers.
type Stats struct {
	Events[int64]
	Running      int64 `json:"running"`
	Waiting      int64 `json:"waiting"`
	Pins         int   `json:"pins"`
	PinnedTokens int   `json:"pinned_tokens"`
	KVUsed       int64 `json:"kv_used_tokens"` // in whole blocks
	TraceDropped int64 `json:"trace_dropped"`  // step trace entries lost to a slow writer

	Ranks []RankStats `json:"ranks"`
}

// RankStats is the part of a rank.
type RankStats struct {
	Running    int64 `json:"running"`
	Waiting    int64 `json:"waiting"`
	KVUsed     int64 `json:"kv_used_tokens"`
	Concurrent int64 `json:"max_concurrent"`   // most decode requests present at once
	Stranded   int64 `json:"stranded_tokens"`  // KV kept for requests whose clients left while it was on its way, in whole blocks
	KVBatches  int64 `json:"kv_event_batches"` // published since the rank started
}

// Stranded is the KV that the ranks keep for nobody, in whole blocks.
func (s Stats) Stranded() (tokens int64) {
	for _, r := range s.Ranks {
		tokens += r.Stranded
	}
	return tokens
}

// Stats reads the counters now.
func (e *Engine) Stats() Stats {
	e.mu.Lock()
	l := e.life
	e.mu.Unlock()
	s := Stats{Events: e.count.read(), TraceDropped: e.log.Dropped()}
	if l == nil {
		return s
	}
	s.Pins, s.PinnedTokens = l.pins.Held()
	for i := range l.prefills {
		r := l.rankStats(i)
		s.Running, s.Waiting, s.KVUsed = s.Running+r.Running, s.Waiting+r.Waiting, s.KVUsed+r.KVUsed
		s.Ranks = append(s.Ranks, r)
	}
	return s
}

func (l *life) rankStats(rank int) RankStats {
	p, g := l.prefills[rank], l.group.Gauges(rank)
	return RankStats{
		Running:    p.Running.Load() + g.Running.Load(),
		Waiting:    p.Waiting.Load() + g.Waiting.Load(),
		KVUsed:     (p.Used.Load() + g.KVBlocks.Load()) * blockSize,
		Concurrent: g.Most.Load(),
		Stranded:   g.Stranded.Load() * blockSize,
		KVBatches:  l.events[rank].Published(),
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
		last := c.Epoch.Load()
		if epoch < last {
			c.StaleEpochs.Add(1)
			return
		}
		if c.Epoch.CompareAndSwap(last, epoch) {
			return
		}
	}
}
