package policy

import "math"

// Push is when a local replica may be sent one more request.
type Push uint8

// The modes.
const (
	SPE   Push = iota // few of ours have no first token yet
	SPP               // at the last scrape nothing waited in the engine, and the credit since is not used up
	SPO               // few of ours are not finished
	Blind             // always
)

var pushWords = []string{"sp-e", "sp-p", "sp-o", "blind"}

func (m Push) String() string { return pushWords[m] }

// Replica is what is known of a local replica when a round begins.
type Replica struct {
	Healthy  bool
	GateOpen bool // KV gate, and the decode side has room
	Filled   bool // only the KV gate is closed, and it is predicted to open

	Unanswered  int // our requests there without a first token
	Outstanding int // our requests there
	Foreign     int // what others have waiting there: scraped less ours
	Pending     int // waiting in the engine at the last scrape, its deferred ones aside
	Credit      int // SP-P: pushes left since that scrape
}

// unlimited is more requests than any replica takes.
const unlimited = math.MaxInt32

// Replica says how many more requests a replica takes, and why none.
func (s *Settings) Replica(x *Replica) (left int, why Reason) {
	switch {
	case !x.Healthy:
		return 0, Unhealthy
	case !x.GateOpen && x.Filled:
		return 0, NoRoom
	case !x.GateOpen:
		return 0, GateClosed
	}
	switch s.Push {
	case SPE:
		left = s.MaxUnanswered - x.Unanswered - max(0, x.Foreign)
	case SPP:
		if x.Pending > 0 {
			return 0, Pending
		}
		left = x.Credit
	case SPO:
		left = s.MaxOutstanding - x.Outstanding
	case Blind:
		left = unlimited
	}
	if left <= 0 {
		return 0, Full
	}
	return left, Available
}

// Credit is how many pushes a scrape allows under SP-P until the next one. Each
// push takes one of it, each first token gives one back.
func (s *Settings) Credit(running, pending, maxNumSeqs int) int {
	if pending > 0 {
		return 0
	}
	return min(max(maxNumSeqs-running, 1), s.CreditMax)
}

// Auto as MaxUnanswered stands for what AutoUnanswered says: the caller fills it
// in before it asks.
const Auto = 0

// AutoUnanswered is max_unanswered: auto, half more than what arrives at a
// replica while one first token is waited for.
func AutoUnanswered(arrivalsPerS, medianTTFTMs float64) int {
	const least, most = 8, 64
	n := math.Ceil(1.5 * arrivalsPerS * medianTTFTMs / 1000)
	if !(n > least) {
		return least
	}
	return int(min(n, most))
}
