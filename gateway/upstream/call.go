// Package upstream sends requests to engines. It returns an answer, or a fault in the terms of
// gateway/lifecycle, and knows nothing of leases, slots and clients.
package upstream

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"time"

	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/owner"
	"evenkeel/mooncake"
	"evenkeel/sse"
)

// NoticeTimeout is how long an engine may take to notice that the proxy has ended a call, before
// the proxy cuts the connection.
const NoticeTimeout = 250 * time.Millisecond

// NewCall names the rank in a header, but for SGLang in the body. An SGLang engine that both
// prefills and decodes gets it in the header, unless its profile says that ranks must not be named.
func NewCall(client *engine.Client, profile *mooncake.Profile, target *engine.Target) *engine.Call {
	if profile.Connector == mooncake.SGLang {
		if rankInBody := !profile.Aggregated; rankInBody || profile.NamedRank(target.Rank) < 0 {
			target = target.Unranked()
		}
	}
	return client.NewCall(target)
}

// NewRendezvous is for calls to both engines at the same time, with id as their X-Request-Id. ranks
// is how many the prefill engine has.
func NewRendezvous(id string, endpoint mooncake.Endpoint, prefillProfile *mooncake.Profile, prefill *engine.Target, ranks int,
	decodeProfile *mooncake.Profile, decode *engine.Target) *mooncake.Rendezvous {
	rendezvous := &mooncake.Rendezvous{Endpoint: endpoint, RID: id, PrefillRank: prefillProfile.NamedRank(prefill.Rank),
		DecodeRank: decodeProfile.NamedRank(decode.Rank),
		RequestID:  endpoint.RequestID(id)}
	if prefillProfile.Connector == mooncake.SGLang {
		// No other request may have the room's number. Modulo ranks it must be the prefill rank (see
		// Rendezvous.Room).
		room := rand.Int64N(1 << 62)
		rankCount := int64(max(1, ranks))
		rendezvous.Host, rendezvous.Port = prefill.URL.Hostname(), prefillProfile.BootstrapPort
		rendezvous.Room = room - room%rankCount + int64(max(0, prefill.Rank))
	}
	return rendezvous
}

// PairHeaders is for a request that is bound to a decode rank before its prefill. RIDHeader is for
// endpoints of SGLang whose body cannot have the id.
func PairHeaders(id string, endpoint mooncake.Endpoint, prefillProfile *mooncake.Profile) []engine.Header {
	headers := engine.JSONHeaders(id)
	if prefillProfile.Nameless(endpoint) {
		headers = append(headers, engine.Header{Name: mooncake.RIDHeader, Value: id})
	}
	return headers
}

// A Call is sent once, by Open or SendAndRead. Any goroutine may end it with the methods of
// engine.Call.
type Call struct {
	*engine.Call
	Kind   lifecycle.CallKind
	Engine string // the id of the engine in engine.Monitor
	// Scope must be this proxy's when the request is sent; nil: no other proxy sends to the engine.
	Scope         *owner.Scope
	Path          string
	Aggregated    bool // the engine both prefills and decodes
	InEngineQueue bool // in the engine at first: the rank has no slot or no KV room yet
	Limits        engine.Deadlines
	Log           *zap.Logger

	// Tracked, if set, returns the error of a broken connection if the call was ended because its
	// engine is down, and err otherwise.
	Tracked interface{ Cause(err error) error }

	RefusalBody []byte // the beginning of the body that came with an error status
}

// BeyondHeader tells an engine that the request was sent on purpose beyond the slots or the KV room
// of the rank. Engines may ignore it; it explains such requests in their logs.
const BeyondHeader = "X-Evenkeel-Beyond-Slots"

// Open returns when the head of the answer has come. The caller closes the response, which comes
// with a fault for an error status.
//
// The request may be sent only while this proxy owns the engine's scope. From Enter on, it counts
// as being sent: if another proxy takes the scope over, the loss is not complete until markSent is
// called, or a time limit is over.
func (c *Call) Open(headers []engine.Header, body [][]byte) (*engine.Response, *failure.Fault) {
	scope := c.Scope // the closure below does not use c, so that c stays on its caller's stack
	markSent, owned := scope.Enter()
	defer markSent() // does nothing if it was called before
	if !owned {
		return nil, c.FaultOf(owner.ErrNotOwner)
	}
	if scope != nil { // again, right before the request is written
		c.OnWritten(markSent)
		epoch := scope.Epoch()
		c.Guard(func() error { return scope.CheckEpoch(epoch) })
	}
	if c.InEngineQueue {
		headers = append(headers, engine.Header{Name: BeyondHeader, Value: "1"})
	}
	resp, err := c.Do(http.MethodPost, c.Path, scope.AppendEpochHeader(headers), body, c.Limits)
	if err != nil {
		return nil, c.FaultOf(err)
	}
	if resp.StatusCode() != http.StatusOK {
		return resp, c.refusalFault(resp)
	}
	return resp, nil
}

// SendAndRead returns the whole answer, which must have come by the deadline and may have at most
// maxBytes.
func (c *Call) SendAndRead(headers []engine.Header, body [][]byte, maxBytes int, deadline time.Time) (answer []byte, fault *failure.Fault) {
	resp, fault := c.Open(headers, body)
	if fault == nil {
		answer, fault = c.Read(resp, nil, maxBytes, deadline)
	}
	if resp != nil {
		resp.Close()
	}
	return answer, fault
}

// Read reads an open call's answer to its end, into buffer if that is large enough.
func (c *Call) Read(resp *engine.Response, buffer []byte, maxBytes int, deadline time.Time) ([]byte, *failure.Fault) {
	resp.SetDeadline(deadline)
	answer, err := resp.ReadInto(buffer, maxBytes)
	if err != nil {
		return buffer, c.FaultOf(err)
	}
	return answer, nil
}

// FaultOf is for err before the answer or in the middle of it.
func (c *Call) FaultOf(err error) *failure.Fault {
	if errors.Is(err, owner.ErrNotOwner) { // nothing was sent
		return failure.NewFault(lifecycle.CallEnd{Call: c.Kind, Reason: lifecycle.NotOurs}, failure.NotOurs, owner.ErrNotOwner)
	}
	if c.Tracked != nil {
		err = c.Tracked.Cause(err)
	}
	return &failure.Fault{CallEnd: callEndOf(c.Kind, err), ClientError: failure.NoAnswer(c.sideName(), err), Err: err, BlamedEngine: c.Engine}
}

// callEndOf assumes Headed and Broke unless err says otherwise. An engine is silent if an event
// stream brings no event in time (sse.ErrSilent), although bytes may come, or the connection
// nothing (engine.WasSilent).
func callEndOf(kind lifecycle.CallKind, err error) lifecycle.CallEnd {
	end := lifecycle.CallEnd{Call: kind, Progress: lifecycle.Headed, Reason: lifecycle.Broke}
	callErr, isCall := errors.AsType[*engine.Error](err)
	switch {
	case errors.Is(err, sse.ErrSilent):
		end.Reason = lifecycle.Silent
		return end
	case !isCall: // the answer is malformed
		end.Reason = lifecycle.Garbled
		return end
	case !callErr.Sent:
		end.Progress = lifecycle.Unsent
	case !callErr.Answered:
		end.Progress = lifecycle.Sent
	}
	switch { // else Broke
	case callErr.Aborted || errors.Is(err, engine.ErrClosed): // by the proxy
		end.Reason = lifecycle.HungUp
	case callErr.Stale(): // the engine had most likely closed the kept-alive connection before
		end.Reason = lifecycle.Stale
	case end.Progress == lifecycle.Unsent && callErr.Phase == engine.PhaseConnect:
		end.Reason = lifecycle.Unreachable
	case engine.WasSilent(err):
		end.Reason = lifecycle.Silent
	}
	return end
}

// refusalFault blames the engine if that refuses requests for a reason of its own, such as a pause
// or a model that it does not serve any more.
func (c *Call) refusalFault(resp *engine.Response) *failure.Fault {
	// A guard in front of the engine may have seen a higher epoch of another owner.
	c.Scope.RecordRefusal(string(resp.Header(owner.EpochHeader)))
	c.RefusalBody = failure.RefusalBody(resp)
	status := failure.CorrectStatus(c.Path, resp.StatusCode(), c.RefusalBody) // some are misleading
	side, id := c.sideName(), c.Target().ID
	// The side may be "engine" itself.
	engineName := strings.TrimPrefix(side+" engine", failure.Engine+" ")
	err := fmt.Errorf("%s %s answered %d", engineName, id, status)
	fault := failure.NewFault(lifecycle.CallEnd{Call: c.Kind, Progress: lifecycle.Headed}, nil, err)
	fault.Status = status
	// Paused, or re-forming its group, or the rank was retired or does not exist.
	if paused := engine.ParseRefusal(resp.StatusCode(), c.RefusalBody, c.Target()); paused != nil {
		fault.Reason, fault.ClientError, fault.BlamedEngine = lifecycle.Paused, failure.PausedError(side, paused), c.Engine
		fault.Err = fmt.Errorf("%w: %w", fault.Err, paused)
		return fault
	}
	fault.ClientError = failure.RefusalError(c.Log, side, id, status, resp, c.RefusalBody)
	if unlisted := engine.Unlisted(status, c.RefusalBody); unlisted != nil {
		fault.Reason, fault.BlamedEngine, fault.Err = lifecycle.Unlisted, c.Engine, fmt.Errorf("%w: %w", fault.Err, unlisted)
		// With this code, a request from another region goes back there (see setPeerHeaders), where
		// engines may have the model.
		fault.ClientError.Code = failure.NoSuchModel("").Code
		return fault
	}
	fault.Reason = lifecycle.ReasonOfStatus(status)
	fault.Err = failure.MarkUndelivered(fault.Err, string(c.RefusalBody))
	fault.RetryAfter = time.Duration(failure.RetryAfter(resp)) * time.Second
	return fault
}

func (c *Call) sideName() string {
	if c.Aggregated {
		return failure.Engine
	}
	return [...]string{lifecycle.Prefill: "prefill", lifecycle.Decode: "decode", lifecycle.Sole: failure.Engine}[c.Kind]
}

// Abort ends a request of an SGLang engine, which may not notice that the proxy has closed the
// connection. SGLang ends all requests whose ids begin with this id (SGLang pull request 25561).
func Abort(client *engine.Client, target *engine.Target, id string, log *zap.Logger) error {
	fault := abort(client, target, id, log, "/abort_request", fmt.Appendf(nil, `{"rid":%q}`, id))
	if fault == nil || fault.Status != 0 { // any answer shows that it got the abort
		return nil
	}
	return fault.Err
}

// AbortTokens ends a vLLM request to mooncake.Tokens with id as its X-Request-Id. The engine
// answers before it ends the request, and ignores an unknown id (0.32.0, abort_requests in
// entrypoints/scale_out/token_in_token_out/api_router.py).
func AbortTokens(client *engine.Client, target *engine.Target, id string, log *zap.Logger) error {
	body := fmt.Appendf(nil, `{"request_ids":[%q]}`, mooncake.Tokens.RequestID(id))
	if fault := abort(client, target, id, log, "/inference/v1/abort_requests", body); fault != nil {
		return fault.Err
	}
	return nil
}

// An abort does no harm twice (Repeat).
func abort(client *engine.Client, target *engine.Target, id string, log *zap.Logger, path string, body []byte) *failure.Fault {
	c := Call{Call: client.NewCall(target.Unranked()).Repeat(), Path: path,
		Limits: engine.Deadlines{Connect: abortTimeout, FirstByte: abortTimeout}, Log: log}
	_, fault := c.SendAndRead(engine.JSONHeaders(id+"-abort"), [][]byte{body}, maxAbortAnswer, time.Now().Add(2*abortTimeout))
	return fault
}

const (
	abortTimeout   = 2 * time.Second // limit for the connection, and again for the answer
	maxAbortAnswer = 1 << 10         // bytes; nothing in the answer is used
)
