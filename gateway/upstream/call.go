// Package upstream sends all requests of clients to engines. It returns an answer, or a fault in the terms of gateway/lifecycle. It knows
// nothing of leases, slots and clients.
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

// Notice is how long an engine may take to notice that the proxy has left. Then the proxy cuts a connection that the engine did not close.
const Notice = 250 * time.Millisecond

// New prepares a call to an engine. A request for SGLang names the rank in its body, not in a header. But if SGLang
// prefills and decodes in one engine, the header names the rank, unless ranks must not be named.
func New(client *engine.Client, profile *mooncake.Profile, target *engine.Target) *engine.Call {
	if profile.Connector == mooncake.SGLang && (!profile.Aggregated() || profile.NamedRank(target.Rank) < 0) {
		target = target.Unranked()
	}
	return client.NewCall(target)
}

// Meet returns how the two legs of the request with this id, which run at once, find each other, as far as that is known before they
// are sent. ranks is how many ranks the prefill engine has.
func Meet(id string, e mooncake.Endpoint, p *mooncake.Profile, prefill *engine.Target, ranks int, d *mooncake.Profile,
	decode *engine.Target) *mooncake.Meeting {
	m := &mooncake.Meeting{Endpoint: e, RID: id, PrefillRank: p.NamedRank(prefill.Rank), DecodeRank: d.NamedRank(decode.Rank),
		RequestID: e.RequestID(id)}
	if p.Connector == mooncake.SGLang {
		room, n := rand.Int64N(1<<62), int64(max(1, ranks)) // a random room, so that it is new; modulo ranks it must be the prefill rank
		m.Host, m.Port, m.Room = prefill.URL.Hostname(), p.BootstrapPort, room-room%n+int64(max(0, prefill.Rank))
	}
	return m
}

// Headers returns the headers of a leg with this id, for a request that is bound before its prefill.
func Headers(id string, e mooncake.Endpoint, p *mooncake.Profile) []engine.Header {
	headers := engine.JSONHeaders(id)
	if p.Nameless(e) {
		headers = append(headers, engine.Header{Name: mooncake.RIDHeader, Value: id})
	}
	return headers
}

// A Call is a request to an engine. Open or Whole sends it, once. Any goroutine may end it at any time, by the methods of engine.Call.
type Call struct {
	*engine.Call
	Leg    lifecycle.Leg
	Engine string       // the monitor's id
	Scope  *owner.Scope // the request is sent only while the scope is ours; nil: no other proxy sends to the engine
	Run    Run          // knows whether the call was ended because the engine is down; nil: it is never ended for that
	Path   string
	Mixed  bool // the engine computes the prompt and writes the answer
	Beyond bool // the request is sent although the rank has no slot or no KV room for it
	Limits engine.Deadlines
	Log    *zap.Logger

	Refusal []byte // the beginning of the body that came with an error status
}

// A Run knows whether a call was aborted because its engine is down. Cause then returns err as that of a broken call, else err itself.
type Run interface{ Cause(err error) error }

// BeyondHeader tells an engine that the request was sent on purpose although the rank has no slot
// or no KV room for it. An engine may ignore it; it helps to read logs.
const BeyondHeader = "X-Evenkeel-Beyond-Slots"

// Open sends the request and returns once the head of its answer has come. The caller closes the response. An error status is a
// fault, and its response is returned, too.
func (c *Call) Open(headers []engine.Header, body [][]byte) (*engine.Response, *failure.Fault) {
	scope := c.Scope // a closure that has it, and not c, leaves c on its caller's stack
	sent, ours := scope.Enter()
	defer sent()
	if !ours {
		return nil, c.Broke(owner.ErrNotOwner)
	}
	if scope != nil {
		c.OnWritten(sent)
		epoch := scope.Epoch()
		c.Guard(func() error { return scope.Still(epoch) })
	}
	if c.Beyond {
		headers = append(headers, engine.Header{Name: BeyondHeader, Value: "1"})
	}
	resp, err := c.Do(http.MethodPost, c.Path, scope.Mark(headers), body, c.Limits)
	if err != nil {
		return nil, c.Broke(err)
	}
	if resp.StatusCode() != http.StatusOK {
		return resp, c.refused(resp)
	}
	return resp, nil
}

// Whole sends the request and reads its answer to the end, until by at the latest. The answer may have at most most bytes. It
// is read into room if room is large enough.
func (c *Call) Whole(headers []engine.Header, body [][]byte, room []byte, most int, by time.Time) ([]byte, *failure.Fault) {
	resp, f := c.Open(headers, body)
	if f == nil {
		room, f = c.Read(resp, room, most, by)
	}
	if resp != nil {
		resp.Close()
	}
	return room, f
}

// Read reads the answer of an open call to its end, as Whole does.
func (c *Call) Read(resp *engine.Response, room []byte, most int, by time.Time) ([]byte, *failure.Fault) {
	resp.SetDeadline(by)
	answer, err := resp.ReadInto(room, most)
	if err != nil {
		return room, c.Broke(err)
	}
	return answer, nil
}

// Broke returns the fault of a call that failed with err, before its answer or in the middle of it.
func (c *Call) Broke(err error) *failure.Fault {
	if errors.Is(err, owner.ErrNotOwner) { // nothing was sent, and the engine is not to blame
		return failure.Of(lifecycle.Ended{Leg: c.Leg, Why: lifecycle.NotOurs}, failure.NotOurs, owner.ErrNotOwner)
	}
	if c.Run != nil {
		err = c.Run.Cause(err)
	}
	return &failure.Fault{Ended: ended(c.Leg, err), Answer: failure.Transport(c.side(), err), Err: err, Engine: c.Engine}
}

// ended says how far a leg had come, and why it ended.
func ended(leg lifecycle.Leg, err error) lifecycle.Ended {
	e := lifecycle.Ended{Leg: leg, Far: lifecycle.Headed, Why: lifecycle.Broke}
	var call *engine.Error
	switch isCall := errors.As(err, &call); {
	case errors.Is(err, sse.ErrSilent):
		e.Why = lifecycle.Silent
		return e
	case !isCall: // the answer is not as it should be
		e.Why = lifecycle.Garbled
		return e
	case !call.Sent:
		e.Far = lifecycle.Unsent
	case !call.Answered:
		e.Far = lifecycle.Sent
	}
	switch {
	case call.Aborted || errors.Is(err, engine.ErrClosed):
		e.Why = lifecycle.HungUp
	case call.Stale():
		e.Why = lifecycle.Stale
	case e.Far == lifecycle.Unsent && call.Phase == engine.PhaseConnect:
		e.Why = lifecycle.Unreachable
	case engine.WasSilent(err):
		e.Why = lifecycle.Silent
	}
	return e
}

// refused returns the fault of a call whose engine answered with an error status. The engine's 4xx answers reach the client as they
// came. Its 5xx answers do not, nor does a refusal of the proxy's own credential.
func (c *Call) refused(resp *engine.Response) *failure.Fault {
	c.Scope.Refused(string(resp.Header(owner.EpochHeader)))
	c.Refusal = failure.Body(resp)
	status, side, id := failure.StatusOf(c.Path, resp.StatusCode(), c.Refusal), c.side(), c.Target().ID
	who := strings.TrimPrefix(side+" engine", failure.Engine+" ")
	if why := engine.Withheld(resp.StatusCode(), c.Refusal, c.Target()); why != nil {
		return &failure.Fault{
			Ended: lifecycle.Ended{Leg: c.Leg, Far: lifecycle.Headed, Why: lifecycle.Withheld}, Answer: failure.Withheld(side, why), Status: status,
			Engine: c.Engine,
			Err:    fmt.Errorf("%s %s answered %d: %w", who, id, status, why),
		}
	}
	if why := engine.Unlisted(status, c.Refusal); why != nil {
		answer := failure.Refused(c.Log, side, id, status, resp, c.Refusal)
		answer.Code = failure.NoSuchModel("").Code // another region may have it
		return &failure.Fault{
			Ended: lifecycle.Ended{Leg: c.Leg, Far: lifecycle.Headed, Why: lifecycle.Unlisted}, Answer: answer, Status: status, Engine: c.Engine,
			Err: fmt.Errorf("%s %s answered %d: %w", who, id, status, why),
		}
	}
	return &failure.Fault{
		Ended:  lifecycle.Ended{Leg: c.Leg, Far: lifecycle.Headed, Why: lifecycle.ByStatus(status)},
		Answer: failure.Refused(c.Log, side, id, status, resp, c.Refusal), Status: status,
		Err:        failure.Undelivered(fmt.Errorf("%s %s answered %d", who, id, status), string(c.Refusal)),
		RetryAfter: time.Duration(failure.RetryAfter(resp)) * time.Second,
	}
}

func (c *Call) side() string {
	if c.Mixed {
		return failure.Engine
	}
	return [...]string{lifecycle.Prefill: "prefill", lifecycle.Decode: "decode", lifecycle.Sole: failure.Engine}[c.Leg]
}

// Abort asks an engine of SGLang to end a request, because the engine may not notice by itself that the proxy has left. SGLang
// ends all requests whose id begins with this id (SGLang pull request 25561).
func Abort(client *engine.Client, target *engine.Target, id string, log *zap.Logger) error {
	c := Call{Call: client.NewCall(target.Unranked()).Repeat(), Path: "/abort_request",
		Limits: engine.Deadlines{Connect: abortTime, FirstByte: abortTime}, Log: log}
	_, f := c.Whole(engine.JSONHeaders(id+"-abort"), [][]byte{fmt.Appendf(nil, `{"rid":%q}`, id)}, nil, 1<<10, time.Now().Add(2*abortTime))
	if f != nil && f.Status == 0 {
		return f.Err
	}
	return nil
}

// AbortTokens asks an engine of vLLM to end a request to mooncake.Tokens that has id as its X-Request-Id. The engine answers before it
// ends the request, and ignores an unknown name (0.32.0, abort_requests in entrypoints/scale_out/token_in_token_out/api_router.py).
func AbortTokens(client *engine.Client, target *engine.Target, id string, log *zap.Logger) error {
	c := Call{Call: client.NewCall(target.Unranked()).Repeat(), Path: "/inference/v1/abort_requests",
		Limits: engine.Deadlines{Connect: abortTime, FirstByte: abortTime}, Log: log}
	_, f := c.Whole(engine.JSONHeaders(id+"-abort"), [][]byte{fmt.Appendf(nil, `{"request_ids":[%q]}`, mooncake.Tokens.RequestID(id))}, nil, 1<<10, time.Now().Add(2*abortTime))
	if f != nil {
		return f.Err
	}
	return nil
}

const abortTime = 2 * time.Second
