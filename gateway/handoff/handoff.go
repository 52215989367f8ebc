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
	"evenkeel/gateway/lifecycle"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// A Handoff is a prefilled prompt with everything that must be settled with it.
type Handoff struct {
	mooncake.Handoff
	Origin
	Lease     *prefill.Lease
	Born      fleet.Birth
	Avoid     []int32         // workers that failed at it
	kv        json.RawMessage // the kv_transfer_params once they were taken; nil: they were not
	witnessed witness         // what the prefill engine had said when the hand-off was sent
}

// Origin is the attempt that made the hand-off. Its request may be at another attempt when the hand-off is used.
type Origin struct {
	Request  zapcore.ObjectMarshaler // names it in the log
	ID       string                  // of the request
	ProbeID  string                  // X-Request-Id that a decode request must have; empty: any new one
	Arrival  time.Time
	Model    fleet.Route
	Endpoint mooncake.Endpoint
	Body     mooncake.Body
	Changes  *mooncake.Changes
	Prompt   int // tokens
	Attempt  int
}

// Params returns the kv_transfer_params for a decode request. The hand-off is taken once. As long as no byte of a request with it was
// written to an engine, a later call returns the same params for another rank, but not after the deadline of the hand-off.
func (h *Handoff) Params(now time.Time) (json.RawMessage, error) {
	if h.kv != nil {
		if !now.Before(h.Deadline()) {
			return nil, mooncake.ErrExpired
		}
		return h.kv, nil
	}
	var err error
	h.kv, err = h.Acquire(now)
	return h.kv, err
}

// Identify gives a decode request the probe's id if the prefill engine knows the
// blocks only by that id. Without a hand-off (h is nil) the headers stay as they are. No engine then has another request of this id: the
// probe is over, and such a hand-off is not discarded while an engine may still have it.
func (h *Handoff) Identify(headers []engine.Header) []engine.Header {
	if h == nil || h.ProbeID == "" {
		return headers
	}
	for i := range headers {
		if headers[i].Name == engine.RequestID {
			headers[i].Value = h.ProbeID
		}
	}
	return headers
}

// PulledBy is until when a first event is believed without a sign that the hold was renewed: its KV was then read
// while the prefill engine still had the blocks. A later event may be made of blocks that belong to another request by then.
// A quarter of the margin between Deadline and Expires is left, because the two clocks differ: the engine counts from the end of the
// prefill, the proxy from the engine's answer. An answer in one piece does not show when its KV was pulled. So if nothing renews the
// hold, such an answer may come later.
func (h *Handoff) PulledBy() time.Time {
	return h.Expires().Add(-h.Expires().Sub(h.Deadline()) / 4)
}

// BindBy is until when the hand-off may wait for a rank. It is a little before the
// deadline, because the hand-off must also be sent before the deadline.
func (h *Handoff) BindBy() time.Time {
	return h.Deadline().Add(-min(h.Expires().Sub(h.Deadline())/16, 250*time.Millisecond))
}

// ErrOutlived is the error of a hand-off whose prefill engine is another process now.
var ErrOutlived = errors.New("the prefill engine's process that made the hand-off is gone, and its KV with it")

// ErrLate is the error of an answer whose KV was perhaps another prompt's when it was read.
var ErrLate = errors.New("the decode engine gave no sign of life for longer than the prefill engine certainly keeps the KV, and began " +
	"its answer after that: it may be made of another prompt's KV")

// BlockTokens is the largest block of KV that engines use. A pull may end with the
// last whole block, so that an engine computes less than one block of a prompt that
// it did get.
const BlockTokens = 128

// Settle gives a prompt's lease back, in the way that the end of its leg requires. why is the fault that the leg ended with; nil: there was
// none.
func Settle(l *prefill.Lease, how lifecycle.How, fault *failure.Fault) {
	if (how == lifecycle.Refuse || how == lifecycle.Lose) && fault != nil && fault.Err != nil {
		l.Blame(fault.Err.Error())
	}
	switch how {
	case lifecycle.Free:
		l.Release()
	case lifecycle.Refuse:
		l.Failed(false, 0)
	case lifecycle.Lose:
		l.Failed(true, l.Candidate.Profile.KVHoldTimeout)
	default: // also KV that should be discarded, but that no engine will fetch
		l.Orphan()
	}
}

// LimitFromSlot ends a call that waits for its first event when its request has had a slot for as long as limit, until stop is called. A
// hand-off may be
// bound to a rank that has no slot or no KV room for it yet: ahead of a slot that comes free, or at its deadline. Where
// the engine's own queue renews its hold, the time that it waits there does not count.
func LimitFromSlot(slot *dispatcher.Slot, call *engine.Call, limit time.Duration) (stop func()) {
	every := max(limit/16, time.Millisecond) // how often the slot is looked at
	var slotSince time.Time                  // zero: the request has had no slot yet
	return Watch(every, func() time.Duration {
		switch now := time.Now(); {
		case slot.Waits():
		case slotSince.IsZero():
			slotSince = now
		case now.Sub(slotSince) >= limit:
			call.Expire()
		}
		return every
	})
}

// Watch has look called after a while, and then again after each time that it returns, until that is 0 or less, or stop is called. look
// does not run any more when stop has returned.
func Watch(after time.Duration, look func() (again time.Duration)) (stop func()) {
	var mu sync.Mutex
	var timer *time.Timer // nil: it was stopped
	mu.Lock()
	defer mu.Unlock()
	timer = time.AfterFunc(after, func() {
		mu.Lock()
		defer mu.Unlock()
		if timer == nil {
			return
		}
		if again := look(); again > 0 {
			timer.Reset(again)
		}
	})
	return func() {
		mu.Lock()
		defer mu.Unlock()
		timer.Stop()
		timer = nil
	}
}

// Patience is how much longer evenkeel waits for an answer in one piece; 0 or less: the wait is over. asked is when the engine was asked
// for the answer, and tokens is how many tokens the answer may have. Nothing arrives before all of the answer is computed. So after
// limits.probe_timeout evenkeel waits as long as the core of the rank gives signs of life, by events of other streams or by gauges, and
// at most for as long as the tokens may take.
func Patience(r *fleet.Rank, settings *fleet.Settings, asked time.Time, tokens int, now time.Time) time.Duration {
	until := asked.Add(settings.Limits.ProbeTimeout)
	latest := until.Add(time.Duration(tokens) * slowestToken)
	if alive := r.Signs.Last().Add(settings.Limits.EventTimeout); alive.After(until) {
		until = alive
	}
	if until.After(latest) {
		until = latest
	}
	return until.Sub(now)
}

// slowestToken is longer than an engine takes for a token at any speed that clients accept. It only bounds the wait for an engine
// that has lost one request and goes on with others.
const slowestToken = time.Second

// LimitWhole ends the call of an answer in one piece when Patience is over, unless stop is called before. tokens is how many tokens the
// answer may have.
func LimitWhole(r *fleet.Rank, call *engine.Call, settings *fleet.Settings, tokens int) (stop func()) {
	asked := time.Now()
	return Watch(Patience(r, settings, asked, tokens, asked), func() time.Duration {
		left := Patience(r, settings, asked, tokens, time.Now())
		if left <= 0 {
			call.Expire()
		}
		return left
	})
}

// Await begins the wait for the first event of a request that is sent to a rank, with a hand-off or, if h is nil, without
// one. The wait says until when the prefill engine surely keeps the KV. whole says that the answer comes in one piece, so that nothing but
// gauges tells what the core of the rank does until then.
func (h *Handoff) Await(r *fleet.Rank, now time.Time, whole bool) *engine.Wait {
	switch {
	case h == nil || whole && !(r.Profile.Renews() && r.Signs.Gauged() && r.Heeds(h.Endpoint)):
		return r.Signs.Await(now, mooncake.HeldUntil(now.Add(Forever)))
	case !r.Heeds(h.Endpoint): // the request may be on another rank than the one whose signs these are
		return r.Signs.Await(now, mooncake.HeldUntil(h.PulledBy()))
	}
	return r.Signs.Await(now, r.Profile.Hold(now, h.PulledBy()))
}

// Strands says whether a decode engine that failed at a hand-off, whose time is over, may keep blocks for it for ever: if its core stood
// still, it reads the request only now, and waits for KV that is gone. An engine that has answered has read it before.
func Strands(r *fleet.Rank, fault *failure.Fault) bool {
	return fault.Verdict().KV == lifecycle.DoubtOn && fault.Why < lifecycle.Garbled && lifecycle.Dialects[r.Profile.Connector].Strands
}

// Forever is the limit of a wait that something else ends.
const Forever = 1000 * time.Hour

// witness is what a prefill engine had said of its hand-offs when one of them was sent to a decode engine.
type witness struct {
	expired     float64 // hand-offs that it had given away before anything had fetched them
	known       bool    // the engine reports that number
	oursExpired int     // hand-offs of ours that were left to the engine and that it had given away
}

// Witness notes, when the hand-off is sent, what the prefill engine says of hand-offs that it has given away. Refuted compares with it.
func (h *Handoff) Witness(m Monitor) {
	h.witnessed.expired, h.witnessed.known = m.Expired(h.Lease.Candidate.Instance)
	held, ever := h.Lease.Unfetched()
	h.witnessed.oursExpired = ever - held
}

// Refuted says whether the prefill engine may have given the KV away before the first event of the answer came. It only looks if
// nothing but renewals can have kept the KV. Then it compares how many hand-offs the engine has given away since this one was
// sent with how many were left to the engine. An engine that does not report the number refutes nothing. If another proxy left
// hand-offs to the engine, that looks the same, and the prompt is prefilled once more.
func (h *Handoff) Refuted(ctx context.Context, m Monitor, wait *engine.Wait, now time.Time) bool {
	if h == nil || !h.witnessed.known || !wait.Renewed(now) {
		return false
	}
	expired, known := m.ExpiredNow(ctx, h.Lease.Candidate.Instance)
	_, ever := h.Lease.Unfetched()
	if !known || expired-h.witnessed.expired <= float64(ever-h.witnessed.oursExpired) {
		return false
	}
	wait.Resalt() // the decode engine may have cached the wrong KV
	return true
}
