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

// serve runs a request up to the first event of its answer. The caller relays the rest of the answer,
// and closes the stream to give back what the request holds. If serve returns neither a stream nor
// an error, another proxy answers the request, through ctx.
//
// Before the first event nothing has reached the client, so a failed attempt may be repeated.
// If an answer is lost later, continueAnswer calls serve again, with a prompt that also has
// the answer so far. For this call, and for a leg of a fan-out, ctx is nil: neither is sent to another proxy.
func (j *job) serve(ctx *fasthttp.RequestCtx) (*stream, *openai.Error) {
	j.life.MustServeHere = ctx == nil // ctx is needed to let another proxy answer
	j.life.NoHandOff = j.incoming.NoHandOff
	j.byName.noteNoRank()
	j.mu.Lock() // after a lost answer, prefill calls of earlier attempts may still run and use life
	j.recorder.Begin(&j.life)
	j.mu.Unlock()
	j.avoid.prefill = nil            // to continue a lost answer, every prefill engine may be asked
	defer func() { j.query = nil }() // when the answer has begun, the routing question and the hashes of the prompt in it are not needed
	begun := lifecycle.Event{Kind: lifecycle.Begun}
	if j.passthrough != nil {
		begun.Bind = lifecycle.Passthrough
	}
	s, fail := (&executor{job: j, ctx: ctx}).run(begun)
	if fail != nil {
		j.record.EndAttempt(fail)
	}
	return s, fail
}

// An executor holds the lease, hand-off, slot and stream of a request. The request's lifecycle only knows which of them are held.
type executor struct {
	job *job
	ctx *fasthttp.RequestCtx

	forward   *geo.Forward      // the way to the other proxy that should serve the request
	nextQuery *geo.RoutingQuery // the question to which dispatcher the request goes, for its next wait in the arrival queue
	lease     *prefill.Lease
	handoff   *handoff.Handoff // the hand-off that the prefill engine has returned, until a decode engine gets it; nil: there is none
	slot      *dispatcher.Slot
	stream    *stream
	fault     *failure.Fault // how the last call to an engine failed; nil: none failed
	lastError *openai.Error  // what the client gets if no other attempt follows

	answerBegun bool // this executor only carries out the effects that follow the end of an answer
}

// run reports event to the request's lifecycle and carries out the effects that the lifecycle returns. The last effect brings the next
// event. This goes on until the lifecycle says that there is an answer or an error. run returns the stream of the answer, or the error.
// Both are nil if another proxy answers.
func (r *executor) run(event lifecycle.Event) (*stream, *openai.Error) {
	j := r.job
	var buffer [8]lifecycle.Effect
	effects := buffer[:0]
	defer onPanic(func() { r.giveBackAfterPanic(effects) })
	for {
		event.ClientLeft = j.client.Left()
		if effects = j.step(event, buffer[:0]); len(effects) == 0 {
			j.srv.Log.Error("a request ended without an answer or an error; this is a bug, please report it", zap.Inline(j))
			return nil, failure.InternalError
		}
		for len(effects) > 0 {
			effect := effects[0]
			switch effects = effects[1:]; effect.Kind {
			case lifecycle.AnswerIt:
				return r.beginAnswer(), nil
			case lifecycle.Fail:
				return nil, r.clientError(effect.Error)
			}
			event = r.do(effect)
			// The effect's call or wait is over, so a client that leaves now need not end it. The effects up to Forward see to this themselves,
			// because the answer of another proxy may still be under way.
			if effect.Kind > lifecycle.Forward {
				j.client.OnGone(nil)
			}
		}
	}
}

// giveBackAfterPanic gives back, after a panic, all that the remaining effects would have given back, and all that the request still holds.
func (r *executor) giveBackAfterPanic(remaining []lifecycle.Effect) {
	j := r.job
	j.client.OnGone(nil) // before the rest, so that the callback cannot abort a call that is given back here
	if r.stream != nil { // the stream has the slot
		defer r.stream.giveBackAll(board.Failed)
	}
	if !j.life.Resumed() { // keepForResume may have charged bytes that the lifecycle does not know of yet
		j.releaseResumeBytes()
	}
	hasPrefillCall := r.stream != nil && r.stream.upstream.prefillCall != nil
	panicked := lifecycle.Event{Kind: lifecycle.Panicked, Idle: !hasPrefillCall} // Idle: neither call of the last pair had begun
	for _, effect := range slices.Concat(remaining, j.step(panicked, nil)) {
		switch { // effects without a case count outcomes or take the request further, and the request has ended
		case effect.Kind == lifecycle.SendBoth: // after a panic, no new call is sent
		case effect.Pair > 0 && hasPrefillCall: // the effect is about the decode call and the prefill call that run at the same time
			r.stream.upstream.prefillCall.doAfterPanic(effect)
		case effect.Kind == lifecycle.Settle || effect.Kind == lifecycle.Resolve:
			r.do(effect)
		}
	}
}

// do carries out one effect. For most effects it does not wait, and returns the zero event. If it must wait for the end of an effect, it
// returns the event that says how the effect ended.
func (r *executor) do(effect lifecycle.Effect) lifecycle.Event {
	j := r.job
	switch effect.Kind {
	case lifecycle.Question: // asks which dispatcher should serve the request, while the request is in the arrival queue
		if j.query == nil { // not nil: offerElsewhere, handleReturned or routingQuery has made this question already
			j.query = j.newRoutingQuery(false)
		}
	case lifecycle.Attempt:
		j.record.Report(journal.Event{Kind: journal.Attempted})
		r.fault, r.stream, r.lease = nil, nil, nil
	case lifecycle.Settle:
		r.settle(effect.Resource, effect.Disposition)
	case lifecycle.Restart: // offerElsewhere has made the question for the next wait in the arrival queue
		j.query = r.nextQuery
	case lifecycle.Drop:
		r.forward.DropUnsent()
	case lifecycle.Avoid, lifecycle.ReportFailure, lifecycle.ReportSuccess:
		r.reportOutcome(effect)
	case lifecycle.Resolve: // the engines of earlier 500s are blamed or cleared
		for _, settle := range j.unexplained500s {
			settle(effect.Blame)
		}
		j.unexplained500s = nil
	case lifecycle.TryLocal:
		if r.slot = j.bindLocal(); r.slot == nil {
			return lifecycle.Event{Kind: lifecycle.NoLocal}
		}
		r.prepareStream()
		return lifecycle.Event{Kind: lifecycle.LocalBound, Copied: j.resume.chargedBytes > 0, NoEarlyEvents: r.stream.upstream.unstreamed}
	case lifecycle.Queue:
		return r.queue()
	case lifecycle.Forward:
		var event lifecycle.Event
		event.Kind, r.lastError = j.forwardToPeer(r.ctx, r.forward)
		return event
	case lifecycle.SendProbe:
		return r.sendProbe(effect.Until)
	case lifecycle.Enqueue:
		return r.enqueue(effect)
	case lifecycle.SendDecode:
		fault, quit := r.stream.decode(r.handoff, effect.Until)
		if fault == nil && r.isAggregated() {
			const unknown = -1
			var noHold time.Time // the rank keeps no KV for a hand-off
			r.lease.Answered(prefill.Usage{PromptTokens: j.promptTokens, CachedTokens: unknown}, noHold)
		}
		return r.beganEvent(fault, quit)
	case lifecycle.SendBoth:
		return r.beganEvent(r.stream.decodeDuringPrefill(r.lease, effect.Pair, effect.Until))
	case lifecycle.Pause:
		if j.awaitRetry(effect.Retry, r.fault) {
			return lifecycle.Event{Kind: lifecycle.Retried}
		}
		return lifecycle.Event{Kind: lifecycle.GivenUp}
	case lifecycle.Offer: // Group: another proxy owns the decode group now; otherwise every attempt here failed
		return r.offerElsewhere(effect.Group)
	case lifecycle.Remember, lifecycle.Recall, lifecycle.Complain, lifecycle.Choose, lifecycle.SendOver, lifecycle.SendAnew:
		return r.doPassthrough(effect)
	case lifecycle.Confirm: // the decode engine has ended the answer; its end waits until the KV is confirmed
		s := r.stream
		if fault := s.upstream.prefillCall.confirmKV(s.upstream.answer.Filter.Prompt(), j.client.Gone()); fault != nil {
			s.upstream.fault = fault
			return lifecycle.Event{Kind: lifecycle.CallFailed}
		}
		return lifecycle.Event{Kind: lifecycle.Believed}
	case lifecycle.GoOn: // the next call of fill continues the answer, after the client has got all earlier events
		r.stream.state = lost
	case lifecycle.EndWhole:
		r.stream.finishAnswer(nil)
	case lifecycle.BreakOff:
		r.stream.finishAnswer(r.stream.upstream.fault.ClientError)
	case lifecycle.AnswerIt, lifecycle.Fail: // run itself carries out these two
	}
	return lifecycle.Event{}
}

// queue waits in the arrival queue. The event says that the request has a lease on a prefill engine (Turn), that another proxy should
// serve the request (Directed), or that the request got no lease (NoTurn). Open in NoTurn says that another region may have an engine.
// Later attempts avoid the engine of the lease.
func (r *executor) queue() lifecycle.Event {
	j := r.job
	lease, forward, err := j.awaitLease()
	switch {
	case forward != nil: // another proxy should serve the request
		r.forward = forward
		return lifecycle.Event{Kind: lifecycle.Directed}
	case err != nil:
		r.lastError = j.leaseError(err)
		return lifecycle.Event{Kind: lifecycle.NoTurn, Open: errors.Is(err, prefill.ErrUnavailable)}
	}
	j.avoid.prefill = append(j.avoid.prefill, lease.Candidate.ID)
	r.lease = lease
	bind := j.srv.bindOrder(lease.Candidate)
	if j.req.PrefillOnly && bind == lifecycle.Early { // the prefill engine gives the whole answer, so no decode rank is bound
		bind = lifecycle.Late
	}
	return lifecycle.Event{Kind: lifecycle.Turn, Bind: bind, Traits: lifecycle.Traits[lease.Candidate.Profile.Connector]}
}

// sendProbe asks the prefill engine of the lease for a hand-off, or for the whole answer to a request that needs no decode.
func (r *executor) sendProbe(until lifecycle.Timeout) lifecycle.Event {
	j := r.job
	if j.client.Left() { // a request whose client has left is sent to no engine
		return r.callFailed(failure.NewFault(lifecycle.CallEnd{Reason: lifecycle.Left}, failure.ClientGone, nil))
	}
	j.enterPhase(journal.Prefill, "")
	var fault *failure.Fault
	if j.req.PrefillOnly {
		if r.stream, fault = j.prefillOnly(r.lease, until); fault != nil {
			return r.callFailed(fault)
		}
		return lifecycle.Event{Kind: lifecycle.First}
	}
	if r.handoff, fault = j.runProbe(r.lease, until); fault != nil {
		fault.Kept = true // the prefill engine may hold the KV until its hold timeout
		return r.callFailed(fault)
	}
	return lifecycle.Event{Kind: lifecycle.HandedOver, ReusesRequestID: r.handoff.ReusedRequestID != ""}
}

// enqueue waits until the dispatcher binds the request to a decode rank, and prepares the stream for the slot on that rank. The bind says
// when the prompt is prefilled: before the binding (Late), after it by a prefill engine (Early), or by the rank itself (Aggregated).
func (r *executor) enqueue(effect lifecycle.Effect) lifecycle.Event {
	j := r.job
	if effect.Permit { // a hand-off waits a second time, for another rank: its first place in the pool was given back
		j.srv.Places.Reserve()
	}
	var fault *failure.Fault
	switch effect.Bind {
	case lifecycle.Aggregated:
		r.slot, fault = j.placeAggregated(r.lease)
	case lifecycle.Early: // the prompt is not prefilled yet, so the client's deadline limits the wait, and the length is an estimate
		r.slot, fault = j.place(r.lease.Candidate, j.estimatedTokens(), func(entry *pool.Entry) <-chan dispatcher.Result {
			entry.Early, entry.Deadline = true, j.firstTokenDeadline()
			return j.srv.Dispatcher.Enqueue(entry, j.ranksWithPrefix(entry.Model, entry.Prompt)...)
		})
	case lifecycle.Late:
		r.slot, fault = j.placeHandoff(r.handoff)
	}
	if fault != nil {
		return r.callFailed(fault)
	}
	r.prepareStream()
	s := r.stream
	noEarlyEvents := s.upstream.unstreamed
	if effect.Bind == lifecycle.Early { // in a pair, the wait is the same for an answer without early text and one in one piece
		noEarlyEvents = noEarlyEvents || s.upstream.noEarlyText
	}
	return lifecycle.Event{Kind: lifecycle.Bound, Copied: j.resume.chargedBytes > 0, NoEarlyEvents: noEarlyEvents,
		MayIgnoreAbort: mayIgnoreAbort(noEarlyEvents, s.upstream.rank.Profile, j.req.Endpoint)}
}

// prepareStream prepares the stream of the answer for the slot that the attempt has got. From now on the stream owns the slot, and gives it
// back.
func (r *executor) prepareStream() {
	// if newStream panics, the lifecycle does not know of the slot yet, so the slot is given back here
	defer onPanic(func() { r.job.srv.Dispatcher.Release(r.slot, board.Outcome{Kind: board.Cancelled}) })
	r.stream = r.job.newStream(r.slot)
}

// isAggregated says whether the attempt goes to a rank that prefills and decodes.
func (r *executor) isAggregated() bool { return r.lease != nil && r.lease.Candidate.Aggregated }

// beganEvent returns the event that reports whether an answer has begun: First if fault is nil, else the event of the fault. quit says that
// the call ended because the client left, and that no engine uses the slot any more.
func (r *executor) beganEvent(fault *failure.Fault, quit bool) lifecycle.Event {
	if fault != nil {
		fault.Moved = r.stream.upstream.tracked.MustMove()
		event := r.callFailed(fault)
		event.Quit = quit
		if r.stream.upstream.slot == nil { // the whole answer had come, so its slot is free already
			r.stream.giveBackAll(board.Failed)
		}
		return event
	}
	return lifecycle.Event{Kind: lifecycle.First, Copied: r.job.resume.chargedBytes > 0}
}

// callFailed keeps the fault of a failed call for the effects that follow, and writes the fault and the name of its engine into the record.
// It returns the event that reports the fault to the request's lifecycle.
func (r *executor) callFailed(fault *failure.Fault) lifecycle.Event {
	r.fault, r.lastError = fault, fault.ClientError
	r.job.byName.noteNoRank()
	if fault.Reason == lifecycle.Unlisted { // leaseError gives this to the client if no other engine has the model
		r.job.unlistedAnswer = fault.ClientError
	}
	failedEngine := ""
	switch {
	case r.stream != nil: // the attempt has got as far as a slot, or is passed through
		r.stream.upstream.fault = fault
		failedEngine = r.stream.upstream.failedEngine()
	case r.lease != nil && fault.EngineFailed():
		failedEngine = r.lease.Candidate.ID
	}
	if fault.Reason == lifecycle.Stale && r.lease != nil { // the connection was stale, so the next attempt may use the same prefill engine
		r.job.avoid.prefill = r.job.avoid.prefill[:len(r.job.avoid.prefill)-1]
	}
	r.job.record.Report(journal.Event{Kind: journal.AttemptEnded, Cause: fault.Cause(), On: failedEngine, Status: fault.Status,
		Answer: fault.ClientError})
	event := r.job.callFailedEvent(fault)
	if r.stream != nil {
		event.Engine = r.stream.upstream.rank.Instance
	}
	if fault.Call == lifecycle.Prefill && r.lease != nil { // also if a stream exists: its prefill call has failed
		event.Engine = r.prefillEngine().Instance
	}
	return event
}

// prefillEngine returns the prefill engine that the attempt asked last. It differs from the engine of r.lease if prefillCall tried another
// one.
func (r *executor) prefillEngine() prefill.Candidate {
	if r.stream != nil && r.stream.upstream.prefillCall != nil {
		return r.stream.upstream.prefillCall.prefillEngine()
	}
	return r.lease.Candidate
}

// reportOutcome notes that an engine failed or served the request, or that the next attempts avoid a rank. If another engine fails at the
// same request later, the request is the likely cause. Then a status 500 does not count against the prefill engine or the group of ranks
// that gave it.
func (r *executor) reportOutcome(effect lifecycle.Effect) {
	ofPrefill := effect.Kind == lifecycle.ReportFailure && effect.Call == lifecycle.Prefill
	ofAggregated := r.isAggregated() && effect.Blame == lifecycle.Disputed
	if ofPrefill || ofAggregated { // the 500 was counted when the lease was given back, before its cause is known
		scheduler, id := r.job.srv.Prefill, r.prefillEngine().ID
		r.job.unexplained500s = append(r.job.unexplained500s, func(cause lifecycle.Blame) {
			if cause == lifecycle.Nobody { // the request is the cause
				scheduler.Forgive(id)
			}
		})
	}
	if !ofPrefill {
		r.stream.reportDecodeOutcome(effect)
	}
}

// offerElsewhere asks whether another proxy should get a request that cannot be served here: the owner of its decode group if
// groupMoved is true, else a region where no attempt has failed yet. If so, it returns Offered, and the request asks this in its next wait
// in the arrival queue. Otherwise it returns NotOffered.
func (r *executor) offerElsewhere(groupMoved bool) lifecycle.Event {
	j, peers := r.job, r.job.srv.Peers
	notOffered := lifecycle.Event{Kind: lifecycle.NotOffered}
	mayBeForwarded := peers != nil && j.req.Endpoint.IsChatOrCompletions() // requests to other endpoints are always served here
	if !mayBeForwarded || j.client.Left() {
		return notOffered
	}
	switch {
	case groupMoved && j.incoming.namesEngines(): // a request that names its engines goes to no other proxy
		return notOffered
	case !groupMoved && !peers.Offered(j.model.Name): // no other region has the model, so the prompt need not be hashed to ask
		return notOffered
	}
	const mustStay = false
	query := j.newRoutingQuery(mustStay)
	if !groupMoved && !query.Offered() { // the request must stay here, or may not go to a region that has the model
		return notOffered
	}
	r.nextQuery = query
	if r.fault == nil { // no call failed, so callFailed has not ended the attempt in the record
		j.record.EndAttempt(r.lastError)
	}
	return lifecycle.Event{Kind: lifecycle.Offered}
}

// beginAnswer returns the stream of an answer whose first event has come; nil: another proxy has answered. If the whole answer has
// come, it reports the end to the request's lifecycle. Otherwise a client that leaves ends the call from now on.
func (r *executor) beginAnswer() *stream {
	s := r.stream
	if s == nil {
		return nil
	}
	s.dropRequestBody()
	switch {
	case s.state == ended: // the whole answer came at once
		event := lifecycle.Event{Kind: lifecycle.Ends}
		if s.upstream.fault != nil {
			event = r.job.callFailedEvent(s.upstream.fault)
		}
		s.step(event)
	case s.upstream.call != nil: // from now on, if the client leaves, the connection is closed, and the engine aborts the request
		r.job.client.OnGone(func() { s.upstream.call.Disconnect(upstream.NoticeTimeout) })
	}
	return s
}

// clientError returns the error that the client gets. which says what the error is about.
func (r *executor) clientError(which lifecycle.Error) *openai.Error {
	switch which {
	case lifecycle.OfClient:
		return failure.ClientGone
	case lifecycle.OfRanks: // no engine or rank can serve the request
		if r.job.passthrough != nil {
			return cmp.Or(r.job.passthrough.noEngine, failure.NoRoute) // noEngine is nil if all attempts that a request may make were made
		}
		return failure.NoLocalRank(r.job.client.Left(), r.lastError)
	case lifecycle.OfOwner: // another proxy owns the decode group, and the request cannot be sent there
		return failure.NotOurs
	}
	return r.lastError // the error of the last attempt, of the wait in the queue, or of the other proxy
}

// settle gives back something that the request holds, or passes it on. disposition says what happens to it.
func (r *executor) settle(resource lifecycle.Resource, disposition lifecycle.Disposition) {
	j := r.job
	switch resource {
	case lifecycle.Permit:
		if disposition == lifecycle.Back { // otherwise (Pass) the request's entry in the pool gives the place back
			j.srv.Places.Release()
		}
	case lifecycle.Lease:
		switch disposition {
		case lifecycle.Pass: // the lease is given back later, with the hand-off or by prefillCall
		case lifecycle.Discard: // runProbe returned a hand-off together with a fault
			j.discard(r.handoff)
		default:
			handoff.SettleLease(r.lease, disposition, r.fault)
			clientLeft := r.fault != nil && r.fault.Reason == lifecycle.Left
			if clientLeft && disposition == lifecycle.Free { // the engine has aborted the prefill, and keeps nothing
				j.noteFreed()
			}
		}
	case lifecycle.KV:
		switch disposition {
		case lifecycle.Discard:
			j.discard(r.handoff)
		case lifecycle.MaybeRead, lifecycle.MaybeRunning:
			j.maybeRead = append(j.maybeRead, r.handoff)
		default:
			handoff.SettleLease(r.handoff.Lease, disposition, nil)
		}
		r.handoff = nil
	case lifecycle.MaybeReadKV:
		r.settleMaybeRead(disposition)
	case lifecycle.Slot:
		r.settleSlot(disposition)
	case lifecycle.Call:
		r.settleCall(disposition)
	case lifecycle.LeaseOwner:
		if j.leaseOwner != nil { // the job makes no more calls, so the audit reports leases that were not given back
			j.srv.Prefill.Ended(j.leaseOwner)
			j.leaseOwner = nil
		}
	case lifecycle.Copy:
		j.releaseResumeBytes()
	case lifecycle.Seat, lifecycle.Body, lifecycle.Memory:
		r.givePassthroughBack(resource, disposition)
	}
}

// settleMaybeRead discards or gives back the oldest hand-off of which it was not known whether an engine has read it.
func (r *executor) settleMaybeRead(disposition lifecycle.Disposition) {
	j := r.job
	if len(j.maybeRead) == 0 { // a panic came before the hand-off was added to maybeRead
		return
	}
	oldest := j.maybeRead[0]
	j.maybeRead = j.maybeRead[1:]
	if disposition == lifecycle.Discard {
		oldest.Avoid = j.avoid.ranks()
		j.discard(oldest)
		return
	}
	handoff.SettleLease(oldest.Lease, disposition, nil)
}

// settleCall takes a call that is over out of the counts of its engine. Before the answer has begun, it also gives back what the stream of
// the call holds. Later the client may still have to read the end of the answer from the stream, so Close does that.
func (r *executor) settleCall(disposition lifecycle.Disposition) {
	j := r.job
	if j.passthrough != nil {
		r.endPassthroughCall(disposition)
	}
	if r.stream != nil { // nil: a panic came before the stream was made
		r.stream.upstream.endAccounting(disposition)
	}
	if disposition == lifecycle.Cancelled || j.passthrough != nil { // the call may have ended because the client left
		j.noteFreed()
	}
	if r.stream != nil && !r.answerBegun {
		r.stream.giveBackAll(boardKinds[disposition])
	}
}

// settleSlot gives the slot back. It also reports a decode rank that failed at a prompt which it had to compute itself.
func (r *executor) settleSlot(disposition lifecycle.Disposition) {
	j, s := r.job, r.stream
	if s == nil { // a panic came before the stream was made
		j.srv.Dispatcher.Release(r.slot, board.Outcome{Kind: boardKinds[disposition]})
		return
	}
	failedAtPrompt := disposition == lifecycle.Failing && r.fault != nil && !r.answerBegun
	if failedAtPrompt && s.upstream.computesPrompt && !r.isAggregated() { // an aggregated rank computes every prompt itself
		j.srv.metrics.localFailures.Inc()
		j.record.Route = "" // the next attempt may go to a prefill engine
		j.srv.Log.Warn("a decode rank failed at a prompt that it got without a hand-off", zap.Inline(j),
			zap.String("engine", s.upstream.rank.Target.ID), zap.Error(r.fault.Err))
	}
	s.releaseSlot(boardKinds[disposition])
}
