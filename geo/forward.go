package geo

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
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
var blameless = []string{causeDown, causeUnfit, causeLarge, RejectBusy, RejectDraining, RejectDeadline, RejectOwner, RejectRecipient}

var causes = append([]string{causeDial, causeBroken, causeTimeout, causeDown, causeStatus, causeUnfit, causeLarge}, rejects...)

// Request is what is forwarded: the client's own, less what clients may not
// send.
type Request struct {
	Method, Target string // Target is the path with its query
	Headers        []engine.Header
	Body           [][]byte
	Stream         bool
	Deadline       time.Time // when the client gives up; zero: unknown
	Most           int64     // bytes of a streamed answer; 0: any number
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
var ErrPeerLost = errors.New("geo: the peer was lost in the middle of an answer")

// PeerID is where it goes.
func (f *Forward) PeerID() string { return f.peer.id }

// Send sends the request and returns once the client may have something: the
// first event of a 2xx, or all of an answer that is not streamed. A
// Failure ends the forward; else Close does.
func (f *Forward) Send(r *Request) (whole *Relay, fail *Failure) {
	whole, err := f.send(r)
	if err == nil {
		return whole, nil
	}
	if f.resp != nil {
		f.resp.Close()
	}
	return nil, f.Fail(err)
}

// refused is a status that is no success.
type refused struct {
	status int
	reject string
	relay  *Relay
}

func (r *refused) Error() string { return fmt.Sprintf("the peer answered %d %s", r.status, r.reject) }

// relayed are the statuses that mean the client's own request.
var relayed = []int{http.StatusBadRequest, http.StatusNotFound, http.StatusRequestEntityTooLarge, http.StatusUnsupportedMediaType, http.StatusUnprocessableEntity}

func (f *Forward) send(r *Request) (*Relay, error) {
	n := f.node
	now := time.Now()
	deadline := now.Add(n.cfg.FirstByte)
	if f.peer.sibling {
		deadline = now.Add(n.cfg.Whole)
	}
	if !r.Deadline.IsZero() && r.Deadline.Before(deadline) {
		deadline, f.hurried = r.Deadline, true
	}
	if !now.Before(deadline) { // no time left would read as no limit
		return nil, errLate
	}
	if !r.Stream {
		defer f.awaitsWhole()()
	}
	call := n.traffic.NewCall(f.peer.target)
	call.OnWritten(f.Written)
	if !f.Carry(call) {
		return nil, engine.ErrAborted
	}
	hdr := n.papersOf(&Message{Method: r.Method, Target: r.Target, Tenant: f.tenant}, r.Body, n.addressOf(f.peer), f.came, f.rid, now, deadline)
	hdr = append(hdr, r.Headers...)
	resp, err := call.Do(r.Method, r.Target, hdr, r.Body, engine.Deadlines{Connect: n.cfg.Connect, FirstByte: deadline.Sub(now), Idle: deadline.Sub(now)})
	if err != nil {
		return nil, err
	}
	f.resp = resp
	resp.SetDeadline(deadline)
	if status := resp.StatusCode(); status/100 != 2 {
		return nil, f.refusal(status)
	}
	cached := -1
	if c, err := strconv.Atoi(string(resp.Header(CachedHeader))); err == nil && c >= 0 {
		cached = c
	}
	if !r.Stream {
		body, err := resp.ReadAll(n.cfg.WholeBytes)
		if err == nil && !json.Valid(body) {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return nil, err
		}
		f.Begun(true, cached)
		return &Relay{Status: resp.StatusCode(), ContentType: string(resp.ContentType()), Body: body}, nil
	}
	if !bytes.HasPrefix(resp.ContentType(), []byte("text/event-stream")) {
		return nil, fmt.Errorf("the peer answered a stream with content type %q", resp.ContentType())
	}
	f.reader = sse.NewReader()
	f.reader.Reset(sse.Limits{Event: n.cfg.EventBytes, Bytes: r.Most, First: max(1, time.Until(deadline)), Gap: n.cfg.Idle})
	for seen := false; !seen; {
		if seen, err = f.fill(); err != nil && !seen {
			return nil, err
		}
	}
	f.Begun(false, cached)
	return nil, nil
}

var errLate = errors.New("no first event came in time")

// refusal reads an answer that is no success.
func (f *Forward) refusal(status int) error {
	reject := string(f.resp.Header(RejectHeader))
	e := &refused{status: status, reject: reject}
	contentType := string(f.resp.ContentType())
	body, err := f.resp.ReadAll(1 << 20)
	if err == nil && reject == "" && (slices.Contains(relayed, status) || f.peer.sibling) { // a sibling tried all that there is
		e.relay = &Relay{Status: status, ContentType: contentType, Body: body}
	}
	return e
}
