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

// Scheduler owns the state of all prefill engines, and the requests that wait for one. One lock
// guards this state. It is held during a decision, but never during I/O.
type Scheduler struct {
	changed chan struct{} // wakes Run when the candidates or the settings have changed
	clock   func() time.Time

	mu      sync.Mutex  // guards all fields below
	timer   *time.Timer // calls Wake at wakeAt; nil: a simulation calls Wake itself
	wakeAt  time.Time   // next time at which a waiting request may be answered without any event; zero: none
	choose  chooser
	manager queueManager
	state
}

// state is what chooser and queueManager share. Its own methods only read it, or change the set of
// candidates (roster.go).
type state struct {
	cfg     Config
	metrics *metrics
	now     time.Time // time of the present call, read by lock

	candidates map[string]*candidate // by ID; a removed candidate stays until its last charge has ended
	models     map[string]*model
	// modelsUnknown says that a live candidate, or every candidate, has not named its models yet. A
	// request for an unknown model then gets ErrUnavailable (503), not ErrModelNotFound (404).
	modelsUnknown bool

	queue    *queue.Queue[*waiter]
	ledger   *ledger.Ledger
	cache    *cache.Cache
	fit      *fit.Times
	steering steer.Overrides
	budget   budget
	batch    BatchStatus
}

// model holds the candidates and the waiting requests for one model name.
type model struct {
	name            string
	candidates      []*candidate // the model's candidates, in configured order
	cursor          int          // position (candidate.order) of the candidate that round-robin chose last; -1: none yet
	queue           *queue.ModelQueue[*waiter]
	throughput      fit.Throughput
	freeDecodeSlots map[string]int // free decode slots by region, as last reported; nil: all requests are decoded in one region
}

// candidate is kept after its removal from the configuration until its last charge has ended.
type candidate struct {
	Candidate
	order      int  // position in the configuration, from 0
	configured bool // false: removed, but kept until its charges end
	load       ledger.EngineLoad
	// byModel counts the unanswered charges of each model that only some ranks of the board list; load
	// counts them, too.
	byModel         map[string]*ledger.ModelCounts
	ring            []uint64
	cache           cache.CachedBlocks
	computeTimer    fit.ComputeTimer
	residual        fit.Residual
	circuit         circuit.Circuit
	trialAt         time.Time           // its hand-offs are lost: when it gets a prompt as a trial; zero: they arrive
	trialLease      uint64              // number of the trial's lease; 0: none, or its result is known
	lastFault       string              // of a probe; empty after a probe was answered
	capacityWarned  bool                // that the KV capacity is not known
	answeredSeconds prometheus.Observer // durations of answered probes; nil before the first
}

type chooser struct {
	*state
	scheduler *Scheduler // for Lease, whose methods take its lock
	lastLease uint64     // number of the newest lease; the first has 1

	// Scratch memory, which is reused so as not to allocate.
	waitedFor   []*candidate    // candidates whose load includes waiting requests in this round
	eligible    []*candidate    // candidates that passed the filters so far
	view        []policy.Engine // indicators of the eligible candidates, by fillView
	heldBlocks  []int32         // by slot of the prefix index, by fillView
	prefillers  []Prefiller     // of localState
	slotsNeeded map[string]int  // by region: a model's prompts in prefill or waiting for a decode slot
}

// queueManager decides which of the waiting requests are served, under the scheduler's lock.
type queueManager struct {
	*state
	choose *chooser
}

// Lease is the charge of one prompt on one candidate, from the choice of the candidate until its
// engine has freed the prompt's KV blocks:
//
//	Acquire ─▶ probing ─Answered─▶ pooled ─Dispatched─▶ dispatched
//
// If the connector needs the decode rank before the prefill, the probe is sent later, by MarkSent.
// In each phase, one last call ends the lease: Release (the KV is free, or was never written),
// Orphan (no decode engine will fetch it) or Failed (the probe failed). An answered or orphaned
// lease also ends by itself at the engine's hold timeout; the last call then changes nothing. Any
// call after the last one is a bug, which is counted.
type Lease struct {
	Candidate Candidate     // as configured at the time of the choice
	Policy    string        // that chose the candidate
	Wait      time.Duration // in the arrival queue
	Prompt    int           // tokens, counted or estimated
	HitTokens int           // predicted to be in the candidate's prefix cache
	Trace     *Trace        // nil without Config.Explain
	Others    int           // this proxy's unanswered probes on the candidate when this prompt was charged

	scheduler        *Scheduler
	chargedTo        *candidate // with its present state
	number           uint64
	canary           bool
	predictedMs      float64 // of the prefill; 0: no prediction
	hadOthersPrompts bool    // other proxies or clients had prompts on it when this one was charged
	model            string
	inFlight         ledger.InFlight
	request          *Request // for a lease that replaces this one; nil: never replaced
	predictedHit     cache.PredictedHit
}

// waiter is a request in the arrival queue.
type waiter struct {
	Request
	item       queue.Item[*waiter]
	policy     *policy.Policy
	since      time.Time           // entered the queue
	timesOutAt time.Time           // its time in the queue is over
	done       chan struct{}       // closed after lease or err is set
	onResult   func(*Lease, error) // for a request of Offer; nil: the caller waits for done
	lease      *Lease
	err        error

	siblings       []*waiter       // waiting prompts (legs) of the same request, this one included; nil: it has only one
	regionDecision *regionDecision // shared by all siblings; nil: not entered by EnterAll
}

// deliverResult must be called once, under the scheduler's lock.
func (w *waiter) deliverResult(lease *Lease, err error) {
	w.lease, w.err = lease, err
	close(w.done)
	if w.regionDecision != nil {
		// The other legs stay here if this one was served or refused here, and leave if it goes
		// elsewhere.
		w.regionDecision.announce()
	}
	if w.onResult != nil {
		w.onResult(lease, err)
	}
}

// announce may be called more than once, under the scheduler's lock.
func (d *regionDecision) announce() {
	if !d.closed {
		d.closed = true
		close(d.done)
	}
}

// keepSiblingsHere keeps all legs of a client's request in this region, because one of them is
// served here. nil: the request has only one prompt.
func keepSiblingsHere(siblings []*waiter) {
	for _, leg := range siblings {
		leg.item.Pin()             // no leg may be displaced after another one is served
		leg.Deadline = time.Time{} // it is for the client's first token, which the served leg sends
		leg.keepHere()
		leg.regionDecision.announce()
	}
}

func (r *Request) keepHere() {
	if r.Remote != nil {
		r.Remote.Stay()
	}
}

// LeaseOwner stands for one request in this proxy, with all its attempts. It must make the last
// call (Release, Orphan or Failed) on each of its leases; otherwise the lease counts as lost in the
// audit.
type LeaseOwner = ledger.LeaseOwner

// Request describes a prompt for which a prefill engine is wanted.
type Request struct {
	ID           string // hashed to decide between candidates with equal scores
	Model        string
	PromptTokens int
	Counted      bool // PromptTokens was counted; false: estimated
	Prompt       Prompt
	Session      uint64                   // hash of the session's key; 0: no session
	EndsSession  bool                     // the session has no further request
	PromptBytes  int                      // for vllm-ascend's weight; 0: four bytes per token
	Arrival      time.Time                // of the first attempt; zero: now
	Key          string                   // tenant or user; within a priority, the keys take turns
	Priority     int                      // higher ones are served first
	Batch        bool                     // only uses capacity that no other request needs; Priority is ignored
	Deadline     time.Time                // latest time of the first token; within a priority, earlier ones are served first; zero: none
	HasPlace     bool                     // a retry, with a place in the pool of hand-offs
	Exclude      []string                 // IDs of candidates that were tried; they are used only if no other is left
	Policy       string                   // as policy.Parse reads it; empty: the scheduler's default
	Target       string                   // ID of the only candidate that may take the request; empty: any
	MayGoTo      func(region string) bool // nil: any region
	Returned     bool                     // another region gave the request back: it waits by its first arrival, even if the queue is full
	Remote       RemoteRegions            // decides which region serves the request; nil: this one
	LeaseOwner   *LeaseOwner              // must end the lease; nil: the audit does not check it
	replaces     *Candidate               // only engines that reach its decode rank may take the request; nil: no rank is chosen

	considered struct { // kept while the request waits, because it is considered many times
		counted        bool // by the hotspot detector
		scoresCompared bool // by the hotspot detector
		lookup         cache.Lookup
	}
}

// RemoteRegions decides whether another region serves a request. Its methods are called under the
// scheduler's lock: they must not wait, do I/O or call the scheduler.
type RemoteRegions interface {
	// Offered reports whether another region serves the request's model.
	Offered() bool
	// Where decides where the request is served. It is called again at every event as long as the
	// request waits.
	Where(h *Here) Where
	// Takes reports, for a request that stays here, whether a candidate may get one more probe now.
	Takes(p *Prefiller) bool
	// Queued is called when a request entered or left the arrival queue of its model, with its new
	// length.
	Queued(now time.Time, entered bool, waiting int)
	// Stay is called when one leg of the request is served in this region: its other legs must stay,
	// too.
	Stay()
}

// Where is the answer of RemoteRegions: this region, another one, or the request waits.
type Where uint8

// Here is the state of this region for one request, valid only during the call of
// RemoteRegions.Where.
type Here struct {
	Model  string
	Now    time.Time
	Round  uint64    // of decisions; during a round, only its own decisions change the state
	Tokens int       // of the prompt
	Since  time.Time // entered the arrival queue
	Local
}

type Local struct {
	Prefillers   []Prefiller
	Waiting      int     // without retries and batch
	Tokens       int     // prompt tokens of the waiting requests
	ArrivalsPerS float64 // new requests
	TTFTMs       float64 // median time from a probe to its answer; 0: no answer yet
}

// Prefiller is the state of one candidate, for the choice between regions.
type Prefiller struct {
	policy.Engine
	Region          string // empty: the proxy's own
	Live            bool   // up, and its circuit allows requests
	Open            bool   // its KV gate is open, and the pool and the decode side of its region have room
	Unanswered      int    // probes of this proxy
	Held            int    // prompts of this proxy that are unanswered or whose KV may still be fetched
	OthersWaiting   int    // requests of other proxies and clients
	WaitingAtScrape int    // all requests
	// Ran is how many requests ran at the last scrape in which none waited. With Answered, it shows
	// how many more the engine can run.
	Ran int
	// Answered is how many of this proxy's probes ended after that scrape, less those that were sent.
	Answered       int
	MaxSeqs        int         // most requests that the engine runs at once; 0: not known
	Samples        int         // prefills from which the latency was learned
	KVGateWillOpen bool        // only the KV gate keeps prompts away, and it is predicted to open
	Room           ledger.Room // zero: not known
	// ResidualMs is by how many ms the engine will probably exceed the predicted time for its
	// unanswered probes and one more.
	ResidualMs float64
}

type Trace struct {
	Reason   string       // policy, only (one was eligible), canary, affinity or fallback
	Eligible int          // candidates that passed the filters
	Best     []policy.Row // the chosen one first, the others by score; without scores if no policy was asked
}

// Ticket stands for a request or leg that has entered the arrival queue or was served at once.
type Ticket struct {
	scheduler *Scheduler
	lease     *Lease
	waiter    *waiter // nil: served at once
}

// regionDecision is shared by the legs of one request. done is closed when it is decided whether
// they stay in this region.
type regionDecision struct {
	done   chan struct{}
	closed bool
}

// watcher is the Scheduler with the state of Run.
type watcher struct {
	*Scheduler
	streams map[*candidate]cache.Feed
}
