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

// Forward is one request that is sent to a peer, with its answer. It is booked when the peer is chosen, sent at most once, and
// ended once.
type Forward struct {
	peers           *Peers
	peer            *peer  // the peer that gets the request
	number          uint64 // unique among the forwards of this proxy
	model           string
	rid, tenant     string       // the request's id at its origin, and the tenant that sent it
	inboundHop      *Hop         // the hop by which another proxy sent the request here; nil: a client sent it
	unansweredCount int          // how many unanswered requests of the peer this forward counts as; 0 after the first event
	hitTokens       int          // prompt tokens that are predicted to be cached at the peer
	predicted       policy.Terms // the predicted cost at the peer
	localMs         float64      // the predicted cost in this region, in ms; -1: no engine of this region could serve the request
	prompt          prefill.Prompt
	blockTokens     float64           // tokens per block of the prompt
	speculation     index.Speculation // the prompt's blocks, which count as cached at the peer from the decision on
	decidedAt       time.Time         // when the peer was chosen
	queuedAt        time.Time         // when the request entered the arrival queue

	mu              sync.Mutex
	carrier         Carrier // nil until the request is sent
	clientHasAnswer bool    // the client has, or is about to get, the first byte of its answer
	clientLeft      bool    // the client has closed its connection
	abandonCause    string  // cause for which abandon ended the forward; empty: abandon was not called
	ended           bool

	clientDeadline bool             // the client's deadline applies, because it comes before this proxy's time limit
	resp           *engine.Response // the peer's answer
	cached         int              // prompt tokens that the peer found in a cache; -1: not reported
	firstAt        time.Time        // when the answer began; zero: it has not begun
	reader         *sse.Reader
	idle           time.Duration // how long the peer may be silent, as last set on the connection
	unread         []byte        // events that the caller has not read yet
	events         int           // number of data events so far
	readErr        error         // error that Read returns after the events in unread; nil: more events may come
}

// Causes of a fallback to this region, as metrics name them.
const (
	causeDial    = "dial"
	causeBroken  = "broken"
	causeTimeout = "timeout"
	causeDown    = "peer_down"
	causeStatus  = "status"
	causeUnfit   = "unfit"     // the request cannot be sent to a proxy at all, for example because of its path
	causeLarge   = "too_large" // an answer that is not streamed, or an event, exceeds its limit
)

// blameless are the causes that do not count as failures of the peer. Otherwise a client could make a healthy peer count as
// broken.
var blameless = []string{causeDown, causeUnfit, causeLarge, RejectBusy, RejectDraining, RejectModel, RejectDeadline, RejectOwner,
	RejectRecipient}

var causes = append([]string{causeDial, causeBroken, causeTimeout, causeDown, causeStatus, causeUnfit, causeLarge}, rejects...)

// Request is a client's request in the form in which it is forwarded. It has no body keys that a client may not set (see
// mooncake.Reserved), and no headers that are not meant for another proxy.
type Request struct {
	Method, Target string // Target is the path with its query
	Headers        []engine.Header
	Body           [][]byte
	Stream         bool
	NewConnection  bool          // the request is sent over a new connection
	Deadline       time.Time     // when the client gives up; zero: unknown
	ExtraHold      time.Duration // additional time for which the peer may hold the request back, as for batch requests
	MaxBytes       int64         // size limit of a streamed answer, in bytes; 0: none
}

// Failure is the reason why a forward gave the client no answer.
type Failure struct {
	ClientLeft bool   // the client has left
	Relay      *Relay // the peer's refusal, which is passed on to the client; nil: none
	Reason     string // cause for which the request is now served in another way; empty if ClientLeft or Relay is set
	Sibling    bool   // the peer serves the same engines: only their owner may serve the request, which may be this proxy soon
	MayHaveRun bool   // the peer may still have run the request
	Err        error
}

// Relay is a peer's answer, which the client gets unchanged.
type Relay struct {
	Status      int
	ContentType string
	Body        []byte
}

// ErrPeerLost is returned by Read after the error event for a lost peer.
var ErrPeerLost = errors.New("geo: the other proxy was lost in the middle of an answer")

// PeerID is the id of the peer that gets the request.
func (f *Forward) PeerID() string { return f.peer.id }

// refusedError is the error for an answer of the peer whose status is not a success.
type refusedError struct {
	status int
	reject string // why the peer did not take the request (RejectHeader); empty: status counts as the result of serving it
	relay  *Relay // the peer's answer, if the client gets this answer; nil: the request is served in another way
}

func (r *refusedError) Error() string {
	return fmt.Sprintf("the peer answered %d %s", r.status, r.reject)
}

// clientErrorStatuses are the statuses that blame the client's request. They are passed on to the client.
var clientErrorStatuses = []int{http.StatusBadRequest, http.StatusNotFound, http.StatusRequestEntityTooLarge,
	http.StatusUnsupportedMediaType, http.StatusUnprocessableEntity}

var errLate = errors.New("no first event came in time")

// Carrier carries a forward to its peer: a call over HTTP, or a simulated call.
type Carrier interface {
	Abort() // ends the call to the peer at once; the forward fails unless the client already has a part of the answer
	Bytes() (out, in int64)
}
