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

// send is Send without the end of the forward after an error. An answer that is not streamed is returned; of a stream,
// the first event is in unread when send returns.
func (f *Forward) send(r *Request) (*Relay, error) {
	n := f.node
	now := time.Now()
	deadline := now.Add(n.cfg.FirstByte)
	if f.peer.sibling {
		deadline = now.Add(n.cfg.Whole)
	}
	deadline = deadline.Add(r.Held)
	if !r.Deadline.IsZero() && r.Deadline.Before(deadline) {
		deadline, f.clientDeadline = r.Deadline, true
	}
	if !now.Before(deadline) { // a limit of 0 would mean no limit
		return nil, errLate
	}
	if !r.Stream {
		defer f.awaitsWhole()()
	}
	call := n.traffic.NewCall(f.peer.target)
	call.OnWritten(f.Written)
	if r.Dials {
		call.Fresh()
	}
	if !f.Carry(call) {
		return nil, engine.ErrAborted
	}
	hdr := n.hopHeaders(&Message{Method: r.Method, Target: r.Target, Tenant: f.tenant}, r.Body, n.addressOf(f.peer), f.hop, f.rid, now,
		deadline)
	hdr = append(hdr, r.Headers...)
	resp, err := call.Do(r.Method, r.Target, hdr, r.Body,
		engine.Deadlines{Connect: n.cfg.Connect, FirstByte: deadline.Sub(now), Idle: deadline.Sub(now)})
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

// refusal reads an answer whose status is not a success.
func (f *Forward) refusal(status int) error {
	reject := string(f.resp.Header(RejectHeader))
	e := &refused{status: status, reject: reject}
	contentType := string(f.resp.ContentType())
	body, err := f.resp.ReadAll(1 << 20)
	// the client's own deadline cannot be met; our own limit is not the reason
	unmet := reject == RejectDeadline && status == http.StatusServiceUnavailable
	if err == nil && (unmet || reject == "" && (slices.Contains(relayed, status) || f.peer.sibling)) { // a sibling tried the same engines
		e.relay = &Relay{Status: status, ContentType: contentType, Body: body}
	}
	return e
}
