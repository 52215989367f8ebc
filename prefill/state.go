package prefill

import (
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"evenkeel/engine/circuit"
	"evenkeel/prefill/cache"
	"evenkeel/prefill/fit"
	"evenkeel/prefill/ledger"
	"evenkeel/prefill/policy"
	"evenkeel/prefill/queue"
	"evenkeel/prefill/steer"
)

// Scheduler owns the state of all prefill engines: their loads, gates and circuits, and the requests that wait for an engine.
// One lock guards this state. It is held during a decision, but never during I/O.
//
// The state consists of values that have neither a clock nor a lock: queue, ledger, cache, fit and steer. chooser decides
// about one request, and queueManager about all waiting requests.
type Scheduler struct {
	changed chan struct{} // wakes Run when the candidates or the settings have changed
	clock   func() time.Time

	mu      sync.Mutex  // guards all fields below
	timer   *time.Timer // calls Wake at wakeAt; nil: a simulation calls Wake itself
	wakeAt  time.Time   // see queueManager.nextWake
	choose  chooser
	manager queueManager
	state
}

// state is the state of a Scheduler that chooser and queueManager share. Its own methods only read it, or change the set of candidates
// (roster.go).
type state struct {
	cfg     Config
	metrics *metrics
	now     time.Time // when the scheduler's lock was last taken by lock

	candidates    map[string]*candidate // by ID; removed candidates stay while they have charges
	models        map[string]*model
	modelsUnknown bool // the models of a live candidate, or of all candidates, are not known yet

	queue     *queue.Queue[*waiter]
	ledger    *ledger.Ledger
	cache     *cache.Cache
	fit       *fit.Times
	overrides steer.Overrides
	budget    budget
	batch     BatchStatus
}

// model holds the candidates and the waiting requests for one model name.
type model struct {
	name        string
	candidates  []*candidate // in configured order
	cursor      int          // order of the candidate that round-robin chose last, -1: none yet
	queue       *queue.ModelQueue[*waiter]
	throughput  fit.Throughput
	decodeSlots map[string]int // free decode slots by region, as last reported; nil: all requests are decoded in one region
}

// candidate is a Candidate together with its state. After its removal from the configuration, it is kept until its last
// charge has ended.
type candidate struct {
	Candidate
	order           int  // position in the configuration
	configured      bool // false: removed, but kept for its charges
	load            ledger.EngineLoad
	byModel         map[string]*ledger.ModelCounts // by model: its part of load; only of models that not all of its ranks list
	ring            []uint64
	cache           cache.CachedBlocks
	computeTimer    fit.ComputeTimer
	residual        fit.Residual
	circuit         circuit.Circuit
	lastFault       string              // the last fault; empty after a probe was answered
	capacityWarned  bool                // a log line has said that the capacity is not known
	answeredSeconds prometheus.Observer // durations of its answered probes; nil before the first
}

// chooser chooses the candidate for one request.
type chooser struct {
	*state
	scheduler *Scheduler // for the leases
	lastLease uint64     // number of the last lease

	// Reused memory of one decision, or of one round of decisions.
	waitedFor  []*candidate    // candidates on which waiting requests count in this round, until endRound
	eligible   []*candidate    // the candidates that passed the filters so far
	view       []policy.Engine // indicators of the candidates of the last call of fillView
	heldBlocks []int32         // how many of the prompt's blocks are held, by slot of the prefix index
	prefillers []Prefiller     // result of localState
	onTheWay   map[string]int  // result of countOnTheWay, by region
}

// queueManager decides which of the waiting requests are served. Its methods are called under the scheduler's lock.
type queueManager struct {
	*state
	choose *chooser
}

// Lease is the charge of one prompt on one candidate, from the choice of the candidate until its engine has freed the
// prompt's KV blocks:
//
//	Acquire ─▶ probing ─Answered─▶ pooled ─Dispatched─▶ dispatched
//
// If the connector needs the decode rank before the prefill, the probe is sent later, by MarkSent. In each phase, one last call
// ends the lease: Release (the KV is free after the first decode event, was discarded, or was never written), Orphan (no
// decode engine will fetch the KV) or Failed (the probe failed). An answered or orphaned lease also ends by itself at the
// engine's hold timeout; the last call then changes nothing. Any call after the last one is a bug, which is counted.
type Lease struct {
	Candidate Candidate     // as it was when it was chosen
	Policy    string        // name of the policy that chose the candidate
	Wait      time.Duration // in the arrival queue
	Prompt    int           // length of the prompt in tokens, counted or estimated
	HitTokens int           // prompt tokens that are predicted to be in the candidate's prefix cache
	Trace     *Trace        // explains the choice; nil without Config.Explain
	Others    int           // unanswered probes on the candidate when this prompt was charged

	scheduler        *Scheduler
	c                *candidate
	number           uint64
	canary           bool
	predictedMs      float64 // duration of the prefill in ms; 0: no prediction
	hadOthersPrompts bool    // the candidate had prompts of others when this prompt was charged
	model            string
	inFlight         ledger.InFlight
	request          *Request           // for a lease of another candidate that may replace this one; nil: none may
	predictedHit     cache.PredictedHit // what the prefill finds and leaves in the prefix cache
}

// waiter is a request in the arrival queue.
type waiter struct {
	Request
	item       queue.Item[*waiter]
	policy     *policy.Policy
	since      time.Time           // when it entered the queue
	timesOutAt time.Time           // when its wait times out
	done       chan struct{}       // closed after lease or err is set
	onResult   func(*Lease, error) // called with the result, for a request of Offer; nil: the caller waits for done
	lease      *Lease
	err        error

	siblings       []*waiter       // the waiting prompts (legs) of the same request, itself included; nil: it has only one
	regionDecision *regionDecision // shared by the siblings; nil: none
}

// deliverResult passes the result of a request to the caller that waits for it.
func (w *waiter) deliverResult(lease *Lease, err error) {
	w.lease, w.err = lease, err
	close(w.done)
	if w.regionDecision != nil {
		w.regionDecision.announce() // in any case: siblings stay here with a leg that is served or refused, and go with one that goes elsewhere
	}
	if w.onResult != nil {
		w.onResult(lease, err)
	}
}

// announce wakes those who wait for the decision, because it is made. It may be called more than once.
func (d *regionDecision) announce() {
	if !d.closed {
		d.closed = true
		close(d.done)
	}
}

// keepSiblingsHere keeps all legs of a request in this region, because one of them is served here.
func keepSiblingsHere(siblings []*waiter) {
	for _, sibling := range siblings {
		sibling.item.Pin()             // no leg may be displaced after another leg is served
		sibling.Deadline = time.Time{} // the deadline is for the client's first token, which the served leg sends
		sibling.keepHere()
		sibling.regionDecision.announce()
	}
}

// keepHere tells the request's RemoteRegions that the request is served in this region.
func (r *Request) keepHere() {
	if r.Remote != nil {
		r.Remote.Stay()
	}
}

// LeaseOwner stands for one attempt to serve a request. The attempt must make the last call on every lease that names its
// LeaseOwner. A lease that has no last call when the attempt ends is lost, and the audit shows it.
type LeaseOwner = ledger.LeaseOwner

// Request is a request for a prefill.
type Request struct {
	ID           string // breaks ties
	Model        string
	PromptTokens int                      // length of the prompt in tokens
	Counted      bool                     // PromptTokens was counted; false: estimated
	Prompt       Prompt                   // identifies the prompt in prefix caches
	Session      uint64                   // hash of the session's key; 0: no session
	EndsSession  bool                     // the session has no further request
	PromptBytes  int                      // for vllm-ascend's weight; 0: four per token
	Arrival      time.Time                // of the request's first attempt; zero: now
	Key          string                   // of the tenant or user: keys of one priority take turns
	Priority     int                      // higher priorities are served first
	Batch        bool                     // it only uses capacity that no other request needs; its Priority does not count
	Deadline     time.Time                // for the first token; within a priority, earlier deadlines are served first; zero: none
	HasPlace     bool                     // it has a place in the pool already, because it is a retry
	Exclude      []string                 // IDs of the candidates that were tried before
	Policy       string                   // empty: the scheduler's policy
	Target       string                   // ID of the only candidate that may take it; empty: any
	MayGoTo      func(region string) bool // whether an engine of another region may take it; nil: any may
	Returned     bool                     // another region gave it back: it waits by its first arrival, even if the queue is full
	Remote       RemoteRegions            // decides between regions; nil: this region serves it
	LeaseOwner   *LeaseOwner              // the attempt that is responsible for the lease; nil: the audit does not check it

	considered struct { // state between two considerations of the request
		counted bool // the hotspot detector has counted it
		weighed bool // the hotspot detector has compared its scores
		cache   cache.Lookup
	}
}

// RemoteRegions decides whether another region serves a request. Its methods are called under the scheduler's lock: they must not
// wait, do I/O or call the scheduler.
type RemoteRegions interface {
	// Offered reports whether another region serves the request's model.
	Offered() bool
	// Where decides where the request is served. It is called again at every event as long as the request waits.
	Where(h *Here) Where
	// Takes reports, for a request that stays in this region, whether a candidate may get one more probe now.
	Takes(p *Prefiller) bool
	// Queued is called when a request entered the arrival queue of its model, or left it. waiting is the number of
	// requests in the queue now.
	Queued(now time.Time, entered bool, waiting int)
	// Stay is called when one leg of the request is served in this region: its other legs must then be served here as well.
	Stay()
}

// Where is the decision of RemoteRegions.
type Where uint8

// Here is the state of this region for one request. It is only valid during the call.
type Here struct {
	Model  string
	Now    time.Time
	Round  uint64    // number of the round of decisions; during a round, only its own decisions change the state
	Tokens int       // of the prompt
	Since  time.Time // when the request entered the arrival queue
	Local
}

// Local is the state of this region for one model.
type Local struct {
	Prefillers   []Prefiller
	Waiting      int     // requests in the arrival queue
	Tokens       int     // of their prompts
	ArrivalsPerS float64 // new requests per second
	TTFTMs       float64 // median time from a probe to its answer; 0: no answer yet
}

// Prefiller is the state of one candidate, for the choice between regions.
type Prefiller struct {
	policy.Engine
	Region          string      // empty: the proxy's own region
	Live            bool        // up, and its circuit allows requests
	Open            bool        // its KV gate is open, and the pool and the decode side of its region have room
	Unanswered      int         // probes of this proxy
	Held            int         // unanswered probes of this proxy, and its prompts whose KV a decode engine may still fetch
	OthersWaiting   int         // waiting requests of others
	WaitingAtScrape int         // all requests that waited at the last scrape
	Ran             int         // all requests that ran at the last scrape that found none waiting
	Answered        int         // probes of this proxy answered since that scrape, less those sent since
	MaxSeqs         int         // requests that its engine runs at once; 0: not known
	Samples         int         // number of prefills from which its latency was learned
	KVGateWillOpen  bool        // only its KV gate keeps prompts away, and the gate is predicted to open
	Room            ledger.Room // zero: not known
	ResidualMs      float64     // ms by which its probes, and one more, will exceed their predictions; negative: stay below them
}

// A Trace explains the choice of a candidate.
type Trace struct {
	Reason   string       // policy, or only, canary, affinity, fallback
	Eligible int          // number of candidates that passed the filters
	Best     []policy.Row // the chosen candidate first, the others by score; without scores if no policy was asked
}

// Ticket stands for a request, or one leg of a request, that has entered the arrival queue or was served at once.
type Ticket struct {
	scheduler *Scheduler
	lease     *Lease
	w         *waiter // nil: served at once
}

// regionDecision tells the legs of a request when it is decided whether they stay in this region: done is closed then.
type regionDecision struct {
	done   chan struct{}
	closed bool
}

// watcher is the Scheduler with the state of Run, which scrapes the engines and follows their KV events.
type watcher struct {
	*Scheduler
	streams map[*candidate]cache.Feed // running streams of KV events
}
