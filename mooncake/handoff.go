package mooncake

import (
	"encoding/json"
	"errors"
	"sync/atomic"
	"time"
)

// Acquire and Discard return one of these errors. If Acquire returns one, the prompt must be prefilled again.
var (
	ErrTaken   = errors.New("mooncake: the hand-off was already used")
	ErrExpired = errors.New("mooncake: the hand-off is past its deadline")
)

// Handoff holds the kv_transfer_params that a prefill engine returned. One decode request may use them, and only
// before a deadline: a later or second use could read KV blocks that now belong to another user's prompt.
type Handoff struct {
	params   json.RawMessage
	deadline time.Time   // from this time on, Acquire fails, because the decode engine might pull too late
	expires  time.Time   // from this time on, even Discard fails, because the prefill engine has freed the blocks
	taken    atomic.Bool // an atomic.Bool, so that go vet reports a copy of the Handoff
}

// NewHandoff returns a hand-off with these params, which the caller must not change any more. deadline is the
// time of the probe's response headers plus HoldBudget. expires is the time of these headers plus the whole kv_hold_timeout.
func NewHandoff(params json.RawMessage, deadline, expires time.Time) Handoff {
	return Handoff{params: params, deadline: deadline, expires: expires}
}

// Deadline returns the time from which on Acquire fails, because the decode engine might pull too late.
func (h *Handoff) Deadline() time.Time { return h.deadline }

// Acquire returns the params to the first caller before the deadline, and
// ErrTaken or ErrExpired to any other. After either, prefill again.
func (h *Handoff) Acquire(now time.Time) (json.RawMessage, error) {
	return h.takeBefore(now, h.deadline)
}

// takeBefore returns the params to the first caller before the time end. It returns ErrExpired from end on, and ErrTaken to
// a second caller.
func (h *Handoff) takeBefore(now, end time.Time) (json.RawMessage, error) {
	if !now.Before(end) {
		return nil, ErrExpired
	}
	if !h.taken.CompareAndSwap(false, true) {
		return nil, ErrTaken
	}
	return h.params, nil
}

// Discard returns the params once, as Acquire does, for a decode request whose only purpose is that the prefill engine frees the blocks. It
// succeeds until expires, not only until the deadline, because no client gets the answer of this request.
func (h *Handoff) Discard(now time.Time) (json.RawMessage, error) {
	return h.takeBefore(now, h.expires)
}

// Expires returns the time from which on Discard fails, because the prefill engine has freed the blocks.
func (h *Handoff) Expires() time.Time { return h.expires }
