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
	hit         int // tokens thought to be cached there
	predicted   policy.Terms
	localMs     float64
	prompt      prefill.Prompt
	blockTokens float64
	expected    index.Speculation
	decided     time.Time
	since       time.Time // when it entered the arrival queue

	mu      sync.Mutex
	call    *engine.Call // once it is sent
	started bool         // the client has, or is about to have, its first byte
	left    bool         // the client has gone
	cause   string       // why it was abandoned from outside
	ended   bool

	hurried bool // its deadline is the client's
	resp    *engine.Response
	cached  int
	firstAt time.Time
	framer  *sse.Framer
	read    [8 << 10]byte
	out     []byte // events the client has not taken yet
	events  int
	done    bool  // [DONE] came
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
var blameless = []string{causeDown, causeUnfit, causeLarge, RejectBusy, RejectDraining, RejectDeadline, RejectOwner}

var causes = []string{
	causeDial, causeBroken, causeTimeout, causeDown, causeStatus, causeUnfit, causeLarge, RejectBusy, RejectDraining, RejectHop, RejectSignature, RejectStale, RejectModel,
	RejectVersion, RejectPeer, RejectDeadline, RejectOwner,
}

// Request is what is forwarded: the client's own, less what clients may not
// send.
type Request struct {
	Method, Target string // Target is the path with its query
	Headers        []engine.Header
	Body           [][]byte
	Stream         bool
	Deadline       time.Time // when the client gives up; zero: unknown
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

// Region is where that is.
func (f *Forward) Region() string { return f.peer.conf.Region }

// Send sends the request and returns once the client may have something: the
// first event of a 2xx, or all of an answer that is not streamed (geo R27). A
// Failure ends the forward; else Close does.
func (f *Forward) Send(r *Request) (whole *Relay, fail *Failure) {
	whole, err := f.send(r)
	if err == nil {
		return whole, nil
	}
	fail = f.failure(err)
	fail.Sibling = f.peer.sibling
	if f.resp != nil {
		f.resp.Close()
	}
	f.end(fail.outcome(), fail.Reason)
	return nil, fail
}

// refused is a status that is no success.
type refused struct {
	status int
	reject string
	relay  *Relay
}

func (r *refused) Error() string { return fmt.Sprintf("the peer answered %d %s", r.status, r.reject) }

// relayed are the statuses that mean the client's own request (geo R29).
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
	call := n.traffic.NewCall(f.peer.target)
	call.OnWritten(f.written)
	if !f.attach(call) {
		return nil, engine.ErrAborted
	}
	hdr := n.papersOf(&Message{Method: r.Method, Target: r.Target, Tenant: f.tenant, Body: r.Body}, f.came, f.rid, now, deadline)
	hdr = append(hdr, r.Headers...)
	resp, err := call.Do(r.Method, r.Target, hdr, r.Body, engine.Deadlines{Connect: n.cfg.Connect, FirstByte: deadline.Sub(now), Idle: deadline.Sub(now)})
	if err != nil {
		return nil, err
	}
	f.resp = resp
	if status := resp.StatusCode(); status/100 != 2 {
		return nil, f.refusal(status)
	}
	f.cached = -1
	if c, err := strconv.Atoi(string(resp.Header(CachedHeader))); err == nil && c >= 0 {
		f.cached = c
	}
	if !r.Stream {
		body, err := resp.ReadAll(n.cfg.WholeBytes)
		if err == nil && !json.Valid(body) {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return nil, err
		}
		f.begun()
		return &Relay{Status: resp.StatusCode(), ContentType: string(resp.ContentType()), Body: body}, nil
	}
	if !bytes.HasPrefix(resp.ContentType(), []byte("text/event-stream")) {
		return nil, fmt.Errorf("the peer answered a stream with content type %q", resp.ContentType())
	}
	f.framer = sse.NewFramer(n.cfg.EventBytes)
	for seen := false; !seen; {
		left := time.Until(deadline)
		if left <= 0 {
			return nil, errLate
		}
		resp.SetIdle(left)
		if seen, err = f.fill(); err != nil && !seen {
			return nil, err
		}
	}
	resp.SetIdle(n.cfg.Idle)
	f.begun()
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

// fill reads one arrival; event tells whether a data event is in it. Events are
// handed on whole: what comes after one that broke off could not be told apart.
func (f *Forward) fill() (event bool, err error) {
	k, err := f.resp.Read(f.read[:])
	f.framer.Feed(f.read[:k])
	for {
		e, ok := f.framer.Next()
		if !ok {
			break
		}
		f.out = append(f.out, e.Raw...)
		if e.Kind == sse.KindData {
			f.events++
		}
		event = event || e.Kind != sse.KindComment
		f.done = f.done || e.Kind == sse.KindDone
	}
	return event, err
}

// ContentType of the answer that is streamed.
func (f *Forward) ContentType() []byte { return f.resp.ContentType() }

// Cached is how many prompt tokens the peer found in a cache; -1: it did not say.
func (f *Forward) Cached() int { return f.cached }

// Events is how many data events came so far: about as many tokens.
func (f *Forward) Events() int { return f.events }

// FirstAt is when the first event was here.
func (f *Forward) FirstAt() time.Time { return f.firstAt }

// Read hands out whole events as they come, waiting for the first bytes only.
// A peer that is lost is an event that says so, no [DONE], and ErrPeerLost, so
// that the connection is closed (geo R30).
func (f *Forward) Read(p []byte) (int, error) {
	for len(f.out) == 0 {
		if f.over != nil {
			return 0, f.over
		}
		f.more()
	}
	k := copy(p, f.out)
	f.out = f.out[:copy(f.out, f.out[k:])]
	return k, nil
}

// tailTime is how long the end of a body may take behind its [DONE].
const tailTime = 250 * time.Millisecond

// more reads on until there is something to hand out, or nothing more.
func (f *Forward) more() {
	if f.done {
		f.resp.SetIdle(tailTime)
	}
	_, err := f.fill()
	switch {
	case err == nil:
	case f.done: // whole, whatever became of the connection
		f.over = io.EOF
	default:
		f.over = ErrPeerLost
		f.out = sse.ErrorEvent(f.out, "upstream region lost", "server_error", "peer_lost")
	}
}

// Close ends the forward, however far it was read.
func (f *Forward) Close() {
	f.resp.Close()
	outcome := OutcomeOK
	switch {
	case f.framer == nil: // it came whole
	case errors.Is(f.over, ErrPeerLost) && !f.gone():
		outcome = OutcomeLost
	case !f.done:
		outcome = OutcomeGone
	}
	f.end(outcome, "")
}

// Lost says whether the peer was lost in the middle.
func (f *Forward) Lost() bool { return errors.Is(f.over, ErrPeerLost) && !f.gone() }

// Whole says whether all of the answer was read.
func (f *Forward) Whole() bool { return f.framer == nil || f.done }

// Leave tells that the client has gone: the connection is closed at once, which
// is how the peer hears of it (geo R26). It never blocks.
func (f *Forward) Leave() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.left = true
	if f.call != nil {
		f.call.Abort()
	}
}

// Drop ends a forward that was never sent.
func (f *Forward) Drop() { f.end(OutcomeGone, "") }

// abandon ends the attempt from outside, unless the client has something.
func (f *Forward) abandon(cause string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.started || f.left {
		return
	}
	f.cause = cause
	if f.call != nil {
		f.call.Abort()
	}
}

// attach makes the call one that Leave and abandon reach; false: they came
// before.
func (f *Forward) attach(call *engine.Call) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.call = call
	return !f.left && f.cause == ""
}

func (f *Forward) gone() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.left
}

// written notes that a probe which is sent from now on counts the request.
func (f *Forward) written() {
	n := f.node
	n.mu.Lock()
	defer n.mu.Unlock()
	f.peer.reserved.Written(f.number, n.at(time.Now()))
}

// begun notes the first byte: from here on there is no way back.
func (f *Forward) begun() {
	f.mu.Lock()
	f.started = true
	f.mu.Unlock()
	f.firstAt = time.Now()
	n, p := f.node, f.peer
	took := ms(f.firstAt.Sub(f.decided))
	n.metrics.ttft.WithLabelValues(routeForward, p.id).Observe(f.firstAt.Sub(f.since).Seconds())
	n.mu.Lock()
	defer n.mu.Unlock()
	p.circuit.Succeed()
	if predicted := f.predicted.TTFT(); predicted > 0 { // there was a prediction
		p.distrust.Add(took - predicted)
		n.metrics.costError.WithLabelValues(p.id).Observe((took - predicted) / 1000)
	}
	if f.cached >= 0 {
		n.metrics.hits.WithLabelValues(p.id, "actual").Add(float64(f.cached))
		if float64(f.hit-f.cached) >= f.blockTokens && len(f.prompt.Keys) > 0 {
			p.sent.Correct(p.slot, f.prompt.Keys, int(float64(f.cached)/f.blockTokens))
		}
	}
	p.sent.Confirm(&f.expected)
}

// failure says what becomes of a request whose forward failed.
func (f *Forward) failure(err error) *Failure {
	f.mu.Lock()
	defer f.mu.Unlock()
	var ee *engine.Error
	var status *refused
	isCall := errors.As(err, &ee)
	switch {
	case f.left:
		return &Failure{Gone: true, Err: err}
	case f.cause != "":
		return &Failure{Reason: f.cause, Ran: true, Err: err}
	case errors.As(err, &status):
		switch {
		case status.relay != nil:
			return &Failure{Relay: status.relay, Err: err}
		case slices.Contains(causes, status.reject):
			return &Failure{Reason: status.reject, Err: err}
		}
		return &Failure{Reason: causeStatus, Err: err}
	case isCall && ee.Phase == engine.PhaseRequest:
		return &Failure{Reason: causeUnfit, Err: err}
	case errors.Is(err, engine.ErrTooLarge):
		return &Failure{Reason: causeLarge, Ran: true, Err: err}
	case f.hurried && (errors.Is(err, errLate) || isCall && ee.Timeout && ee.Phase != engine.PhaseConnect):
		return &Failure{Reason: RejectDeadline, Ran: true, Err: err}
	case errors.Is(err, errLate), isCall && ee.Timeout && ee.Phase != engine.PhaseConnect:
		return &Failure{Reason: causeTimeout, Ran: true, Err: err}
	case isCall && ee.Phase == engine.PhaseConnect:
		return &Failure{Reason: causeDial, Err: err}
	}
	return &Failure{Reason: causeBroken, Ran: !isCall || ee.Sent, Err: err}
}

func (x *Failure) outcome() string {
	switch {
	case x.Gone:
		return OutcomeGone
	case x.Relay != nil:
		return OutcomeRelayed
	}
	return OutcomeFallback
}

// end settles the forward, once: circuit, books, receipt.
func (f *Forward) end(outcome, cause string) {
	f.mu.Lock()
	if f.ended {
		f.mu.Unlock()
		return
	}
	f.ended = true
	call := f.call
	f.mu.Unlock()
	n, p, now := f.node, f.peer, time.Now()
	rec := &Receipt{At: f.decided, RID: f.rid, Origin: n.cfg.ID, Peer: p.id, Model: f.model, Outcome: outcome, Cause: cause}
	rec.Predicted.RTT, rec.Predicted.T0, rec.Predicted.Prefill, rec.Predicted.Wait = f.predicted.RTT, f.predicted.T0, f.predicted.Prefill, f.predicted.Wait
	rec.Predicted.LocalCost = f.localMs
	rec.Actual.TotalMs, rec.Actual.CachedTokens = ms(now.Sub(f.decided)), f.cached
	if !f.firstAt.IsZero() {
		rec.Actual.TTFTMs = ms(f.firstAt.Sub(f.decided))
	} else {
		rec.Actual.CachedTokens = -1
	}
	if call != nil {
		rec.BytesOut, rec.BytesIn = call.Bytes()
	}
	rec.USD = usd(rec.BytesOut, rec.BytesIn, p.conf.PriceOut, p.conf.PriceIn)
	f.settle(outcome, cause, rec.USD, now)
	n.metrics.forwards.WithLabelValues(p.id, outcome).Inc()
	n.metrics.inflight.WithLabelValues(p.id).Dec()
	n.metrics.bytes.WithLabelValues(p.id, "out").Add(float64(rec.BytesOut))
	n.metrics.bytes.WithLabelValues(p.id, "in").Add(float64(rec.BytesIn))
	n.metrics.dollars.WithLabelValues(p.id).Add(rec.USD)
	if outcome == OutcomeFallback {
		n.metrics.fallbacks.WithLabelValues(p.id, cause).Inc()
	}
	n.papers.add(rec)
	n.cfg.Log.Info("forward", rec.fields()...)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.bury(p)
}

// settle gives back what was booked on the peer.
func (f *Forward) settle(outcome, cause string, spent float64, now time.Time) {
	n, p := f.node, f.peer
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(p.inflight, f)
	p.reserved.Withdrawn(f.number)
	p.spent.add(spent, now)
	if outcome == OutcomeFallback {
		p.disown()
	}
	switch {
	case !f.firstAt.IsZero(), outcome == OutcomeRelayed:
		p.circuit.Succeed()
	case outcome == OutcomeFallback && !slices.Contains(blameless, cause):
		if p.circuit.Fail(f.number, now) {
			time.AfterFunc(p.circuit.Out(), n.cfg.Tier.Wake)
		}
	default:
		p.circuit.Neutral(f.number)
	}
	p.sent.Drop(&f.expected)
}
