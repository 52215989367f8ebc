// Package upstream sends requests to engines. It returns an answer, or a fault in the terms of gateway/lifecycle. It knows nothing of
// leases, slots and clients.
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

// NoticeTimeout is how long an engine may take to notice that the proxy has ended a call. After that, the proxy cuts the connection if the
// engine has not closed it.
const NoticeTimeout = 250 * time.Millisecond

// NewCall prepares a call to an engine. The rank is named in a header, but for SGLang in the body. An SGLang engine that both prefills and
// decodes gets the rank in the header, unless its profile says that ranks must not be named.
func NewCall(client *engine.Client, profile *mooncake.Profile, target *engine.Target) *engine.Call {
	if profile.Connector == mooncake.SGLang {
		if rankInBody := !profile.Aggregated; rankInBody || profile.NamedRank(target.Rank) < 0 {
			target = target.Unranked() // the header names no rank
		}
	}
	return client.NewCall(target)
}

// NewRendezvous returns the data by which the prefill engine and the decode engine of a request find each other, if both calls run at the
// same time. id is the X-Request-Id of both calls. ranks is how many ranks the prefill engine has.
func NewRendezvous(id string, endpoint mooncake.Endpoint, prefillProfile *mooncake.Profile, prefill *engine.Target, ranks int,
	decodeProfile *mooncake.Profile, decode *engine.Target) *mooncake.Rendezvous {
	rendezvous := &mooncake.Rendezvous{Endpoint: endpoint, RID: id, PrefillRank: prefillProfile.NamedRank(prefill.Rank),
		DecodeRank: decodeProfile.NamedRank(decode.Rank),
		RequestID:  endpoint.RequestID(id)}
	if prefillProfile.Connector == mooncake.SGLang {
		// The number of the room is random, so that no other request has it. Modulo ranks it must be the prefill rank (see
		// Rendezvous.Room): the random number is rounded down to a multiple of ranks, and the rank is added.
		room := rand.Int64N(1 << 62)
		rankCount := int64(max(1, ranks))
		rendezvous.Host, rendezvous.Port = prefill.URL.Hostname(), prefillProfile.BootstrapPort
		rendezvous.Room = room - room%rankCount + int64(max(0, prefill.Rank))
	}
	return rendezvous
}

// PairHeaders returns the headers of a call with this X-Request-Id, for a request that is bound to a decode rank before its prefill. For
// endpoints of SGLang whose body cannot have the id, the header RIDHeader has it, too.
func PairHeaders(id string, endpoint mooncake.Endpoint, prefillProfile *mooncake.Profile) []engine.Header {
	headers := engine.JSONHeaders(id)
	if prefillProfile.Nameless(endpoint) {
		headers = append(headers, engine.Header{Name: mooncake.RIDHeader, Value: id})
	}
	return headers
}

// A Call is a request to an engine. Open or SendAndRead sends it, once. Any goroutine may end it at any time with the methods of
// engine.Call.
type Call struct {
	*engine.Call
	Kind          lifecycle.CallKind
	Engine        string       // the id of the engine in engine.Monitor
	Scope         *owner.Scope // the request is sent only while this proxy owns the scope; nil: no other proxy sends to the engine
	Path          string
	Aggregated    bool // the engine both prefills and decodes
	InEngineQueue bool // the request waits in the engine's own queue at first, because the rank has no slot or no KV room for it yet
	Limits        engine.Deadlines
	Log           *zap.Logger

	// Tracked finds out whether the call was ended because its engine is down, and returns the error of a broken connection in this
	// case. It returns any other error unchanged. nil: the call is not ended for this reason.
	Tracked interface{ Cause(err error) error }

	RefusalBody []byte // the beginning of the body that came with an error status
}

// BeyondHeader tells an engine that the request was sent on purpose although it is beyond the slots or the KV room of the rank, so that it
// waits in the engine's own queue. Engines may ignore the header. It explains such requests in their logs.
const BeyondHeader = "X-Evenkeel-Beyond-Slots"

// Open sends the request and returns when the head of the answer has come. The caller closes the response. For an error status, Open
// returns both the response and a fault.
//
// The request may be sent only while this proxy owns the engine's scope. From Enter on, it counts as being sent: if another proxy takes the
// scope over, the loss is not complete until markSent is called, or a time limit is over.
func (c *Call) Open(headers []engine.Header, body [][]byte) (*engine.Response, *failure.Fault) {
	scope := c.Scope // the closure below uses scope instead of c, so that c stays on its caller's stack
	markSent, owned := scope.Enter()
	defer markSent() // does nothing if markSent was called when the request was written (OnWritten)
	if !owned {      // another proxy sends to the engine now
		return nil, c.FaultOf(owner.ErrNotOwner)
	}
	if scope != nil { // the ownership is checked once more right before the request is written
		c.OnWritten(markSent)
		epoch := scope.Epoch()
		c.Guard(func() error { return scope.CheckEpoch(epoch) })
	}
	if c.InEngineQueue { // tells the engine, for its log, that the request is beyond the rank's slots or KV room
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

// SendAndRead sends the request and reads the whole answer, which must have come by the deadline and may have at most maxBytes bytes.
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

// Read reads the answer of an open call to its end, as SendAndRead does, into buffer if buffer is large enough.
func (c *Call) Read(resp *engine.Response, buffer []byte, maxBytes int, deadline time.Time) ([]byte, *failure.Fault) {
	resp.SetDeadline(deadline)
	answer, err := resp.ReadInto(buffer, maxBytes)
	if err != nil {
		return buffer, c.FaultOf(err)
	}
	return answer, nil
}

// FaultOf returns the fault of a call that failed with err, before its answer or in the middle of it.
func (c *Call) FaultOf(err error) *failure.Fault {
	if errors.Is(err, owner.ErrNotOwner) { // nothing was sent, so the engine has not failed
		return failure.NewFault(lifecycle.CallEnd{Call: c.Kind, Reason: lifecycle.NotOurs}, failure.NotOurs, owner.ErrNotOwner)
	}
	if c.Tracked != nil {
		err = c.Tracked.Cause(err)
	}
	return &failure.Fault{CallEnd: callEndOf(c.Kind, err), ClientError: failure.NoAnswer(c.sideName(), err), Err: err, BlamedEngine: c.Engine}
}

// callEndOf returns how far a call had come when it failed with err, and why it failed. kind is the kind of the call. Unless err says
// otherwise, bytes of the answer had come (Headed), and the connection broke (Broke). An engine may be silent in two ways: an event stream
// brings no event in time (sse.ErrSilent), although bytes may come, or the connection brings nothing in time (engine.WasSilent).
func callEndOf(kind lifecycle.CallKind, err error) lifecycle.CallEnd {
	end := lifecycle.CallEnd{Call: kind, Progress: lifecycle.Headed, Reason: lifecycle.Broke}
	callErr, isCall := errors.AsType[*engine.Error](err)
	switch {
	case errors.Is(err, sse.ErrSilent):
		end.Reason = lifecycle.Silent
		return end
	case !isCall: // the connection works, but the answer is malformed
		end.Reason = lifecycle.Garbled
		return end
	case !callErr.Sent:
		end.Progress = lifecycle.Unsent
	case !callErr.Answered:
		end.Progress = lifecycle.Sent
	}
	switch { // a connection that broke in any other way keeps the reason Broke
	case callErr.Aborted || errors.Is(err, engine.ErrClosed): // the proxy ended the call
		end.Reason = lifecycle.HungUp
	case callErr.Stale(): // the engine had most likely closed the kept-alive connection before
		end.Reason = lifecycle.Stale
	case end.Progress == lifecycle.Unsent && callErr.Phase == engine.PhaseConnect: // no connection could be made
		end.Reason = lifecycle.Unreachable
	case engine.WasSilent(err):
		end.Reason = lifecycle.Silent
	}
	return end
}

// refusalFault returns the fault of a call whose engine answered with an error status. If the engine refuses requests for a reason of its
// own, e.g. because it is paused, or does not serve the model any more, the fault blames the engine. The client gets an engine's 4xx answer
// unchanged, but not a 5xx answer or an answer that refuses the proxy's own credential.
func (c *Call) refusalFault(resp *engine.Response) *failure.Fault {
	// A guard in front of the engine may have refused the request because another proxy has owned the engine since (a higher epoch).
	c.Scope.RecordRefusal(string(resp.Header(owner.EpochHeader)))
	c.RefusalBody = failure.RefusalBody(resp)
	status := failure.CorrectStatus(c.Path, resp.StatusCode(), c.RefusalBody) // some engines send a misleading status at some endpoints
	side, id := c.sideName(), c.Target().ID
	engineName := strings.TrimPrefix(side+" engine", failure.Engine+" ") // the side may be "engine" itself
	err := fmt.Errorf("%s %s answered %d", engineName, id, status)
	fault := failure.NewFault(lifecycle.CallEnd{Call: c.Kind, Progress: lifecycle.Headed}, nil, err)
	fault.Status = status
	// The reason is that the engine is paused or re-forms its group, or that the rank was retired or does not exist.
	if paused := engine.ParseRefusal(resp.StatusCode(), c.RefusalBody, c.Target()); paused != nil {
		fault.Reason, fault.ClientError, fault.BlamedEngine = lifecycle.Paused, failure.PausedError(side, paused), c.Engine
		fault.Err = fmt.Errorf("%w: %w", fault.Err, paused)
		return fault
	}
	fault.ClientError = failure.RefusalError(c.Log, side, id, status, resp, c.RefusalBody)
	if unlisted := engine.Unlisted(status, c.RefusalBody); unlisted != nil {
		fault.Reason, fault.BlamedEngine, fault.Err = lifecycle.Unlisted, c.Engine, fmt.Errorf("%w: %w", fault.Err, unlisted)
		// With this code, a request that came from another region goes back to that region (see setPeerHeaders), whose engines may
		// have the model.
		fault.ClientError.Code = failure.NoSuchModel("").Code
		return fault
	}
	fault.Reason = lifecycle.ReasonOfStatus(status)
	fault.Err = failure.MarkUndelivered(fault.Err, string(c.RefusalBody)) // notes if the body says that the KV did not arrive
	fault.RetryAfter = time.Duration(failure.RetryAfter(resp)) * time.Second
	return fault
}

// sideName returns the word for the call's engine in errors: prefill, decode, or engine.
func (c *Call) sideName() string {
	if c.Aggregated {
		return failure.Engine
	}
	return [...]string{lifecycle.Prefill: "prefill", lifecycle.Decode: "decode", lifecycle.Sole: failure.Engine}[c.Kind]
}

// Abort asks an SGLang engine to end a request, because the engine may not notice that the proxy has closed the connection. SGLang ends all
// requests whose ids begin with this id (SGLang pull request 25561).
func Abort(client *engine.Client, target *engine.Target, id string, log *zap.Logger) error {
	fault := abort(client, target, id, log, "/abort_request", fmt.Appendf(nil, `{"rid":%q}`, id))
	if fault == nil || fault.Status != 0 { // any answer shows that the engine got the abort
		return nil
	}
	return fault.Err
}

// AbortTokens asks a vLLM engine to end a request to the endpoint mooncake.Tokens that has id as its X-Request-Id. The engine answers
// before it ends the request, and ignores an unknown id (0.32.0, abort_requests in
// entrypoints/scale_out/token_in_token_out/api_router.py).
func AbortTokens(client *engine.Client, target *engine.Target, id string, log *zap.Logger) error {
	body := fmt.Appendf(nil, `{"request_ids":[%q]}`, mooncake.Tokens.RequestID(id))
	if fault := abort(client, target, id, log, "/inference/v1/abort_requests", body); fault != nil {
		return fault.Err
	}
	return nil
}

// abort sends body, which tells an engine to end the request with this id. If the connection turns out to be closed, the abort is sent once
// more (Repeat), because it does no harm twice.
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
