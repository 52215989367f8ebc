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
	wakeAt  time.Time   // next time at which a waiting request may be answered without any event; zero: none
	choose  chooser
	manager queueManager
	state
}

// state is the state of a Scheduler that chooser and queueManager share. Its own methods only read it, or change the set of candidates
// (roster.go).
type state struct {
	cfg     Config
	metrics *metrics
	now     time.Time // time of the present call: lock reads the clock when it takes the scheduler's lock

	candidates map[string]*candidate // by candidate ID; a removed candidate stays until its last charge has ended
	models     map[string]*model
	// modelsUnknown says that a live candidate, or every candidate, has not named its models yet. A request for an unknown model then
	// gets ErrUnavailable (503), not ErrModelNotFound (404).
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

// candidate is a Candidate together with its state. After its removal from the configuration, it is kept until its last
// charge has ended.
type candidate struct {
	Candidate
	order      int  // position in the configuration, from 0
	configured bool // false: removed from the configuration, but kept until its charges end
	load       ledger.EngineLoad
	// byModel counts the unanswered charges of each model that only some ranks of the board list. load counts these charges, too.
	byModel         map[string]*ledger.ModelCounts
	ring            []uint64
	cache           cache.CachedBlocks
	computeTimer    fit.ComputeTimer
	residual        fit.Residual
	circuit         circuit.Circuit
	trialAt         time.Time           // its engine's hand-offs are lost: when it gets a prompt as a trial; zero: they arrive
	trialLease      uint64              // number of the lease whose prompt is the trial; 0: none is, or its result is known
	lastFault       string              // description of the last failed probe; empty after a probe was answered
	capacityWarned  bool                // the warning that the candidate's KV capacity is not known was logged
	answeredSeconds prometheus.Observer // histogram of the durations of the candidate's answered probes; nil before the first answer
}

// chooser chooses the candidate for one request.
type chooser struct {
	*state
	scheduler *Scheduler // each lease keeps it, because the methods of Lease take its lock
	lastLease uint64     // number of the newest lease; the first lease has number 1

	// Scratch memory, which every decision or round of decisions reuses so as not to allocate.
	waitedFor   []*candidate    // candidates whose load includes waiting requests in this round; endRound clears the list
	eligible    []*candidate    // candidates that passed the filters so far, for the present request
	view        []policy.Engine // policy indicators of the eligible candidates, computed by fillView
	heldBlocks  []int32         // how many of the prompt's first blocks each slot of the prefix index holds, computed by fillView
	prefillers  []Prefiller     // slice that localState returns and reuses
	slotsNeeded map[string]int  // by region: a model's prompts in prefill or waiting for a decode slot, counted by countSlotsNeeded
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
// ends the lease: Release, Orphan or Failed. Release means that the KV is free: after the first decode event, because it was
// discarded, or because it was never written. Orphan means that no decode engine will fetch the KV, and Failed that the probe
// failed. An answered or orphaned lease also ends by itself at the engine's hold timeout; the last call then changes nothing. Any
// call after the last one is a bug, which is counted.
type Lease struct {
	Candidate Candidate     // copy of the candidate's configuration at the time of the choice
	Policy    string        // name of the policy that chose the candidate
	Wait      time.Duration // time in the arrival queue
	Prompt    int           // length of the prompt in tokens, counted or estimated
	HitTokens int           // prompt tokens that are predicted to be in the candidate's prefix cache
	Trace     *Trace        // explains the choice; nil without Config.Explain
	Others    int           // probes of this proxy that the candidate had not answered when this prompt was charged

	scheduler        *Scheduler
	chargedTo        *candidate // the candidate with its present state
	number           uint64
	canary           bool
	predictedMs      float64 // duration of the prefill in ms; 0: no prediction
	hadOthersPrompts bool    // when this prompt was charged, the candidate also had prompts of other proxies or clients
	model            string
	inFlight         ledger.InFlight
	request          *Request           // copy of the request, for a lease of another candidate that replaces this one; nil: never replaced
	predictedHit     cache.PredictedHit // prediction of what the prefill finds in the prefix cache, and of what it leaves there
}

// waiter is a request in the arrival queue.
type waiter struct {
	Request
	item       queue.Item[*waiter]
	policy     *policy.Policy
	since      time.Time           // when the request entered the queue
	timesOutAt time.Time           // when the request's time in the queue is over
	done       chan struct{}       // closed after lease or err is set
	onResult   func(*Lease, error) // called with the result, for a request of Offer; nil: the caller waits for done
	lease      *Lease
	err        error

	siblings       []*waiter       // the waiting prompts (legs) of the same request, this one included; nil: the request has only one prompt
	regionDecision *regionDecision // shared by all siblings; nil: the request was not entered by EnterAll
}

// deliverResult passes the result of a request, a lease or an error, to its caller: it closes w.done, and calls w.onResult for a request
// of Offer. It must be called once, under the scheduler's lock.
func (w *waiter) deliverResult(lease *Lease, err error) {
	w.lease, w.err = lease, err
	close(w.done)
	if w.regionDecision != nil {
		// The result decides about the request's other legs, too: they stay here if this leg was served or refused here, and leave
		// if it goes to another region.
		w.regionDecision.announce()
	}
	if w.onResult != nil {
		w.onResult(lease, err)
	}
}

// announce wakes the goroutines that wait in AwaitRegionDecision. It may be called more than once, under the scheduler's lock.
func (d *regionDecision) announce() {
	if !d.closed {
		d.closed = true
		close(d.done)
	}
}

// keepSiblingsHere keeps all legs of a request in this region, because one of them is served here. The legs are the prompts of one client's
// request. siblings are those that waited, the served one included; nil: the request has only one prompt.
func keepSiblingsHere(siblings []*waiter) {
	for _, leg := range siblings {
		leg.item.Pin()                // no leg may be displaced from the full queue after another leg is served
		leg.Deadline = time.Time{}    // the deadline is for the client's first token, which the served leg sends
		leg.keepHere()                // its RemoteRegions must not send it to another region any more
		leg.regionDecision.announce() // wakes the goroutine that waits for the decision about the region
	}
}

// keepHere tells the request's RemoteRegions, if it has any, that the request is served in this region.
func (r *Request) keepHere() {
	if r.Remote != nil {
		r.Remote.Stay()
	}
}

// LeaseOwner stands for one request in this proxy, with all its attempts. The request must make the last call (Release, Orphan or Failed)
// on every lease that names its LeaseOwner. If the request ends here before, the lease counts as lost in the audit.
type LeaseOwner = ledger.LeaseOwner

// Request describes a prompt for which a prefill engine is wanted.
type Request struct {
	ID           string // hashed to decide between candidates with equal scores
	Model        string
	PromptTokens int                      // length of the prompt in tokens
	Counted      bool                     // PromptTokens was counted; false: estimated
	Prompt       Prompt                   // identifies the prompt in prefix caches
	Session      uint64                   // hash of the session's key; 0: no session
	EndsSession  bool                     // the session has no further request
	PromptBytes  int                      // length of the prompt in bytes, for vllm-ascend's weight; 0: four bytes per token
	Arrival      time.Time                // when the request's first attempt arrived; zero: now
	Key          string                   // tenant or user; within a priority, the keys take turns
	Priority     int                      // higher priorities are served first
	Batch        bool                     // the request only uses capacity that no other request needs; Priority is ignored
	Deadline     time.Time                // latest time of the first token; within a priority, earlier deadlines are served first; zero: none
	HasPlace     bool                     // the request is a retry, and has a place in the pool of hand-offs already
	Exclude      []string                 // IDs of the candidates that were tried before; they are used only if no other is left
	Policy       string                   // policy for this request, as policy.Parse reads it; empty: the scheduler's default
	Target       string                   // ID of the only candidate that may take the request; empty: any may
	MayGoTo      func(region string) bool // whether an engine of another region may take the request; nil: any may
	Returned     bool                     // another region gave the request back: it waits by its first arrival, even if the queue is full
	Remote       RemoteRegions            // decides which region serves the request; nil: this region
	LeaseOwner   *LeaseOwner              // stands for the request, which must end the lease; nil: the audit does not check it
	replaces     *Candidate               // only engines that reach its decode rank may replace this one; nil: no rank is chosen

	considered struct { // state that is kept while the request waits, because it is considered many times
		counted        bool         // the hotspot detector has counted the request
		scoresCompared bool         // the hotspot detector has compared the scores of the request's candidates
		lookup         cache.Lookup // result of the last look-up of the prompt in the prefix index
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

// Where is the answer of RemoteRegions: this region serves the request, another region does, or the request waits.
type Where uint8

// Here is the state of this region for one request. It is only valid during the call of RemoteRegions.Where.
type Here struct {
	Model  string
	Now    time.Time
	Round  uint64    // number of the round of decisions; during a round, only its own decisions change the state
	Tokens int       // length of the prompt in tokens
	Since  time.Time // when the request entered the arrival queue
	Local
}

// Local is the state of this region for one model.
type Local struct {
	Prefillers   []Prefiller
	Waiting      int     // requests in the arrival queue, without retries and batch
	Tokens       int     // prompt tokens of the waiting requests
	ArrivalsPerS float64 // new requests per second
	TTFTMs       float64 // median time from a probe to its answer; 0: no answer yet
}

// Prefiller is the state of one candidate, for the choice between regions.
type Prefiller struct {
	policy.Engine
	Region          string // region of the engine; empty: the proxy's own region
	Live            bool   // the candidate is up, and its circuit allows requests
	Open            bool   // the candidate's KV gate is open, and the pool and the decode side of its region have room
	Unanswered      int    // probes of this proxy that the candidate has not answered
	Held            int    // unanswered probes of this proxy, and prompts of this proxy whose KV a decode engine may still fetch
	OthersWaiting   int    // requests of other proxies and clients that wait in the engine
	WaitingAtScrape int    // all requests that waited at the last scrape
	// Ran is how many requests ran at the last scrape in which no request waited.
	Ran int
	// Answered is the number of this proxy's probes that ended after the scrape of Ran, with an answer or without, less the number of
	// probes that were sent after it.
	Answered       int
	MaxSeqs        int         // most requests that the engine runs at once; 0: not known
	Samples        int         // number of prefills from which the candidate's latency was learned
	KVGateWillOpen bool        // only the KV gate keeps prompts from the candidate, and the gate is predicted to open
	Room           ledger.Room // when the KV cache has room for more prompts; zero: not known
	// ResidualMs is by how many ms the engine will probably exceed the predicted time for its unanswered probes and one more;
	// negative: it will need less time.
	ResidualMs float64
}

// A Trace explains the choice of a candidate.
type Trace struct {
	Reason   string       // why the candidate was chosen: policy, only (one was eligible), canary, affinity or fallback
	Eligible int          // number of candidates that passed the filters
	Best     []policy.Row // candidates by score, the chosen one first; without scores if no policy was asked
}

// Ticket stands for a request, or one leg of a request, that has entered the arrival queue or was served at once.
type Ticket struct {
	scheduler *Scheduler
	lease     *Lease
	waiter    *waiter // nil: the request was served at once
}

// regionDecision is shared by the legs (prompts) of one request. done is closed when it is decided whether the legs stay in this
// region.
type regionDecision struct {
	done   chan struct{}
	closed bool
}

// watcher is the Scheduler with the state of Run, which scrapes the engines and follows their KV events.
type watcher struct {
	*Scheduler
	streams map[*candidate]cache.Feed // running streams of KV events, by candidate
}
