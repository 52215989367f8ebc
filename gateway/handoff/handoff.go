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

	"evenkeel/dispatcher"
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
	Maker  roster.ProcessID // the prefill engine's process, and its weights, that made the KV
	Avoid  []int32          // decode workers that failed to decode the hand-off
	params json.RawMessage  // the kv_transfer_params; nil: not taken yet

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

	// NoteExpiries sets the fields below when the hand-off is sent.
	expiredBefore    float64 // how many hand-offs the prefill engine had freed before a decode engine fetched their KV
	expiredKnown     bool    // the prefill engine reports how many hand-offs it has freed unfetched
	ownExpiredBefore int     // how many hand-offs this proxy had left to the hold timeout, and whose timeout is over
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

// FirstEventBy is the last moment at which a first event proves that its KV was read in time, if the prefill engine's hold on the KV is not
// renewed. A later answer may be made of KV blocks that belong to another request by then. FirstEventBy lies before Expires by a quarter of
// the margin between Deadline and Expires, because the two sides count differently: the engine from the end of the prefill, the proxy from
// the engine's answer. An answer in one piece does not show when its KV was pulled, so it may come later if nothing renews the hold.
func (h *Handoff) FirstEventBy() time.Time {
	return h.Expires().Add(-h.Expires().Sub(h.Deadline()) / 4)
}

// BindBy is until when the hand-off may wait for a rank. It lies a little before the deadline, to leave time to send the hand-off: a
// sixteenth of the margin between Deadline and Expires, but at most 250 ms.
func (h *Handoff) BindBy() time.Time {
	return h.Deadline().Add(-min(h.Expires().Sub(h.Deadline())/16, 250*time.Millisecond))
}

// ErrOutlived is the error of a hand-off whose prefill engine has restarted, so that its KV is lost.
var ErrOutlived = errors.New("the prefill engine's process that made the hand-off is gone, and its KV with it")

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

// LimitFromSlot ends a call that waits for its first event once its request has had a slot for as long as limit. stop ends this watch. The
// time before the slot does not count: a hand-off may be bound to a rank that has no slot or no KV room for it yet, and then waits in the
// engine's own queue, where its hold is renewed.
func LimitFromSlot(slot *dispatcher.Slot, call *engine.Call, limit time.Duration) (stop func()) {
	interval := max(limit/16, time.Millisecond) // between two checks whether the request has a slot
	var slotSince time.Time                     // zero: the request has had no slot yet
	return Repeat(interval, func() time.Duration {
		switch now := time.Now(); {
		case slot.StillInEngineQueue(): // the request still waits for a slot of the engine
		case slotSince.IsZero():
			slotSince = now
		case now.Sub(slotSince) >= limit:
			call.Expire()
		}
		return interval
	})
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

// AwaitFirstEvent begins the wait for the first event of a request that is sent to a rank, with the hand-off h, or without one (nil). The
// wait knows until when the prefill engine certainly keeps the KV (see holdOn). ep is the endpoint of the request, and onePiece says that
// the answer comes in one piece.
func (h *Handoff) AwaitFirstEvent(r *roster.Rank, ep mooncake.Endpoint, now time.Time, onePiece bool) *engine.PendingPull {
	pull := r.Signs.AddPull(now, h.holdOn(r, now, onePiece))
	if !r.EngineHonoursRank(ep) {
		pull.RunsOnAnyRank()
	}
	return pull
}

// holdOn returns until when the prefill engine certainly keeps the KV of a hand-off that is sent to a rank now (the hold):
//   - If there is no hand-off (h is nil), or if nothing shows when its KV is pulled, the hold is unlimited.
//   - Engines of some profiles renew the hold while the hand-off waits in their queue. Then it lasts as long as signs of life of the rank
//     prove the renewals: events of its streams, and gauges that move.
//   - Otherwise it ends at FirstEventBy.
//
// onePiece says that the answer comes in one piece. Until it comes, only gauges show whether the rank works.
func (h *Handoff) holdOn(r *roster.Rank, now time.Time, onePiece bool) mooncake.Hold {
	unlimited := mooncake.HeldUntil(now.Add(Forever))
	if h == nil {
		return unlimited
	}
	runsOnThisRank := r.EngineHonoursRank(h.Endpoint) // else the signs of this rank prove nothing about the request's hold
	hold := h.Lease.Candidate.Profile.Hold(now, h.FirstEventBy(), r.Profile)
	isRenewed := hold.MaxSilence() > 0 // by the profiles of both engines
	gaugesShowRenewals := isRenewed && r.Signs.HasGauges() && runsOnThisRank
	switch {
	// An answer in one piece comes long after its KV was pulled. Nothing shows when that was, so with a hold that ends at a fixed time,
	// good answers would be refused, too. Where gauges show that the hold is renewed, its end moves with them (below).
	case onePiece && !gaugesShowRenewals:
		return unlimited
	case !runsOnThisRank: // nothing can prove renewals, so the hold ends at a fixed time
		return mooncake.HeldUntil(h.FirstEventBy())
	}
	return hold
}

// LeaksBlocks says whether a decode engine that failed at an expired hand-off may hold KV blocks
// for it for ever. This happens if the core of the engine stood still: it reads the request only
// now, and waits for a push of KV that is gone (vLLM's watchdog for registrations only writes a log
// line: nixl/push_scheduler.py, vLLM issue 46283). An engine that has answered has read the request
// before.
func LeaksBlocks(r *roster.Rank, fault *failure.Fault) bool {
	awaitsPush := r.Profile.Connector == mooncake.NIXLPush
	unanswered := fault.Reason < lifecycle.Garbled // from this reason on, the engine has answered
	return awaitsPush && unanswered && fault.Verdict().KV == lifecycle.MaybeRunning
}

// Forever is the limit of a wait that other code ends.
const Forever = 1000 * time.Hour

// NoteExpiries is called when the hand-off is sent. It notes how many hand-offs the prefill engine has freed unfetched, for
// MayHaveExpired.
func (h *Handoff) NoteExpiries(m Monitor) {
	h.expiredBefore, h.expiredKnown = m.Expired(h.Lease.Candidate.Instance)
	stillHeld, total := h.Lease.Unfetched() // hand-offs that this proxy has left to the engine's hold timeout
	h.ownExpiredBefore = total - stillHeld
}

// MayHaveExpired says whether the prefill engine may have freed the KV before the first event of the answer came. Up to the end of the hold
// that the engine keeps in any case, it cannot have. After that, only renewals can have kept the KV, and MayHaveExpired compares two counts
// since NoteExpiries, i.e. since this hand-off was sent: the hand-offs that the engine has freed unfetched, and those that this proxy left
// to the engine's hold timeout. If the engine has freed more, this hand-off may be among them. If the surplus comes from another proxy
// instead, the only harm is that this prompt, and those that wait on the rank, are prefilled once more. If the engine does not report its
// count, MayHaveExpired returns false.
func (h *Handoff) MayHaveExpired(ctx context.Context, m Monitor, pull *engine.PendingPull, now time.Time) bool {
	if h == nil || !h.expiredKnown { // there is no hand-off, or no count to compare with
		return false
	}
	if !pull.KeptByRenewal(now) { // the KV is there without any renewal
		return false
	}
	freed, known := m.ExpiredNow(ctx, h.Lease.Candidate.Instance)
	_, leftSinceStart := h.Lease.Unfetched() // hand-offs that this proxy has left to the hold timeout, also those that are still held
	freedSince := freed - h.expiredBefore
	// When this hand-off was sent, ownExpiredBefore of the hand-offs that this proxy had left were freed. The engine has freed at most
	// all others since.
	ownFreedAtMost := float64(leftSinceStart - h.ownExpiredBefore)
	if !known || freedSince <= ownFreedAtMost {
		return false
	}
	pull.MarkLost() // the decode engine may have cached the wrong KV, and used it for requests that wait there
	return true
}
