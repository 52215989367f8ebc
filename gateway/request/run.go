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

// serve runs a request up to the first event of its answer. It reports events to the request's lifecycle, and carries out the effects that
// the lifecycle returns.
//
// The caller relays the rest of the answer, and closes the stream, which settles the request. If serve returns neither a stream nor an
// error, another dispatcher answers the request through ctx. Before the first event nothing has reached the client, so a failed attempt may
// start over. If an answer is lost later, goOn calls serve again with a longer prompt. In this case, and for a leg of a fan-out, ctx is
// nil, and the request is not sent to another dispatcher.
func (j *job) serve(ctx *fasthttp.RequestCtx) (*stream, *openai.Error) {
	j.life.Bound, j.life.OnlyLocal = ctx == nil, j.incoming.Whole
	j.abort.lostRank()
	j.mu.Lock() // if serve continues a lost answer, prefill legs of earlier attempts may still use the tape
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

// A runner holds a request's lease, hand-off, slot and stream. The lifecycle itself only knows whether the request holds them.
type runner struct {
	job *job
	ctx *fasthttp.RequestCtx

	forward      *geo.Forward  // the way to another dispatcher that should have the request
	nextQuestion *geo.Question // the question that goes with the request's next turn
	lease        *prefill.Lease
	handoff      *handoff.Handoff // the probe's hand-off, until a decode engine has taken it; nil: there is none
	slot         *dispatcher.Slot
	stream       *stream
	fault        *failure.Fault // how the last call to an engine failed; nil: none did
	lastError    *openai.Error  // the client's error if no further attempt is made

	answerBegun bool // the client may have a part of the answer: the runner carries out the effects of its end
}

// run reports event to the request's lifecycle, carries out the effects that the lifecycle returns, and goes on with the event that the
// last of them brings, until the lifecycle says that there is an answer or an error. It returns the stream of the answer, or the error;
// both are nil if another dispatcher answers.
func (r *runner) run(event lifecycle.Event) (*stream, *openai.Error) {
	j := r.job
	var buffer [8]lifecycle.Effect
	effects := buffer[:0]
	defer onPanic(func() { // carry out the effects that give something back, and give back what the request still holds
		j.client.OnGone(nil)
		if r.stream != nil { // the stream holds the slot
			defer r.stream.settle(board.Failed)
		}
		if !j.life.Resumed() { // the lifecycle may not know yet that bytes are kept
			j.forget()
		}
		hasPartner := r.stream != nil && r.stream.from.partner != nil
		for _, effect := range slices.Concat(effects, j.tell(lifecycle.Event{What: lifecycle.Panicked, Idle: !hasPartner}, nil)) {
			switch {
			case effect.Do == lifecycle.SendBoth: // nothing new is sent
			case effect.Pair > 0 && hasPartner:
				r.stream.from.partner.carryOut(effect)
			case effect.Do == lifecycle.Settle || effect.Do == lifecycle.Find:
				r.do(effect)
			}
		}
	})
	for {
		event.Left = j.client.Left()
		if effects = j.tell(event, buffer[:0]); len(effects) == 0 {
			j.srv.Log.Error("a request ended without an answer or an error; this is a bug, please report it", zap.Inline(j))
			return nil, failure.Broken
		}
		for len(effects) > 0 {
			effect := effects[0]
			switch effects = effects[1:]; effect.Do {
			case lifecycle.AnswerIt:
				return r.answer(), nil
			case lifecycle.Fail:
				return nil, r.error(effect.Error)
			}
			// an effect after Forward may have set a callback for a client that leaves, which ends a wait that is over now
			if event = r.do(effect); effect.Do > lifecycle.Forward {
				j.client.OnGone(nil)
			}
		}
	}
}

// do carries out one effect. Most effects are done at once, and do returns no event. If an effect takes time, do waits for its end, and
// returns the event that says how it ended.
func (r *runner) do(effect lifecycle.Effect) lifecycle.Event {
	j := r.job
	switch effect.Do {
	case lifecycle.Question: // asks where the request should go
		if j.question == nil {
			j.question = j.elsewhere(false)
		}
	case lifecycle.Attempt:
		j.record.Report(journal.Event{What: journal.Attempted})
		r.fault, r.stream, r.lease = nil, nil, nil
	case lifecycle.Settle:
		r.settle(effect.Thing, effect.How)
	case lifecycle.Restart:
		j.question = r.nextQuestion
	case lifecycle.Drop:
		r.forward.Drop()
	case lifecycle.Shun, lifecycle.Condemn, lifecycle.Acclaim:
		r.judge(effect)
	case lifecycle.Find:
		j.settleAccused(effect.Finding)
	case lifecycle.TryLocal:
		if r.slot = j.bindLocal(); r.slot == nil {
			return lifecycle.Event{What: lifecycle.NoLocal}
		}
		r.begin()
		return lifecycle.Event{What: lifecycle.LocalBound, Copied: j.resume.chargedBytes > 0, Whole: r.stream.from.whole}
	case lifecycle.Queue:
		return r.queue()
	case lifecycle.Forward:
		var event lifecycle.Event
		event.What, r.lastError = j.send(r.ctx, r.forward)
		return event
	case lifecycle.SendProbe:
		if j.client.Left() { // before anything is sent
			return r.fell(failure.Of(lifecycle.Ended{Why: lifecycle.Left}, failure.Gone, nil))
		}
		j.enter(journal.Prefill, "")
		var fault *failure.Fault
		if j.req.PrefillOnly {
			if r.stream, fault = j.prefillOnly(r.lease, effect.Until); fault != nil {
				return r.fell(fault)
			}
			return lifecycle.Event{What: lifecycle.First}
		}
		if r.handoff, fault = j.probe(r.lease, effect.Until); fault != nil {
			fault.Kept = true // the prefill engine may hold KV until a decode engine pulls it
			return r.fell(fault)
		}
		return lifecycle.Event{What: lifecycle.HandedOver, Named: r.handoff.ProbeID != ""}
	case lifecycle.Enqueue:
		return r.enqueue(effect)
	case lifecycle.SendDecode:
		fault, quit := r.stream.decode(r.handoff, effect.Until)
		if fault == nil && r.mixed() {
			r.lease.Answered(prefill.Usage{PromptTokens: j.promptTokens, CachedTokens: -1}, time.Time{}) // no KV is kept for a hand-off
		}
		return r.began(fault, quit)
	case lifecycle.SendBoth:
		return r.began(r.stream.decodeBeside(r.lease, effect.Pair, effect.Until))
	case lifecycle.Pause:
		if j.again(effect.Retry, r.fault) {
			return lifecycle.Event{What: lifecycle.Retried}
		}
		return lifecycle.Event{What: lifecycle.GivenUp}
	case lifecycle.Offer:
		return r.offer(effect.Group)
	case lifecycle.Remember, lifecycle.Recall, lifecycle.Complain, lifecycle.Choose, lifecycle.SendOver, lifecycle.SendAnew:
		return r.doPassed(effect)
	case lifecycle.Confirm: // the decode engine has ended its answer, but the prefill engine may still report broken KV
		s := r.stream
		if fault := s.from.partner.believe(s.from.answer.Mirror.Prompt(), j.client.Gone()); fault != nil {
			s.from.fault = fault
			return lifecycle.Event{What: lifecycle.Fell}
		}
		return lifecycle.Event{What: lifecycle.Believed}
	case lifecycle.GoOn: // fill continues the answer, once the client has all events that have come
		r.stream.stage = lost
	case lifecycle.EndWhole:
		r.stream.finish(nil)
	case lifecycle.BreakOff:
		r.stream.finish(r.stream.from.fault.Answer)
	case lifecycle.AnswerIt, lifecycle.Fail: // run carries these out
	}
	return lifecycle.Event{}
}

// queue waits for the request's turn in the arrival queue. It returns Turn if the request has a lease on a prefill engine, Directed if
// another dispatcher should serve it, and NoTurn if it failed to get a turn.
func (r *runner) queue() lifecycle.Event {
	j := r.job
	lease, away, err := j.choose()
	switch {
	case away != nil:
		r.forward = away
		return lifecycle.Event{What: lifecycle.Directed}
	case err != nil:
		r.lastError = j.notChosen(err)
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

// enqueue waits until the dispatcher binds the request to a decode rank, and prepares the stream for the rank's slot. The script says
// whether the prompt is prefilled before that (Late), after it by a prefill engine (Early), or by the rank itself (Mixed).
func (r *runner) enqueue(effect lifecycle.Effect) lifecycle.Event {
	j := r.job
	if effect.Place { // the hand-off had left the pool for a rank that failed, and waits for another rank
		j.srv.Places.Reserve()
	}
	var fault *failure.Fault
	switch effect.Script {
	case lifecycle.Mixed:
		r.slot, fault = j.placeMixed(r.lease)
	case lifecycle.Early:
		r.slot, fault = j.place(r.lease.Candidate, j.estimate(), func(entry *pool.Entry) <-chan dispatcher.Result {
			entry.Early, entry.Deadline = true, j.wanted()
			return j.srv.Dispatcher.Enqueue(entry, j.nearRanks(entry.Model, entry.Prompt)...)
		})
	case lifecycle.Late:
		r.slot, fault = j.wait(r.handoff)
	}
	if fault != nil {
		return r.fell(fault)
	}
	r.begin()
	s := r.stream
	silent := s.from.whole || s.from.muffled // the answer may have no event before its end
	return lifecycle.Event{
		What: lifecycle.Bound, Copied: j.resume.chargedBytes > 0,
		Whole: s.from.whole || effect.Script == lifecycle.Early && silent, Deaf: deaf(silent, s.from.rank.Profile, j.req.Endpoint),
	}
}

// begin prepares the stream of the answer for the slot that the attempt has got. From then on the stream has the slot, and gives it
// back.
func (r *runner) begin() {
	// a panic here comes before the request's life knows of the slot
	defer onPanic(func() { r.job.srv.Dispatcher.Release(r.slot, board.Outcome{Kind: board.Cancelled}) })
	r.stream = r.job.newStream(r.slot)
}

// mixed says whether the attempt goes to a rank that prefills and decodes.
func (r *runner) mixed() bool { return r.lease != nil && r.lease.Candidate.Mixed }

// began returns the event that reports whether the answer has begun: First if fault is nil, else the event of fell. quit says that the call
// has ended because the client left, and that no engine uses the slot any more.
func (r *runner) began(fault *failure.Fault, quit bool) lifecycle.Event {
	if fault != nil {
		fault.Moved = r.stream.from.run.Moved()
		event := r.fell(fault)
		event.Quit = quit
		if r.stream.from.slot == nil { // the whole answer had come, so that the slot is free already
			r.stream.settle(board.Failed)
		}
		return event
	}
	return lifecycle.Event{What: lifecycle.First, Copied: r.job.resume.chargedBytes > 0}
}

// fell notes that a call of the attempt to an engine has failed, and returns the event that reports this to the request's lifecycle. It
// also writes the fault and the name of the engine into the record.
func (r *runner) fell(fault *failure.Fault) lifecycle.Event {
	r.fault, r.lastError = fault, fault.Answer
	r.job.abort.lostRank()
	if fault.Why == lifecycle.Unlisted {
		r.job.unlistedAnswer = fault.Answer
	}
	on := ""
	switch {
	case r.stream != nil:
		r.stream.from.fault = fault
		on = r.stream.from.failedOn()
	case r.lease != nil && fault.OfEngine():
		on = r.lease.Candidate.ID
	}
	if fault.Why == lifecycle.Stale && r.lease != nil { // a stale connection says nothing against the prefill engine of this attempt
		r.job.avoid.prefill = r.job.avoid.prefill[:len(r.job.avoid.prefill)-1]
	}
	r.job.record.Report(journal.Event{What: journal.Failed, Cause: fault.Cause(), On: on, Status: fault.Status, Answer: fault.Answer})
	event := r.job.fell(fault)
	if r.stream != nil {
		event.Engine = r.stream.from.rank.Instance
	}
	if fault.Leg == lifecycle.Prefill && r.lease != nil {
		event.Engine = r.prefiller().Instance
	}
	return event
}

// prefiller is the prefill engine that the attempt asked last. It differs from that of the lease if the prefill leg was moved to another
// engine.
func (r *runner) prefiller() prefill.Candidate {
	if r.stream != nil && r.stream.from.partner != nil {
		return r.stream.from.partner.prefiller()
	}
	return r.lease.Candidate
}

// judge notes that an engine failed or did well. If a prefill engine answers 500 and another engine then fails with the same request, the
// first engine is forgiven, because the request is the likely cause.
func (r *runner) judge(effect lifecycle.Effect) {
	if effect.Do == lifecycle.Condemn && effect.Leg == lifecycle.Prefill {
		tier, id := r.job.srv.Tier, r.prefiller().ID
		r.job.accused = append(r.job.accused, func(finding lifecycle.Finding) {
			if finding == lifecycle.Innocent {
				tier.Forgive(id)
			}
		})
		return
	}
	r.stream.judge(effect)
}

// offer asks whether a request that cannot be served here should go elsewhere: to the owner of its decode group if group is true, else
// to a region where attempts have not failed yet. If so, the question goes with the request's next turn.
func (r *runner) offer(group bool) lifecycle.Event {
	j, node := r.job, r.job.srv.Node
	no := lifecycle.Event{What: lifecycle.NotOffered}
	if node == nil || !j.req.Endpoint.Common() || j.client.Left() || group && j.incoming.aimed() || !group && !node.Offered(j.model.Name) {
		return no
	}
	question := j.elsewhere(false)
	if !group && !question.Offered() {
		return no
	}
	if r.nextQuestion = question; r.fault == nil {
		j.record.EndAttempt(r.lastError)
	}
	return lifecycle.Event{What: lifecycle.Offered}
}

// answer returns the stream whose first event has come. It is nil if another dispatcher has answered.
func (r *runner) answer() *stream {
	s := r.stream
	if s == nil {
		return nil
	}
	switch s.shed(); {
	case s.stage == ended: // the whole answer came with the first event
		event := lifecycle.Event{What: lifecycle.Ends}
		if s.from.fault != nil {
			event = r.job.fell(s.from.fault)
		}
		s.step(event)
	case s.from.call != nil: // after the first event, closing the connection makes the engine abort the request
		r.job.client.OnGone(func() { s.from.call.Leave(upstream.Notice) })
	}
	return s
}

// error returns the error that the client gets in the end.
func (r *runner) error(which lifecycle.Error) *openai.Error {
	switch which {
	case lifecycle.OfClient:
		return failure.Gone
	case lifecycle.OfRanks:
		if r.job.passed != nil {
			return cmp.Or(r.job.passed.noEngine, failure.NoRoute) // none is nil if the request has asked as many engines as it may
		}
		return failure.NoLocal(r.job.client.Left(), r.lastError)
	case lifecycle.OfOwner:
		return failure.NotOurs
	case lifecycle.OfAttempt, lifecycle.OfPeer:
	}
	return r.lastError
}

// settle gives back a thing that the request holds, or passes it on, in the way that how names.
func (r *runner) settle(thing lifecycle.Thing, how lifecycle.How) {
	j := r.job
	switch thing {
	case lifecycle.Place:
		if how == lifecycle.Back {
			j.srv.Places.Release()
		}
	case lifecycle.Lease:
		switch {
		case how == lifecycle.Pass: // the hand-off or the partner has the lease now, and settles it
		case how == lifecycle.Discard:
			j.discard(r.handoff)
		default:
			handoff.Settle(r.lease, how, r.fault)
			if how == lifecycle.Free && r.fault != nil && r.fault.Why == lifecycle.Left {
				j.freed()
			}
		}
	case lifecycle.KV:
		switch how {
		case lifecycle.Discard:
			j.discard(r.handoff)
		case lifecycle.Doubt, lifecycle.DoubtOn:
			j.doubts = append(j.doubts, r.handoff)
		default:
			handoff.Settle(r.handoff.Lease, how, nil)
		}
		r.handoff = nil
	case lifecycle.Doubted:
		if len(j.doubts) == 0 { // a panic came before the hand-off was put into doubts
			break
		}
		doubted := j.doubts[0]
		j.doubts = j.doubts[1:]
		if how == lifecycle.Discard {
			doubted.Avoid = j.avoid.ranks()
			j.discard(doubted)
		} else {
			handoff.Settle(doubted.Lease, how, nil)
		}
	case lifecycle.Slot:
		s := r.stream
		if s == nil { // a panic came before there was a stream
			j.srv.Dispatcher.Release(r.slot, board.Outcome{Kind: kinds[how]})
			return
		}
		if s.from.local && how == lifecycle.Failing && r.fault != nil && !r.answerBegun && !r.mixed() {
			j.srv.metrics.localFailures.Inc()
			j.record.Route = ""
			j.srv.Log.Warn("a decode rank failed at a prompt that it got without a hand-off", zap.Inline(j),
				zap.String("engine", s.from.rank.Target.ID), zap.Error(r.fault.Err))
		}
		s.release(kinds[how])
	case lifecycle.Call:
		if j.passed != nil {
			r.countCall(how)
		}
		if r.stream != nil { // nil: a panic came before there was a stream
			r.stream.from.hangUp(how)
		}
		if how == lifecycle.Cancelled || j.passed != nil {
			j.freed()
		}
		if r.stream != nil && !r.answerBegun {
			r.stream.settle(kinds[how])
		}
	case lifecycle.Holder:
		if j.holder != nil { // the tier's audit learns that no lease of this request may be out any more
			j.srv.Tier.Ended(j.holder)
			j.holder = nil
		}
	case lifecycle.Copy:
		j.forget()
	case lifecycle.Seat, lifecycle.Body, lifecycle.Memory:
		r.giveUp(thing, how)
	}
}
