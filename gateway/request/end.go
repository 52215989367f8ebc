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

// endFailed ends the present call before the answer was whole. If the answer has begun, the
// lifecycle decides whether it goes on elsewhere. Otherwise the code that waits for the first event
// gets the fault and decides.
func (s *stream) endFailed(why lifecycle.Reason, answer *openai.Error, err error) {
	if s.state >= ended {
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
	case !begun && isPassthrough && firstEventCame: // with the end: the client gets both
		s.finishAnswer(answer)
		return
	case !begun: // the code that waits for the first event reports the fault
		s.state, s.endError = ended, answer
		return
	}
	event := s.job.callFailedEvent(s.upstream.fault, s)
	// The reasons from Rejected on stand for a status in an event. After Preempted, the engine lacks
	// KV memory, and has not failed.
	comesFromStatus := why >= lifecycle.Rejected && why != lifecycle.Preempted
	// After two Faulty engines the lifecycle makes no further attempt. In an answer that has begun,
	// any 5xx counts, not only 500.
	event.Faulty = comesFromStatus && answer.Status/100 == 5 && !s.upstream.fault.Moved
	s.step(event)
}

// setFault: if the answer has not begun, the code that waits for the first event corrects the
// progress.
func setFault(s *stream, why lifecycle.Reason, answer *openai.Error, err error) {
	kind := lifecycle.Decode
	if s.job.passthrough != nil {
		kind = lifecycle.Sole
	}
	begun := !s.firstAt.IsZero()
	engineWasDrained := begun && s.upstream.endedByDrain()
	// Through: the engine has read the KV. Open: its answer began with status 200.
	end := lifecycle.CallEnd{Call: kind, Progress: lifecycle.Through, Reason: why, Open: true, Moved: engineWasDrained}
	fault := failure.NewFault(end, answer, err)
	fault.Status, fault.BlamedEngine = s.upstream.answer.Filter.Failure().Status, s.upstream.rank.Instance
	s.upstream.fault = fault
}

// reasonAfterBegin corrects the reason of a failure in an event after the answer had begun.
func reasonAfterBegin(why lifecycle.Reason, answer *openai.Error) lifecycle.Reason {
	switch {
	case why == lifecycle.Throttled: // the engine had room, so it refuses the request itself
		return lifecycle.Rejected
	case why == lifecycle.Rejected && answer.Status/100 == 5: // a 401 or 403, for which FromStream gives a 502
		return lifecycle.Erred // the engine refuses evenkeel's own credential
	}
	return why
}

// endWhole: after a begun answer, the lifecycle's effect EndWhole writes its end. If the whole
// answer came at once, the lifecycle does not know of a begun answer yet, so endWhole writes the
// end itself.
func (s *stream) endWhole() {
	if s.state >= ended {
		return
	}
	if err := s.upstream.wrongType; err != nil { // the client does not get an answer in this form
		s.endFailed(lifecycle.Garbled, failure.StreamBroke("upstream_broken", err), err)
		return
	}
	if s.firstAt.IsZero() {
		s.finishAnswer(nil)
	}
	s.step(lifecycle.Event{Kind: lifecycle.Ends})
}

// step reports an event of a begun answer to the lifecycle, and carries out its effects. Only
// Confirm, always the last, brings an event.
func (s *stream) step(event lifecycle.Event) {
	r := executor{job: s.job, stream: s, fault: s.upstream.fault, answerBegun: true}
	event.ClientLeft, event.Engine = s.job.client.Left(), s.upstream.rank.Instance
	var buffer [6]lifecycle.Effect
	effects := s.job.step(event, buffer[:0])
	defer onPanic(func() { // still give back what the remaining effects would
		for _, effect := range effects {
			if effect.Kind == lifecycle.Settle || effect.Kind == lifecycle.Resolve {
				r.do(effect)
			}
		}
	})
	for len(effects) > 0 {
		effect := effects[0]
		effects = effects[1:]
		if event = r.do(effect); effect.Kind == lifecycle.Confirm {
			s.step(event)
		}
	}
}

// boardKinds: what the dispatcher is told of a slot that is given back.
var boardKinds = map[lifecycle.Disposition]board.Kind{lifecycle.Failing: board.Failed, lifecycle.Cancelled: board.Cancelled,
	lifecycle.Finish: board.Finished}

// finishAnswer ends the answer that the client reads; fail is nil if it is whole. An error event
// keeps the client from taking it for a whole one. An answer in one piece and a leg of a fan-out
// have no such end: their caller finds the error in s.endError.
func (s *stream) finishAnswer(fail *openai.Error) {
	if s.state >= ended {
		return
	}
	if fail != nil && s.job.client.Left() { // whatever failed: the client left, or ended it by name
		fail = leftError(s.job)
	}
	s.state, s.endError = ended, fail
	answer := s.upstream.answer
	if fail == nil { // the last event with the usage, if the client lacks it
		answer.out = answer.MissingUsage(answer.out)
	} else { // the end that the engine sent may be wrong, for example because KV was missing
		answer.out = answer.DropEnd(answer.out)
		if fail.Status == journal.StatusClientClosed { // the client reads nothing more
			return
		}
		logBrokenAnswer(s, fail)
	}
	if answer.Assembler != nil || s.upstream.unstreamed || s.job.isLeg {
		return // a fan-out writes one end for all its legs
	}
	writeStreamEnd(s)
}

// writeStreamEnd writes an error event if there is one, and what else ends a stream.
func writeStreamEnd(s *stream) {
	failed, reported := s.endError != nil, cmp.Or(s.endError, failure.NoError) // without message and code
	errorType := reported.TypeFor(s.job.req.Endpoint.Path())
	answer := s.upstream.answer
	answer.out = answer.Ending(answer.out, failed, reported.Message, errorType, reported.Code)
}

// logBrokenAnswer leaves out requests that are passed through: their receipt has the error.
func logBrokenAnswer(s *stream, fail *openai.Error) {
	if s.job.passthrough != nil {
		return
	}
	s.job.srv.Log.Warn("an answer broke off", zap.Inline(s.job), zap.String("engine", s.upstream.rank.Target.ID),
		zap.Int("tokens", s.tokens()), zap.String("outcome", journal.Outcome(fail)), zap.String("cause", s.logText(fail)))
}

// logText leaves out the engine's own words, because many engines repeat parts of the prompt in
// them. Only the client gets them.
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

// movedOutError: the answer was cut at the deadline of a drain, and cannot go on.
func (srv *Server) movedOutError() *openai.Error {
	return srv.drainedError("its engine was taken out of service or paused, and the answer cannot go on elsewhere; " +
		"send the request again")
}

func (srv *Server) drainedError(why string) *openai.Error {
	if srv.Serving().Err() != nil {
		return failure.Leaving
	}
	return openai.Unavailable("engine_drained", why, 1)
}

// Close ends the request and gives back what it holds. It first removes the callback for the
// client's departure: the engine's connection may serve another request soon, which a late
// departure must not end.
func (s *stream) Close() {
	if s.state == givenBack {
		return
	}
	s.job.client.OnGone(nil)
	s.endFailed(lifecycle.Left, failure.ClientGone, nil) // if the client's side has ended first
	s.finishAnswer(failure.ClientGone)                   // after a panic the answer has no end
	s.recordEnd()
	s.job.releaseResumeBytes() // only after a panic, if the lifecycle did not know of the kept bytes yet
	s.memory.Release()
	s.giveBackAll(board.Cancelled) // after a panic also the slot
}

// recordEnd records how the answer ended, and concludes the request. A fan-out concludes the
// client's request once, when all its legs have ended.
func (s *stream) recordEnd() {
	now, j, tokens := time.Now(), s.job, s.tokens()
	if j.passthrough != nil { // there is no rank, pace or prefix cache to report on
		j.passthrough.Duration.Observe(now.Sub(j.record.Arrival).Seconds())
		j.record.EndAttempt(s.endError)
		j.srv.Conclude(j.incoming, s.endError)
		return
	}
	j.record.Report(journal.Event{Kind: journal.Relayed, Took: now.Sub(s.firstAt), Tokens: tokens})
	// The arrival of events shows the pace, unless all text may have come at the end.
	eventsShowPace := !s.upstream.unstreamed && !s.upstream.mayHoldTextBack
	if tokens > 1 && s.endError == nil && eventsShowPace {
		j.record.Report(journal.Event{Kind: journal.Paced, Took: s.lastTokenAt.Sub(s.firstTokenAt), Tokens: tokens})
	}
	compareTokenCounts(s)
	s.checkPrefixCache()
	// This names the engine that has failed. EndAttempt, which does not, then finds no attempt to end.
	if failedEngine := s.upstream.failedEngine(); s.endError != nil && failedEngine != "" {
		j.record.Report(journal.Event{Kind: journal.AttemptEnded, Cause: journal.Outcome(s.endError), On: failedEngine, Answer: s.endError})
	}
	j.record.EndAttempt(s.endError)
	if !j.isLeg {
		j.srv.Conclude(j.incoming, s.endError)
	}
}

// compareTokenCounts compares the tokens counted while they came, which are the load of the ranks,
// with the engine's final count. It learns how many tokens the engine puts in a chunk, and counts
// an answer that is off by over 1 %.
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

// collect reads the answer to its end, as one body that it charges to memory. It ends the request.
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
		// readWhole has made an event of the engine's body. It is copied, because Close gives the buffer
		// to other requests.
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

func (s *stream) giveBackAll(kind board.Kind) {
	if s.state == givenBack {
		return
	}
	s.state = givenBack
	s.releaseSlot(kind)
	s.upstream.endAccounting(lifecycle.Spent)
	s.detach()
}

// detach gives back the connection and buffers. If only the end of the HTTP body has not come yet,
// another goroutine reads it, so that the client does not wait for it.
func (s *stream) detach() {
	resp, b := s.upstream.resp, s.upstream.answer
	s.upstream.answer = nil
	if resp != nil && b.Reader.Done() && !resp.Ended() {
		finish := func() {
			drainBody(resp, b)
			b.putBack()
		}
		if s.job.srv.finishing.Run(maxFinishers, finish) == nil { // else too many run, or the proxy shuts down
			return
		}
	}
	if resp != nil {
		resp.Close()
	}
	b.putBack()
}

// releaseSlot gives the slot back once. If the answer is not whole, it first waits until the engine
// has dropped the request, so that the next request of this slot does not run beside it.
func (s *stream) releaseSlot(kind board.Kind) {
	if s.upstream.slot == nil {
		return
	}
	if kind != board.Finished {
		s.upstream.closeAndAwaitEnd()
		if s.upstream.call.IgnoredClose() { // the slot goes to another request all the same
			s.job.srv.metrics.ignoredCloses.Inc()
		}
	}
	// A prefill call need not go on for a client that is gone. If no event came, failDuringPrefill has
	// told it.
	if s.upstream.prefillCall != nil && !s.firstAt.IsZero() {
		abandoned := kind == board.Cancelled
		s.upstream.prefillCall.answerEnded(abandoned)
	}
	s.job.srv.Dispatcher.Release(s.upstream.slot, s.slotOutcome(kind))
	s.upstream.slot = nil
}

// endAccounting takes a call that is over out of the counts of its engine's traffic, and out of the
// calls that a drain may end. Free: the engine has computed nothing. Later calls change nothing.
func (u *upstreamCall) endAccounting(disposition lifecycle.Disposition) {
	computedNothing := disposition == lifecycle.Free
	u.correctTokensToCompute(computedNothing)
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

// Conclude is the last step of a request: it settles its share of the caller's limits, and has the
// journal write its end. Only the first call does this.
func (srv *Server) Conclude(in *Incoming, fail *openai.Error) {
	if !in.concluded.CompareAndSwap(false, true) {
		return // ConcludePanicked was first
	}
	defer srv.openRequests.Add(-1)
	if in.forgetName != nil { // the client can no longer end the request by name
		in.forgetName()
	}
	tokens := in.Record.PromptTokens + in.Record.OutputTokens
	clientLeft := fail != nil && fail.Status == journal.StatusClientClosed
	engineChosen := in.Record.Route != ""
	if tokens == 0 && engineChosen && clientLeft {
		// The client left before the prompt's length was reported. A negative number keeps the estimate.
		tokens = -1
	}
	in.CorrectEstimate(tokens)
	in.Body.Release()
	if in.From != nil { // another proxy sent the request
		srv.Peers.CountReceived(in.Record.Origin, journal.Outcome(fail))
	}
	in.Record.End(fail)
}

// closeAndAwaitEnd ends the call, and waits until the decode engine has closed the connection, too,
// for upstream.NoticeTimeout at most. Otherwise the slot could go to another request while the
// engine still runs this one.
func (u *upstreamCall) closeAndAwaitEnd() {
	if u.resp == nil || u.resp.Ended() {
		return
	}
	u.call.Disconnect(upstream.NoticeTimeout)
	var dropped [1 << 10]byte
	for {
		if _, err := u.resp.Read(dropped[:]); err != nil { // closed by the engine, or the time is over
			return
		}
	}
}

// settleLease gives back the lease of a prefill that has ended, or leaves it to a new owner: the
// hand-off, or the prefill call beside a decode call.
func (r *executor) settleLease(disposition lifecycle.Disposition) {
	if disposition == lifecycle.Refuse && r.hasLeaseOfOthers() {
		disposition = lifecycle.Free // a rank of another group has failed
	}
	switch disposition {
	case lifecycle.Pass:
	case lifecycle.Discard: // the prefill call failed although it returned a hand-off, which has the lease
		r.job.discard(r.handoff)
	default:
		handoff.SettleLease(r.lease, disposition, r.fault)
		endedByClient := r.fault != nil && r.fault.Reason == lifecycle.Left
		if endedByClient && disposition == lifecycle.Free { // the engine keeps nothing
			r.job.noteEnginesFreeIfLeft()
		}
	}
}

// settleKV: a hand-off that may have been read waits until the attempts are over. Until then it is
// not known whether the request makes engines fail, and a discard would send it to one more engine.
func (r *executor) settleKV(disposition lifecycle.Disposition) {
	j := r.job
	switch disposition {
	case lifecycle.Discard:
		j.discard(r.handoff)
	case lifecycle.MaybeRead, lifecycle.MaybeRunning:
		j.maybeRead = append(j.maybeRead, r.handoff)
	default: // Free, or Orphan: freed at the hold timeout
		var noFault *failure.Fault
		handoff.SettleLease(r.handoff.Lease, disposition, noFault)
	}
	r.handoff = nil
}

// settleMaybeRead settles the oldest hand-off in maybeRead. The lifecycle keeps their order.
func (r *executor) settleMaybeRead(disposition lifecycle.Disposition) {
	j := r.job
	if len(j.maybeRead) == 0 { // a panic came before it was added
		return
	}
	oldest := j.maybeRead[0]
	j.maybeRead = j.maybeRead[1:]
	if disposition == lifecycle.Discard {
		oldest.Avoid = j.avoid.ranks() // no rank that has failed at this request
		j.discard(oldest)
		return
	}
	var noFault *failure.Fault
	handoff.SettleLease(oldest.Lease, disposition, noFault)
}

// settleCall: before the answer has begun, it also gives back what the stream holds. Later the
// client may still read the end of the answer, so Close does that.
func (r *executor) settleCall(disposition lifecycle.Disposition) {
	j := r.job
	if r.stream != nil { // nil: a panic came before the stream was made
		r.stream.upstream.endAccounting(disposition)
	}
	// Cancelled: the client left. Free and Spent, of a passed-through call, do not say so.
	if disposition == lifecycle.Cancelled || j.passthrough != nil {
		j.noteEnginesFreeIfLeft()
	}
	if r.stream != nil && !r.answerBegun {
		r.stream.giveBackAll(boardKinds[disposition])
	}
}

// discard frees the KV of a hand-off that no decode will use.
func (j *job) discard(h *handoff.Handoff) {
	if j.client.Left() {
		j.srv.discards.Discard(h, j.noteEnginesFreeIfLeft)
	} else {
		j.srv.discards.Discard(h, nil)
	}
}
