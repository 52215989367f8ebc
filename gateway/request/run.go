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
	mayForward := ctx != nil // another proxy answers through ctx
	beginServing(j, mayForward)
	defer func() { j.query = nil }() // when the answer has begun, the routing question and the hashes of the prompt in it are not needed
	begun := lifecycle.Event{Kind: lifecycle.Begun}
	if j.passthrough != nil { // one engine serves all of the request, so the lifecycle binds no rank for it
		begun.Bind = lifecycle.Passthrough
	}
	s, fail := (&executor{job: j, ctx: ctx}).run(begun)
	if fail != nil {
		j.record.EndAttempt(fail)
	}
	return s, fail
}

// beginServing resets what the job knows of earlier attempts, before the request is served from its start, or a lost answer goes on.
// mayForward says that another proxy may answer the request.
func beginServing(j *job, mayForward bool) {
	j.life.MustServeHere = !mayForward
	j.life.NoHandOff = j.incoming.NoHandOff
	j.namedAbort.noteNoRank() // the rank that lost the answer does not have the request any more, so an abort must not go there
	j.mu.Lock()               // after a lost answer, prefill calls of earlier attempts may still run and use life
	j.recorder.Begin(&j.life)
	j.mu.Unlock()
	j.avoid.prefill = nil // to continue a lost answer, every prefill engine may be asked
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

// run reports event to the request's lifecycle and carries out the effects that the lifecycle returns. Only the last of these effects
// brings an event, which is reported next. This goes on until the lifecycle says that there is an answer or an error. run returns the
// stream of the answer, or the error. Both are nil if another proxy answers.
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
			// The call or wait of the effect is over, so a client that leaves need not end it any more. Of the kinds up to
			// Forward, only Forward itself may leave a callback, which must stay: another proxy's answer may be under way.
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
	if r.stream != nil {
		// This comes last: the effects below give the slot back, each with its own report to the dispatcher. It gives back what is
		// left.
		defer r.stream.giveBackAll(board.Failed)
	}
	if !j.life.Resumed() { // keepForResume may have charged bytes that the lifecycle does not know of yet
		j.releaseResumeBytes()
	}
	// In a pair of calls that run at the same time, the prefill call is made before the decode call is sent. So without a prefill call,
	// neither of them has begun (Idle), and the lifecycle then only gives the lease of the pair back.
	hasPrefillCall := r.stream != nil && r.stream.upstream.prefillCall != nil
	panicked := lifecycle.Event{Kind: lifecycle.Panicked, Idle: !hasPrefillCall}
	for _, effect := range slices.Concat(remaining, j.step(panicked, nil)) {
		switch isOfPair := effect.Pair > 0; { // pairs are numbered from 1
		case effect.Kind == lifecycle.SendBoth: // after a panic, no new call is sent
		case isOfPair && hasPrefillCall: // the effect is about a call of the pair, so the prefill call carries it out
			r.stream.upstream.prefillCall.doAfterPanic(effect)
		// Settle gives back a resource, and Resolve the notes about earlier 500s. All other effects count outcomes, or take the
		// request further, which has ended.
		case effect.Kind == lifecycle.Settle || effect.Kind == lifecycle.Resolve:
			r.do(effect)
		}
	}
}

// do carries out one effect. For most effects it does not wait, and returns the zero event, which run does not report. If it must wait for
// the end of an effect, it returns the event that says how the effect ended.
func (r *executor) do(effect lifecycle.Effect) lifecycle.Event {
	j := r.job
	switch effect.Kind {
	// Which proxy serves the request.
	case lifecycle.Question: // while the request is in the arrival queue, evenkeel asks which proxy should serve it
		// After a Restart, after another region gave the request back, and for a leg, the question is made already.
		if j.query == nil {
			const mustStay = false
			j.query = j.newRoutingQuery(mustStay)
		}
	case lifecycle.Restart: // after Offer: the question that Offer has made is asked in the next wait in the arrival queue
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
	// Only for a request that is passed through to one engine: choosing the engine, sending, and noting how the engine failed.
	case lifecycle.Remember, lifecycle.Recall, lifecycle.Complain, lifecycle.Choose, lifecycle.SendOver, lifecycle.SendAnew:
		return r.doPassthrough(effect)

	// After a call, or an attempt.
	case lifecycle.Settle: // something that the request holds is given back or passed on
		r.settle(effect.Resource, effect.Disposition)
	case lifecycle.Avoid, lifecycle.ReportFailure, lifecycle.ReportSuccess: // the rank is avoided, or its outcome counted
		r.reportOutcome(effect)
	case lifecycle.Resolve: // the engines of earlier 500s are blamed or cleared
		j.answered500.resolve(j.srv.Dispatcher, effect.Blame)
	case lifecycle.Pause: // waits before the next attempt
		if j.awaitRetry(effect.Retry, r.fault) {
			return lifecycle.Event{Kind: lifecycle.Retried}
		}
		return lifecycle.Event{Kind: lifecycle.GivenUp} // no attempt is granted, no time is left, or the client has left

	// The end of an answer that has begun.
	case lifecycle.Confirm: // the decode engine has ended the answer; its end waits until the KV is confirmed
		return r.confirm()
	case lifecycle.GoOn: // the call was lost, and another one is to continue its answer
		r.stream.state = lost // with this, the next call of fill continues the answer, after the client has got all earlier events
	case lifecycle.EndWhole: // the client gets the end of its complete answer
		r.stream.finishAnswer(nil)
	case lifecycle.BreakOff: // the client gets an error as the end of its answer
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
	return lifecycle.Event{Kind: lifecycle.LocalBound, Copied: bodyIsKept(r.job), NoEarlyEvents: r.stream.upstream.unstreamed}
}

// sendDecode sends the request to the decode rank, with the hand-off if there is one, and waits for the first event of the answer. The
// returned event says whether this event came (First), or how the call failed.
func (r *executor) sendDecode(until lifecycle.Timeout) lifecycle.Event {
	fault, clientQuit := r.stream.decode(r.handoff, until)
	if fault == nil && r.isAggregated() { // the rank has begun its answer, so the prefill of the lease is over, too
		const unknown = -1
		var noHold time.Time // the rank keeps no KV for a hand-off
		r.lease.Answered(prefill.Usage{PromptTokens: r.job.promptTokens, CachedTokens: unknown}, noHold)
	}
	return r.beganEvent(fault, clientQuit)
}

// confirm waits, after the end of the answer, until the prefill engine has confirmed that the KV was complete from which the answer was
// made. If it has, the event is Believed, and the client gets the end of the answer. Otherwise the event is CallFailed.
func (r *executor) confirm() lifecycle.Event {
	s := r.stream
	if abortedEmpty(s) {
		return lifecycle.Event{Kind: lifecycle.Believed}
	}
	promptTokens := s.upstream.answer.Filter.Prompt() // as the decode engine counted them; the prefill engine must count as many
	if fault := s.upstream.prefillCall.confirmKV(promptTokens, r.job.client.Gone()); fault != nil {
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
	bind := bindOrder(lease.Candidate)
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

// enqueue waits until the dispatcher binds the request to a decode rank, and prepares the stream for the slot on that rank. The returned
// event says that there is a slot (Bound), or how the wait failed.
func (r *executor) enqueue(effect lifecycle.Effect) lifecycle.Event {
	j := r.job
	if effect.Permit { // a hand-off waits a second time, and its first wait has used up its place in the pool
		j.srv.Places.Reserve()
	}
	var fault *failure.Fault
	if r.slot, fault = r.awaitSlot(effect.Bind); fault != nil {
		return r.callFailed(fault)
	}
	r.prepareStream()
	call := &r.stream.upstream
	// The lifecycle lets the first event take as long as the whole answer may take if the answer comes in one piece. If the call runs
	// beside its prefill call (Early), it does so, too, for a stream whose engine may send no text before the end.
	noEarlyEvents := call.unstreamed || effect.Bind == lifecycle.Early && call.mayHoldTextBack
	return lifecycle.Event{Kind: lifecycle.Bound, Copied: bodyIsKept(j), NoEarlyEvents: noEarlyEvents,
		MayIgnoreAbort: mayIgnoreAbort(noEarlyEvents, call.rank.Profile, j.req.Endpoint)}
}

// awaitSlot waits in the pool until the dispatcher gives the request a slot on a decode rank. bind says when the prompt is prefilled.
func (r *executor) awaitSlot(bind lifecycle.Bind) (*dispatcher.Slot, *failure.Fault) {
	j := r.job
	switch bind {
	case lifecycle.Aggregated: // the rank itself prefills the prompt
		return j.placeAggregated(r.lease)
	case lifecycle.Early: // the prompt is not prefilled yet, so the client's deadline limits the wait, and the length is an estimate
		return j.place(r.lease.Candidate, j.estimatedTokens(), func(entry *pool.Entry) <-chan dispatcher.Result {
			entry.Early, entry.Deadline = true, j.firstTokenDeadline()
			return j.srv.Dispatcher.Enqueue(entry)
		})
	default: // Late: the prompt is prefilled, and there is a hand-off
		return j.placeHandoff(r.handoff)
	}
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

// hasLeaseOfOthers says whether an aggregated attempt went to a rank that is not of the group that has the lease. The dispatcher may bind
// the request to any rank of the board, and the failure of such a rank says nothing about the group of the lease.
func (r *executor) hasLeaseOfOthers() bool {
	return r.isAggregated() && r.stream != nil && r.stream.upstream.rank.Group != r.lease.Candidate.ID
}

// beganEvent returns the event that reports whether an answer has begun: First if fault is nil, else the event of the fault. clientQuit
// says that the call ended because the client left, and that no engine uses the slot any more. If an answer had come whole before its
// fault was found, beganEvent also gives back its buffers.
func (r *executor) beganEvent(fault *failure.Fault, clientQuit bool) lifecycle.Event {
	if fault == nil {
		return lifecycle.Event{Kind: lifecycle.First, Copied: bodyIsKept(r.job)}
	}
	fault.Moved = r.stream.upstream.endedByDrain()
	event := r.callFailed(fault)
	event.Quit = clientQuit
	// If the answer had come whole, the lifecycle gave back slot and call at its end. Only the connection and the buffers are left.
	if r.stream.upstream.slot == nil {
		r.stream.giveBackAll(board.Failed) // Failed has no effect: it would be reported with the slot
	}
	return event
}

// callFailed keeps the fault of a failed call for the effects that follow, and writes the fault and the name of its engine into the record.
// It returns the event that reports the fault to the request's lifecycle.
func (r *executor) callFailed(fault *failure.Fault) lifecycle.Event {
	j := r.job
	r.fault, r.lastError = fault, fault.ClientError
	j.namedAbort.noteNoRank()               // the call is over, so no rank has the request that the client could have aborted
	if fault.Reason == lifecycle.Unlisted { // leaseError gives this to the client if no other engine has the model
		j.unlistedAnswer = fault.ClientError
	}
	if r.stream != nil {
		r.stream.upstream.fault = fault // failedEngine reads it
	}
	failedEngine := r.failedEngine() // for the record, which names only an engine that is at fault
	// A stale connection says nothing about its engine, so the next attempt may use the same prefill engine.
	if fault.Reason == lifecycle.Stale && r.lease != nil {
		j.avoid.forgetLastPrefill()
	}
	j.record.Report(journal.Event{Kind: journal.AttemptEnded, Cause: fault.Cause(), On: failedEngine, Status: fault.Status,
		Answer: fault.ClientError})
	event := j.callFailedEvent(fault, r.stream)
	event.Engine = r.calledEngine() // the lifecycle decides by itself whether this engine is at fault
	return event
}

// failedEngine returns the name of the engine or rank that has failed (r.fault); empty: none has, or it is not known which one.
func (r *executor) failedEngine() string {
	switch {
	case r.stream != nil: // the attempt has got as far as a slot, or is passed through
		return r.stream.upstream.failedEngine()
	case r.lease != nil && r.fault.EngineFailed():
		return r.lease.Candidate.ID
	}
	return ""
}

// calledEngine returns the role and the address of the engine whose call has ended with r.fault, whether or not that engine has failed;
// empty: no engine was called.
func (r *executor) calledEngine() string {
	switch {
	case r.fault.Call == lifecycle.Prefill && r.lease != nil: // also if a stream exists: the prefill call beside it has failed
		return r.prefillEngine().Instance
	case r.stream != nil:
		return r.stream.upstream.rank.Instance
	}
	return ""
}

// prefillEngine returns the prefill engine that the attempt asked last. It differs from the engine of r.lease if prefillCall tried another
// one.
func (r *executor) prefillEngine() prefill.Candidate {
	if r.stream != nil && r.stream.upstream.prefillCall != nil {
		return r.stream.upstream.prefillCall.prefillEngine()
	}
	return r.lease.Candidate
}

// reportOutcome notes that an engine failed or served the request, or that the next attempts avoid a rank. The failure of a prefill call is
// counted elsewhere, when its lease is given back. So the lifecycle reports such a failure here only for a 500, which the request may have
// caused instead of the engine.
func (r *executor) reportOutcome(effect lifecycle.Effect) {
	is500OfPrefill := effect.Kind == lifecycle.ReportFailure && effect.Call == lifecycle.Prefill
	// The decode call to a rank that also prefills has a lease, too. Disputed: a 500 that the engine or the request may have caused.
	is500OfAggregated := r.isAggregated() && !r.hasLeaseOfOthers() && effect.Blame == lifecycle.Disputed
	if is500OfPrefill || is500OfAggregated {
		r.noteUnexplained500() // if the request turns out to be the cause, this takes back what the lease has counted
	}
	if !is500OfPrefill { // the outcome is that of a decode call
		r.stream.reportDecodeOutcome(effect)
	}
}

// noteUnexplained500 is called after a 500 of the engine, or the group of ranks, that has computed the prompt. The 500 was counted against
// them when the lease was given back. If another engine later answers the same request with 500, the request is the likely cause. The
// lifecycle reports the cause by the effect Resolve. It calls the function that is noted here, which then takes the count back.
func (r *executor) noteUnexplained500() {
	scheduler, id := r.job.srv.Prefill, r.prefillEngine().ID
	unexplained := note500(r.job)
	unexplained.settle = append(unexplained.settle, func(cause lifecycle.Blame) {
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
	if r.fault == nil { // no call failed, because the arrival queue had no engine; after a call, callFailed has ended the attempt
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
			event = r.job.callFailedEvent(s.upstream.fault, s)
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
		p := r.job.passthrough
		if p == nil {
			return failure.NoLocalRank(r.job.client.Left(), r.lastError)
		}
		// If the last choice found no engine, noEngine says why. It is nil if the request was sent to the largest number of engines
		// that may be asked. None of them had the endpoint.
		return cmp.Or(p.noEngine, failure.NoRoute)
	case lifecycle.OfOwner: // another proxy owns the decode group, and the request cannot be sent there
		return failure.NotOurs
	}
	return r.lastError // the error of the last attempt, of the wait in the queue, or of the other proxy
}

// settle gives back one resource that the request holds, or leaves it to a new owner. disposition says which: Pass means that a new owner
// gives it back, and every other disposition is a way to give it back now. Of a lease or a hand-off, the disposition says what becomes of
// the KV on the prefill engine, for example Free: the engine has no KV of the request, or has freed it. Of a slot or a call to a rank, it
// says how the request ended there. Most other resources are only given back (Back).
func (r *executor) settle(resource lifecycle.Resource, disposition lifecycle.Disposition) {
	j := r.job
	switch resource {
	case lifecycle.Permit: // the place in the pool
		if disposition == lifecycle.Back { // otherwise (Pass) the request's entry in the pool gives the place back
			j.srv.Places.Release()
		}
	case lifecycle.Lease:
		r.settleLease(disposition)
	case lifecycle.KV: // the hand-off
		r.settleKV(disposition)
	case lifecycle.MaybeReadKV: // a hand-off of an earlier attempt, which a decode engine may have read
		r.settleMaybeRead(disposition)
	case lifecycle.Slot:
		r.settleSlot(disposition)
	case lifecycle.Call:
		if j.passthrough != nil { // the engine of such a call, and its tokens, are counted apart
			r.endPassthroughCall(disposition)
		}
		r.settleCall(disposition)
	case lifecycle.LeaseOwner: // by the owner, the audit finds leases that are never given back
		if j.leaseOwner != nil { // the job makes no more calls, so the audit now reports leases that it still holds
			j.srv.Prefill.Ended(j.leaseOwner)
			j.leaseOwner = nil
		}
	case lifecycle.Copy: // the body, which was kept so that a lost answer can go on
		j.releaseResumeBytes()
	case lifecycle.Seat, lifecycle.Body, lifecycle.Memory: // held only by a request that is passed through
		r.givePassthroughBack(resource, disposition)
	}
}

// settleSlot gives the slot back. It also counts and logs the failure of a decode rank at a prompt that it had to compute itself.
func (r *executor) settleSlot(disposition lifecycle.Disposition) {
	j, s := r.job, r.stream
	if s == nil { // a panic came before the stream was made
		j.srv.Dispatcher.Release(r.slot, board.Outcome{Kind: boardKinds[disposition]})
		return
	}
	failedAtPrompt := disposition == lifecycle.Failing && r.fault != nil && !r.answerBegun
	computedPromptAlone := s.upstream.computesPrompt && !r.isAggregated() // an aggregated rank computes every prompt itself
	if failedAtPrompt && computedPromptAlone {
		j.srv.metrics.localFailures.Inc()
		j.record.Route = "" // the route Local has failed, and the next attempt sets its own
		j.srv.Log.Warn("a decode rank failed at a prompt that it got without a hand-off", zap.Inline(j),
			zap.String("engine", s.upstream.rank.Target.ID), zap.Error(r.fault.Err))
	}
	s.releaseSlot(boardKinds[disposition])
}
