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
	j.byName.noteNoRank() // the rank that lost the answer does not have the request any more, so an abort by name must not go there
	j.mu.Lock()           // after a lost answer, prefill calls of earlier attempts may still run and use life
	j.recorder.Begin(&j.life)
	j.mu.Unlock()
	j.avoid.prefill = nil            // to continue a lost answer, every prefill engine may be asked
	defer func() { j.query = nil }() // when the answer has begun, the routing question and the hashes of the prompt in it are not needed
	begun := lifecycle.Event{Kind: lifecycle.Begun}
	if j.passthrough != nil { // one engine serves all of the request, so no rank is bound for it
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
			// The call or wait of an effect is over now, so a client that leaves need not end it any more. The kinds of effects
			// up to Forward see to this themselves, because the answer of another proxy may still be under way.
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
	// In a pair of calls that run at the same time, the prefill call is made before the decode call is sent. So without a prefill call,
	// neither of them has begun (Idle).
	hasPrefillCall := r.stream != nil && r.stream.upstream.prefillCall != nil
	panicked := lifecycle.Event{Kind: lifecycle.Panicked, Idle: !hasPrefillCall}
	for _, effect := range slices.Concat(remaining, j.step(panicked, nil)) {
		// Settle gives back a resource of the request, and Resolve the notes about earlier 500s. Effects without a case count
		// outcomes, or take the request further, which has ended.
		givesBack := effect.Kind == lifecycle.Settle || effect.Kind == lifecycle.Resolve
		switch {
		case effect.Kind == lifecycle.SendBoth: // after a panic, no new call is sent
		case effect.Pair > 0 && hasPrefillCall: // the effect is about a call of the pair
			r.stream.upstream.prefillCall.doAfterPanic(effect)
		case givesBack:
			r.do(effect)
		}
	}
}

// do carries out one effect. For most effects it does not wait, and returns the zero event. If it must wait for the end of an effect, it
// returns the event that says how the effect ended.
func (r *executor) do(effect lifecycle.Effect) lifecycle.Event {
	j := r.job
	switch effect.Kind {
	// Which proxy serves the request.
	case lifecycle.Question: // while the request is in the arrival queue, evenkeel asks which proxy should serve it
		if j.query == nil { // not nil: offerElsewhere, handleReturned or routingQuery has made this question already
			const mustStay = false
			j.query = j.newRoutingQuery(mustStay)
		}
	case lifecycle.Restart: // offerElsewhere has made the question for the next wait in the arrival queue
		j.query = r.nextQuery
	case lifecycle.Offer: // Group: another proxy owns the decode group now; otherwise every attempt here failed
		return r.offerElsewhere(effect.Group)
	case lifecycle.Forward: // another proxy gets the request
		var event lifecycle.Event
		event.Kind, r.lastError = j.forwardToPeer(r.ctx, r.forward)
		return event
	case lifecycle.Drop: // another proxy was chosen, but will not get the request
		r.forward.DropUnsent()

	// An attempt at this proxy.
	case lifecycle.Attempt: // an attempt begins
		j.record.Report(journal.Event{Kind: journal.Attempted})
		r.fault, r.stream, r.lease = nil, nil, nil
	case lifecycle.TryLocal: // a decode rank that also prefills is looked for
		return r.tryLocal()
	case lifecycle.Queue: // waits for a prefill engine
		return r.queue()
	case lifecycle.SendProbe: // the prefill engine gets the prompt
		return r.sendProbe(effect.Until)
	case lifecycle.Enqueue: // waits for a slot on a decode rank
		return r.enqueue(effect)
	case lifecycle.SendDecode: // the decode rank gets the request
		return r.sendDecode(effect.Until)
	case lifecycle.SendBoth: // the decode rank and the prefill engine get the request at the same time
		return r.beganEvent(r.stream.decodeDuringPrefill(r.lease, effect.Pair, effect.Until))
	case lifecycle.Remember, lifecycle.Recall, lifecycle.Complain, lifecycle.Choose, lifecycle.SendOver, lifecycle.SendAnew:
		return r.doPassthrough(effect)

	// After a call, or an attempt.
	case lifecycle.Settle: // something that the request holds is given back or passed on
		r.settle(effect.Resource, effect.Disposition)
	case lifecycle.Avoid, lifecycle.ReportFailure, lifecycle.ReportSuccess:
		r.reportOutcome(effect)
	case lifecycle.Resolve: // the engines of earlier 500s are blamed or cleared
		for _, settle := range j.unexplained500s {
			settle(effect.Blame)
		}
		j.unexplained500s = nil
	case lifecycle.Pause: // waits before the next attempt
		if j.awaitRetry(effect.Retry, r.fault) {
			return lifecycle.Event{Kind: lifecycle.Retried}
		}
		return lifecycle.Event{Kind: lifecycle.GivenUp}

	// The end of an answer that has begun.
	case lifecycle.Confirm: // the decode engine has ended the answer; its end waits until the KV is confirmed
		return r.confirm()
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

// tryLocal looks for a decode rank that also prefills the prompt. If there is one, it prepares the stream for the slot there.
func (r *executor) tryLocal() lifecycle.Event {
	if r.slot = r.job.bindLocal(); r.slot == nil {
		return lifecycle.Event{Kind: lifecycle.NoLocal}
	}
	r.prepareStream()
	bodyIsKept := r.job.resume.chargedBytes > 0 // so that a lost answer can go on
	return lifecycle.Event{Kind: lifecycle.LocalBound, Copied: bodyIsKept, NoEarlyEvents: r.stream.upstream.unstreamed}
}

// sendDecode sends the request to the decode rank, with the hand-off if there is one, and waits for the first event of the answer.
func (r *executor) sendDecode(until lifecycle.Timeout) lifecycle.Event {
	fault, quit := r.stream.decode(r.handoff, until)
	if fault == nil && r.isAggregated() { // the rank has also prefilled the prompt, so its answer ends the prefill of the lease
		const unknown = -1
		var noHold time.Time // the rank keeps no KV for a hand-off
		r.lease.Answered(prefill.Usage{PromptTokens: r.job.promptTokens, CachedTokens: unknown}, noHold)
	}
	return r.beganEvent(fault, quit)
}

// confirm waits until the prefill engine has confirmed that the KV of the answer was complete. The event says whether it was.
func (r *executor) confirm() lifecycle.Event {
	s := r.stream
	if fault := s.upstream.prefillCall.confirmKV(s.upstream.answer.Filter.Prompt(), r.job.client.Gone()); fault != nil {
		s.upstream.fault = fault
		return lifecycle.Event{Kind: lifecycle.CallFailed}
	}
	return lifecycle.Event{Kind: lifecycle.Believed}
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
		otherRegionMayServe := errors.Is(err, prefill.ErrUnavailable)
		return lifecycle.Event{Kind: lifecycle.NoTurn, Open: otherRegionMayServe}
	}
	j.avoid.prefill = append(j.avoid.prefill, lease.Candidate.ID)
	r.lease = lease
	bind := j.srv.bindOrder(lease.Candidate)
	// The prefill engine gives the whole answer, so no decode rank is needed. With Late, the prefill call comes first, and here it is
	// the only call.
	if j.req.PrefillOnly && bind == lifecycle.Early {
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
	// With noEarlyEvents, the lifecycle gives the wait for the first event as much time as the whole answer may take. If the two calls
	// run at the same time (Early), this is also done for an engine that may send no text before the end.
	noEarlyEvents := s.upstream.unstreamed
	if effect.Bind == lifecycle.Early {
		noEarlyEvents = noEarlyEvents || s.upstream.noEarlyText
	}
	bodyIsKept := j.resume.chargedBytes > 0 // so that a lost answer can go on
	return lifecycle.Event{Kind: lifecycle.Bound, Copied: bodyIsKept, NoEarlyEvents: noEarlyEvents,
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
		if r.stream.upstream.slot == nil { // the whole answer had come, so its slot is free already; only the call and its buffers are left
			r.stream.giveBackAll(board.Failed)
		}
		return event
	}
	bodyIsKept := r.job.resume.chargedBytes > 0 // so that a lost answer can go on
	return lifecycle.Event{Kind: lifecycle.First, Copied: bodyIsKept}
}

// callFailed keeps the fault of a failed call for the effects that follow, and writes the fault and the name of its engine into the record.
// It returns the event that reports the fault to the request's lifecycle.
func (r *executor) callFailed(fault *failure.Fault) lifecycle.Event {
	r.fault, r.lastError = fault, fault.ClientError
	// The call is over, so an abort by name must find no rank that has the request.
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
	// A stale connection says nothing about its engine, so the next attempt may use the same prefill engine. queue has put the engine
	// of this attempt at the end of the list.
	if fault.Reason == lifecycle.Stale && r.lease != nil {
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

// reportOutcome notes that an engine failed or served the request, or that the next attempts avoid a rank. Failures of a prefill call are
// counted when its lease is given back. So reportOutcome is called only for those whose cause may be the request: after a status 500.
func (r *executor) reportOutcome(effect lifecycle.Effect) {
	is500OfPrefill := effect.Kind == lifecycle.ReportFailure && effect.Call == lifecycle.Prefill
	is500OfAggregated := r.isAggregated() && effect.Blame == lifecycle.Disputed // the engine or the request may have caused it
	if is500OfPrefill || is500OfAggregated {
		r.forgive500IfUnjust()
	}
	if !is500OfPrefill {
		r.stream.reportDecodeOutcome(effect)
	}
}

// forgive500IfUnjust is called after a 500 of the engine, or the group of ranks, that has computed the prompt. It was counted against them
// when the lease was given back. If another engine fails at the same request later, the request is the likely cause, and this count is
// taken back.
func (r *executor) forgive500IfUnjust() {
	scheduler, id := r.job.srv.Prefill, r.prefillEngine().ID
	r.job.unexplained500s = append(r.job.unexplained500s, func(cause lifecycle.Blame) {
		if cause == lifecycle.Nobody { // the request is the cause
			scheduler.Forgive(id)
		}
	})
}

// offerElsewhere makes the question whether another proxy should get a request that cannot be served here: the owner of its decode group if
// groupMoved is true, else a region where no attempt has failed yet. If the question makes sense, offerElsewhere returns Offered, and keeps
// it in nextQuery for the request's next wait in the arrival queue, where it is decided. Otherwise it returns NotOffered.
func (r *executor) offerElsewhere(groupMoved bool) lifecycle.Event {
	j, peers := r.job, r.job.srv.Peers
	notOffered := lifecycle.Event{Kind: lifecycle.NotOffered}
	mayBeForwarded := peers != nil && j.req.Endpoint.IsChatOrCompletions() // requests to other endpoints are always served here
	if !mayBeForwarded || j.client.Left() {
		return notOffered
	}
	var query *geo.RoutingQuery
	if groupMoved {
		query = questionForOwner(j)
	} else {
		query = questionForOtherRegion(j)
	}
	if query == nil {
		return notOffered
	}
	r.nextQuery = query
	if r.fault == nil { // no call failed, so callFailed has not ended the attempt in the record
		j.record.EndAttempt(r.lastError)
	}
	return lifecycle.Event{Kind: lifecycle.Offered}
}

// questionForOwner returns the question whether the owner of the decode group should serve the request; nil: the request names its engines,
// and so goes to no other proxy.
func questionForOwner(j *job) *geo.RoutingQuery {
	if j.incoming.namesEngines() {
		return nil
	}
	const mustStay = false
	return j.newRoutingQuery(mustStay)
}

// questionForOtherRegion returns the question whether another region should serve the request; nil: the request may go to no region that
// has its model.
func questionForOtherRegion(j *job) *geo.RoutingQuery {
	if !j.srv.Peers.Offered(j.model.Name) { // no other region has the model, so the prompt need not be hashed for the question
		return nil
	}
	const mustStay = false
	query := j.newRoutingQuery(mustStay)
	if !query.Offered() { // the request must stay here, or may not go to a region that has the model
		return nil
	}
	return query
}

// beginAnswer returns the stream of an answer whose first event has come; nil: another proxy has answered. If the whole answer has
// come, it reports the end to the request's lifecycle. Otherwise a client that leaves ends the call from now on.
func (r *executor) beginAnswer() *stream {
	s := r.stream
	if s == nil { // this proxy has called no engine in the last attempt, because another proxy has answered through ctx
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
	case s.upstream.call != nil: // the engine still sends the answer; if the client leaves, the engine aborts it when the connection is closed
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
				j.noteFreed() // the record shows how long the engines held something for this client after it had left
			}
		}
	case lifecycle.KV:
		r.settleKV(disposition)
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
	case lifecycle.Copy: // the body, which was kept so that a lost answer can go on
		j.releaseResumeBytes()
	case lifecycle.Seat, lifecycle.Body, lifecycle.Memory:
		r.givePassthroughBack(resource, disposition)
	}
}

// settleKV gives the hand-off back, or has it discarded. If a decode engine may have read it, settleMaybeRead does this after the last
// attempt: until then, it is not known whether the request breaks engines, and a discard would send it to one more.
func (r *executor) settleKV(disposition lifecycle.Disposition) {
	j := r.job
	switch disposition {
	case lifecycle.Discard:
		j.discard(r.handoff)
	case lifecycle.MaybeRead, lifecycle.MaybeRunning:
		j.maybeRead = append(j.maybeRead, r.handoff)
	default:
		var noFault *failure.Fault // the prefill engine has not failed
		handoff.SettleLease(r.handoff.Lease, disposition, noFault)
	}
	r.handoff = nil
}

// settleMaybeRead discards or gives back the oldest hand-off of which it was not known whether an engine has read it. The lifecycle settles
// these hand-offs in the order in which settleKV has put them into maybeRead.
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
	var noFault *failure.Fault // the prefill engine has not failed
	handoff.SettleLease(oldest.Lease, disposition, noFault)
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
		j.noteFreed() // if so, the record shows how long the engine held something for the client after that
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
