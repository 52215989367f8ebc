package geo

import (
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"evenkeel/engine"
	"evenkeel/geo/policy"
	"evenkeel/prefill"
	"evenkeel/prefill/index"
	"evenkeel/sse"
)

// Forward is one request's way to a peer and back: booked when it was decided,
// sent once, and ended once.
type Forward struct {
	node        *Node
	peer        *peer
	number      uint64
	model       string
	rid, tenant string
	came        *Hop
	legs        int // requests that it is
	hit         int // tokens thought to be cached there
	predicted   policy.Terms
	localMs     float64
	prompt      prefill.Prompt
	blockTokens float64
	expected    index.Speculation
	decided     time.Time
	since       time.Time // when it entered the arrival queue

	mu      sync.Mutex
	carrier Carrier // once it is sent
	started bool    // the client has, or is about to have, its first byte
	left    bool    // the client has gone
	cause   string  // why it was abandoned from outside
	ended   bool

	hurried bool // its deadline is the client's
	resp    *engine.Response
	cached  int
	firstAt time.Time
	reader  *sse.Reader
	idle    time.Duration // how long the peer may be silent, as the connection has it
	out     []byte        // events the client has not taken yet
	events  int
	over    error // of Read: why nothing more comes
}

// Causes of a fallback, as metrics label them.
const (
	causeDial    = "dial"
	causeBroken  = "broken"
	causeTimeout = "timeout"
	causeDown    = "peer_down"
	causeStatus  = "status"
	causeUnfit   = "unfit"     // no dispatcher could be told of it: its path, say
	causeLarge   = "too_large" // an answer in one piece, or an event
)

// blameless are the causes that say nothing about the peer, so that no client
// can take one out.
var blameless = []string{causeDown, causeUnfit, causeLarge, RejectBusy, RejectDraining, RejectModel, RejectDeadline, RejectOwner,
	RejectRecipient}

var causes = append([]string{causeDial, causeBroken, causeTimeout, causeDown, causeStatus, causeUnfit, causeLarge}, rejects...)

// Request is what is forwarded: the client's own, less what clients may not
// send.
type Request struct {
	Method, Target string // Target is the path with its query
	Headers        []engine.Header
	Body           [][]byte
	Stream         bool
	Dials          bool          // it is sent over a new connection
	Deadline       time.Time     // when the client gives up; zero: unknown
	Held           time.Duration // that the peer may hold it back besides, as it does with batch
	Most           int64         // bytes of a streamed answer; 0: any number
}

// Failure is a forward that gave the client nothing.
type Failure struct {
	Gone    bool   // the client has left
	Relay   *Relay // a refusal that is the client's to see
	Reason  string // else why it is served here now
	Sibling bool   // who failed serves the same engines: another owner does it, or we once we own them
	Ran     bool   // it may have been served there all the same
	Err     error
}

// Relay is a peer's answer, as it came.
type Relay struct {
	Status      int
	ContentType string
	Body        []byte
}

// ErrPeerLost is Read's error after the event that says so.
var ErrPeerLost = errors.New("geo: the other proxy was lost in the middle of an answer")

// PeerID is where it goes.
func (f *Forward) PeerID() string { return f.peer.id }

// refused is a status that is no success.
type refused struct {
	status int
	reject string
	relay  *Relay
}

func (r *refused) Error() string { return fmt.Sprintf("the peer answered %d %s", r.status, r.reject) }

// relayed are the statuses that mean the client's own request.
var relayed = []int{http.StatusBadRequest, http.StatusNotFound, http.StatusRequestEntityTooLarge, http.StatusUnsupportedMediaType,
	http.StatusUnprocessableEntity}

var errLate = errors.New("no first event came in time")

// Carrier brings a forward to its peer: a call over HTTP, or a simulation's.
type Carrier interface {
	Abort() // the forward is to fail, if the client has nothing of it yet
	Bytes() (out, in int64)
}
