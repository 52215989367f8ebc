package request

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"

	"evenkeel/dispatcher/board"
	"evenkeel/gateway/edge"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/handoff"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/upstream"
)

// endFailed ends the answer's present call before the answer was whole. why is the reason for the lifecycle, answer the error for the
// client, and err the cause. If the answer has begun, the request's lifecycle decides what follows: the answer may still go on at another
// engine. If the client has nothing of it, the code that waits for the first event gets the fault and decides.
func (s *stream) endFailed(why lifecycle.Reason, answer *openai.Error, err error) {
	if s.state >= ended { // the end was handled already
		return
	}
	if s.job.client.Left() { // the answer broke off because its client left
		why, answer = lifecycle.Left, failure.ClientGone
	}
	begun, isPassthrough := !s.firstAt.IsZero(), s.job.passthrough != nil
	if begun {
		why = reasonAfterBegin(why, answer)
	}
	setFault(s, why, answer, err)
	switch firstEventCame := s.upstream.answer.Filter.Started(); {
	case !begun && isPassthrough && firstEventCame: // the first event came together with the end, so the client gets both
		s.finishAnswer(answer)
		return
	case !begun: // the client has nothing, so the code that waits for the first event reports the fault
		s.state, s.endError = ended, answer
		return
	}
	event := s.job.callFailedEvent(s.upstream.fault, s)
	// The reasons from Rejected on stand for a status in an event. After Preempted, the engine lacks KV memory, and has not failed.
	comesFromStatus := why >= lifecycle.Rejected && why != lifecycle.Preempted
	// By Faulty, the lifecycle counts the engines that failed at this request, and after two it makes no further attempt. In an event
	// of an answer that has begun, any 5xx says so, and not only 500. An engine that was taken out of service (Moved) does not count.
	event.Faulty = comesFromStatus && answer.Status/100 == 5 && !s.upstream.fault.Moved
	s.step(event)
}

// setFault describes in s.upstream.fault how the present call has ended. The progress is that of a call whose answer has begun. If it has
// not begun, the code that waits for the first event corrects the progress (decodeFault), or makes a fault of its own.
func setFault(s *stream, why lifecycle.Reason, answer *openai.Error, err error) {
	kind := lifecycle.Decode
	if s.job.passthrough != nil {
		kind = lifecycle.Sole
	}
	begun := !s.firstAt.IsZero()
	engineWasDrained := begun && s.upstream.endedByDrain()
	// Through: the engine has read the KV. Open: its answer began with status 200. Moved: a drain ended the call.
	end := lifecycle.CallEnd{Call: kind, Progress: lifecycle.Through, Reason: why, Open: true, Moved: engineWasDrained}
	fault := failure.NewFault(end, answer, err)
	fault.Status, fault.BlamedEngine = s.upstream.answer.Filter.Failure().Status, s.upstream.rank.Instance
	s.upstream.fault = fault
}

// reasonAfterBegin corrects the reason of a failure that an engine has reported in an event after it had begun the answer.
func reasonAfterBegin(why lifecycle.Reason, answer *openai.Error) lifecycle.Reason {
	switch {
	case why == lifecycle.Throttled: // the engine had room, because it began the answer, so it refuses the request itself
		return lifecycle.Rejected
	case why == lifecycle.Rejected && answer.Status/100 == 5: // a 401 or 403, for which FromStream gives the client a 502
		return lifecycle.Erred // the engine refuses evenkeel's own credential, and not the request
	}
	return why
}

// endWhole reports to the request's lifecycle that the engine has sent all of the answer. After an answer that has begun, the lifecycle
// returns the effect EndWhole, which writes the end of the answer. But the whole answer may come at once, while the code that waits for the
// first event has not returned yet. Then the lifecycle does not know of a begun answer, so endWhole writes the end itself.
func (s *stream) endWhole() {
	if s.state >= ended { // the end was handled already
		return
	}
	if err := s.upstream.wrongType; err != nil { // the client does not get an answer in this form, so that the engine has failed
		s.endFailed(lifecycle.Garbled, failure.StreamBroke("upstream_broken", err), err)
		return
	}
	if s.firstAt.IsZero() {
		s.finishAnswer(nil)
	}
	s.step(lifecycle.Event{Kind: lifecycle.Ends})
}

// step reports an event of an answer that has begun to the request's lifecycle, and carries out the effects that the lifecycle returns. Of
// these effects only Confirm, which is always the last one, brings an event: how the wait for the prefill engine ended. That event is a
// step of its own.
func (s *stream) step(event lifecycle.Event) {
	r := executor{job: s.job, stream: s, fault: s.upstream.fault, answerBegun: true}
	event.ClientLeft, event.Engine = s.job.client.Left(), s.upstream.rank.Instance
	var buffer [6]lifecycle.Effect
	effects := s.job.step(event, buffer[:0])
	defer onPanic(func() { // after a panic, still carry out the remaining effects that give something back
		for _, effect := range effects {
			if effect.Kind == lifecycle.Settle || effect.Kind == lifecycle.Resolve {
				r.do(effect)
			}
		}
	})
	for len(effects) > 0 {
		effect := effects[0]
		effects = effects[1:]
		if event = r.do(effect); effect.Kind == lifecycle.Confirm { // the wait until the prefill engine confirms the KV is over
			s.step(event)
		}
	}
}

// boardKinds has, for each disposition with which a slot is given back, the end of the request that the dispatcher is told. A call without
// a slot has other dispositions.
var boardKinds = map[lifecycle.Disposition]board.Kind{lifecycle.Failing: board.Failed, lifecycle.Cancelled: board.Cancelled,
	lifecycle.Finish: board.Finished}

// finishAnswer ends the answer that the client reads: it logs an error, and writes the end of a stream. Later calls do nothing. If fail is
// nil, the answer is whole. Otherwise it ends with an error event, so that the client cannot take it for a whole one. An answer in one
// piece and a leg of a fan-out have no such end: their caller finds the error in s.endError.
func (s *stream) finishAnswer(fail *openai.Error) {
	if s.state >= ended {
		return
	}
	if fail != nil && s.job.client.Left() { // whatever failed, the request ended because its client left, or ended it by name
		fail = leftError(s.job)
	}
	s.state, s.endError = ended, fail
	answer := s.upstream.answer
	if fail == nil { // MissingUsage appends the last event with the usage, if the client still lacks it
		answer.out = answer.MissingUsage(answer.out)
	} else { // the engine may have sent an end that turned out to be wrong, for example because KV was missing, so it is dropped
		answer.out = answer.DropEnd(answer.out)
		if fail.Status == journal.StatusClientClosed { // the client reads nothing more
			return
		}
		logBrokenAnswer(s, fail)
	}
	if answer.Assembler != nil || s.upstream.unstreamed || s.job.isLeg {
		return // only a stream has an end of its own, and a fan-out writes one end for all its legs
	}
	writeStreamEnd(s)
}

// writeStreamEnd writes the end of a stream for the client: an error event if the answer ended with an error (s.endError), and what else
// ends a stream of the client's endpoint.
func writeStreamEnd(s *stream) {
	failed, reported := s.endError != nil, cmp.Or(s.endError, failure.NoError) // NoError has no message and no code
	errorType := reported.TypeFor(s.job.req.Endpoint.Path())
	answer := s.upstream.answer
	answer.out = answer.Ending(answer.out, failed, reported.Message, errorType, reported.Code)
}

// logBrokenAnswer logs an answer that ends with an error. It logs nothing of a request that is passed through, whose receipt has the error.
func logBrokenAnswer(s *stream, fail *openai.Error) {
	if s.job.passthrough != nil {
		return
	}
	s.job.srv.Log.Warn("an answer broke off", zap.Inline(s.job), zap.String("engine", s.upstream.rank.Target.ID),
		zap.Int("tokens", s.tokens()), zap.String("outcome", journal.Outcome(fail)), zap.String("cause", s.logText(fail)))
}

// logText is the reason why a stream failed, without the engine's own words. Only the client gets these words, because many engines repeat
// parts of the prompt in them.
func (s *stream) logText(fail *openai.Error) string {
	if said := s.upstream.answer.Filter.Failure(); said.Status != 0 && said.Message == fail.Message {
		return fmt.Sprintf("an error event of status %d; the engine's log has its text", said.Status)
	}
	return fail.Message
}

// The ways in which a decode engine can fail after a status of 200.
var (
	errNotWhole = errors.New("the engine's stream ended without a finish_reason")
	errRefusal  = errors.New("the engine's first event was a failure")
)

// movedOutError is the error of an answer that was cut at the deadline of a drain, and that no other engine can continue.
func (srv *Server) movedOutError() *openai.Error {
	return srv.drainedError("its engine was taken out of service or paused, and the answer cannot go on elsewhere; " +
		"send the request again")
}

// drainedError is the error of a request whose engine was taken out of service or paused. If the proxy shuts down, the error says this
// instead.
func (srv *Server) drainedError(why string) *openai.Error {
	if srv.Serving().Err() != nil {
		return failure.Leaving
	}
	return openai.Unavailable("engine_drained", why, 1)
}

// Close ends the request and gives back what it holds, whether or not the answer is whole. It first removes the callback for the client's
// departure: the engine's connection may serve another request soon, and a late departure of this client must not end that other request.
func (s *stream) Close() {
	if s.state == givenBack {
		return
	}
	s.job.client.OnGone(nil)
	s.endFailed(lifecycle.Left, failure.ClientGone, nil) // if the answer has not ended, the client's side has ended first
	s.finishAnswer(failure.ClientGone)                   // has an effect only after a panic, because of which the answer has no end
	s.recordEnd()
	s.job.releaseResumeBytes() // has an effect only after a panic, if the lifecycle did not know of the kept bytes yet
	s.memory.Release()
	s.giveBackAll(board.Cancelled) // the call and the buffers, and after a panic also the slot, which then counts as Cancelled
}

// recordEnd writes into the record and the metrics how the request's answer ended, and concludes the request. A leg of a fan-out is not
// concluded: the fan-out concludes the client's request once, when all its legs have ended.
func (s *stream) recordEnd() {
	now, j, tokens := time.Now(), s.job, s.tokens()
	if j.passthrough != nil { // the request went to one engine unchanged, so there is no rank, pace or prefix cache to report on
		j.passthrough.Duration.Observe(now.Sub(j.record.Arrival).Seconds())
		j.record.EndAttempt(s.endError)
		j.srv.Conclude(j.incoming, s.endError)
		return
	}
	j.record.Report(journal.Event{Kind: journal.Relayed, Took: now.Sub(s.firstAt), Tokens: tokens})
	// The arrival of events shows when the tokens were computed, unless all text may have come at the end.
	eventsShowPace := !s.upstream.unstreamed && !s.upstream.mayHoldTextBack
	if tokens > 1 && s.endError == nil && eventsShowPace {
		j.record.Report(journal.Event{Kind: journal.Paced, Took: s.lastTokenAt.Sub(s.firstTokenAt), Tokens: tokens})
	}
	compareTokenCounts(s)
	s.checkPrefixCache()
	// If an engine has failed, this event ends the attempt and names the engine. EndAttempt, which does not, then finds none to end.
	if failedEngine := s.upstream.failedEngine(); s.endError != nil && failedEngine != "" {
		j.record.Report(journal.Event{Kind: journal.AttemptEnded, Cause: journal.Outcome(s.endError), On: failedEngine, Answer: s.endError})
	}
	j.record.EndAttempt(s.endError)
	if !j.isLeg {
		j.srv.Conclude(j.incoming, s.endError)
	}
}

// compareTokenCounts compares two counts of an answer's tokens: the one made while they came, and the engine's final one. The first count
// serves as the load of the ranks. So compareTokenCounts learns how many tokens the engine puts in a chunk, and counts an answer that is
// off by over 1 %. It leaves out answers without a final count, and answers that are not counted chunk by chunk.
func compareTokenCounts(s *stream) {
	if s.endError != nil || s.upstream.unstreamed || s.upstream.mayHoldTextBack {
		return
	}
	s.upstream.rank.Traffic.Learn(s.upstream.answer.Filter.TokensPerChunk)
	usage, _ := s.upstream.answer.Filter.Usage()
	drift, known := s.upstream.answer.Filter.Drift()
	if overOnePercent := max(drift, -drift)*100 > usage.Completion; known && overOnePercent {
		s.job.srv.metrics.miscounted.Inc()
	}
}

// collect reads the answer to its end and returns it as one body, for a client that has not asked
// for a stream. It charges the body to memory, ends the request, and gives back what else the
// request holds.
func (s *stream) collect(memory *edge.Reservation) ([]byte, *openai.Error) {
	defer s.Close()
	for s.state < ended {
		if err := s.fill(); err != nil {
			return nil, failure.StreamBroke("upstream_broken", err)
		}
	}
	if s.endError != nil {
		return nil, s.endError
	}
	var body []byte
	if s.upstream.unstreamed {
		// The buffer has the engine's body as one event, because readWhole makes an event of it. The body is copied, because Close
		// gives the buffer to other requests.
		body = bytes.TrimSpace(bytes.TrimPrefix(bytes.Clone(s.upstream.answer.out), []byte("data:")))
	} else {
		var err error
		if body, err = s.upstream.answer.Assembler.JSON(nil); err != nil {
			s.endError = failure.StreamBroke("upstream_broken", err)
			return nil, s.endError
		}
	}
	if !memory.AcquireAnswer(len(body)) {
		s.endError = failure.NoRoomForAnswer
		return nil, s.endError
	}
	return body, nil
}

// giveBackAll gives back everything that the stream still holds: its slot, its call and its buffers. kind tells the dispatcher how the
// request ended.
func (s *stream) giveBackAll(kind board.Kind) {
	if s.state == givenBack {
		return
	}
	s.state = givenBack
	s.releaseSlot(kind)
	s.upstream.endAccounting(lifecycle.Spent)
	s.detach()
}

// detach gives back the call's connection and buffers. If the answer is complete but the end of the HTTP body has not come yet, another
// goroutine reads it, so that the client does not wait for it.
func (s *stream) detach() {
	resp, b := s.upstream.resp, s.upstream.answer
	s.upstream.answer = nil
	if resp != nil && b.Reader.Done() && !resp.Ended() { // the answer is complete, but its HTTP body is not
		finish := func() {
			drainBody(resp, b)
			b.putBack()
		}
		if s.job.srv.finishing.Run(maxFinishers, finish) == nil { // otherwise too many run already, or the proxy shuts down
			return
		}
	}
	if resp != nil {
		resp.Close()
	}
	b.putBack()
}

// releaseSlot gives the slot back, and tells the dispatcher how the answer ended. Only the first call does so. If the answer is not whole,
// it first waits until the engine has dropped the request, so that the next request of this slot does not run beside it.
func (s *stream) releaseSlot(kind board.Kind) {
	if s.upstream.slot == nil {
		return
	}
	if kind != board.Finished {
		s.upstream.closeAndAwaitEnd()
		if s.upstream.call.IgnoredClose() { // the engine has not noticed the close in time; the slot goes to another request all the same
			s.job.srv.metrics.ignoredCloses.Inc()
		}
	}
	// A prefill call may still run, and need not go on for a client that is gone. If no event came, failDuringPrefill has told it.
	if s.upstream.prefillCall != nil && !s.firstAt.IsZero() {
		abandoned := kind == board.Cancelled
		s.upstream.prefillCall.answerEnded(abandoned)
	}
	s.job.srv.Dispatcher.Release(s.upstream.slot, s.slotOutcome(kind))
	s.upstream.slot = nil
}

// endAccounting removes a call that is over from the counts of its engine's traffic: the prompt tokens that the engine may have to compute,
// the answers that run, and the calls that were sent although the rank had no slot or no KV room for them. It also removes the call from
// the calls that a drain may end. disposition is how the call was given back. Free means that the engine has computed nothing. Later calls
// change nothing.
func (u *upstreamCall) endAccounting(disposition lifecycle.Disposition) {
	computedNothing := disposition == lifecycle.Free
	u.correctTokensToCompute(computedNothing) // the announced number becomes the number of tokens that the engine has computed
	if u.countedRunning {
		u.countedRunning = false
		u.rank.Traffic.End()
	}
	if u.countedWithoutSlot {
		u.countedWithoutSlot = false
		u.rank.Traffic.AddSentWithoutSlot(-1)
	}
	u.job.srv.Fleet.Untrack(u.tracked)
}

// Conclude is the last step of a request. It gives back the request's share of its caller's limits, and has the journal write how the
// request ended. Only the first call does this. fail is the request's error; nil: the answer was whole.
func (srv *Server) Conclude(in *Incoming, fail *openai.Error) {
	if !in.concluded.CompareAndSwap(false, true) {
		return // ConcludePanicked ended the request before its answer was closed
	}
	defer srv.openRequests.Add(-1)
	if in.forgetName != nil { // the answer has a name, by which the client can no longer end the request from now on
		in.forgetName()
	}
	tokens := in.Record.PromptTokens + in.Record.OutputTokens
	clientLeft := fail != nil && fail.Status == journal.StatusClientClosed
	engineChosen := in.Record.Route != ""
	if tokens == 0 && engineChosen && clientLeft {
		// The client left before the engine that computed the prompt had reported its length. A negative number keeps the estimate.
		tokens = -1
	}
	in.CorrectEstimate(tokens)
	in.Body.Release()
	if in.From != nil { // another proxy sent the request
		srv.Peers.CountReceived(in.Record.Origin, journal.Outcome(fail))
	}
	in.Record.End(fail)
}

// closeAndAwaitEnd ends the call, and reads on until the decode engine has closed the connection, too. Then the engine has noticed the end.
// Without this wait, the slot could go to another request while the engine still runs this one. It waits for upstream.NoticeTimeout at
// most.
func (u *upstreamCall) closeAndAwaitEnd() {
	if u.resp == nil || u.resp.Ended() {
		return
	}
	u.call.Disconnect(upstream.NoticeTimeout)
	var dropped [1 << 10]byte
	for {
		if _, err := u.resp.Read(dropped[:]); err != nil { // the engine has closed the connection, or the time is over
			return
		}
	}
}

// settleLease gives back the lease of a prefill that has ended, or leaves it to a new owner (Pass): the hand-off, or the prefill call that
// runs beside a decode call. With Discard, a decode engine is made to fetch the KV, so that the prefill engine frees it.
func (r *executor) settleLease(disposition lifecycle.Disposition) {
	if disposition == lifecycle.Refuse && r.hasLeaseOfOthers() {
		disposition = lifecycle.Free // a rank of another group has failed
	}
	switch disposition {
	case lifecycle.Pass: // the new owner gives the lease back
	case lifecycle.Discard: // the prefill call failed although it returned a hand-off, which has the lease
		r.job.discard(r.handoff)
	default:
		handoff.SettleLease(r.lease, disposition, r.fault)
		endedByClient := r.fault != nil && r.fault.Reason == lifecycle.Left
		if endedByClient && disposition == lifecycle.Free { // the engine has aborted the prefill, and keeps nothing
			r.job.noteEnginesFreeIfLeft()
		}
	}
}

// settleKV gives the hand-off back, or has it discarded: a decode engine then gets the request once more, only to fetch the KV, so that the
// prefill engine frees it. A hand-off that a decode engine may have read waits in maybeRead for the end of the attempts (settleMaybeRead).
// Until then it is not known whether the request makes engines fail, and a discard would send it to one more engine.
func (r *executor) settleKV(disposition lifecycle.Disposition) {
	j := r.job
	switch disposition {
	case lifecycle.Discard:
		j.discard(r.handoff)
	case lifecycle.MaybeRead, lifecycle.MaybeRunning: // MaybeRunning: the decode engine may also still work on the request
		j.maybeRead = append(j.maybeRead, r.handoff)
	default: // Free: the KV is free; Orphan: the prefill engine frees it at its hold timeout
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
		oldest.Avoid = j.avoid.ranks() // the rank that fetches the KV must be none that has failed at this request
		j.discard(oldest)
		return
	}
	var noFault *failure.Fault // the prefill engine has not failed
	handoff.SettleLease(oldest.Lease, disposition, noFault)
}

// settleCall takes a call that is over out of the counts of its engine (see endAccounting). If the client has left, the record notes that
// the engine holds nothing for it any more. Before the answer has begun, settleCall also gives back what the stream of the call holds.
// Later the client may still have to read the end of the answer from the stream, so Close does that.
func (r *executor) settleCall(disposition lifecycle.Disposition) {
	j := r.job
	if r.stream != nil { // nil: a panic came before the stream was made
		r.stream.upstream.endAccounting(disposition)
	}
	// A decode call that ended because the client left is Cancelled. The dispositions of a call that was passed through (Free, Spent)
	// say only whether the engine computed tokens, so any of them may come after the client has left.
	if disposition == lifecycle.Cancelled || j.passthrough != nil {
		j.noteEnginesFreeIfLeft() // does nothing if the client has not left
	}
	if r.stream != nil && !r.answerBegun {
		r.stream.giveBackAll(boardKinds[disposition])
	}
}

// discard frees the KV of a hand-off that no decode will use. If the client has left, the record notes the moment when the KV is free.
func (j *job) discard(h *handoff.Handoff) {
	if j.client.Left() {
		j.srv.discards.Discard(h, j.noteEnginesFreeIfLeft)
	} else {
		j.srv.discards.Discard(h, nil)
	}
}
