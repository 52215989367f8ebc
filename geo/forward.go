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
	peer        *peer // the peer that gets the request
	number      uint64
	model       string
	rid, tenant string       // the request's id at its origin, and whose request it is
	hop         *Hop         // the hop by which the request came here; nil: it came from a client
	requests    int          // how many requests it counts as
	hitTokens   int          // tokens of the prompt that are believed to be cached at the peer
	predicted   policy.Terms // what the request was predicted to cost at the peer
	localMs     float64      // what it was predicted to cost here, in ms; -1: no engine here could serve it
	prompt      prefill.Prompt
	blockTokens float64           // tokens that one block of the prompt stands for
	expected    index.Speculation // the prompt's blocks, which count as cached at the peer from the decision on
	decided     time.Time         // when the peer was chosen
	since       time.Time         // when it entered the arrival queue

	mu         sync.Mutex
	carrier    Carrier // nil until the request is sent
	started    bool    // the client has, or is about to have, its first byte
	clientLeft bool    // the client has gone
	cause      string  // why it was abandoned from outside
	ended      bool

	clientDeadline bool             // the deadline is the client's, which comes before our own
	resp           *engine.Response // the peer's answer
	cached         int              // tokens of the prompt that the peer found in a cache; -1: it did not say
	firstAt        time.Time
	reader         *sse.Reader
	idle           time.Duration // how long the peer may be silent, as the connection has it
	unread         []byte        // events the client has not taken yet
	events         int           // data events so far
	readErr        error         // why Read returns no more events
}

// Causes of a fallback, as metrics label them.
const (
	causeDial    = "dial"
	causeBroken  = "broken"
	causeTimeout = "timeout"
	causeDown    = "peer_down"
	causeStatus  = "status"
	causeUnfit   = "unfit"     // the request cannot be sent to a dispatcher at all, for example because of its path
	causeLarge   = "too_large" // an answer in one piece, or an event
)

// blameless are the causes that do not count as failures of the peer, so that no client
// can make a peer count as broken.
var blameless = []string{causeDown, causeUnfit, causeLarge, RejectBusy, RejectDraining, RejectModel, RejectDeadline, RejectOwner,
	RejectRecipient}

var causes = append([]string{causeDial, causeBroken, causeTimeout, causeDown, causeStatus, causeUnfit, causeLarge}, rejects...)

// Request is a client's request as it is forwarded. Keys of its body that a client may not set (see mooncake.Reserved) are left out, and so
// are headers that are not meant for another dispatcher.
type Request struct {
	Method, Target string // Target is the path with its query
	Headers        []engine.Header
	Body           [][]byte
	Stream         bool
	Dials          bool          // the request is sent over a new connection
	Deadline       time.Time     // when the client gives up; zero: unknown
	Held           time.Duration // how much longer the peer may hold the request back, as it does with batch requests
	Most           int64         // limit of a streamed answer, in bytes; 0: none
}

// Failure says why a forward gave the client nothing.
type Failure struct {
	Gone    bool   // the client has left
	Relay   *Relay // a refusal that is passed on to the client; nil: there is none
	Reason  string // otherwise, why the request is served here now
	Sibling bool   // the peer serves the same engines: another owner must serve the request, or we do once we own them
	Ran     bool   // the peer may have served the request nevertheless
	Err     error
}

// Relay is a peer's answer, unchanged.
type Relay struct {
	Status      int
	ContentType string
	Body        []byte
}

// ErrPeerLost is the error that Read returns behind the error event of a lost peer.
var ErrPeerLost = errors.New("geo: the other proxy was lost in the middle of an answer")

// PeerID is the id of the peer that gets the request.
func (f *Forward) PeerID() string { return f.peer.id }

// refused is an answer whose status is not a success.
type refused struct {
	status int
	reject string
	relay  *Relay
}

func (r *refused) Error() string { return fmt.Sprintf("the peer answered %d %s", r.status, r.reject) }

// relayed are the statuses that say that the client's own request is at fault.
var relayed = []int{http.StatusBadRequest, http.StatusNotFound, http.StatusRequestEntityTooLarge, http.StatusUnsupportedMediaType,
	http.StatusUnprocessableEntity}

var errLate = errors.New("no first event came in time")

// Carrier carries a forward to its peer: a call over HTTP, or a simulated call.
type Carrier interface {
	Abort() // ends the call to the peer at once; the forward fails if the client has nothing of it yet
	Bytes() (out, in int64)
}
