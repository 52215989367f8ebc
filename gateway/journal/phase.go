package journal

import "evenkeel/gateway/receipt"

// Phase says how far a request is, or was when its client left, as a label of metrics.
type Phase string

// The phases of a request, in their order.
const (
	Queued    Phase = receipt.Queued       // the request waits for prefill
	Prefill   Phase = receipt.Prefilling   // from the prefill request to its answer
	Pooled    Phase = receipt.Pooled       // the request waits for a slot on a decode rank
	Transfer  Phase = receipt.Transferring // from the decode request to its first event
	Streaming Phase = "streaming"          // from the first event on
)

var phases = []Phase{Queued, Prefill, Pooled, Transfer, Streaming}

// waitOf returns the field of a receipt that has the time of a phase.
func waitOf(w *receipt.Waits, p Phase) *float64 {
	switch p {
	case Queued:
		return &w.Queue
	case Prefill:
		return &w.Prefill
	case Pooled:
		return &w.Pool
	case Transfer:
		return &w.Transfer
	default:
		return &w.Relay
	}
}
