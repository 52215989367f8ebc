package geo

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"time"

	"evenkeel/engine"
	"evenkeel/sse"
)

// Send returns when the client can get a part of the answer: the first event of a stream, or the
// whole. After a Failure the forward has ended; otherwise the caller must call Close.
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

// send does not end the forward after an error.
func (f *Forward) send(r *Request) (*Relay, error) {
	ps, now := f.peers, time.Now()
	deadline := f.firstEventDeadline(r, now)
	untilDeadline := deadline.Sub(now)
	if untilDeadline <= 0 { // the call would take 0 for no limit
		return nil, errLate
	}
	// An answer in one piece does not show when its first token came.
	if !r.Stream {
		stopTimer := f.startUnansweredTimer(untilDeadline)
		defer stopTimer()
	}
	call := f.newCall(r)
	// From now on, AbortByClient and abandon can abort the call.
	if mayStart := f.SetCarrier(call); !mayStart { // one of these has happened already
		return nil, engine.ErrAborted
	}
	// SetDeadline below replaces Idle, so that many short silences do not exceed the deadline.
	limits := engine.Deadlines{Connect: ps.cfg.Connect, FirstByte: untilDeadline, Idle: untilDeadline}
	resp, err := call.Do(r.Method, r.Target, f.headers(r, now, deadline), r.Body, limits)
	if err != nil {
		return nil, err
	}
	f.resp = resp
	resp.SetDeadline(deadline)
	if status := resp.StatusCode(); status/100 != 2 {
		return nil, f.readRefusal(status)
	}
	return f.receive(r, deadline)
}

func (f *Forward) newCall(r *Request) *engine.Call {
	call := f.peers.traffic.NewCall(f.peer.target)
	call.OnWritten(f.Written)
	if r.NewConnection {
		call.Fresh()
	}
	return call
}

func (f *Forward) headers(r *Request, now, deadline time.Time) []engine.Header {
	headers := slices.Clip(r.Headers)
	if f.tenant != "" { // a header without a value would be signed, and a mesh may drop it
		headers = append(headers, engine.Header{Name: TenantHeader, Value: f.tenant})
	}
	message := &Message{Method: r.Method, Target: r.Target, Headers: headers}
	return f.peers.hopHeaders(message, r.Body, f.peers.recipientOf(f.peer), f.inboundHop, f.rid, now, deadline)
}

// receive reads a good answer: the whole, or a stream up to its first event, which must come before
// the deadline.
func (f *Forward) receive(r *Request, deadline time.Time) (*Relay, error) {
	cached := -1 // not reported
	if c, err := strconv.Atoi(string(f.resp.Header(CachedHeader))); err == nil && c >= 0 {
		cached = c
	}
	const whole, streamed = true, false
	if !r.Stream {
		answer, err := f.readWhole()
		if err == nil {
			f.AnswerBegun(whole, cached)
		}
		return answer, err
	}
	cfg := &f.peers.cfg
	// At least 1 ns, because 0 would be no limit.
	limits := sse.Limits{Event: cfg.EventBytes, Bytes: r.MaxBytes, First: max(1, time.Until(deadline)), Gap: cfg.Idle}
	if err := f.readFirstEvent(limits); err != nil {
		return nil, err
	}
	f.AnswerBegun(streamed, cached)
	return nil, nil
}

// firstEventDeadline is the earlier of the client's own deadline and this proxy's limit.
func (f *Forward) firstEventDeadline(r *Request, now time.Time) time.Time {
	limit := f.peers.cfg.FirstByte
	if f.peer.sibling { // it may take as long as this proxy would
		limit = f.peers.cfg.Whole
	}
	ownDeadline := now.Add(limit + r.ExtraHold) // for ExtraHold the peer may hold a batch request back
	clientGivesUpFirst := !r.Deadline.IsZero() && r.Deadline.Before(ownDeadline)
	if clientGivesUpFirst {
		f.clientDeadline = true
		return r.Deadline
	}
	return ownDeadline
}

// readWhole: a body that is no JSON counts as broken off.
func (f *Forward) readWhole() (*Relay, error) {
	body, err := f.resp.ReadAll(f.peers.cfg.WholeBytes)
	if err == nil && !json.Valid(body) {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return nil, err
	}
	return &Relay{Status: f.resp.StatusCode(), ContentType: string(f.resp.ContentType()), Body: body}, nil
}

// readFirstEvent reads up to the first event that is no comment. Comments may come long before the
// first token.
func (f *Forward) readFirstEvent(limits sse.Limits) error {
	if contentType := f.resp.ContentType(); !bytes.HasPrefix(contentType, []byte("text/event-stream")) {
		return fmt.Errorf("the peer answered a stream with content type %q", contentType)
	}
	f.reader = sse.NewReader()
	f.reader.Reset(limits)
	for {
		event, err := f.readEvents()
		if event { // the next read returns an error again
			return nil
		}
		if err != nil {
			return err
		}
	}
}

const maxRefusal = 1 << 20 // bytes of an answer whose status is not a success

// readRefusal: the client gets the answer itself (relay) if no other proxy could answer better.
func (f *Forward) readRefusal(status int) error {
	reject := string(f.resp.Header(RejectHeader)) // empty: status is the result of serving the request
	e := &refusedError{status: status, reject: reject}
	contentType := string(f.resp.ContentType())
	body, err := f.resp.ReadAll(maxRefusal)
	// The client's own deadline cannot be met, which is true of any region.
	deadlineUnmet := reject == RejectDeadline && status == http.StatusServiceUnavailable
	// A client's error is one in any region. A sibling has tried this proxy's engines.
	final := reject == "" && (slices.Contains(clientErrorStatuses, status) || f.peer.sibling)
	if err == nil && (deadlineUnmet || final) {
		e.relay = &Relay{Status: status, ContentType: contentType, Body: body}
	}
	return e
}
