package mooncake

import (
	"encoding/json"
	"errors"
	"sync/atomic"
	"time"
)

// If Acquire returns one of these, the prompt must be prefilled again.
var (
	ErrTaken   = errors.New("mooncake: the hand-off was already used")
	ErrExpired = errors.New("mooncake: the hand-off is past its deadline")
)

// Handoff holds the kv_transfer_params from a prefill engine. One decode request may use them, and
// only before a deadline: a later or second use could read another user's prompt.
type Handoff struct {
	params   json.RawMessage
	deadline time.Time   // for Acquire: later, the decode engine might pull too late
	expires  time.Time   // for Discard: the prefill engine has freed the blocks
	taken    atomic.Bool // an atomic.Bool, so that go vet reports a copy of the Handoff
}

// NewHandoff takes over params. deadline is the time of the probe's response headers plus
// HoldBudget, expires these headers plus the whole kv_hold_timeout.
func NewHandoff(params json.RawMessage, deadline, expires time.Time) Handoff {
	return Handoff{params: params, deadline: deadline, expires: expires}
}

// Deadline returns the time from which on Acquire fails.
func (h *Handoff) Deadline() time.Time { return h.deadline }

// Acquire returns the params to the first caller before the deadline, and ErrTaken or ErrExpired to
// any other.
func (h *Handoff) Acquire(now time.Time) (json.RawMessage, error) {
	return h.takeBefore(now, h.deadline)
}

func (h *Handoff) takeBefore(now, end time.Time) (json.RawMessage, error) {
	if !now.Before(end) {
		return nil, ErrExpired
	}
	if !h.taken.CompareAndSwap(false, true) {
		return nil, ErrTaken
	}
	return h.params, nil
}

// Discard is Acquire for a decode request whose only purpose is that the prefill engine frees the
// blocks. It succeeds until expires, because no client gets the answer.
func (h *Handoff) Discard(now time.Time) (json.RawMessage, error) {
	return h.takeBefore(now, h.expires)
}

// Expires returns the time from which on Discard fails.
func (h *Handoff) Expires() time.Time { return h.expires }
