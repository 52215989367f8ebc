// Package handoff holds prefilled prompts: until when one may be decoded, and what
// becomes of one from which no answer is made.
package handoff

import (
	"encoding/json"
	"errors"
	"time"

	"go.uber.org/zap/zapcore"

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
	Lease *prefill.Lease
	Born  fleet.Birth
	Avoid []int32         // workers that failed at it
	kv    json.RawMessage // the taken params, while no engine can have read them
	seen  witness
}

// Origin is the attempt that prefilled it. Its request may be at another by then.
type Origin struct {
	Request  zapcore.ObjectMarshaler // names it in the log
	ID       string                  // of the request
	ProbeID  string                  // X-Request-Id that a decode request must have; empty: any new one
	Arrival  time.Time
	Model    fleet.Route
	Endpoint mooncake.Endpoint
	Body     mooncake.Body
	Leg      *mooncake.Leg
	Prompt   int // tokens
	Attempt  int
}

// Params returns the params for a decode request. The hand-off is taken once; as
// long as no byte of a request with it was written, the params may go to another
// rank, before the same deadline.
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
// blocks only by that id. No engine then has another request of this id: the probe
// is over, and such a hand-off is not discarded while an engine may still have it.
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
// while the prefiller still had the blocks. A later event may be made of blocks that belong to another request by then.
// A quarter of the margin is left for the difference between the two clocks: the engine counts from the end of the
// prefill, we from its answer. An answer in one piece does not show when its KV was pulled. So if nothing renews the
// hold, such an answer may come later.
func (h *Handoff) PulledBy() time.Time {
	return h.Expires().Add(-h.Expires().Sub(h.Deadline()) / 4)
}

// BindBy is until when it may wait for a rank. It is a little before the deadline,
// because the hand-off must also be sent before the deadline.
func (h *Handoff) BindBy() time.Time {
	return h.Deadline().Add(-min(h.Expires().Sub(h.Deadline())/16, 250*time.Millisecond))
}

// ErrOutlived ends what a hand-off was for whose prefill engine is another process now.
var ErrOutlived = errors.New("the prefill engine's process that made the hand-off is gone, and its KV with it")

// ErrLate ends an answer whose KV was perhaps another prompt's when it was read.
var ErrLate = errors.New("the decode engine gave no sign of life for longer than the prefill engine certainly keeps the KV, and began its answer after that: it may be made of another prompt's KV")

// BlockTokens is the largest block of KV that engines use. A pull may end with the
// last whole block, so that an engine computes less than one block of a prompt that
// it did get.
const BlockTokens = 128

// Settle gives a prompt's lease back as the end of its leg wants it. why is the fault that the leg ended with; nil: there was none.
func Settle(l *prefill.Lease, how lifecycle.How, why *failure.Fault) {
	if (how == lifecycle.Refuse || how == lifecycle.Lose) && why != nil && why.Err != nil {
		l.Blame(why.Err.Error())
	}
	switch how {
	case lifecycle.Free:
		l.Release()
	case lifecycle.Refuse:
		l.Failed(false, 0)
	case lifecycle.Lose:
		l.Failed(true, l.Candidate.Profile.KVHoldTimeout)
	default: // also of what is not fetched, for want of somebody who does
		l.Orphan()
	}
}
