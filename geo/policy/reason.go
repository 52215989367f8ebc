package policy

// Reason is why a place takes no request now. Metrics and receipts use its
// words.
type Reason uint8

// The reasons. With a reason from Queued to NoRoom, a request may wait for the place. With the
// others, a place is not even compared.
const (
	Available  Reason = iota
	Queued            // peer: its arrival queue is longer than tau
	NoReplica         // peer: none of its replicas takes a request
	Full              // no more requests may be sent; peer: all that it takes are reserved, or as many are unanswered as its window allows
	Pending           // replica: the engine has requests that it has not begun
	NoRoom            // replica: its KV gate is closed, but is predicted to open
	Unhealthy         // replica
	GateClosed        // replica: its KV gate is closed, or the decode side has no room; it is not known for how long
	Never             // peer: no good probe yet
	Down              // peer: missed too many probes
	Stale             // peer: the last good probe is too old
	Version           // peer: speaks another major version
	Draining          // peer
	Model             // peer: does not offer the model
	Nonsense          // peer: its answer has impossible numbers
	Circuit           // peer: too many forwards fell back
	Budget            // peer: the day's egress is spent
)

var reasonWords = [...]string{
	"available", "queue", "no_replica", "full", "pending", "no_room", "unhealthy", "gate_closed", "never_probed", "down", "stale", "version",
	"draining", "model", "nonsense", "circuit", "budget",
}

func (r Reason) String() string { return reasonWords[r] }

// Awaitable says that a request may wait for the place: there is no reason, or the reason is expected to end soon.
func (r Reason) Awaitable() bool { return r < Unhealthy }
