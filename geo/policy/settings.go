package policy

import (
	"math"

	"evenkeel/internal/namedargs"
)

// Settings are the settings of a policy. The config sets them for all policies, and a policy's text can change them for
// itself.
type Settings struct {
	Push           Push
	MaxUnanswered  int     // for SPE: bound of a replica's requests without a first token; Auto: computed from the traffic
	MaxOutstanding int     // for SPO: bound of this region's unfinished requests on a replica
	CreditMax      int     // for SPP: bound of the requests that a replica gets between two scrapes
	Patience       float64 // for SPP: ms that a request may wait for a cache hit, per ms of prefill that the hit saves; 0: off
	Tau            int     // for skylb: the longest queue of a peer that still gets requests
	Costs
}

// Costs weigh the terms that `finish` and `gorgo` compare.
type Costs struct {
	WaitWeight    float64 // factor of the predicted wait in ms
	PrefillWeight float64 // factor of the predicted prefill in ms
	BatchWeight   float64 // factor of the cost of a larger decode batch: BatchMs for each request in it
	BatchMs       float64 // ms by which each request in the batch prolongs a decode step
	MinGainMs     float64 // ms by which a peer must be cheaper than a local replica
	TPMs          float64 // ms of prefill per new token, until this is learned
	T0Ms          float64 // ms of prefill per prompt, until this is learned
}

// Defaults returns the default settings. BatchWeight is for the policy `finish`.
func Defaults() Settings {
	return Settings{
		Push:           SPE, // a replica gets requests while fewer than MaxUnanswered wait for a first token
		MaxUnanswered:  8,   // by SPE: with so many requests that wait for a first token, a replica gets no more
		MaxOutstanding: 64,  // by SPO: with so many unfinished requests of this region, a replica gets no more
		CreditMax:      32,  // by SPP: a replica gets at most so many requests between two scrapes
		Tau:            4,   // a peer with more requests in its arrival queue gets none
		Costs: Costs{
			WaitWeight: 1, PrefillWeight: 1, // the predicted wait and the predicted prefill count as they are
			BatchWeight: 50,     // each request in the decode batch costs so many times BatchMs
			BatchMs:     0.06,   // ms by which each request prolongs a decode step
			MinGainMs:   10,     // ms by which a peer must be cheaper than a local replica
			TPMs:        0.0938, // ms per new token: Mistral-7B on an A100, from GORGO's Table 1
			T0Ms:        150.72, // ms per prompt, from the same table
		},
	}
}

type setting = namedargs.Key[Settings]

// unbounded is an upper limit that no sensible setting reaches.
const unbounded = 1e6

// pushKeys are the keys of every policy, tauKeys of the skylb policies, costKeys of the policies that compare costs.
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

// Push is the rule by which a local replica gets one more request, or none.
type Push uint8

// Values of Push. Each value says when a local replica gets one more request.
const (
	SPE   Push = iota // while fewer than MaxUnanswered requests wait for a first token, including those of other senders (ForeignWaiting)
	SPP               // if no request waited in the engine at the last scrape, as long as the credit since then is not used up
	SPO               // while fewer than MaxOutstanding requests of this region are unfinished
	Blind             // always
)

var pushWords = []string{"sp-e", "sp-p", "sp-o", "blind"}

func (m Push) String() string { return pushWords[m] }

// Replica is the state of a local replica when a round begins.
type Replica struct {
	Healthy      bool
	GateOpen     bool // the KV gate is open, and the decode side has room
	GateWillOpen bool // only the KV gate is closed, and it is predicted to open

	Unanswered     int // this region's requests without a first token
	Outstanding    int // this region's unfinished requests
	ForeignWaiting int // waiting requests of other senders: the scraped number less this region's requests
	Pending        int // requests that waited in the engine at the last scrape, without deferred requests
	Credit         int // for SPP: requests that may still be sent before the next scrape
}

// unlimited stands for no bound: it is more than any replica takes.
const unlimited = math.MaxInt32

// JudgeReplica returns how many more requests may be sent to a replica, and Available; or 0 and the reason why it takes none.
func (s *Settings) JudgeReplica(replica *Replica) (maxSends int, why Reason) {
	switch {
	case !replica.Healthy:
		return 0, Unhealthy
	case !replica.GateOpen && replica.GateWillOpen: // its KV cache is full, but a request may wait for room there
		return 0, NoRoom
	case !replica.GateOpen: // it is closed for an unknown time, so that no request waits for the replica
		return 0, GateClosed
	}
	switch s.Push {
	case SPE: // sp-e bounds the requests without a first token, also those of other senders
		maxSends = s.MaxUnanswered - replica.Unanswered - max(0, replica.ForeignWaiting)
	case SPP: // sp-p sends only what the engine can begin, as far as its last scrape shows
		if replica.Pending > 0 {
			return 0, Pending
		}
		maxSends = replica.Credit
	case SPO: // sp-o bounds this region's unfinished requests
		maxSends = s.MaxOutstanding - replica.Outstanding
	case Blind:
		maxSends = unlimited
	}
	if maxSends <= 0 {
		return 0, Full
	}
	return maxSends, Available
}

// Credit is how many requests the push mode SPP (sp-p) may send to a replica from one scrape to the next. running and pending are the
// requests that ran and waited in the engine at the scrape; maxNumSeqs is how many it runs at once. Each request that is sent uses one up,
// and each first token returns one. An engine that runs as many as it can, but has none waiting, gets one request, which may begin before
// the next scrape.
func (s *Settings) Credit(running, pending, maxNumSeqs int) int {
	if pending > 0 { // the engine has more requests than it can begin
		return 0
	}
	return min(max(maxNumSeqs-running, 1), s.CreditMax)
}

// Auto is a value of MaxUnanswered, which the caller must replace by AutoUnanswered before it calls JudgeReplica.
const Auto = 0

// AutoUnanswered is the value of `max_unanswered: auto`: 1.5 times the requests that arrive at a replica during the time to
// first token, at least 8 and at most 64.
func AutoUnanswered(arrivalsPerS, medianTTFTMs float64) int {
	const least, most = 8, 64
	unanswered := math.Ceil(1.5 * arrivalsPerS * medianTTFTMs / 1000)
	if !(unanswered > least) { // this form also catches NaN
		return least
	}
	return int(min(unanswered, most))
}
