package policy

// Reason is why a place takes no request now. Its words are those of metrics
// and receipts.
type Reason uint8

// The reasons. From Queued to NoRoom a place may be waited for; the others it is
// not even compared with.
const (
	Available  Reason = iota
	Queued            // peer: its arrival queue is longer than tau
	NoReplica         // peer: none of its replicas takes a request
	Full              // no pushes left; of a peer: all its free ones are reserved, or as many requests are unanswered as it is trusted with
	Pending           // replica: the engine has requests that it has not begun
	NoRoom            // replica: its KV gate is closed, and its memory is predicted to get free
	Unhealthy         // replica
	GateClosed        // replica: its KV gate is closed, or nobody could take its prefills; nobody knows for how long
	Never             // peer: no good probe yet
	Down              // peer: missed too many probes
	Stale             // peer: the last good probe is too old
	Version           // peer: speaks another major version
	Draining          // peer
	Model             // peer: does not offer the model
	Nonsense          // peer: its answer has numbers that cannot be
	Circuit           // peer: too many forwards fell back
	Budget            // peer: the day's egress is spent
)

var reasonWords = [...]string{
	"available", "queue", "no_replica", "full", "pending", "no_room", "unhealthy", "gate_closed", "never_probed", "down", "stale", "version",
	"draining", "model", "nonsense", "circuit", "budget",
}

func (r Reason) String() string { return reasonWords[r] }

// Passing says that there is no reason, or one that goes by itself, soon enough to wait
// for.
func (r Reason) Passing() bool { return r < Unhealthy }
