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

// Node is this dispatcher among the others: it knows its peers, decides which
// request goes to one, and carries it there.
type Node struct {
	cfg      Config
	boot     string
	started  time.Time
	clock    Clock
	traffic  *engine.Client
	metrics  *metrics
	verifier *Verifier
	papers   receipts
	running  sync.WaitGroup  // probers, and ends of forwards that are waited for; begun under mu, or before Start returns
	ctx      context.Context // of the probers
	stop     context.CancelFunc

	snapshot int64 // bytes of what is remembered of the prompts sent to a peer

	mu       sync.Mutex
	text     string // of the policy
	settings policy.Settings
	policy   *policy.Policy // both of them; each model decides by a copy
	models   map[string]*modelState
	peers    []*peer
	number   uint64 // of the last forward
}

// Tier is this region's arrival queue.
type Tier interface {
	Offers(func(model string, l *prefill.Local))
	Wake()
}

// modelState is how the requests of one model are decided.
type modelState struct {
	policy policy.Policy
	push   policy.Settings // of the round
	drain  policy.Drain
	round  uint64
	places []policy.Place
	peers  []*peer // of the places behind the local ones
	local  int     // how many those are
	hits   []int32
	barred []bool
}

// peer is what a Node knows of another dispatcher. All of it is under the
// Node's lock.
type peer struct {
	conf   *PeerConfig
	id     string // of the entry, with the address where that has several
	target *engine.Target

	// Its prober.
	ctx    context.Context // ends it
	cancel func()
	link   Link
	unplan func() bool // prevents the next question; false: it is asked already

	sibling bool // of our own region, with the same engines
	gone    bool // its name leads here no more; forwards may still be on their way

	// From its probes.
	name     string // that it gave itself
	boot     string
	itself   bool // it is ourselves, under a name that leads to all
	major    int
	decoded  []string // sibling: models that it decodes
	probed   bool
	up       bool
	misses   int
	goods    int
	fault    string    // why the last probe was missed
	good     time.Time // when the last good one was answered
	draining bool
	offers   map[string]policy.Offer
	rtt      policy.RTT

	// Of our forwards.
	reserved policy.Reservations
	circuit  circuit.Circuit
	distrust policy.Distrust
	residual fit.Residual
	trust    policy.Trust
	open     int // requests that it has not answered
	spent    spending
	inflight map[*Forward]struct{}
	sent     *index.Index // what was forwarded there
	slot     index.Slot
	reasons  map[string]policy.Reason // last judged, by model
}

// at is a time as policies count it.
func (n *Node) at(t time.Time) float64 { return ms(t.Sub(n.started)) }

// model is the state of one model's decisions; nil: there are too many.
func (n *Node) model(name string) *modelState {
	s := n.models[name]
	if s == nil && len(n.models) < maxModelStates {
		s = &modelState{policy: *n.policy}
		n.models[name] = s
	}
	return s
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

func us(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

// Link is the way of probes to one peer: HTTP, or what a simulation makes of it.
type Link interface {
	// Ask brings a question to the peer. It calls answered once, before or after it
	// returns: with the answer, or with an error when there is none within limit or
	// when ctx ends.
	Ask(ctx context.Context, question []byte, limit time.Duration, answered func(Echo))
	// Warm keeps connections ready for the requests that are forwarded to the peer.
	Warm(ctx context.Context, limit time.Duration) error
	Close()
}

// Echo is what came of a question.
type Echo struct {
	Text    []byte
	Trip    time.Duration // from when the question was written
	Dialled bool          // the connection was dialled for it, so that Trip says nothing of the way
	Err     error
}

// maxModelStates bounds what requests for models that nobody has could make.
const maxModelStates = 1024
