package request

import (
	"cmp"
	"errors"
	"slices"
	"time"

	"github.com/valyala/fasthttp"
	"go.uber.org/zap"

	"evenkeel/dispatcher"
	"evenkeel/dispatcher/board"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/handoff"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/upstream"
	"evenkeel/geo"
	"evenkeel/pool"
	"evenkeel/prefill"
)

// serve runs a request up to the first event of its answer. It reports to the request's life what happens, and carries out the effects
// that the life returns.
//
// The caller relays the rest and settles by closing the stream. Without a stream and
// without an error the answer came from another dispatcher and is on its way to ctx.
// Before the first event nothing has reached the client, so a failure may start over.
// An answer that is lost afterwards comes here again, from goOn: the prompt is longer
// by then, the rest is the same. ctx is nil then, and for a leg of a fan-out: neither
// is sent to another dispatcher.
func (j *job) serve(ctx *fasthttp.RequestCtx) (*stream, *openai.Error) {
	j.life.Bound, j.life.OnlyLocal = ctx == nil, j.in.Whole
	j.abort.lost()
	j.mu.Lock() // prefill legs of attempts before a lost answer may be under way
	j.tape.Begin(&j.life)
	j.mu.Unlock()
	j.avoid.prefill = nil
	defer func() { j.question = nil }()
	begun := lifecycle.Event{What: lifecycle.Begun}
	if j.passed != nil {
		begun.Script = lifecycle.Passed
	}
	s, fail := (&runner{job: j, ctx: ctx}).run(begun)
	if fail != nil {
		j.record.EndAttempt(fail)
	}
	return s, fail
}

// A runner holds the things of which a life only knows whether they are held: lease, hand-off, slot, stream.
type runner struct {
	job *job
	ctx *fasthttp.RequestCtx

	away   *geo.Forward  // the way to another dispatcher that should have the request
	asks   *geo.Question // the question that goes with the request's next turn
	lease  *prefill.Lease
	held   *handoff.Handoff
	slot   *dispatcher.Slot
	stream *stream
	fault  *failure.Fault // how the last leg failed; nil: no leg did
	fail   *openai.Error  // the error of the last attempt

	answers bool // the answer has begun: the runner carries out what follows its end
}

func (r *runner) run(e lifecycle.Event) (*stream, *openai.Error) {
	j := r.job
	var room [8]lifecycle.Effect
	todo := room[:0]
	defer onPanic(func() { // give back what the remaining effects were to give back, and what is still held
		j.client.OnGone(nil)
		if r.stream != nil { // the stream has the slot
			defer r.stream.settle(board.Failed)
		}
		if !j.life.Resumed() { // bytes may be kept of which the life does not know yet
			j.forget()
		}
		met := r.stream != nil && r.stream.from.partner != nil
		for _, x := range slices.Concat(todo, j.tell(lifecycle.Event{What: lifecycle.Panicked, Idle: !met}, nil)) {
			switch {
			case x.Do == lifecycle.SendBoth:
			case x.Pair > 0 && met:
				r.stream.from.partner.carryOut(x)
			case x.Do == lifecycle.Settle || x.Do == lifecycle.Find:
				r.do(x)
			}
		}
	})
	for {
		e.Left = j.client.Left()
		if todo = j.tell(e, room[:0]); len(todo) == 0 {
			j.srv.Log.Error("a request ended without an answer or an error; this is a bug, please report it", zap.Inline(j))
			return nil, failure.Broken
		}
		for len(todo) > 0 {
			x := todo[0]
			switch todo = todo[1:]; x.Do {
			case lifecycle.AnswerIt:
				return r.answer(), nil
			case lifecycle.Fail:
				return nil, r.error(x.Error)
			}
			if e = r.do(x); x.Do > lifecycle.Forward { // the wait is over, and with it what the client's leaving was to end
				j.client.OnGone(nil)
			}
		}
	}
}

// do carries out an effect. If the effect is waited for, do returns the event that says how it ended.
func (r *runner) do(x lifecycle.Effect) lifecycle.Event {
	j := r.job
	switch x.Do {
	case lifecycle.Question:
		if j.question == nil {
			j.question = j.elsewhere(false)
		}
	case lifecycle.Attempt:
		j.record.Report(journal.Event{What: journal.Attempted})
		r.fault, r.stream, r.lease = nil, nil, nil
	case lifecycle.Settle:
		r.settle(x.Thing, x.How)
	case lifecycle.Restart:
		j.question = r.asks
	case lifecycle.Drop:
		r.away.Drop()
	case lifecycle.Shun, lifecycle.Condemn, lifecycle.Acclaim:
		r.judge(x)
	case lifecycle.Find:
		j.find(x.Finding)
	case lifecycle.TryLocal:
		if r.slot = j.bindLocal(); r.slot == nil {
			return lifecycle.Event{What: lifecycle.NoLocal}
		}
		r.begin()
		return lifecycle.Event{What: lifecycle.LocalBound, Copied: j.resume.charged > 0, Whole: r.stream.from.whole}
	case lifecycle.Queue:
		return r.queue()
	case lifecycle.Forward:
		var e lifecycle.Event
		e.What, r.fail = j.send(r.ctx, r.away)
		return e
	case lifecycle.SendProbe:
		if j.client.Left() { // before anything is sent
			return r.fell(failure.Of(lifecycle.Ended{Why: lifecycle.Left}, failure.Gone, nil))
		}
		j.enter(journal.Prefill, "")
		var f *failure.Fault
		if j.req.PrefillOnly {
			if r.stream, f = j.prefillOnly(r.lease, x.Until); f != nil {
				return r.fell(f)
			}
			return lifecycle.Event{What: lifecycle.First}
		}
		if r.held, f = j.probe(r.lease, x.Until); f != nil {
			f.Kept = true // the prefill engine keeps the KV until a decode engine fetches it
			return r.fell(f)
		}
		return lifecycle.Event{What: lifecycle.HandedOver, Named: r.held.ProbeID != ""}
	case lifecycle.Enqueue:
		return r.enqueue(x)
	case lifecycle.SendDecode:
		f, quit := r.stream.decode(r.held, x.Until)
		if f == nil && r.mixed() {
			r.lease.Answered(prefill.Usage{PromptTokens: j.prompt, CachedTokens: -1}, time.Time{}) // no KV is kept for a hand-off
		}
		return r.began(f, quit)
	case lifecycle.SendBoth:
		return r.began(r.stream.decodeBeside(r.lease, x.Pair, x.Until))
	case lifecycle.Pause:
		if j.again(x.Retry, r.fault) {
			return lifecycle.Event{What: lifecycle.Retried}
		}
		return lifecycle.Event{What: lifecycle.GivenUp}
	case lifecycle.Offer:
		return r.offer(x.Group)
	case lifecycle.Remember, lifecycle.Recall, lifecycle.Complain, lifecycle.Choose, lifecycle.SendOver, lifecycle.SendAnew:
		return r.pass(x)
	case lifecycle.Confirm: // the decode engine is done with it, whatever the prefill engine says
		s := r.stream
		if f := s.from.partner.believe(s.from.answer.Mirror.Prompt(), j.client.Gone()); f != nil {
			s.from.fault = f
			return lifecycle.Event{What: lifecycle.Fell}
		}
		return lifecycle.Event{What: lifecycle.Believed}
	case lifecycle.GoOn: // fill goes on with the answer, once the client has what came so far
		r.stream.stage = lost
	case lifecycle.EndWhole:
		r.stream.finish(nil)
	case lifecycle.BreakOff:
		r.stream.finish(r.stream.from.fault.Answer)
	case lifecycle.AnswerIt, lifecycle.Fail: // run does these
	}
	return lifecycle.Event{}
}

func (r *runner) queue() lifecycle.Event {
	j := r.job
	lease, away, err := j.choose()
	switch {
	case away != nil:
		r.away = away
		return lifecycle.Event{What: lifecycle.Directed}
	case err != nil:
		r.fail = j.notChosen(err)
		return lifecycle.Event{What: lifecycle.NoTurn, Open: errors.Is(err, prefill.ErrUnavailable)}
	}
	j.avoid.prefill = append(j.avoid.prefill, lease.Candidate.ID)
	r.lease = lease
	script := j.srv.script(lease.Candidate)
	if j.req.PrefillOnly && script == lifecycle.Early {
		script = lifecycle.Late // no decode rank has a part in it
	}
	return lifecycle.Event{What: lifecycle.Turn, Script: script, Dialect: lifecycle.Dialects[lease.Candidate.Profile.Connector]}
}

func (r *runner) enqueue(x lifecycle.Effect) lifecycle.Event {
	j := r.job
	if x.Place { // a hand-off that comes back for another rank
		j.srv.Places.Reserve()
	}
	var f *failure.Fault
	switch x.Script {
	case lifecycle.Mixed:
		r.slot, f = j.placeMixed(r.lease)
	case lifecycle.Early:
		r.slot, f = j.place(r.lease.Candidate, j.estimate(), func(e *pool.Entry) <-chan dispatcher.Result {
			e.Early, e.Deadline = true, j.wanted()
			return j.srv.Dispatcher.Enqueue(e, j.near(e.Model, e.Prompt)...)
		})
	case lifecycle.Late:
		r.slot, f = j.wait(r.held)
	}
	if f != nil {
		return r.fell(f)
	}
	r.begin()
	s := r.stream
	silent := s.from.whole || s.from.muffled // the answer may have no event before its end
	return lifecycle.Event{
		What: lifecycle.Bound, Copied: j.resume.charged > 0,
		Whole: s.from.whole || x.Script == lifecycle.Early && silent, Deaf: deaf(silent, s.from.rank.Profile, j.req.Endpoint),
	}
}

func (r *runner) begin() {
	// a panic here comes before the request's life knows of the slot
	defer onPanic(func() { r.job.srv.Dispatcher.Release(r.slot, board.Outcome{Kind: board.Cancelled}) })
	r.stream = r.job.newStream(r.slot)
}

// mixed says whether the attempt goes to a rank that prefills and decodes.
func (r *runner) mixed() bool { return r.lease != nil && r.lease.Candidate.Mixed }

func (r *runner) began(f *failure.Fault, quit bool) lifecycle.Event {
	if f != nil {
		f.Moved = r.stream.from.run.Moved()
		e := r.fell(f)
		e.Quit = quit
		if r.stream.from.slot == nil { // all of its answer had come, so that its slot is free
			r.stream.settle(board.Failed)
		}
		return e
	}
	return lifecycle.Event{What: lifecycle.First, Copied: r.job.resume.charged > 0}
}

func (r *runner) fell(f *failure.Fault) lifecycle.Event {
	r.fault, r.fail = f, f.Answer
	if f.Why == lifecycle.Unlisted {
		r.job.unlisted = f.Answer
	}
	on := ""
	switch {
	case r.stream != nil:
		r.stream.from.fault = f
		on = r.stream.from.failedOn()
	case r.lease != nil && f.OfEngine():
		on = r.lease.Candidate.ID
	}
	if f.Why == lifecycle.Stale && r.lease != nil { // a stale connection says nothing against the prefill engine of this attempt
		r.job.avoid.prefill = r.job.avoid.prefill[:len(r.job.avoid.prefill)-1]
	}
	r.job.record.Report(journal.Event{What: journal.Failed, Cause: f.Cause(), On: on, Status: f.Status, Answer: f.Answer})
	e := r.job.fell(f)
	if r.stream != nil {
		e.Engine = r.stream.from.rank.Instance
	}
	if f.Leg == lifecycle.Prefill && r.lease != nil {
		e.Engine = r.prefiller().Instance
	}
	return e
}

// prefiller is the engine that was to prefill last.
func (r *runner) prefiller() prefill.Candidate {
	if r.stream != nil && r.stream.from.partner != nil {
		return r.stream.from.partner.prefiller()
	}
	return r.lease.Candidate
}

// judge takes note of an engine that failed, or served. A prefill engine's 500 may be forgiven.
func (r *runner) judge(x lifecycle.Effect) {
	if x.Do == lifecycle.Condemn && x.Leg == lifecycle.Prefill {
		tier, id := r.job.srv.Tier, r.prefiller().ID
		r.job.accused = append(r.job.accused, func(f lifecycle.Finding) {
			if f == lifecycle.Innocent {
				tier.Forgive(id)
			}
		})
		return
	}
	r.stream.judge(x)
}

// offer asks whether a request that cannot be served here should go to its decode group's owner, or to a region where attempts
// have not failed yet.
func (r *runner) offer(group bool) lifecycle.Event {
	j, node := r.job, r.job.srv.Node
	no := lifecycle.Event{What: lifecycle.NotOffered}
	if node == nil || !j.req.Endpoint.Common() || j.client.Left() || group && j.in.aimed() || !group && !node.Offered(j.model.Name) {
		return no
	}
	q := j.elsewhere(false)
	if !group && !q.Offered() {
		return no
	}
	if r.asks = q; r.fault == nil {
		j.record.EndAttempt(r.fail)
	}
	return lifecycle.Event{What: lifecycle.Offered}
}

// answer is nil if another dispatcher has answered.
func (r *runner) answer() *stream {
	s := r.stream
	if s == nil {
		return nil
	}
	switch s.shed(); {
	case s.stage == ended: // all of it came at once
		e := lifecycle.Event{What: lifecycle.Ends}
		if s.from.fault != nil {
			e = r.job.fell(s.from.fault)
		}
		s.step(e)
	case s.from.call != nil: // from here on a close has the engine abort the request
		r.job.client.OnGone(func() { s.from.call.Leave(upstream.Notice) })
	}
	return s
}

func (r *runner) error(which lifecycle.Error) *openai.Error {
	switch which {
	case lifecycle.OfClient:
		return failure.Gone
	case lifecycle.OfRanks:
		if r.job.passed != nil {
			return cmp.Or(r.job.passed.none, failure.NoRoute) // none is nil if the request has asked as many engines as it may
		}
		return failure.NoLocal(r.job.client.Left(), r.fail)
	case lifecycle.OfOwner:
		return failure.NotOurs
	case lifecycle.OfAttempt, lifecycle.OfPeer:
	}
	return r.fail
}

func (r *runner) settle(t lifecycle.Thing, how lifecycle.How) {
	j := r.job
	switch t {
	case lifecycle.Place:
		if how == lifecycle.Back {
			j.srv.Places.Release()
		}
	case lifecycle.Lease:
		switch {
		case how == lifecycle.Pass: // the hand-off settles it, or the legs of the attempt do
		case how == lifecycle.Discard:
			j.discard(r.held)
		default:
			handoff.Settle(r.lease, how, r.fault)
			if how == lifecycle.Free && r.fault != nil && r.fault.Why == lifecycle.Left {
				j.freed()
			}
		}
	case lifecycle.KV:
		switch how {
		case lifecycle.Discard:
			j.discard(r.held)
		case lifecycle.Doubt, lifecycle.DoubtOn:
			j.doubts = append(j.doubts, r.held)
		default:
			handoff.Settle(r.held.Lease, how, nil)
		}
		r.held = nil
	case lifecycle.Doubted:
		if len(j.doubts) == 0 { // a panic came before the hand-off was noted
			break
		}
		h := j.doubts[0]
		j.doubts = j.doubts[1:]
		if how == lifecycle.Discard {
			h.Avoid = j.avoid.ranks()
			j.discard(h)
		} else {
			handoff.Settle(h.Lease, how, nil)
		}
	case lifecycle.Slot:
		s := r.stream
		if s == nil { // a panic came before there was a stream
			j.srv.Dispatcher.Release(r.slot, board.Outcome{Kind: kinds[how]})
			return
		}
		if s.from.local && how == lifecycle.Failing && r.fault != nil && !r.answers && !r.mixed() {
			j.srv.metrics.localFailures.Inc()
			j.record.Route = ""
			j.srv.Log.Warn("a decode rank failed at a prompt that it got without a hand-off", zap.Inline(j),
				zap.String("engine", s.from.rank.Target.ID), zap.Error(r.fault.Err))
		}
		s.release(kinds[how])
	case lifecycle.Call:
		if j.passed != nil {
			r.count(how)
		}
		if r.stream != nil { // else a panic came before there was one
			r.stream.from.hangUp(how)
		}
		if how == lifecycle.Cancelled || j.passed != nil {
			j.freed()
		}
		if r.stream != nil && !r.answers {
			r.stream.settle(kinds[how])
		}
	case lifecycle.Holder:
		if j.holder != nil { // the audit hears that no lease has to come back any more
			j.srv.Tier.Ended(j.holder)
			j.holder = nil
		}
	case lifecycle.Copy:
		j.forget()
	case lifecycle.Seat, lifecycle.Body, lifecycle.Memory:
		r.giveUp(t, how)
	}
}
