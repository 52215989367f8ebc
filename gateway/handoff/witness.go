package handoff

import (
	"context"
	"time"

	"evenkeel/engine"
)

// witness is what a prefill engine had said of its hand-offs when one of them was sent to a decode engine.
type witness struct {
	expired float64 // hand-offs that it had given away before anything had fetched them
	known   bool
	before  int // hand-offs of ours that were left to the engine and that it had given away
}

// Witness notes what the prefill engine says of hand-offs that it has given away.
func (h *Handoff) Witness(m Monitor) {
	h.seen.expired, h.seen.known = m.Expired(h.Lease.Candidate.Instance)
	held, ever := h.Lease.Unfetched()
	h.seen.before = ever - held
}

// Refuted says that the first event of an answer has come, and that the prefill engine may have given the KV away before. It
// is asked where only renewals can have kept the KV: has it given away more, since the hand-off was sent, than what was
// left to it? An engine that does not say refutes nothing. What another proxy left to it looks the same; the prompt is
// prefilled once more then.
func (h *Handoff) Refuted(ctx context.Context, m Monitor, w *engine.Wait, now time.Time) bool {
	if h == nil || !h.seen.known || !w.Renewed(now) {
		return false
	}
	n, known := m.ExpiredNow(ctx, h.Lease.Candidate.Instance)
	_, ever := h.Lease.Unfetched()
	if !known || n-h.seen.expired <= float64(ever-h.seen.before) {
		return false
	}
	w.Resalt() // the decode engine may have cached it
	return true
}
