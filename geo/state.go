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
// requests go to a peer, and carries them there.
type Node struct {
	cfg      Config
	boot     string
	started  time.Time
	clock    Clock
	traffic  *engine.Client
	metrics  *metrics
	verifier *Verifier
	receipts receipts
	// running counts the goroutines and probers that Close waits for: those that probe a peer, follow the discovery of peers, or read
	// the end of a forward's body. They begin under mu, or before Start returns, so that none begins while Close waits.
	running sync.WaitGroup
	ctx     context.Context // its end stops the probers
	stop    context.CancelFunc

	snapshot int64 // bytes that the memory of the prompts sent to one peer may take

	mu       sync.Mutex
	text     string // the policy as Parse takes it
	settings policy.Settings
	policy   *policy.Policy // made of settings and text; each model decides by a copy
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
	push   policy.Settings // the settings of the present round
	drain  policy.Drain
	round  uint64
	places []policy.Place
	peers  []*peer // the peers of the places behind the local places
	local  int     // how many local places there are
	hits   []int32
	barred []bool
}

// peer is what a Node knows of another dispatcher. All of it is under the
// Node's lock.
type peer struct {
	conf   *PeerConfig
	id     string // the id of its entry, with the address if the entry stands for several dispatchers
	target *engine.Target

	// Its prober.
	ctx        context.Context // its end stops the prober
	cancel     func()
	link       Link
	cancelNext func() bool // cancels the next question; false: it was asked already

	sibling bool // a dispatcher of our own region, with the same engines
	gone    bool // its name does not resolve to this address any more; forwards may still be under way

	// From its probes.
	name       string // the id that it gives itself
	boot       string
	itself     bool // the address is this dispatcher's own, behind a name that resolves to several
	major      int
	decoded    []string // of a sibling: models that it decodes
	probed     bool
	up         bool
	misses     int
	goodsInRow int
	fault      string    // why the last probe was missed
	good       time.Time // when the last good one was answered
	draining   bool
	offers     map[string]policy.Offer
	rtt        policy.RTT

	// Of our forwards.
	reserved   policy.Reservations
	circuit    circuit.Circuit
	distrust   policy.Distrust
	residual   fit.Residual
	trust      policy.Trust
	unanswered int // requests that have no first event yet; see awaitsWhole for those that are not streamed
	spent      spending
	inflight   map[*Forward]struct{}
	prompts    *index.Index // the prompts that were forwarded there
	slot       index.Slot
	reasons    map[string]policy.Reason // by model, as judged last
}

// at is a time as policies count it: in ms since the node was made.
func (n *Node) at(t time.Time) float64 { return ms(t.Sub(n.started)) }

// model is the state of one model's decisions; nil: there are too many models.
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

// Link carries probes to one peer: over HTTP, or in a simulation.
type Link interface {
	// Ask brings a question to the peer. It calls answered once, before or after it
	// returns: with the answer, or with an error when there is none within limit or
	// when ctx ends.
	Ask(ctx context.Context, question []byte, limit time.Duration, answered func(Echo))
	// Warm keeps connections ready for the requests that are forwarded to the peer.
	Warm(ctx context.Context, limit time.Duration) error
	Close()
}

// Echo is the outcome of a question.
type Echo struct {
	Text    []byte
	Trip    time.Duration // from when the question was written until the answer came
	Dialled bool          // the connection was dialled for this question, so that Trip is no round trip
	Err     error
}

// maxModelStates bounds the states that requests for unknown models could create.
const maxModelStates = 1024
