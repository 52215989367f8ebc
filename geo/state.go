package geo

import (
	"context"
	"sync"
	"time"

	"evenkeel/engine"
	"evenkeel/engine/circuit"
	"evenkeel/geo/policy"
	"evenkeel/prefill"
	"evenkeel/prefill/fit"
	"evenkeel/prefill/index"
)

// Peers probes the peers of this proxy, and decides which requests are forwarded.
type Peers struct {
	cfg      Config
	process  *process
	started  time.Time
	clock    Clock
	traffic  *engine.Client
	metrics  *metrics
	verifier *Verifier
	receipts receipts
	// running counts the goroutines and probers for which Close waits. They begin under mu, or before
	// Start returns, so that none begins while Close waits.
	running sync.WaitGroup
	ctx     context.Context // all probers stop when it ends
	stop    context.CancelFunc

	maxPromptBytes int64 // for the prompts sent to one peer

	mu         sync.Mutex
	policyText string // as Parse reads it
	settings   policy.Settings
	policy     *policy.Policy // each model decides with a copy of it
	models     map[string]*modelState
	peers      []*peer
	// By id: today's egress cost of removed peers, whose addresses may come back.
	removedEgress map[string]*spending
	lastForward   uint64
}

// Queue is this region's arrival queue.
type Queue interface {
	// Offers calls the function for each model that this region serves.
	Offers(func(model string, l *prefill.Local))
	// Wake makes the queue decide again.
	Wake()
}

type modelState struct {
	policy       policy.Policy
	settings     policy.Settings // of the present round
	departureGap policy.DepartureGap
	round        uint64 // for which candidates and settings were made; 0: none
	candidates   []policy.Candidate
	peers        []*peer // peers[i] is that of candidates[localCount+i]
	localCount   int     // local candidates, which come first
	hits         []int32 // memory for policy.Request.Hits
	barred       []bool  // memory for policy.Request.Barred
}

// peer is another proxy. The Peers' lock guards it.
type peer struct {
	conf   *PeerConfig
	id     string // of the entry in geo.peers, with the address if the entry is several proxies
	target *engine.Target

	// The state of its prober.
	ctx        context.Context // the prober stops when it ends
	cancel     func()
	link       Link
	cancelNext func() bool // the next probe; false: it was sent already

	sibling bool // a proxy of the own region, with the same engines
	removed bool // its name no longer resolves to this address; forwards may be under way

	// The results of its probes.
	name           string   // its id, by its last answer
	boot           string   // names its process: another value after a restart
	isSelf         bool     // this proxy's own address: the entry's name resolves to several proxies
	major          int      // of its protocol; -1: not known
	decodedModels  []string // of a sibling: models of the decode groups that it owns
	probed         bool
	up             bool
	missesInRow    int
	answersInRow   int
	probeError     string // of the last probe; empty: it was answered
	lastAnsweredAt time.Time
	draining       bool
	offers         map[string]policy.Offer
	rtt            policy.RTT

	// The state of forwards to it.
	reserved   policy.Reservations
	circuit    circuit.Circuit
	distrust   policy.Distrust
	residual   fit.Residual
	trust      policy.Trust
	unanswered int       // without a first event; see startUnansweredTimer
	egress     *spending // of forwards today
	inflight   map[*Forward]struct{}
	prompts    *index.Index // forwarded to it
	indexSlot  index.Slot
	reasons    map[string]policy.Reason // by model: last result of Judge
}

// sinceStartMs converts a time for policies.
func (ps *Peers) sinceStartMs(t time.Time) float64 { return ms(t.Sub(ps.started)) }

// stateOf makes the state of a model if there is none. At maxModelStates it first drops any other,
// which is made again when needed.
func (ps *Peers) stateOf(name string) *modelState {
	s := ps.models[name]
	if s != nil {
		return s
	}
	for other := range ps.models { // in random order
		if len(ps.models) < maxModelStates {
			break
		}
		ps.forgetModel(other)
	}
	s = &modelState{policy: *ps.policy}
	ps.models[name] = s
	return s
}

func (ps *Peers) forgetModel(name string) {
	delete(ps.models, name)
	ps.metrics.dropSeries("model", name)
	for _, p := range ps.peers {
		delete(p.reasons, name)
	}
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

func us(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

// Link carries probes to one peer: over HTTP, or in a simulation.
type Link interface {
	// Ask calls answered once, before or after it returns: with an error if no answer comes within
	// limit or if ctx ends.
	Ask(ctx context.Context, question []byte, limit time.Duration, answered func(ProbeOutcome))
	// Warm keeps idle connections ready for forwards.
	Warm(ctx context.Context, limit time.Duration) error
	Close()
}

// ProbeOutcome is the outcome of a question.
type ProbeOutcome struct {
	Text      []byte
	RoundTrip time.Duration // from the writing of the question
	Dialled   bool          // for this question, so that RoundTrip is longer than a round trip
	Err       error
}

// maxModelStates: adapters come and go under new names.
const maxModelStates = 1024
