package policy

// Reason is why a candidate takes no request now. Metrics and receipts show its word.
type Reason uint8

// The reasons. A request may wait for a candidate with a reason from QueueTooLong to NoRoom. A candidate with a later reason is not even
// compared.
const (
	Available    Reason = iota
	QueueTooLong        // peer: its arrival queue is longer than tau
	NoReplica           // peer: none of its replicas takes a request
	Full                // no more requests may be sent: the replica has enough, or the peer's offer or window is used up
	Pending             // replica: the engine has requests that it has not begun
	NoRoom              // replica: its KV gate is closed, but is predicted to open
	Unhealthy           // replica: it is down, or no decode rank serves the model
	GateClosed          // replica: its KV gate is closed, or the decode side has no room, for an unknown time
	NeverProbed         // peer: no good probe yet
	Down                // peer: missed too many probes
	Stale               // peer: the last good probe is too old
	OtherVersion        // peer: speaks another major version
	Draining            // peer: takes no new requests, because it drains
	NotOffered          // peer: does not offer the model
	Nonsense            // peer: its answer has impossible numbers
	CircuitOpen         // peer: too many forwards fell back
	BudgetSpent         // peer: the egress budget of the day is used up
)

var reasonWords = [...]string{
	"available", "queue", "no_replica", "full", "pending", "no_room", "unhealthy", "gate_closed", "never_probed", "down", "stale", "version",
	"draining", "model", "nonsense", "circuit", "budget",
}

func (r Reason) String() string { return reasonWords[r] }

// Awaitable reports whether a request may wait for the candidate: it is available, or is expected to be available soon.
func (r Reason) Awaitable() bool { return r < Unhealthy }
