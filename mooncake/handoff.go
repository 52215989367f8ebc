package mooncake

import (
	"encoding/json"
	"errors"
	"sync/atomic"
	"time"
)

// Sentinels of Acquire and Discard. After either of them from Acquire, the prompt must be prefilled again.
var (
	ErrTaken   = errors.New("mooncake: the hand-off was already used")
	ErrExpired = errors.New("mooncake: the hand-off is past its deadline")
)

// Handoff is what a probe returned and one decode request may consume: the
// prefill engine's kv_transfer_params, opaque, single use and perishable.
// Replaying it can answer with another user's text.
type Handoff struct {
	params   json.RawMessage
	deadline time.Time   // from then on Acquire refuses: the pull might come too late
	expires  time.Time   // from then on Discard refuses, too: the prefill engine has freed the blocks
	taken    atomic.Bool // an atomic also makes go vet reject a copy
}

// NewHandoff returns a hand-off with these params and owns them from now on. deadline is the
// time of the probe's response headers plus HoldBudget; expires is that time plus the engine's
// whole hold timeout.
func NewHandoff(params json.RawMessage, deadline, expires time.Time) Handoff {
	return Handoff{params: params, deadline: deadline, expires: expires}
}

// Deadline is the instant from which Acquire refuses.
func (h *Handoff) Deadline() time.Time { return h.deadline }

// Acquire returns the params to the first caller before the deadline, and
// ErrTaken or ErrExpired to any other. After either, prefill again.
func (h *Handoff) Acquire(now time.Time) (json.RawMessage, error) {
	return h.take(now, h.deadline)
}

// take returns the params to the first caller before end, and an error to any other.
func (h *Handoff) take(now, end time.Time) (json.RawMessage, error) {
	if !now.Before(end) {
		return nil, ErrExpired
	}
	if !h.taken.CompareAndSwap(false, true) {
		return nil, ErrTaken
	}
	return h.params, nil
}

// Discard is Acquire for a decode whose answer is thrown away, so that the prefill engine
// frees the blocks. Its tokens reach no client, so that it may come as long as the
// blocks are held.
func (h *Handoff) Discard(now time.Time) (json.RawMessage, error) {
	return h.take(now, h.expires)
}

// Expires is the instant from which Discard refuses, too.
func (h *Handoff) Expires() time.Time { return h.expires }
