// Package request serves one request: it has an engine prefill the prompt, waits for a
// decode rank, relays that rank's answer, and gives back what the request took, however
// it ends. life.go is the place to start reading.
package request

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/valyala/fasthttp"
	"go.uber.org/zap/zapcore"

	"evenkeel/dispatcher"
	"evenkeel/dispatcher/board"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/handoff"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/life"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/prompt"
	"evenkeel/gateway/suspect"
	"evenkeel/geo"
	"evenkeel/mooncake"
	"evenkeel/pool"
	"evenkeel/prefill"
	"evenkeel/sse"
)

// A job is one prompt that becomes one PD request: a client's request, or one
// leg of a fan-out. serve is its life; the states of its history stand in history.go,
// what a failed attempt comes to in attempt.go.
type job struct {
	srv    *Server
	req    *openai.Request
	body   mooncake.Body // dropped once a decode engine has it
	leg    *mooncake.Leg // what a leg of a fan-out changes in the body
	client reader
	id     string // request id, the stem of the engines' ids
	model  fleet.Route
	arrive time.Time
	ask    sse.Ask
	in     *Incoming
	told   *journal.Request // of in; of a leg, its own

	prompt int // tokens as the prefill engine counted them; of a resumed request with the answer so far
	cached int // of these, found in its prefix cache; -1 unknown
	stay   stay

	history  history
	question *geo.Question // where it goes, if there are other regions and that is open
	ran      int           // proxies of this region that may have served it, and gave it back

	tries suspect.Tries
	local locally

	doubts doubts
	resume resumption
	blame  suspect.Blame
}

// client is the connection the answer goes to: edge.Conn, or a fan-out's share
// of one.
type client interface {
	Gone() <-chan struct{}
	GoneAt() time.Time
	OnGone(func())
}

// serve runs a request up to the first event of its answer:
//
//	choose prefill → probe → wait for a slot → decode
//	       ↑                                      ↓
//	       └────── what the client has ←── lost in the middle
//
// A prompt that a decode rank computes itself begins with decode (local.go). A
// request that another dispatcher should have is sent there instead (abroad.go); its
// history says when that may be.
//
// The caller relays the rest and settles by closing the stream. Without a stream and
// without an error the answer came from another dispatcher and is on its way to ctx.
// Before the first event nothing has reached the client, so a failure may start over:
// with the same hand-off if no byte of a request with it was written to an engine,
// else with a fresh prefill. A broken connection, or a status from an engine or a
// proxy before it, does not prove that the KV was not read.
// An answer that is lost afterwards comes here again, from goOn: the prompt is longer
// by then, the rest is the same. ctx is nil then, and for a leg of a fan-out: neither
// is sent to another dispatcher.
func (j *job) serve(ctx *fasthttp.RequestCtx) (_ *stream, fail *openai.Error) {
	defer j.endStay()
	defer func() {
		if fail != nil {
			j.told.EndAttempt(fail)
		}
	}()
	var held *handoff.Handoff // prefilled and not yet consumed
	var last *openai.Error    // of the attempt before
	j.tries.Forget()
	for {
		if ctx != nil && j.history.open() && j.question == nil {
			j.question = j.elsewhere(false)
		}
		j.told.Attempt()
		var s *stream
		var fault *failure.Fault
		slot := j.bindLocal(held) // to a rank that needs no hand-off
		if slot == nil && j.in.Whole {
			return nil, failure.Alone(j.client.left(), last)
		}
		if slot == nil && held == nil {
			lease, away, err := j.choose()
			switch {
			case away != nil && ctx == nil: // a leg's question was settled before
				away.Drop()
				return nil, failure.NotOurs()
			case away != nil:
				if answered, fail := j.send(ctx, away); answered || fail != nil {
					return nil, fail
				}
				continue
			case err != nil:
				fail := j.notChosen(err)
				if !errors.Is(err, prefill.ErrUnavailable) || !j.leaves(ctx, failed) {
					return nil, fail
				}
				j.told.EndAttempt(fail)
				continue
			}
			j.tries.Prefill = append(j.tries.Prefill, lease.Candidate.ID)
			if j.srv.early(lease.Candidate) {
				if s, fault = j.together(lease); fault == nil {
					return s.begun(), nil
				}
			} else {
				held, fault = j.probe(lease)
			}
		}
		if fault == nil && slot == nil {
			slot, fault = j.wait(held)
		}
		if fault == nil {
			if s, fault = j.decode(held, slot); fault == nil {
				return s.begun(), nil
			}
			if fault.Verdict().Next != life.Room {
				j.tries.Shun(j.srv.Fleet, slot.Worker)
			}
		}
		verdict := fault.Verdict()
		if verdict.Spent() {
			held = nil
		}
		if last = fault.Answer; j.again(fault) {
			continue
		}
		j.doubts.add(held, false) // no engine has it, but no answer needs it any more
		held = nil
		switch {
		case j.client.left():
			return nil, failure.Gone()
		case verdict.Next == life.Ask && j.leaves(ctx, lostGroup):
		case verdict.Next > life.Over && verdict.Next < life.Ask && !j.tries.Poisons() && j.leaves(ctx, failed):
		default:
			return nil, fault.Answer
		}
	}
}

// begun takes note that the answer has begun.
func (s *stream) begun() *stream {
	s.shed()
	s.job.blame.Find(suspect.Guilty)
	return s
}

// onPanic gives back what a step has taken, if it panics. The panic goes on to the edge.
func onPanic(giveBack func()) {
	if v := recover(); v != nil {
		giveBack()
		panic(v)
	}
}

// leaves says whether a request that cannot be served here is asked about again: to
// its decode group's owner, or to a region where attempts have not failed yet. What
// its stay here holds is given back then.
func (j *job) leaves(ctx *fasthttp.RequestCtx, why move) bool {
	node := j.srv.Node
	if ctx == nil || node == nil || !j.req.Endpoint.Common() || j.client.left() || why == lostGroup && j.in.aimed() || why == failed && !node.Offered(j.model.Name) || !j.history.moves(why) {
		return false
	}
	q := j.elsewhere(false)
	if why == failed && !q.Offered() {
		return false
	}
	j.endStay()
	j.tries.Restart()
	j.question = q
	return true
}

// endStay gives back what the request still holds when its attempts here are over: its
// place in the pool, and hand-offs from which no answer may be made.
func (j *job) endStay() {
	j.question = nil
	j.blame.Find(suspect.Unclear)
	j.doubts.settle(j)
	j.stay.end(j.srv.Tier, j.srv.Places)
}

// choose waits in the arrival queue for a place in the pool and an engine that may
// take the prompt. It may be that another dispatcher should have the request.
func (j *job) choose() (*prefill.Lease, *geo.Forward, error) {
	lease, err := j.acquire()
	if err == nil {
		return lease, nil, nil
	}
	q := j.question
	j.question = nil
	if q == nil || q.Forward() == nil {
		return nil, nil, err
	}
	if errors.Is(err, prefill.ErrElsewhere) {
		return nil, q.Forward(), nil
	}
	q.Forward().Drop()
	return nil, nil, err
}

// notChosen is the answer to a request that got no turn.
func (j *job) notChosen(err error) *openai.Error {
	if j.client.left() {
		j.freed()
		return failure.Gone()
	}
	return failure.Queue(err, j.model.Name)
}

// acquire takes the request's turn.
func (j *job) acquire() (*prefill.Lease, error) {
	began := time.Now()
	j.reach(journal.Queued)
	lease, err := j.awaitTurn()
	j.told.Queued(time.Since(began))
	if err != nil {
		return nil, err
	}
	j.stay.place = true
	lease = j.srv.couples.Prefer(lease)
	j.told.Chose(lease)
	if j.history.open() {
		j.tries.Prefill = nil // of attempts before its question
	}
	if j.question != nil {
		j.question.Stayed(lease.Wait)
	}
	j.question = nil
	j.history.moves(turned) // it stays here: no retry leaves
	return lease, nil
}

// awaitTurn waits for the request's turn. Most have it at once, and need nobody who ends the wait.
func (j *job) awaitTurn() (*prefill.Lease, error) {
	k := j.stay.ticket
	if j.stay.ticket = nil; k == nil {
		if err := j.srv.Serving().Err(); err != nil {
			return nil, err
		}
		if j.client.left() {
			return nil, context.Canceled
		}
		entered, err := j.srv.Tier.Enter(j.arrival())
		if err != nil {
			return nil, err
		}
		k = &entered
	}
	if lease := k.Served(); lease != nil {
		return lease, nil
	}
	ctx, cancel := context.WithCancel(j.srv.Serving())
	defer cancel()
	j.client.OnGone(cancel)
	defer j.client.OnGone(nil)
	return k.Wait(ctx)
}

// arrival is what the arrival queue knows of a request. A retry has its first
// arrival.
func (j *job) arrival() prefill.Request {
	r := prefill.Request{
		ID: j.id, Model: j.model.Name, PromptTokens: j.estimate(), Counted: j.prompt > 0 || (j.leg == nil || j.leg.Prompt == nil) && j.req.PromptTokens > 0, PromptBytes: prompt.Bytes(j.req, j.leg), Arrival: j.arrive,
		Session: j.in.Session, Policy: j.in.PrefillPolicy, Target: j.in.ToPrefill,
		Key: j.told.Key, Priority: j.in.Priority, Reserved: j.stay.place, Exclude: j.tries.Prefill, Returned: j.history.waited(),
	}
	if j.stay.holder == nil {
		j.stay.holder = &prefill.Holder{}
	}
	r.Holder = j.stay.holder
	if j.question != nil && !j.stay.place && !j.in.aimed() { // what has a place in the pool stays, and what names engines
		r.Elsewhere, r.Prompt = j.question, j.question.Prompt()
	}
	if r.Prompt.Keys == nil {
		r.Prompt = j.recognize()
	}
	if node := j.srv.Node; node != nil {
		r.May = node.May(j.told.Key, j.model.Name)
	}
	return r
}

// stay is what a request holds of the arrival queue and of the pool.
type stay struct {
	ticket *prefill.Ticket // of a leg that has entered the arrival queue with its siblings
	holder *prefill.Holder // of the leases that serve is to give back or pass on; nil: it had no turn yet
	place  bool            // a reserved place in the pool is ours to give back
}

// end tells the audit that the request no longer has to give back any lease, and gives
// its place back.
func (s *stay) end(tier *prefill.Tier, places *pool.Places) {
	if s.holder != nil {
		tier.Ended(s.holder)
		s.holder = nil
	}
	if s.place {
		s.place = false
		places.Release()
	}
}

// wait parks the hand-off in the pool until the dispatcher binds it to a rank.
func (j *job) wait(h *handoff.Handoff) (*dispatcher.Slot, *failure.Fault) {
	slot, f := j.place(h.Lease.Candidate, j.prompt, func(e *pool.Entry) { e.Deadline = h.BindBy() })
	if f != nil {
		return nil, j.settle(h, f)
	}
	return slot, nil
}

// place waits in the pool until the dispatcher binds the request to a rank. more completes what
// the dispatcher is told of it.
// Any other end of the wait ends the request, with two exceptions: if the region's
// engines were handed back or it lost its ranks, the prompt is prefilled again in
// another region, and if its decode group is another proxy's now, that proxy is asked.
func (j *job) place(c prefill.Candidate, tokens int, more func(*pool.Entry)) (*dispatcher.Slot, *failure.Fault) {
	j.reach(journal.Pooled)
	if !j.stay.place { // a hand-off that comes back for another rank
		j.srv.Places.Reserve()
		j.stay.place = true
	}
	region := j.srv.Fleet.RegionFor(c.Instance)
	e := &pool.Entry{
		ID: j.srv.nextID(), Model: fleet.BoardIn(j.model.Board, region), Prompt: tokens, Age: j.resume.before, Key: j.promptHash(), Arrival: j.arrive, Entered: time.Now(),
		Only: j.in.ToDecode, Avoid: j.tries.Decode, Prefiller: c.Instance, Response: j.req.Endpoint == mooncake.Responses,
	}
	more(e)
	got, lost := j.srv.Dispatcher.Enqueue(e), j.srv.Owner.Losses()
	j.stay.place = false // the entry has it now
	var r dispatcher.Result
	waits, unowned := true, false
	withdraw := func(why life.Why, answer *openai.Error) (*dispatcher.Slot, *failure.Fault) {
		if waits {
			j.srv.Dispatcher.Withdraw(e)
			r, waits = <-got, false
		}
		if r.Err == nil { // the slot came first: ours to give back
			j.srv.Dispatcher.Release(r.Slot, board.Outcome{Kind: board.Cancelled})
		}
		return nil, &failure.Fault{Ended: life.Ended{Why: why}, Answer: answer}
	}
	defer onPanic(func() { withdraw(life.Leaving, nil) })
	for waits {
		if unowned = !j.srv.Fleet.Owned(j.model.Board); unowned || region != "" && !j.srv.Owner.Admits(region) {
			j.srv.Dispatcher.Withdraw(e)
			r, waits = <-got, false // the slot may have come first, so it is checked again before it is used
			continue
		}
		select {
		case r = <-got:
			waits = false
		case <-lost:
			lost = j.srv.Owner.Losses()
		case <-j.client.Gone():
			return withdraw(life.Left, failure.Gone())
		case <-j.srv.Serving().Done():
			return withdraw(life.Leaving, failure.Leaving())
		}
	}
	if r.Err != nil {
		return nil, j.unplaced(r.Err, region, unowned)
	}
	j.told.Placed(r.Slot, time.Since(e.Entered))
	return r.Slot, nil
}

// MarshalLogObject names the job in the log.
func (j *job) MarshalLogObject(enc zapcore.ObjectEncoder) error {
	enc.AddString("id", j.id)
	if j.told.TraceID != "" {
		enc.AddString("trace_id", j.told.TraceID)
	}
	return nil
}

// parts are what of the request make its prompt.
func (j *job) parts() *prompt.Parts {
	return &prompt.Parts{Req: j.req, Body: &j.body, Leg: j.leg, Model: j.model, Resumed: j.resume.times > 0}
}

// promptHash tells prompts apart; 0 where nobody does. The request log has it for
// `evenkeel fit`.
func (j *job) promptHash() uint64 {
	key := j.srv.PromptKey()
	if key == nil {
		return 0
	}
	hash := j.parts().Hash(key)
	if !j.client.isLeg() { // the legs of one request have one line, and their prompts one by one
		j.told.PromptKey = fmt.Sprintf("%016x", hash)
	}
	return hash
}
