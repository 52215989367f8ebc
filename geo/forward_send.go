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

// Send sends the request. It returns when the client can get a part of the answer: the first event of a stream, or the whole
// of an answer that is not streamed. If Send returns a Failure, the forward has ended; otherwise the caller must call Close.
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

// send does what Send does, except that it does not end the forward after an error. It returns an answer that is not streamed. Of a stream,
// it returns nil, and the first event is then in unread.
func (f *Forward) send(r *Request) (*Relay, error) {
	ps, now := f.peers, time.Now()
	deadline := f.firstEventDeadline(r, now)
	untilDeadline := deadline.Sub(now)
	if untilDeadline <= 0 { // the call below would take a time limit of 0 for no limit
		return nil, errLate
	}
	// The number of the peer's requests without a first token is bounded. An answer that is not streamed does not show when its first
	// token came, so a timer ends the time in which the request counts as one of them.
	if !r.Stream {
		stopTimer := f.startUnansweredTimer(untilDeadline)
		defer stopTimer()
	}
	call := f.newCall(r)
	// From now on, AbortByClient and abandon can abort the call, when the client leaves or the peer goes down.
	if mayStart := f.SetCarrier(call); !mayStart { // one of these has happened already
		return nil, engine.ErrAborted
	}
	// Idle limits the silence in the answer. SetDeadline below replaces it, so that many short silences together do not exceed the
	// deadline.
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

// newCall returns a call to the peer that is not sent yet. It will report when the request is written.
func (f *Forward) newCall(r *Request) *engine.Call {
	call := f.peers.traffic.NewCall(f.peer.target)
	call.OnWritten(f.Written)
	if r.NewConnection {
		call.Fresh()
	}
	return call
}

// headers returns the headers of the request r to the peer: those of r, the tenant, and those by which the peer checks who has sent it.
func (f *Forward) headers(r *Request, now, deadline time.Time) []engine.Header {
	headers := slices.Clip(r.Headers)
	if f.tenant != "" { // a header without a value would be signed, and a mesh on the way may drop it
		headers = append(headers, engine.Header{Name: TenantHeader, Value: f.tenant})
	}
	message := &Message{Method: r.Method, Target: r.Target, Headers: headers}
	return f.peers.hopHeaders(message, r.Body, f.peers.recipientOf(f.peer), f.inboundHop, f.rid, now, deadline)
}

// receive reads a good answer: the whole of it, or, if it is streamed, up to its first event, which must come before the deadline. It then
// calls AnswerBegun. For a streamed answer it returns nil.
func (f *Forward) receive(r *Request, deadline time.Time) (*Relay, error) {
	cached := -1 // the peer has not reported it
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
	// First is at least 1 ns, because a limit of 0 would be none.
	limits := sse.Limits{Event: cfg.EventBytes, Bytes: r.MaxBytes, First: max(1, time.Until(deadline)), Gap: cfg.Idle}
	if err := f.readFirstEvent(limits); err != nil {
		return nil, err
	}
	f.AnswerBegun(streamed, cached)
	return nil, nil
}

// firstEventDeadline is the deadline for the first event: the client's own, or the time limit of this proxy, whichever is earlier.
// It sets clientDeadline if the client's deadline is the earlier one.
func (f *Forward) firstEventDeadline(r *Request, now time.Time) time.Time {
	limit := f.peers.cfg.FirstByte
	if f.peer.sibling { // it serves the request with the same engines, so it may take as long as this proxy would
		limit = f.peers.cfg.Whole
	}
	ownDeadline := now.Add(limit + r.ExtraHold) // the peer may first hold the request back for ExtraHold, if it is a batch request
	clientGivesUpFirst := !r.Deadline.IsZero() && r.Deadline.Before(ownDeadline)
	if clientGivesUpFirst {
		f.clientDeadline = true
		return r.Deadline
	}
	return ownDeadline
}

// readWhole reads an answer that is not streamed. A body that is no JSON counts as broken off.
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

// readFirstEvent begins to read a streamed answer, up to its first event that is not a comment. Comments may come long before the first
// token.
func (f *Forward) readFirstEvent(limits sse.Limits) error {
	if contentType := f.resp.ContentType(); !bytes.HasPrefix(contentType, []byte("text/event-stream")) {
		return fmt.Errorf("the peer answered a stream with content type %q", contentType)
	}
	f.reader = sse.NewReader()
	f.reader.Reset(limits)
	for {
		event, err := f.readEvents()
		if event { // an error that came together with the event is returned again by the next read
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// maxRefusal limits the body of an answer whose status is not a success.
const maxRefusal = 1 << 20 // bytes

// readRefusal reads an answer whose status is not a success, and returns it as a refusedError. The client gets the answer itself (relay)
// if no other proxy could answer better.
func (f *Forward) readRefusal(status int) error {
	reject := string(f.resp.Header(RejectHeader)) // empty: status counts as the result of serving the request
	e := &refusedError{status: status, reject: reject}
	contentType := string(f.resp.ContentType())
	body, err := f.resp.ReadAll(maxRefusal)
	// The peer says that the client's own deadline cannot be met, which is true of any region.
	deadlineUnmet := reject == RejectDeadline && status == http.StatusServiceUnavailable
	// An error of the client is an error in any region. A sibling has tried the engines that this proxy would try.
	final := reject == "" && (slices.Contains(clientErrorStatuses, status) || f.peer.sibling)
	if err == nil && (deadlineUnmet || final) {
		e.relay = &Relay{Status: status, ContentType: contentType, Body: body}
	}
	return e
}
