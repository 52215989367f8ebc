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

// Tier owns everything that is known about the prefillers: their accounts,
// gates and circuits, and the requests that wait for one. All of it is behind
// one lock, which is held for a decision but never for I/O.
//
// What the tier knows is kept in plain values that have neither a clock nor a lock: queue, ledger, cache, fit and
// steer. On top of them chooser decides about one request, and arrivals about all
// that wait.
type Tier struct {
	changed chan struct{} // wakes Run when the candidates or the settings have changed
	clock   func() time.Time

	mu       sync.Mutex  // over all that follows
	timer    *time.Timer // wakes the queues when time alone lets a waiter pass; nil: a simulation calls Wake itself
	wakeAt   time.Time   // what the timer is set to
	choose   chooser
	arrivals arrivals
	state
}

// state is all that is known. Its own methods only look at it, or change the set of candidates (roster.go).
type state struct {
	cfg     Config
	metrics *metrics
	now     time.Time // when the present holder took the lock
	roster
	queue  *queue.Queue[*waiter]
	ledger *ledger.Ledger
	cache  *cache.Cache
	fit    *fit.Times
	steer  steer.Steer
	budget budget
	batch  BatchStatus
}

// model is what serves one model name, and who waits for it.
type model struct {
	name    string
	servers []*candidate // in configured order
	cursor  int          // order of the candidate that round-robin chose last, -1 before the first
	line    *queue.Line[*waiter]
	pace    fit.Pace
	slots   map[string]int // decode slots that were free last, by region; nil: all decode in one region
}

// candidate is a Candidate with everything the tier knows about it. It
// outlives its removal until the last charge ended.
type candidate struct {
	Candidate
	order      int  // position in the configuration
	configured bool // false: removed, kept for its charges
	account    ledger.Account
	apart      map[string]*ledger.Apart // part of account, by model, for models that only some of its ranks list
	ring       []uint64
	cache      cache.Holdings
	stretch    fit.Stretch
	residual   fit.Residual
	circuit    circuit.Circuit
	fault      string              // what failed there last; empty once a probe was answered
	unbounded  bool                // it was logged already that its capacity is not known
	answered   prometheus.Observer // seconds of its probes that were answered; nil before the first
}

// chooser decides where one request goes, on top of all that is known.
type chooser struct {
	*state
	tier      *Tier // of the leases it makes
	lastLease uint64

	// Scratch of one decision, and of one round of them.
	heldAt     []*candidate       // candidates that are charged with waiting requests in this round; endRound takes these charges back
	eligible   []*candidate       // what the filters have left
	view       []policy.Candidate // indicators of the candidates that look measured last
	found      []int32            // by slot of the prefix index: how many of the prompt's blocks it holds
	prefillers []Prefiller
	onTheWay   map[string]int // by region
}

// arrivals decides which of the requests that wait pass. Its methods are called under
// the tier's lock.
type arrivals struct {
	*state
	choose *chooser
}

// Lease is the charge of one prompt on one candidate, from the moment it was chosen until the engine has its KV
// blocks back:
//
//	Acquire ─▶ probing ─Answered─▶ pooled ─Dispatched─▶ dispatched
//
// Where the connector needs the decode rank before the prefill, the probe goes out later, with Send. From each phase,
// the last call on the lease ends it: Release (the KV is free: first decode event, discarded, or never written),
// Orphan (no decode engine will fetch it) or Failed (the probe failed). An answered or orphaned lease also ends by
// itself at the engine's hold timeout; the caller's last call then changes nothing. A call after the last is a
// counted bug.
type Lease struct {
	Candidate Candidate     // as it was when it was chosen
	Policy    string        // that chose it
	Wait      time.Duration // in the arrival queue
	Prompt    int           // tokens, as counted or guessed
	HitTokens int           // of them, thought to be in the candidate's prefix cache
	Trace     *Trace        // what it was chosen on; nil without Config.Explain
	Others    int           // probes of ours the candidate had not answered when this one was charged

	tier      *Tier
	c         *candidate
	number    uint64
	canary    bool
	predicted float64 // ms that its prefill will take; 0: no law is known yet
	crowded   bool    // prompts of others were on the candidate when it was charged
	model     string
	charge    ledger.Charge
	request   *Request          // the request, while another candidate may still take it; nil: none may
	expected  cache.Expectation // of what it finds and leaves in the prefix cache
}

// waiter is a request in the arrival queue.
type waiter struct {
	Request
	entry    queue.Entry[*waiter]
	policy   *policy.Policy
	since    time.Time           // when it entered the queue
	until    time.Time           // when its wait ends without a prefiller
	done     chan struct{}       // closed with lease or err set
	onResult func(*Lease, error) // called with the result, for a request of Offer; nil: the caller waits for done
	lease    *Lease
	err      error

	siblings []*waiter       // legs of the same request, itself among them
	decided  *regionDecision // shared by the legs; nil: the request has no other legs
}

// conclude tells the caller that waits what became of its request.
func (w *waiter) conclude(lease *Lease, err error) {
	w.lease, w.err = lease, err
	close(w.done)
	if w.decided != nil {
		w.decided.close() // a leg that was refused goes to no other region, so its siblings do not either
	}
	if w.onResult != nil {
		w.onResult(lease, err)
	}
}

// close says that it is known now whether the request stays in this region. It may be called more than once.
func (d *regionDecision) close() {
	if !d.closed {
		d.closed = true
		close(d.done)
	}
}

// keepHere keeps all legs of a request in this region, because one of them is served here.
func keepHere(siblings []*waiter) {
	for _, sibling := range siblings {
		sibling.entry.Fix()            // half a request must not be displaced
		sibling.Deadline = time.Time{} // the first token is that of another leg
		sibling.stay()
		sibling.decided.close()
	}
}

// stay tells the request's Elsewhere that the request is served in this region.
func (r *Request) stay() {
	if r.Elsewhere != nil {
		r.Elsewhere.Stay()
	}
}

// Holder stands for one attempt to serve a request, from its turn to its end. The
// attempt must make the last call on the leases that name its Holder, so the audit
// sees a lease that was lost on the way.
type Holder = ledger.Holder

// Request asks for a prefiller.
type Request struct {
	ID           string // breaks ties
	Model        string
	PromptTokens int                      // estimate
	Counted      bool                     // PromptTokens was counted, not estimated
	Prompt       Prompt                   // to find it in prefix caches
	Session      uint64                   // hash of its session's key, 0: none
	Ends         bool                     // the session has no further request
	PromptBytes  int                      // for vllm-ascend's weight; 0: four a token
	Arrival      time.Time                // the request's first; zero: now
	Key          string                   // whose it is: keys of one priority take turns
	Priority     int                      // higher ones first
	Batch        bool                     // it takes only what others leave, whatever its priority
	Deadline     time.Time                // by when its first token is wanted; within a priority, earlier deadlines come first; zero: none
	Reserved     bool                     // it holds a place in the pool already, as a retry does
	Exclude      []string                 // IDs of the candidates tried before
	Policy       string                   // empty: the tier's
	Target       string                   // ID of the one candidate it may go to; empty: any
	May          func(region string) bool // whether it may go to an engine of another region; nil: to any
	Returned     bool                     // another region gave it back: even a full queue takes it, at the place of its first arrival
	Elsewhere    Elsewhere                // nil: it is served here
	Holder       *Holder                  // the attempt that must give the lease back; nil: the audit does not check that

	seen struct { // what the tier remembers from one look to the next
		counted bool // by the hotspot detector
		weighed bool
		cache   cache.Lookup
	}
}

// Elsewhere is what other regions could do for one request. Every call comes
// under the tier's lock: none may wait, do I/O or call the tier.
type Elsewhere interface {
	// Offered says whether another region serves the request's model.
	Offered() bool
	// Where is asked when it is the request's turn, at every event, as long as it
	// waits.
	Where(h *Here) Where
	// Takes says, for a request that stays here, whether a prefiller may have one more probe now.
	Takes(p *Prefiller) bool
	// Queued tells that a request of its model entered or left the arrival queue,
	// and how many are there now.
	Queued(now time.Time, entered bool, waiting int)
	// Stay tells that part of the request is served here, so that the rest is, too.
	Stay()
}

// Where a request goes.
type Where uint8

// Here is this region as a request finds it. It is valid during the call only.
type Here struct {
	Model  string
	Now    time.Time
	Round  uint64 // number of the round of decisions; within a round, only the charges of its own decisions change anything
	Tokens int    // of the prompt
	Since  time.Time
	Local
}

// Local is what prefills a model here.
type Local struct {
	Prefillers   []Prefiller
	Waiting      int     // requests in the arrival queue
	Tokens       int     // of their prompts
	ArrivalsPerS float64 // of first attempts
	TTFTMs       float64 // median from a probe to its answer; 0: none came yet
}

// Prefiller is one candidate as it was measured.
type Prefiller struct {
	policy.Candidate
	Region     string      // empty: ours
	Live       bool        // up, and its circuit lets requests pass
	Open       bool        // its KV gate is open, and the pool and the decode side of its region have room
	Unanswered int         // our probes
	Held       int         // our unanswered probes, and our prompts whose KV it still holds for a decode engine
	Foreign    int         // requests of others that wait there
	Pending    int         // all that waited there at the last scrape
	Ran        int         // all that ran there at the last scrape at which none waited
	Answered   int         // our probes that were answered since, less those sent
	MaxSeqs    int         // requests that its engine runs at once; 0: not known
	Samples    int         // prefills that its line was learned from
	Filled     bool        // only its KV gate keeps it from prompts, and the gate is predicted to open
	Room       ledger.Room // zero: not known
	ResidualMs float64     // time that its probes, and one more, take beyond their prediction; below 0: less
}

// A Trace is what a candidate was chosen on.
type Trace struct {
	Reason   string       // policy, or only, canary, affinity, fallback
	Eligible int          // how many candidates the filters left to choose from
	Best     []policy.Row // the chosen first, then by score; without scores where none were asked for
}

// Ticket is the turn of a request, or of one leg of it, in the arrival queue; or its lease, if it was served at once.
type Ticket struct {
	tier  *Tier
	lease *Lease
	w     *waiter // nil: served
}

// regionDecision says, once, that it is known whether the legs of a request stay in this region: done is closed then.
type regionDecision struct {
	done   chan struct{}
	closed bool
}

// runner is what Run has of its own: the candidates' KV events that are followed.
type runner struct {
	*Tier
	followed map[*candidate]cache.Feed
}
