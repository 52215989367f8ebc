package mooncake

import (
	"encoding/json"
	"errors"
	"sync/atomic"
	"time"
)

// Sentinels of Take: after either, the prompt must be prefilled again.
var (
	ErrTaken   = errors.New("mooncake: handoff already taken")
	ErrExpired = errors.New("mooncake: handoff past its deadline")
)

// Handoff is what a probe returned and one decode request may consume: the
// prefill engine's kv_transfer_params, opaque, single use and perishable.
// Replaying it can answer with another user's text (contract 0.1, 2.4).
type Handoff struct {
	params   json.RawMessage
	deadline time.Time
	taken    atomic.Bool // an atomic also makes go vet reject a copy
}

// NewHandoff owns params from now on. The deadline is the time of the probe's
// response headers plus HoldBudget.
func NewHandoff(params json.RawMessage, deadline time.Time) *Handoff {
	return &Handoff{params: params, deadline: deadline}
}

// Deadline is the instant from which Take refuses.
func (h *Handoff) Deadline() time.Time { return h.deadline }

// Take returns the params to the first caller before the deadline, and
// ErrTaken or ErrExpired to any other. After either, prefill again.
func (h *Handoff) Take(now time.Time) (json.RawMessage, error) {
	if !now.Before(h.deadline) {
		return nil, ErrExpired
	}
	if !h.taken.CompareAndSwap(false, true) {
		return nil, ErrTaken
	}
	return h.params, nil
}
