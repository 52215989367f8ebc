package policy

// Reason is why a candidate takes no request now. Metrics and receipts show its word.
type Reason uint8

// A request may wait for a candidate with a reason from QueueTooLong to NoRoom. One with a later
// reason is not even compared.
const (
	Available    Reason = iota
	QueueTooLong        // peer: longer than tau
	NoReplica           // peer: none takes a request
	Full                // replica: it has enough; peer: its offer or window is used up
	Pending             // replica: the engine has requests that it has not begun
	NoRoom              // replica: its KV gate is closed, but is predicted to open
	Unhealthy           // replica: down, or no decode rank serves the model
	GateClosed          // replica: KV gate closed, or no decode room, for an unknown time
	NeverProbed
	Down         // peer: missed too many probes
	Stale        // peer: the last good probe is too old
	OtherVersion // peer: another major version
	Draining
	NotOffered  // peer: not the model
	Nonsense    // peer: impossible numbers
	CircuitOpen // peer: too many forwards fell back
	BudgetSpent // peer: the egress budget of the day
)

var reasonWords = [...]string{
	"available", "queue", "no_replica", "full", "pending", "no_room", "unhealthy", "gate_closed", "never_probed", "down", "stale", "version",
	"draining", "model", "nonsense", "circuit", "budget",
}

func (r Reason) String() string { return reasonWords[r] }

// Awaitable says that it is available, or expected to be soon.
func (r Reason) Awaitable() bool { return r < Unhealthy }
