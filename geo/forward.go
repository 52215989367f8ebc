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

// Forward is one request to a peer, with its answer. It is booked when the peer is chosen, sent at
// most once, and ended once.
type Forward struct {
	peers           *Peers
	peer            *peer
	number          uint64 // among the forwards of this proxy
	model           string
	rid, tenant     string       // at its origin
	inboundHop      *Hop         // by which another proxy sent the request here; nil: a client did
	unansweredCount int          // unanswered requests as which it counts; 0 after the first event
	hitTokens       int          // predicted to be cached at the peer
	predicted       policy.Terms // at the peer
	localMs         float64      // cost here; -1: no engine of this region could serve it
	prompt          prefill.Prompt
	blockTokens     float64
	speculation     index.Speculation // its blocks, cached at the peer from the decision on
	decidedAt       time.Time
	queuedAt        time.Time // in the arrival queue

	mu              sync.Mutex
	carrier         Carrier // nil until the request is sent
	clientHasAnswer bool    // or is about to get its first byte
	clientLeft      bool    // closed its connection
	abandonCause    string  // why abandon ended the forward; or empty
	ended           bool

	clientDeadline bool // the client's deadline comes before this proxy's limit
	resp           *engine.Response
	cached         int       // found by the peer in a cache; -1: not reported
	firstAt        time.Time // when the answer began; or zero
	reader         *sse.Reader
	idle           time.Duration // how long the peer may be silent, as last set
	unread         []byte        // events that the caller has not read
	events         int           // data events so far
	readErr        error         // returned by Read after unread; nil: more may come
}

const (
	causeDial    = "dial"
	causeBroken  = "broken"
	causeTimeout = "timeout"
	causeDown    = "peer_down"
	causeStatus  = "status"
	causeUnfit   = "unfit"     // cannot be sent to a proxy at all, such as by its path
	causeLarge   = "too_large" // an answer in one piece, or an event, exceeds its limit
)

// blameless causes are no failures of the peer: a client could make a healthy one count as broken.
var blameless = []string{causeDown, causeUnfit, causeLarge, RejectBusy, RejectDraining, RejectModel, RejectDeadline, RejectOwner,
	RejectRecipient}

var causes = append([]string{causeDial, causeBroken, causeTimeout, causeDown, causeStatus, causeUnfit, causeLarge}, rejects...)

// Request has no body keys that a client may not set (mooncake.Reserved), and no headers that are
// not meant for another proxy.
type Request struct {
	Method, Target string // Target: path and query
	Headers        []engine.Header
	Body           [][]byte
	Stream         bool
	NewConnection  bool
	Deadline       time.Time     // of the client; zero: unknown
	ExtraHold      time.Duration // for which the peer may hold the request back, as for batch requests
	MaxBytes       int64         // of a streamed answer; 0: no limit
}

// Failure is why a forward gave the client no answer.
type Failure struct {
	ClientLeft bool
	Relay      *Relay // the peer's refusal, passed on to the client; or nil
	Reason     string // why it is served in another way; or empty
	// A sibling has the same engines: only their owner, which may soon be this proxy, may serve it.
	Sibling    bool
	MayHaveRun bool // on the peer
	Err        error
}

// Relay is an answer that the client gets unchanged.
type Relay struct {
	Status      int
	ContentType string
	Body        []byte
}

// ErrPeerLost comes after the error event for a lost peer.
var ErrPeerLost = errors.New("geo: the other proxy was lost in the middle of an answer")

// PeerID is the id of the peer.
func (f *Forward) PeerID() string { return f.peer.id }

type refusedError struct {
	status int
	reject string // RejectHeader; empty: status is the result of serving it
	relay  *Relay // the answer, if the client gets it; or nil
}

func (r *refusedError) Error() string {
	return fmt.Sprintf("the peer answered %d %s", r.status, r.reject)
}

// clientErrorStatuses are passed on to the client.
var clientErrorStatuses = []int{http.StatusBadRequest, http.StatusNotFound, http.StatusRequestEntityTooLarge,
	http.StatusUnsupportedMediaType, http.StatusUnprocessableEntity}

var errLate = errors.New("no first event came in time")

// Carrier is a call over HTTP, or a simulated one.
type Carrier interface {
	Abort() // at once; the forward fails unless the client has a part of the answer
	Bytes() (out, in int64)
}
