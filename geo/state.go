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

// Peers connects this proxy with its peers: it probes them, decides which requests are forwarded to a peer, and forwards
// these requests.
type Peers struct {
	cfg      Config
	process  *process
	started  time.Time
	clock    Clock
	traffic  *engine.Client
	metrics  *metrics
	verifier *Verifier
	receipts receipts
	// running counts the goroutines and probers for which Close waits: they probe a peer, follow the discovery of peers, or
	// read the end of a forward's body. They begin under mu, or before Start returns, so that none begins while Close
	// waits.
	running sync.WaitGroup
	ctx     context.Context // all probers stop when it ends
	stop    context.CancelFunc

	maxPromptBytes int64 // bound of the memory for the prompts sent to one peer, in bytes

	mu            sync.Mutex
	policyText    string // the policy, in the form that Parse reads
	settings      policy.Settings
	policy        *policy.Policy // made of settings and policyText; each model decides with a copy of it
	models        map[string]*modelState
	peers         []*peer
	removedEgress map[string]*spending // by id: today's egress cost of removed peers, whose addresses may come back on the same day
	lastForward   uint64               // number of the last forward
}

// Queue is this region's arrival queue.
type Queue interface {
	// Offers calls the function for each model that this region serves.
	Offers(func(model string, l *prefill.Local))
	// Wake makes the queue decide about its requests again.
	Wake()
}

// modelState is the state of the decisions for one model.
type modelState struct {
	policy       policy.Policy
	settings     policy.Settings // the settings of the present round
	departureGap policy.DepartureGap
	round        uint64 // number of the round for which candidates and settings were made; 0: none
	candidates   []policy.Candidate
	peers        []*peer // peers[i] is the peer of candidates[localCount+i]
	localCount   int     // number of local candidates, which come first in candidates
	hits         []int32 // memory for policy.Request.Hits, which each request overwrites
	barred       []bool  // memory for policy.Request.Barred, which each request overwrites
}

// peer is the state of another proxy. The Peers' lock guards it.
type peer struct {
	conf   *PeerConfig
	id     string // id of the entry in geo.peers, with the address if the entry stands for several proxies
	target *engine.Target

	// The state of its prober.
	ctx        context.Context // the prober stops when it ends
	cancel     func()
	link       Link
	cancelNext func() bool // cancels the next probe; false: the probe was sent already

	sibling bool // a proxy of the own region, with the same engines
	removed bool // the peer's name no longer resolves to this address; forwards may still be under way

	// The results of its probes.
	name           string   // the peer's id, by its last answer
	boot           string   // names the peer's process; a new value means that the peer has restarted
	isSelf         bool     // the address is this proxy's own: the name of the entry resolves to several proxies
	major          int      // major version of the peer's protocol; -1: not known
	decodedModels  []string // for a sibling: models of the decode groups that it owns
	probed         bool
	up             bool
	missesInRow    int
	answersInRow   int
	probeError     string    // error of the last probe; empty: the probe was answered
	lastAnsweredAt time.Time // when the peer last answered a probe
	draining       bool
	offers         map[string]policy.Offer
	rtt            policy.RTT

	// The state of forwards to it.
	reserved   policy.Reservations
	circuit    circuit.Circuit
	distrust   policy.Distrust
	residual   fit.Residual
	trust      policy.Trust
	unanswered int       // requests without a first event; see startUnansweredTimer for requests that are not streamed
	egress     *spending // what forwards to this peer have cost today
	inflight   map[*Forward]struct{}
	prompts    *index.Index // the prompts that were forwarded to it
	indexSlot  index.Slot
	reasons    map[string]policy.Reason // by model: the last result of Judge
}

// sinceStartMs converts a time for policies: to ms since Peers was made.
func (ps *Peers) sinceStartMs(t time.Time) float64 { return ms(t.Sub(ps.started)) }

// stateOf returns the state of a model, and makes it if there is none. If maxModelStates models have a state, it first drops the
// state of any of them, which is made again when it is needed.
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

// forgetModel drops the state of a model, with its metrics.
func (ps *Peers) forgetModel(name string) {
	delete(ps.models, name)
	ps.metrics.dropSeries("model", name)
	for _, p := range ps.peers {
		delete(p.reasons, name)
	}
}

// ms is a duration in milliseconds.
func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// us is a duration in microseconds.
func us(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

// Link carries probes to one peer: over HTTP, or in a simulation.
type Link interface {
	// Ask sends a question to the peer. It calls answered once, before or after it returns: with the answer, or with an
	// error if no answer comes within limit or if ctx ends.
	Ask(ctx context.Context, question []byte, limit time.Duration, answered func(ProbeOutcome))
	// Warm keeps idle connections ready for requests that are forwarded to the peer.
	Warm(ctx context.Context, limit time.Duration) error
	Close()
}

// ProbeOutcome is the outcome of a question.
type ProbeOutcome struct {
	Text      []byte
	RoundTrip time.Duration // from the writing of the question to its answer
	Dialled   bool          // the connection was dialled for this question, so that RoundTrip is longer than a round trip
	Err       error
}

// maxModelStates bounds the number of models with a state, because adapters come and go under new names.
const maxModelStates = 1024
