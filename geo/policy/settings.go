package policy

import (
	"math"

	"evenkeel/internal/namedargs"
)

// Settings are what may be set of a policy, as the config does for all of them
// and a policy's text for one.
type Settings struct {
	Push           Push
	MaxUnanswered  int     // SP-E; Auto: it follows the traffic
	MaxOutstanding int     // SP-O
	CreditMax      int     // SP-P
	Patience       float64 // SP-P: ms waited for a hit, per ms it saves; 0 off
	Tau            int     // requests a peer's queue may hold, for skylb
	Costs
}

// Costs weigh the terms that `finish` and `gorgo` compare.
type Costs struct {
	QS        float64 // weight of the wait
	W         float64 // of the prefill
	Load      float64 // of the batch
	BMs       float64 // a decode step grows by, per request in the batch
	MinGainMs float64 // what a peer must be better by
	TPMs      float64 // of a token, before anything was learned
	T0Ms      float64
}

// Defaults are those of the config; Load is what `finish` has.
func Defaults() Settings {
	return Settings{
		Push: SPE, MaxUnanswered: 8, MaxOutstanding: 64, CreditMax: 32, Tau: 4,
		Costs: Costs{QS: 1, W: 1, Load: 50, BMs: 0.06, MinGainMs: 10, TPMs: 0.0938, T0Ms: 150.72},
	}
}

type setting = namedargs.Key[Settings]

// unbounded is a limit that no setting needs.
const unbounded = 1e6

// pushKeys are those of every policy, costKeys those of what compares costs.
var (
	pushKeys = []setting{
		namedargs.Words("push", func(s *Settings) *Push { return &s.Push }, func(i int) Push { return Push(i) }, pushWords...),
		namedargs.Whole("max_unanswered", 1, unbounded, func(s *Settings) *int { return &s.MaxUnanswered }),
		namedargs.Whole("max_outstanding", 1, unbounded, func(s *Settings) *int { return &s.MaxOutstanding }),
		namedargs.Whole("credit_max", 1, unbounded, func(s *Settings) *int { return &s.CreditMax }),
	}
	tauKeys  = []setting{namedargs.Whole("tau", 0, unbounded, func(s *Settings) *int { return &s.Tau })}
	costKeys = []setting{
		namedargs.Number("qs", 0, unbounded, func(s *Settings) *float64 { return &s.QS }),
		namedargs.Number("w", 0, unbounded, func(s *Settings) *float64 { return &s.W }),
		namedargs.Number("load", 0, unbounded, func(s *Settings) *float64 { return &s.Load }),
		namedargs.Number("b_ms", 0, unbounded, func(s *Settings) *float64 { return &s.BMs }),
		namedargs.Number("min_gain_ms", 0, unbounded, func(s *Settings) *float64 { return &s.MinGainMs }),
	}
	patienceKeys = []setting{namedargs.Number("patience", 0, unbounded, func(s *Settings) *float64 { return &s.Patience })}
)

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
