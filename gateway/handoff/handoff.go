// Package handoff has the hand-offs of prefilled prompts: until when one may be decoded, and what
// becomes of one from which no answer is made.
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

// A Handoff is a prefilled prompt, with its lease, until it is used or discarded.
type Handoff struct {
	mooncake.Handoff
	Lease  *prefill.Lease
	Made   roster.Generation // of the KV
	Avoid  []int32           // decode workers that failed to decode the hand-off
	params json.RawMessage   // the kv_transfer_params; nil: not taken yet

	// Of the attempt that made the hand-off; the request may be in a later one when it is used.
	Request         zapcore.ObjectMarshaler // the request's fields for the log
	ID              string
	ReusedRequestID string // that a decode request must have; empty: any new one
	Arrival         time.Time
	Model           roster.Route
	Endpoint        mooncake.Endpoint
	Body            mooncake.Body
	Changes         *mooncake.Patch
	Prompt          int // length of the prompt in tokens
	Attempt         int

	expiriesBefore engine.Expiries // of the prefill engine, before the hand-off was sent
}

// TakeParams takes the hand-off. A later call, for another rank, returns the same params until the
// deadline. It is allowed only if no byte of a request with them was written to an engine.
func (h *Handoff) TakeParams(now time.Time) (json.RawMessage, error) {
	if h.params != nil {
		if !now.Before(h.Deadline()) {
			return nil, mooncake.ErrExpired
		}
		return h.params, nil
	}
	var err error
	h.params, err = h.Acquire(now)
	return h.params, err
}

// SetRequestID sets the id by which the prefill engine knows its blocks. h may be nil. The id is
// safe to use again: the prefill call is over, and such a hand-off is not discarded while a decode
// engine may still have it.
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

// FirstEventBy is until when the KV is certainly kept: a later answer may be made of another
// request's blocks. See mooncake.Profile.PulledWithin.
func (h *Handoff) FirstEventBy() time.Time {
	return h.Expires().Add(-h.Expires().Sub(h.Deadline()) / 4)
}

// BindBy is until when the hand-off may wait for a rank: before the deadline by the time to send
// it, a sixteenth of the margin, at most 250 ms.
func (h *Handoff) BindBy() time.Time {
	return h.Deadline().Add(-min(h.Expires().Sub(h.Deadline())/16, 250*time.Millisecond))
}

// ErrOutlived means that the prefill engine may have lost the KV since.
var ErrOutlived = errors.New("the prefill engine may have restarted or dropped its KV since it made the hand-off")

// ErrLate means that the KV may have been another prompt's when the decode engine read it.
var ErrLate = errors.New("the decode engine gave no sign of life for longer than the prefill engine certainly keeps the KV, and began " +
	"its answer after that: it may be made of another prompt's KV")

// BlockTokens is the largest KV block of an engine that does not tell it, in tokens.
const BlockTokens = 128

// MostComputed is how many prompt tokens a rank may compute beside a hand-off: it may pull only
// whole blocks. Blocks are longer with decode context parallelism, and in hybrid models.
func MostComputed(rank *roster.Rank) int64 { return max(BlockTokens, rank.BlockTokens) }

// SettleLease gives back the lease of a prefill. With Refuse and Lose, fault, which may be nil,
// counts against the engine.
func SettleLease(l *prefill.Lease, disposition lifecycle.Disposition, fault *failure.Fault) {
	engineFailed := disposition == lifecycle.Refuse || disposition == lifecycle.Lose
	if engineFailed && fault != nil && fault.Err != nil {
		l.Blame(fault.Err.Error())
	}
	switch disposition {
	case lifecycle.Free:
		l.Release()
	case lifecycle.Refuse: // as if the request had not been written
		const written = false
		l.Failed(written, 0)
	case lifecycle.Lose: // the prompt stays charged until the hold timeout
		const written = true
		l.Failed(written, l.Candidate.Profile.KVHoldTimeout)
	default: // Orphan, and KV that no decode engine will fetch
		l.Orphan()
	}
}

// Repeat calls check after first, and again after each duration that check returns, until that is 0
// or less, or stop is called, which check must not do. Once stop has returned, check does not run
// any more.
func Repeat(first time.Duration, check func() (next time.Duration)) (stop func()) {
	var mu sync.Mutex
	var timer *time.Timer // nil: stop was called
	mu.Lock()
	defer mu.Unlock()
	timer = time.AfterFunc(first, func() {
		mu.Lock()
		defer mu.Unlock()
		if timer == nil { // stopped while this goroutine waited for mu
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

// RemainingWait is how much longer evenkeel waits for an answer in one piece of at most that many
// tokens; 0 or less: no longer. Nothing arrives before the whole answer is computed. So after
// limits.probe_timeout, evenkeel waits while the rank's core gives signs of life (events of other
// streams, or gauges that move), at most maxTokenTime per token more.
func RemainingWait(r *roster.Rank, settings *fleet.Settings, asked time.Time, tokens int, now time.Time) time.Duration {
	deadline := asked.Add(settings.Limits.ProbeTimeout)
	countedTokens := min(tokens, maxCountedTokens)
	latest := deadline.Add(time.Duration(countedTokens) * maxTokenTime)
	if aliveUntil := r.Signs.LastSign().Add(settings.Limits.EventTimeout); aliveUntil.After(deadline) {
		deadline = aliveUntil
	}
	if deadline.After(latest) {
		deadline = latest
	}
	return deadline.Sub(now)
}

// maxTokenTime is longer than any speed that clients accept. It bounds the wait for an engine that
// has lost the request but still serves others.
const maxTokenTime = time.Second

// maxCountedTokens makes their time fit a time.Duration. The limits may allow more: several hundred
// choices, of a model whose context is not known.
const maxCountedTokens = 1 << 32

// LimitOnePiece ends the call of an answer in one piece when RemainingWait is over, unless stop is
// called.
func LimitOnePiece(r *roster.Rank, call *engine.Call, settings *fleet.Settings, tokens int) (stop func()) {
	asked := time.Now()
	firstWait := RemainingWait(r, settings, asked, tokens, asked)
	return Repeat(firstWait, func() (nextCheck time.Duration) {
		timeLeft := RemainingWait(r, settings, asked, tokens, time.Now())
		if timeLeft > 0 {
			return timeLeft
		}
		call.Expire()
		return expireInterval // one Expire may have no effect
	})
}

// Expire does nothing while the call has no connection yet, and the call may begin a new wait in
// the same moment.
const expireInterval = time.Second

// AwaitFirstEvent begins the wait for the first event of a request that is sent to a rank. h may be
// nil. onePiece: the answer comes in one piece.
func (h *Handoff) AwaitFirstEvent(r *roster.Rank, ep mooncake.Endpoint, now time.Time, onePiece bool) *engine.PendingPull {
	wait := engine.Wait{OnePiece: onePiece, AnyRank: !r.EngineHonoursRank(ep)}
	if h != nil {
		wait.KeptUntil, wait.MaxSilence = h.FirstEventBy(), h.FirstEventBy().Sub(h.Deadline())
	}
	return r.Signs.AddPull(now, wait)
}

// MayPullLater says whether a decode engine whose call failed may pull the KV yet.
func MayPullLater(fault *failure.Fault) bool {
	unanswered := fault.Reason < lifecycle.Garbled // from Garbled on, the engine has answered
	return unanswered && fault.Verdict().KV == lifecycle.MaybeRunning
}

// LeaksBlocks says whether a decode engine that failed at an expired hand-off may hold KV blocks
// for ever: its core stood still, reads the request only now, and waits for a push of KV that is
// gone (vLLM's watchdog for registrations only writes a log line: nixl/push_scheduler.py, vLLM
// issue 46283).
func LeaksBlocks(r *roster.Rank, fault *failure.Fault) bool {
	return r.Profile.Connector == mooncake.NIXLPush && MayPullLater(fault)
}

// Forever is the limit of a wait that other code ends.
const Forever = 1000 * time.Hour

// NoteExpiries is called before an answer in one piece is asked for.
func (h *Handoff) NoteExpiries(m Monitor) { h.expiriesBefore = m.Expiries(h.Lease.Candidate.Instance) }

// FreedSince says whether the prefill engine has freed unfetched KV since NoteExpiries. If it was
// other hand-offs' KV, this prompt, and those that wait on the rank, are prefilled once more in
// vain.
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
