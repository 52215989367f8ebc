package handoff

import (
	"context"

	"evenkeel/engine"
)

// witness is what was known of a prefill engine when a hand-off was sent to a decode engine.
type witness struct {
	expired float64 // hand-offs that it had given away before anything had fetched them
	known   bool
	before  int // hand-offs of ours that were left to the engine and that it had given away
}

// Witness notes what the prefill engine says of hand-offs that it has given away.
func (h *Handoff) Witness(m *engine.Monitor) {
	h.seen.expired, h.seen.known = m.Expired(h.Lease.Candidate.Instance)
	held, ever := h.Lease.Unfetched()
	h.seen.before = ever - held
}

// Denied asks the prefill engine whether it may have given this hand-off away since it was sent: it has given away more than
// those that were left to it. One that does not say denies nothing. A hand-off of another proxy that was left to the
// engine looks the same; the prompt is prefilled once more then.
func (h *Handoff) Denied(ctx context.Context, m *engine.Monitor) bool {
	if !h.seen.known {
		return false
	}
	n, known := m.ExpiredNow(ctx, h.Lease.Candidate.Instance)
	_, ever := h.Lease.Unfetched()
	return known && n-h.seen.expired > float64(ever-h.seen.before)
}
