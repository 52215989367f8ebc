// Package handoff has the hand-offs of prefilled prompts: until when a hand-off may be
// decoded, and what becomes of a hand-off from which no answer is made.
package handoff

import (
	"context"
	"encoding/json"
	"errors"
	"sync"
	"time"

	"go.uber.org/zap/zapcore"

	"evenkeel/engine"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/lifecycle"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// A Handoff is a prefilled prompt, with the lease and the other state that it needs until it is used or discarded.
type Handoff struct {
	mooncake.Handoff
	Lease  *prefill.Lease
	Made   roster.Generation // of the KV
	Avoid  []int32           // decode workers that failed to decode the hand-off
	params json.RawMessage   // the kv_transfer_params; nil: not taken yet

	// The fields below describe the request in the attempt that made the hand-off. The request may be in a later attempt when the
	// hand-off is used.
	Request         zapcore.ObjectMarshaler // the request's fields for the log
	ID              string                  // request id
	ReusedRequestID string                  // X-Request-Id that a decode request must have; empty: any new one
	Arrival         time.Time
	Model           roster.Route
	Endpoint        mooncake.Endpoint
	Body            mooncake.Body
	Changes         *mooncake.Patch
	Prompt          int // length of the prompt in tokens
	Attempt         int

	expiriesBefore engine.Expiries // of the prefill engine, before the hand-off was sent
}

// TakeParams returns the kv_transfer_params for a decode request. The first call takes the hand-off. A later call, for another rank,
// returns the same params until the deadline of the hand-off. It is allowed only if no byte of a request with the params was written to an
// engine.
func (h *Handoff) TakeParams(now time.Time) (json.RawMessage, error) {
	if h.params != nil { // taken before, for a rank that was sent nothing
		if !now.Before(h.Deadline()) {
			return nil, mooncake.ErrExpired
		}
		return h.params, nil
	}
	var err error
	h.params, err = h.Acquire(now)
	return h.params, err
}

// SetRequestID gives a decode request the id of the prefill request if the prefill engine knows the KV blocks only by this id. Without a
// hand-off (h is nil), the headers stay as they are. The id is safe to use again: the prefill call is over, and such a hand-off is not
// discarded while a decode engine may still have it.
func (h *Handoff) SetRequestID(headers []engine.Header) []engine.Header {
	if h == nil || h.ReusedRequestID == "" {
		return headers
	}
	for i := range headers {
		if headers[i].Name == engine.RequestID {
			headers[i].Value = h.ReusedRequestID
		}
	}
	return headers
}

// FirstEventBy is until when the KV is certainly kept. A later answer may be made of KV blocks that belong to another request by then.
// FirstEventBy lies before Expires by a quarter of the margin between Deadline and Expires (see mooncake.Profile.PulledWithin).
func (h *Handoff) FirstEventBy() time.Time {
	return h.Expires().Add(-h.Expires().Sub(h.Deadline()) / 4)
}

// BindBy is until when the hand-off may wait for a rank. It lies a little before the deadline, to leave time to send the hand-off: a
// sixteenth of the margin between Deadline and Expires, but at most 250 ms.
func (h *Handoff) BindBy() time.Time {
	return h.Deadline().Add(-min(h.Expires().Sub(h.Deadline())/16, 250*time.Millisecond))
}

// ErrOutlived is the error of a hand-off whose prefill engine may have lost the KV since.
var ErrOutlived = errors.New("the prefill engine may have restarted or dropped its KV since it made the hand-off")

// ErrLate is the error of an answer whose KV may have been another prompt's when the decode engine read it.
var ErrLate = errors.New("the decode engine gave no sign of life for longer than the prefill engine certainly keeps the KV, and began " +
	"its answer after that: it may be made of another prompt's KV")

// BlockTokens is the largest number of tokens in one KV block of an engine that does not tell it.
const BlockTokens = 128

// MostComputed is how many prompt tokens a rank may compute beside a hand-off: it may pull only whole blocks, and then computes the rest of
// the prompt itself, which is less than one block. Blocks are longer with decode context parallelism, and in hybrid models.
func MostComputed(rank *roster.Rank) int64 { return max(BlockTokens, rank.BlockTokens) }

// SettleLease gives back the lease of a prompt's prefill, in the way that disposition says. With Refuse and Lose, a failure is counted
// against the engine. fault is the fault with which the prefill ended; nil: there was none.
func SettleLease(l *prefill.Lease, disposition lifecycle.Disposition, fault *failure.Fault) {
	engineFailed := disposition == lifecycle.Refuse || disposition == lifecycle.Lose
	if engineFailed && fault != nil && fault.Err != nil {
		l.Blame(fault.Err.Error())
	}
	switch disposition {
	case lifecycle.Free:
		l.Release()
	case lifecycle.Refuse: // the engine holds no KV, as if the request had not been written to it
		const written = false
		l.Failed(written, 0)
	case lifecycle.Lose: // the engine may hold the KV, so the prompt stays charged until the hold timeout
		const written = true
		l.Failed(written, l.Candidate.Profile.KVHoldTimeout)
	default: // Orphan, and KV that should be discarded, but that no decode engine will fetch
		l.Orphan()
	}
}

// Repeat calls check once the duration first has passed, and then again after each duration that check returns. It ends when check returns
// 0 or less, or when stop is called, which check must not do. Once stop has returned, check does not run any more.
func Repeat(first time.Duration, check func() (next time.Duration)) (stop func()) {
	var mu sync.Mutex
	var timer *time.Timer // nil: stop was called
	mu.Lock()
	defer mu.Unlock()
	timer = time.AfterFunc(first, func() {
		mu.Lock()
		defer mu.Unlock()
		if timer == nil { // stop was called while this goroutine waited for mu
			return
		}
		if next := check(); next > 0 {
			timer.Reset(next)
		}
	})
	return func() {
		mu.Lock()
		defer mu.Unlock()
		if timer != nil {
			timer.Stop()
			timer = nil
		}
	}
}

// RemainingWait is how much longer evenkeel waits for an answer in one piece; 0 or less: the wait is over. asked is when the request was
// sent, and tokens is how many tokens the answer may have. Nothing arrives before the whole answer is computed. So after
// limits.probe_timeout, evenkeel goes on waiting while the core of the rank gives signs of life: events of other streams, or gauges that
// move. Even then it waits no longer than limits.probe_timeout plus maxTokenTime per token.
func RemainingWait(r *roster.Rank, settings *fleet.Settings, asked time.Time, tokens int, now time.Time) time.Duration {
	deadline := asked.Add(settings.Limits.ProbeTimeout)
	countedTokens := min(tokens, maxCountedTokens) // so that their time fits a time.Duration
	latest := deadline.Add(time.Duration(countedTokens) * maxTokenTime)
	if aliveUntil := r.Signs.LastSign().Add(settings.Limits.EventTimeout); aliveUntil.After(deadline) { // the core gave a sign of life
		deadline = aliveUntil
	}
	if deadline.After(latest) {
		deadline = latest
	}
	return deadline.Sub(now)
}

// maxTokenTime is longer than an engine takes per token at any speed that clients accept. It only matters for an engine that has lost
// the request but still serves others: it bounds the wait for this engine.
const maxTokenTime = time.Second

// maxCountedTokens bounds the tokens for which a wait is computed, so that their time fits a time.Duration. The limits of an answer may
// allow more: several hundred choices, of a model whose context is not known.
const maxCountedTokens = 1 << 32

// LimitOnePiece ends the call of an answer in one piece when RemainingWait is over, unless stop is called first. Each sign of life of the
// core, the part of the engine that computes, may prolong that wait. tokens is how many tokens the answer may have.
func LimitOnePiece(r *roster.Rank, call *engine.Call, settings *fleet.Settings, tokens int) (stop func()) {
	asked := time.Now()
	firstWait := RemainingWait(r, settings, asked, tokens, asked) // as it is now, when the request is sent
	return Repeat(firstWait, func() (nextCheck time.Duration) {
		timeLeft := RemainingWait(r, settings, asked, tokens, time.Now())
		if timeLeft > 0 { // a sign of life has prolonged the wait
			return timeLeft
		}
		call.Expire()
		return expireInterval // one Expire may have no effect, so it is repeated until stop is called
	})
}

// expireInterval is the pause before Expire is called again after a wait has expired. Expire does nothing while the call has no connection
// yet, and the call may begin a new wait in the same moment.
const expireInterval = time.Second

// AwaitFirstEvent begins the wait for the first event of a request that is sent to a rank, with the hand-off h, or without one (nil). ep is
// the endpoint of the request, and onePiece says that the answer comes in one piece.
func (h *Handoff) AwaitFirstEvent(r *roster.Rank, ep mooncake.Endpoint, now time.Time, onePiece bool) *engine.PendingPull {
	wait := engine.Wait{OnePiece: onePiece, AnyRank: !r.EngineHonoursRank(ep)}
	if h != nil {
		wait.KeptUntil, wait.MaxSilence = h.FirstEventBy(), h.FirstEventBy().Sub(h.Deadline())
	}
	return r.Signs.AddPull(now, wait)
}

// MayPullLater says whether a decode engine whose call failed may pull the KV of the hand-off yet, because it has not answered.
func MayPullLater(fault *failure.Fault) bool {
	unanswered := fault.Reason < lifecycle.Garbled // from this reason on, the engine has answered
	return unanswered && fault.Verdict().KV == lifecycle.MaybeRunning
}

// LeaksBlocks says whether a decode engine that failed at an expired hand-off may hold KV blocks
// for it for ever. This happens if the core of the engine stood still: it reads the request only
// now, and waits for a push of KV that is gone (vLLM's watchdog for registrations only writes a log
// line: nixl/push_scheduler.py, vLLM issue 46283). An engine that has answered has read the request
// before.
func LeaksBlocks(r *roster.Rank, fault *failure.Fault) bool {
	return r.Profile.Connector == mooncake.NIXLPush && MayPullLater(fault)
}

// Forever is the limit of a wait that other code ends.
const Forever = 1000 * time.Hour

// NoteExpiries is called before an answer in one piece is asked for.
func (h *Handoff) NoteExpiries(m Monitor) { h.expiriesBefore = m.Expiries(h.Lease.Candidate.Instance) }

// FreedSince says whether the prefill engine has freed unfetched KV since NoteExpiries. It may be the KV of other hand-offs: then the only
// harm is that this prompt, and those that wait on the rank, are prefilled once more.
func (h *Handoff) FreedSince(ctx context.Context, m Monitor, engines Engines) mooncake.Freed {
	before, now := h.expiriesBefore, m.ExpiriesNow(ctx, h.Lease.Candidate.Instance)
	inDoubt, _ := engines.KVInDoubt(h.Made)
	switch {
	case inDoubt || before != now: // also if the count is not known any more
		return mooncake.FreedSome
	case !now.Known:
		return mooncake.FreedUnknown
	}
	return mooncake.FreedNone
}
