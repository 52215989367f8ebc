package policy

import (
	"math"

	"evenkeel/internal/namedargs"
)

// Settings are the settings of a policy. The config sets them for all policies,
// and a policy's text for one policy.
type Settings struct {
	Push           Push
	MaxUnanswered  int     // for SP-E; Auto: it follows the traffic
	MaxOutstanding int     // for SP-O
	CreditMax      int     // for SP-P
	Patience       float64 // for SP-P: ms that a request may wait for a hit, for each ms of prefill that it saves; 0: off
	Tau            int     // for skylb: how many requests a peer's queue may have
	Costs
}

// Costs weigh the terms that `finish` and `gorgo` compare.
type Costs struct {
	QS        float64 // weight of the wait
	W         float64 // weight of the prefill
	Load      float64 // weight of the batch
	BMs       float64 // ms by which each request in the batch prolongs a decode step
	MinGainMs float64 // ms by which a peer must be better than staying
	TPMs      float64 // prefill time of a new token, before one was learned
	T0Ms      float64 // prefill time of any prompt, before one was learned
}

// Defaults returns the default settings; Load is for `finish`.
func Defaults() Settings {
	return Settings{
		Push: SPE, MaxUnanswered: 8, MaxOutstanding: 64, CreditMax: 32, Tau: 4,
		Costs: Costs{QS: 1, W: 1, Load: 50, BMs: 0.06, MinGainMs: 10, TPMs: 0.0938, T0Ms: 150.72},
	}
}

type setting = namedargs.Key[Settings]

// unbounded is an upper limit that no sensible setting reaches.
const unbounded = 1e6

// pushKeys are the keys of every policy, costKeys those of policies that compare costs.
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

// Push is the rule for when a local replica gets one more request.
type Push uint8

// The modes. Each says until when an engine gets more requests.
const (
	SPE   Push = iota // while fewer than MaxUnanswered requests wait for a first token, of ours and of others (Foreign) together
	SPP               // while no request waited in the engine at the last scrape, and the credit since then is not used up
	SPO               // while fewer than MaxOutstanding of our requests are unfinished
	Blind             // always
)

var pushWords = []string{"sp-e", "sp-p", "sp-o", "blind"}

func (m Push) String() string { return pushWords[m] }

// Replica is what is known of a local replica when a round begins.
type Replica struct {
	Healthy  bool
	GateOpen bool // the KV gate is open, and the decode side has room
	Filled   bool // only the KV gate is closed, and it is predicted to open

	Unanswered  int // our requests there without a first token
	Outstanding int // our requests there
	Foreign     int // requests of others that wait there: those scraped less ours
	Pending     int // requests that waited in the engine at the last scrape, without deferred requests
	Credit      int // for SP-P: requests that may still be sent since that scrape
}

// unlimited is more requests than any replica takes.
const unlimited = math.MaxInt32

// Replica says how many more requests a replica takes, or why it takes none.
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

// Credit is how many requests a scrape allows under SP-P until the next scrape. Each
// request that is sent takes one of them, each first token gives one back.
func (s *Settings) Credit(running, pending, maxNumSeqs int) int {
	if pending > 0 {
		return 0
	}
	return min(max(maxNumSeqs-running, 1), s.CreditMax)
}

// Auto as MaxUnanswered means that the caller must replace it by AutoUnanswered
// before it calls Replica.
const Auto = 0

// AutoUnanswered is the number for max_unanswered: auto: half more requests than arrive at a
// replica in the time to a first token, from 8 to 64.
func AutoUnanswered(arrivalsPerS, medianTTFTMs float64) int {
	const least, most = 8, 64
	n := math.Ceil(1.5 * arrivalsPerS * medianTTFTMs / 1000)
	if !(n > least) {
		return least
	}
	return int(min(n, most))
}
