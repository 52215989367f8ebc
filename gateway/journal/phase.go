package journal

// Phase says how far a request is, or was when its client left, as a label of metrics.
type Phase string

// The phases of a request, in their order.
const (
	Queued    Phase = "queued"    // the request waits for prefill
	Prefill   Phase = "prefill"   // from the prefill request to its answer
	Pooled    Phase = "pooled"    // the request waits for a slot on a decode rank
	Transfer  Phase = "transfer"  // from the decode request to its first event
	Streaming Phase = "streaming" // from the first event of the answer to its end
)

var phases = []Phase{Queued, Prefill, Pooled, Transfer, Streaming}
