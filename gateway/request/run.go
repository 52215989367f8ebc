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

// serve runs a request up to the first event of its answer. The caller relays the rest, and closes
// the stream to give back what the request holds. Without a stream and an error, another proxy
// answers through ctx.
//
// Before the first event nothing has reached the client, so a failed attempt may be repeated. A
// lost answer goes on by another call of serve, with a prompt that has the answer so far. For this,
// and for a leg of a fan-out, ctx is nil: neither is sent to another proxy.
func (j *job) serve(ctx *fasthttp.RequestCtx) (*stream, *openai.Error) {
	mayForward := ctx != nil
	beginServing(j, mayForward)
	defer func() { j.query = nil }() // of no use once the answer has begun
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

// beginServing resets what the job knows of earlier attempts.
func beginServing(j *job, mayForward bool) {
	j.life.MustServeHere = !mayForward
	j.life.NoHandOff = j.incoming.NoHandOff
	j.namedAbort.noteNoRank() // the rank that lost the answer does not have the request any more
	// After a lost answer, prefill calls of earlier attempts may still run and use life.
	j.mu.Lock()
	j.recorder.Begin(&j.life)
	j.mu.Unlock()
	j.avoid.prefill = nil // to continue a lost answer, every prefill engine may be asked
}

// An executor holds the lease, hand-off, slot and stream of a request. The lifecycle only knows
// which of them are held.
type executor struct {
	job *job
	ctx *fasthttp.RequestCtx

	forward   *geo.Forward      // to the proxy that should serve the request
	nextQuery *geo.RoutingQuery // the query for the next wait in the arrival queue
	lease     *prefill.Lease
	handoff   *handoff.Handoff // what the prefill engine returned, until a decode engine gets it
	slot      *dispatcher.Slot
	stream    *stream
	fault     *failure.Fault // how the last call to an engine failed; nil: none failed
	lastError *openai.Error  // what the client gets if no other attempt follows

	answerBegun bool // only the effects after the end of an answer are carried out
}

// run reports event to the lifecycle and carries out the effects. Only the last of them brings an
// event, which is reported next, until there is an answer or an error. Both results are nil if
// another proxy answers.
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
			// The effect is over, so a client that leaves need not end it. Forward may leave a callback that
			// must stay: another proxy's answer may be under way.
			if effect.Kind > lifecycle.Forward {
				j.client.OnGone(nil)
			}
		}
	}
}

// giveBackAfterPanic gives back what the remaining effects would have given back, and what the
// request still holds.
func (r *executor) giveBackAfterPanic(remaining []lifecycle.Effect) {
	j := r.job
	j.client.OnGone(nil) // first, so that the callback cannot abort a call that is given back here
	if r.stream != nil {
		// Last: the effects below give the slot back, with a report of their own.
		defer r.stream.giveBackAll(board.Failed)
	}
	if !j.life.Resumed() { // keepForResume may have charged bytes that the lifecycle does not know of yet
		j.releaseResumeBytes()
	}
	// The prefill call of a pair is made before the decode call is sent. So without it neither has
	// begun (Idle).
	hasPrefillCall := r.stream != nil && r.stream.upstream.prefillCall != nil
	panicked := lifecycle.Event{Kind: lifecycle.Panicked, Idle: !hasPrefillCall}
	for _, effect := range slices.Concat(remaining, j.step(panicked, nil)) {
		switch isOfPair := effect.Pair > 0; {
		case effect.Kind == lifecycle.SendBoth: // no new call after a panic
		case isOfPair && hasPrefillCall:
			r.stream.upstream.prefillCall.doAfterPanic(effect)
		// All other effects count outcomes, or take the request further.
		case effect.Kind == lifecycle.Settle || effect.Kind == lifecycle.Resolve:
			r.do(effect)
		}
	}
}

// do carries out one effect. If it must wait for the end of the effect, it returns the event that
// says how it ended, and otherwise the zero event.
func (r *executor) do(effect lifecycle.Effect) lifecycle.Event {
	j := r.job
	switch effect.Kind {
	// Which proxy serves the request.
	case lifecycle.Question:
		// Made already after a Restart, after another region gave the request back, and for a leg.
		if j.query == nil {
			const mustStay = false
			j.query = j.newRoutingQuery(mustStay)
		}
	case lifecycle.Restart: // the question that Offer has made
		j.query = r.nextQuery
	case lifecycle.Offer:
		return r.offerElsewhere(effect.Group)
	case lifecycle.Forward:
		var event lifecycle.Event
		event.Kind, r.lastError = j.forwardToPeer(r.ctx, r.forward)
		return event
	case lifecycle.Drop: // another proxy was chosen, but will not get the request
		r.forward.DropUnsent()

	// An attempt at this proxy.
	case lifecycle.Attempt:
		j.record.Report(journal.Event{Kind: journal.Attempted})
		r.fault, r.stream, r.lease = nil, nil, nil
	case lifecycle.TryLocal:
		return r.tryLocal()
	case lifecycle.Queue:
		return r.queue()
	case lifecycle.SendProbe:
		return r.sendProbe(effect.Until)
	case lifecycle.Enqueue:
		return r.enqueue(effect)
	case lifecycle.SendDecode:
		return r.sendDecode(effect.Until)
	case lifecycle.SendBoth:
		return r.beganEvent(r.stream.decodeDuringPrefill(r.lease, effect.Pair, effect.Until))
	// Only for a request that is passed through.
	case lifecycle.Remember, lifecycle.Recall, lifecycle.Complain, lifecycle.Choose, lifecycle.SendOver, lifecycle.SendAnew:
		return r.doPassthrough(effect)

	// After a call, or an attempt.
	case lifecycle.Settle:
		r.settle(effect.Resource, effect.Disposition)
	case lifecycle.Avoid, lifecycle.ReportFailure, lifecycle.ReportSuccess:
		r.reportOutcome(effect)
	case lifecycle.Resolve:
		j.answered500.resolve(j.srv.Dispatcher, effect.Blame)
	case lifecycle.Pause:
		if j.awaitRetry(effect.Retry, r.fault) {
			return lifecycle.Event{Kind: lifecycle.Retried}
		}
		return lifecycle.Event{Kind: lifecycle.GivenUp} // no attempt, no time, or no client is left

	// The end of an answer that has begun.
	case lifecycle.Confirm:
		return r.confirm()
	case lifecycle.GoOn:
		// The next fill continues the answer, after the client has got all earlier events.
		r.stream.state = lost
	case lifecycle.EndWhole:
		r.stream.finishAnswer(nil)
	case lifecycle.BreakOff:
		r.stream.finishAnswer(r.stream.upstream.fault.ClientError)
	case lifecycle.AnswerIt, lifecycle.Fail:
	}
	return lifecycle.Event{}
}

func (r *executor) tryLocal() lifecycle.Event {
	if r.slot = r.job.bindLocal(); r.slot == nil {
		return lifecycle.Event{Kind: lifecycle.NoLocal}
	}
	r.prepareStream()
	return lifecycle.Event{Kind: lifecycle.LocalBound, Copied: bodyIsKept(r.job), NoEarlyEvents: r.stream.upstream.unstreamed}
}

// sendDecode sends the request to the decode rank, and waits for the first event of the answer.
func (r *executor) sendDecode(until lifecycle.Timeout) lifecycle.Event {
	fault, clientQuit := r.stream.decode(r.handoff, until)
	if fault == nil && r.isAggregated() { // the prefill of the lease is over, too
		const unknown = -1
		var noHold time.Time // the rank keeps no KV for a hand-off
		r.lease.Answered(prefill.Usage{PromptTokens: r.job.promptTokens, CachedTokens: unknown}, noHold)
	}
	return r.beganEvent(fault, clientQuit)
}

// confirm waits, after the end of the answer, until the prefill engine has confirmed that the KV
// was complete.
func (r *executor) confirm() lifecycle.Event {
	s := r.stream
	if abortedEmpty(s) {
		return lifecycle.Event{Kind: lifecycle.Believed}
	}
	// The prefill engine must count as many prompt tokens as the decode engine.
	promptTokens := s.upstream.answer.Filter.Prompt()
	if fault := s.upstream.prefillCall.confirmKV(promptTokens, r.job.client.Gone()); fault != nil {
		s.upstream.fault = fault
		return lifecycle.Event{Kind: lifecycle.CallFailed}
	}
	return lifecycle.Event{Kind: lifecycle.Believed}
}

// queue waits in the arrival queue for a lease on a prefill engine, which later attempts avoid.
func (r *executor) queue() lifecycle.Event {
	j := r.job
	lease, forward, err := j.awaitLease()
	switch {
	case forward != nil:
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
	// The prefill engine gives the whole answer. With Late, its call is the only one.
	if j.req.PrefillOnly && bind == lifecycle.Early {
		bind = lifecycle.Late
	}
	return lifecycle.Event{Kind: lifecycle.Turn, Bind: bind, Traits: lifecycle.Traits[lease.Candidate.Profile.Connector]}
}

func (r *executor) sendProbe(until lifecycle.Timeout) lifecycle.Event {
	j := r.job
	if j.client.Left() { // so it is sent to no engine
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

// enqueue waits until the request is bound to a decode rank.
func (r *executor) enqueue(effect lifecycle.Effect) lifecycle.Event {
	j := r.job
	if effect.Permit { // a hand-off waits a second time, and has used up its place in the pool
		j.srv.Places.Reserve()
	}
	var fault *failure.Fault
	if r.slot, fault = r.awaitSlot(effect.Bind); fault != nil {
		return r.callFailed(fault)
	}
	r.prepareStream()
	call := &r.stream.upstream
	// A first event may take as long as the whole answer if it comes in one piece. Beside a prefill
	// call (Early), also if the engine may send no text before the end.
	noEarlyEvents := call.unstreamed || effect.Bind == lifecycle.Early && call.mayHoldTextBack
	return lifecycle.Event{Kind: lifecycle.Bound, Copied: bodyIsKept(j), NoEarlyEvents: noEarlyEvents,
		MayIgnoreAbort: mayIgnoreAbort(noEarlyEvents, call.rank.Profile, j.req.Endpoint)}
}

func (r *executor) awaitSlot(bind lifecycle.Bind) (*dispatcher.Slot, *failure.Fault) {
	j := r.job
	switch bind {
	case lifecycle.Aggregated: // the rank itself prefills
		return j.placeAggregated(r.lease)
	// The prompt is not prefilled yet, so the client's deadline limits the wait, and the length is an
	// estimate.
	case lifecycle.Early:
		return j.place(r.lease.Candidate, j.estimatedTokens(), func(entry *pool.Entry) <-chan dispatcher.Result {
			entry.Early, entry.Deadline = true, j.firstTokenDeadline()
			return j.srv.Dispatcher.Enqueue(entry)
		})
	default: // Late
		return j.placeHandoff(r.handoff)
	}
}

// prepareStream prepares the stream, which owns the slot from now on.
func (r *executor) prepareStream() {
	// The lifecycle does not know of the slot yet.
	defer onPanic(func() { r.job.srv.Dispatcher.Release(r.slot, board.Outcome{Kind: board.Cancelled}) })
	r.stream = r.job.newStream(r.slot)
}

func (r *executor) isAggregated() bool { return r.lease != nil && r.lease.Candidate.Aggregated }

// hasLeaseOfOthers: the dispatcher may bind an aggregated attempt to any rank of the board. The
// failure of a rank of another group says nothing about the group of the lease.
func (r *executor) hasLeaseOfOthers() bool {
	return r.isAggregated() && r.stream != nil && r.stream.upstream.rank.Group != r.lease.Candidate.ID
}

// beganEvent reports First, or the fault. clientQuit: the client left, and no engine uses the slot
// any more.
func (r *executor) beganEvent(fault *failure.Fault, clientQuit bool) lifecycle.Event {
	if fault == nil {
		return lifecycle.Event{Kind: lifecycle.First, Copied: bodyIsKept(r.job)}
	}
	fault.Moved = r.stream.upstream.endedByDrain()
	event := r.callFailed(fault)
	event.Quit = clientQuit
	// The answer had come whole, and its end gave back slot and call. Only the connection and the
	// buffers are left.
	if r.stream.upstream.slot == nil {
		r.stream.giveBackAll(board.Failed) // not reported, because there is no slot
	}
	return event
}

// callFailed keeps the fault for the effects that follow, writes it into the record, and returns
// the event for the lifecycle.
func (r *executor) callFailed(fault *failure.Fault) lifecycle.Event {
	j := r.job
	r.fault, r.lastError = fault, fault.ClientError
	j.namedAbort.noteNoRank()               // no rank has the request that the client could abort
	if fault.Reason == lifecycle.Unlisted { // for leaseError, if no other engine has the model
		j.unlistedAnswer = fault.ClientError
	}
	if r.stream != nil {
		r.stream.upstream.fault = fault // failedEngine reads it
	}
	failedEngine := r.failedEngine() // the record names only an engine that is at fault
	// A stale connection says nothing about its engine.
	if fault.Reason == lifecycle.Stale && r.lease != nil {
		j.avoid.forgetLastPrefill()
	}
	j.record.Report(journal.Event{Kind: journal.AttemptEnded, Cause: fault.Cause(), On: failedEngine, Status: fault.Status,
		Answer: fault.ClientError})
	event := j.callFailedEvent(fault, r.stream)
	event.Engine = r.calledEngine() // the lifecycle decides whether this engine is at fault
	return event
}

// failedEngine is empty if no engine has failed, or if it is not known which one.
func (r *executor) failedEngine() string {
	switch {
	case r.stream != nil:
		return r.stream.upstream.failedEngine()
	case r.lease != nil && r.fault.EngineFailed():
		return r.lease.Candidate.ID
	}
	return ""
}

// calledEngine returns role and address of the engine whose call has ended with r.fault, whether or
// not it is to blame; empty: no engine was called.
func (r *executor) calledEngine() string {
	switch {
	case r.fault.Call == lifecycle.Prefill && r.lease != nil: // even if a decode call runs beside it
		return r.prefillEngine().Instance
	case r.stream != nil:
		return r.stream.upstream.rank.Instance
	}
	return ""
}

// prefillEngine is the one that was asked last. It differs from that of r.lease if prefillCall
// tried another one.
func (r *executor) prefillEngine() prefill.Candidate {
	if r.stream != nil && r.stream.upstream.prefillCall != nil {
		return r.stream.upstream.prefillCall.prefillEngine()
	}
	return r.lease.Candidate
}

// reportOutcome: the failure of a prefill call is counted when its lease is given back. It is
// reported here only for a 500, which the request may have caused.
func (r *executor) reportOutcome(effect lifecycle.Effect) {
	is500OfPrefill := effect.Kind == lifecycle.ReportFailure && effect.Call == lifecycle.Prefill
	// The decode call to a rank that also prefills has a lease, too.
	is500OfAggregated := r.isAggregated() && !r.hasLeaseOfOthers() && effect.Blame == lifecycle.Disputed
	if is500OfPrefill || is500OfAggregated {
		r.noteUnexplained500() // may take back what the lease has counted
	}
	if !is500OfPrefill { // a decode call
		r.stream.reportDecodeOutcome(effect)
	}
}

// noteUnexplained500 is called after a 500 of the engine or group that has computed the prompt,
// which was counted when the lease was given back. If the request turns out to be the cause, the
// effect Resolve takes the count back.
func (r *executor) noteUnexplained500() {
	scheduler, id := r.job.srv.Prefill, r.prefillEngine().ID
	unexplained := note500(r.job)
	unexplained.settle = append(unexplained.settle, func(cause lifecycle.Blame) {
		if cause == lifecycle.Nobody {
			scheduler.Forgive(id)
		}
	})
}

// offerElsewhere makes the question whether the owner of the decode group (groupMoved), or a region
// where no attempt has failed, should get the request. It is decided in the next wait in the
// arrival queue.
func (r *executor) offerElsewhere(groupMoved bool) lifecycle.Event {
	j, peers := r.job, r.job.srv.Peers
	notOffered := lifecycle.Event{Kind: lifecycle.NotOffered}
	// Requests to other endpoints are always served here.
	mayBeForwarded := peers != nil && j.req.Endpoint.IsChatOrCompletions()
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
	if r.fault == nil { // the arrival queue had no engine; after a call, callFailed has ended the attempt
		j.record.EndAttempt(r.lastError)
	}
	return lifecycle.Event{Kind: lifecycle.Offered}
}

// questionForOwner is nil if the request names its engines, and so goes to no other proxy.
func questionForOwner(j *job) *geo.RoutingQuery {
	if j.incoming.namesEngines() {
		return nil
	}
	const mustStay = false
	return j.newRoutingQuery(mustStay)
}

// questionForOtherRegion is nil if the request may go to no region that has its model.
func questionForOtherRegion(j *job) *geo.RoutingQuery {
	if !j.srv.Peers.Offered(j.model.Name) { // so the prompt need not be hashed
		return nil
	}
	const mustStay = false
	query := j.newRoutingQuery(mustStay)
	if !query.Offered() { // the request must stay here, or may not go to a region that has the model
		return nil
	}
	return query
}

// beginAnswer returns the stream of an answer whose first event has come.
func (r *executor) beginAnswer() *stream {
	s := r.stream
	if s == nil { // another proxy has answered through ctx
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
	case s.upstream.call != nil: // the engine aborts the request when the connection is closed
		r.job.client.OnGone(func() { s.upstream.call.Disconnect(upstream.NoticeTimeout) })
	}
	return s
}

func (r *executor) clientError(which lifecycle.Error) *openai.Error {
	switch which {
	case lifecycle.OfClient:
		return failure.ClientGone
	case lifecycle.OfRanks:
		p := r.job.passthrough
		if p == nil {
			return failure.NoLocalRank(r.job.client.Left(), r.lastError)
		}
		// noEngine is nil if the request was sent to the largest number of engines that may be asked.
		// None of them had the endpoint.
		return cmp.Or(p.noEngine, failure.NoRoute)
	case lifecycle.OfOwner: // another proxy owns the decode group, and cannot get the request
		return failure.NotOurs
	}
	return r.lastError // of the last attempt, the wait in the queue, or the other proxy
}

// settle gives back one resource, or leaves it to a new owner (Pass).
func (r *executor) settle(resource lifecycle.Resource, disposition lifecycle.Disposition) {
	j := r.job
	switch resource {
	case lifecycle.Permit:
		if disposition == lifecycle.Back { // otherwise the entry in the pool gives the place back
			j.srv.Places.Release()
		}
	case lifecycle.Lease:
		r.settleLease(disposition)
	case lifecycle.KV:
		r.settleKV(disposition)
	case lifecycle.MaybeReadKV:
		r.settleMaybeRead(disposition)
	case lifecycle.Slot:
		r.settleSlot(disposition)
	case lifecycle.Call:
		if j.passthrough != nil { // its engine and tokens are counted apart
			r.endPassthroughCall(disposition)
		}
		r.settleCall(disposition)
	case lifecycle.LeaseOwner: // by the owner, the audit finds leases that are never given back
		if j.leaseOwner != nil { // the audit now reports leases that the job still holds
			j.srv.Prefill.Ended(j.leaseOwner)
			j.leaseOwner = nil
		}
	case lifecycle.Copy:
		j.releaseResumeBytes()
	case lifecycle.Seat, lifecycle.Body, lifecycle.Memory: // only if passed through
		r.givePassthroughBack(resource, disposition)
	}
}

// settleSlot also counts and logs the failure of a decode rank at a prompt that it had to compute
// itself.
func (r *executor) settleSlot(disposition lifecycle.Disposition) {
	j, s := r.job, r.stream
	if s == nil { // a panic came before the stream was made
		j.srv.Dispatcher.Release(r.slot, board.Outcome{Kind: boardKinds[disposition]})
		return
	}
	failedAtPrompt := disposition == lifecycle.Failing && r.fault != nil && !r.answerBegun
	// An aggregated rank computes every prompt itself.
	computedPromptAlone := s.upstream.computesPrompt && !r.isAggregated()
	if failedAtPrompt && computedPromptAlone {
		j.srv.metrics.localFailures.Inc()
		j.record.Route = "" // the route Local has failed, and the next attempt sets its own
		j.srv.Log.Warn("a decode rank failed at a prompt that it got without a hand-off", zap.Inline(j),
			zap.String("engine", s.upstream.rank.Target.ID), zap.Error(r.fault.Err))
	}
	s.releaseSlot(boardKinds[disposition])
}
