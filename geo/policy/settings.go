package policy

import (
	"math"

	"evenkeel/internal/namedargs"
)

// Settings come from the config; a policy's text can change them for itself.
type Settings struct {
	Push           Push
	MaxUnanswered  int     // SPE: of a replica, without a first token; Auto: from the traffic
	MaxOutstanding int     // SPO: of this region on a replica
	CreditMax      int     // SPP: to a replica between two scrapes
	Patience       float64 // SPP: ms to wait for a cache hit, per ms of prefill saved; 0: off
	Tau            int     // skylb: the longest queue of a peer that still gets requests
	Costs
}

// Costs weigh the terms that `finish` and `gorgo` compare.
type Costs struct {
	WaitWeight    float64 // factor of the predicted wait
	PrefillWeight float64 // factor of the predicted prefill
	BatchWeight   float64 // factor of BatchMs for each request in the decode batch
	BatchMs       float64 // by which each request in the batch prolongs a decode step
	MinGainMs     float64 // by which a peer must be cheaper than a local replica
	TPMs          float64 // prefill per new token, until learned
	T0Ms          float64 // prefill per prompt, until learned
}

// Defaults has the BatchWeight of `finish`.
func Defaults() Settings {
	return Settings{
		Push:           SPE,
		MaxUnanswered:  8,
		MaxOutstanding: 64,
		CreditMax:      32,
		Tau:            4,
		Costs: Costs{
			WaitWeight: 1, PrefillWeight: 1,
			BatchWeight: 50,
			BatchMs:     0.06,
			MinGainMs:   10,
			TPMs:        0.0938, // Mistral-7B on an A100, from GORGO's Table 1
			T0Ms:        150.72, // from the same table
		},
	}
}

type setting = namedargs.Key[Settings]

const unbounded = 1e6

var (
	pushKeys = []setting{
		namedargs.Words("push", func(s *Settings) *Push { return &s.Push }, func(i int) Push { return Push(i) }, pushWords...),
		namedargs.Whole("max_unanswered", 1, unbounded, func(s *Settings) *int { return &s.MaxUnanswered }),
		namedargs.Whole("max_outstanding", 1, unbounded, func(s *Settings) *int { return &s.MaxOutstanding }),
		namedargs.Whole("credit_max", 1, unbounded, func(s *Settings) *int { return &s.CreditMax }),
	}
	tauKeys  = []setting{namedargs.Whole("tau", 0, unbounded, func(s *Settings) *int { return &s.Tau })}
	costKeys = []setting{
		namedargs.Number("qs", 0, unbounded, func(s *Settings) *float64 { return &s.WaitWeight }),
		namedargs.Number("w", 0, unbounded, func(s *Settings) *float64 { return &s.PrefillWeight }),
		namedargs.Number("load", 0, unbounded, func(s *Settings) *float64 { return &s.BatchWeight }),
		namedargs.Number("b_ms", 0, unbounded, func(s *Settings) *float64 { return &s.BatchMs }),
		namedargs.Number("min_gain_ms", 0, unbounded, func(s *Settings) *float64 { return &s.MinGainMs }),
	}
	patienceKeys = []setting{namedargs.Number("patience", 0, unbounded, func(s *Settings) *float64 { return &s.Patience })}
)

// Push says when a local replica gets one more request.
type Push uint8

// A local replica gets one more request, if:
const (
	SPE   Push = iota // fewer than MaxUnanswered wait for a first token, with those of other senders
	SPP               // none waited in the engine at the last scrape, and the credit is not used up
	SPO               // fewer than MaxOutstanding of this region are unfinished
	Blind             // always
)

var pushWords = []string{"sp-e", "sp-p", "sp-o", "blind"}

func (m Push) String() string { return pushWords[m] }

// Replica is a local replica when a round begins.
type Replica struct {
	Healthy      bool
	GateOpen     bool // the KV gate, and the decode side has room
	GateWillOpen bool // only the KV gate is closed, and it is predicted to open

	Unanswered     int // of this region, without a first token
	Outstanding    int // of this region, unfinished
	ForeignWaiting int // of other senders: scraped, less this region's
	Pending        int // waited at the last scrape, without deferred ones
	Credit         int // SPP: may still be sent before the next scrape
}

// unlimited is more than any replica takes.
const unlimited = math.MaxInt32

// JudgeReplica returns how many more requests may be sent, or why none.
func (s *Settings) JudgeReplica(replica *Replica) (maxSends int, why Reason) {
	switch {
	case !replica.Healthy:
		return 0, Unhealthy
	case !replica.GateOpen && replica.GateWillOpen: // a request may wait for room there
		return 0, NoRoom
	case !replica.GateOpen: // for an unknown time, so no request waits
		return 0, GateClosed
	}
	switch s.Push {
	case SPE:
		maxSends = s.MaxUnanswered - replica.Unanswered - max(0, replica.ForeignWaiting)
	case SPP:
		if replica.Pending > 0 {
			return 0, Pending
		}
		maxSends = replica.Credit
	case SPO:
		maxSends = s.MaxOutstanding - replica.Outstanding
	case Blind:
		maxSends = unlimited
	}
	if maxSends <= 0 {
		return 0, Full
	}
	return maxSends, Available
}

// Credit is how many requests SPP may send from one scrape to the next, by the requests that ran
// and waited at the scrape. Each first token returns one. A full engine with none waiting gets one
// request, which may begin before the next scrape.
func (s *Settings) Credit(running, pending, maxNumSeqs int) int {
	if pending > 0 {
		return 0
	}
	return min(max(maxNumSeqs-running, 1), s.CreditMax)
}

// Auto must be replaced by AutoUnanswered before JudgeReplica.
const Auto = 0

// AutoUnanswered is 1.5 times the requests that arrive at a replica during the time to first token,
// from 8 to 64.
func AutoUnanswered(arrivalsPerS, medianTTFTMs float64) int {
	const least, most = 8, 64
	unanswered := math.Ceil(1.5 * arrivalsPerS * medianTTFTMs / 1000)
	if !(unanswered > least) { // catches NaN, too
		return least
	}
	return int(min(unanswered, most))
}
