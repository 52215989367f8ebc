package request

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"

	"evenkeel/dispatcher/board"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/upstream"
)

// fails ends the answer's present call before the answer was whole. answer is the error for the client, and err the cause. If the answer
// has begun, the request's lifecycle decides what follows: the answer may still go on at another engine.
func (s *stream) fails(why lifecycle.Reason, answer *openai.Error, err error) {
	if s.state >= ended {
		return
	}
	if s.job.client.Left() { // the answer broke off because its client left
		why, answer = lifecycle.Left, failure.Gone
	}
	begun, leg := !s.firstAt.IsZero(), lifecycle.Decode
	if s.job.passthrough != nil {
		leg = lifecycle.Sole
	}
	switch {
	case begun && why == lifecycle.Throttled: // the engine had room, because it began the answer, so it refuses the request itself
		why = lifecycle.Rejected
	case begun && why == lifecycle.Rejected && answer.Status/100 == 5: // the engine refuses evenkeel's own credential
		why = lifecycle.Erred
	}
	end := lifecycle.CallEnd{Call: leg, Progress: lifecycle.Through, Reason: why, Open: true, Moved: begun && s.upstream.tracked.MustMove()}
	s.upstream.fault = failure.Of(end, answer, err)
	s.upstream.fault.Status, s.upstream.fault.Engine = s.upstream.answer.Filter.Failure().Status, s.upstream.rank.Instance
	switch {
	case !begun && leg == lifecycle.Sole && s.upstream.answer.Filter.Started(): // the first event came with the end; the client gets it
		s.finish(answer)
		return
	case !begun: // the client has nothing, so the code that waits for the first event reports the fault
		s.state, s.broken = ended, answer
		return
	}
	event := s.job.failedEvent(s.upstream.fault)
	engineSaidSo := why >= lifecycle.Rejected && why != lifecycle.Preempted // these reasons stand for a status in an event
	event.Faulty = engineSaidSo && answer.Status/100 == 5 && !s.upstream.fault.Moved
	s.step(event)
}

// ends notes that the engine has sent all of the answer.
func (s *stream) ends() {
	if s.state >= ended {
		return
	}
	if s.firstAt.IsZero() { // the whole answer came at once
		s.finish(nil)
	}
	s.step(lifecycle.Event{Kind: lifecycle.Ends})
}

// step reports an event of an answer that has begun to the request's lifecycle, and carries out the effects that this returns.
func (s *stream) step(event lifecycle.Event) {
	r := executor{job: s.job, stream: s, fault: s.upstream.fault, answerBegun: true}
	event.Left, event.Engine = s.job.client.Left(), s.upstream.rank.Instance
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
		if event = r.do(effect); effect.Kind == lifecycle.Confirm {
			s.step(event)
		}
	}
}

// outcomeKinds says how the dispatcher is told of the ways in which a slot is settled. A call without a slot has other dispositions.
var outcomeKinds = map[lifecycle.Disposition]board.Kind{lifecycle.Failing: board.Failed, lifecycle.Cancelled: board.Cancelled,
	lifecycle.Finish: board.Finished}

// finish ends the answer that the client reads. Later calls do nothing. If fail is nil, the answer is whole. Otherwise it ends with an
// error event, so that the client cannot take it for a whole one.
func (s *stream) finish(fail *openai.Error) {
	if s.state >= ended {
		return
	}
	if fail != nil && s.job.client.Left() {
		fail = leftError(s.job)
	}
	if s.state, s.broken = ended, fail; fail != nil { // the engine may have ended an answer that turned out to be wrong
		s.upstream.answer.out = s.upstream.answer.DropEnd(s.upstream.answer.out)
	}
	switch {
	case fail == nil:
		s.upstream.answer.out = s.upstream.answer.MissingUsage(s.upstream.answer.out)
	case fail.Status == journal.StatusClientClosed: // the client reads nothing more
		return
	case s.job.passthrough != nil: // the receipt of a request that is passed through has the error, so nothing is logged
	default:
		s.job.srv.Log.Warn("an answer broke off", zap.Inline(s.job), zap.String("engine", s.upstream.rank.Target.ID),
			zap.Int("tokens", s.tokens()), zap.String("outcome", journal.Outcome(fail)), zap.String("cause", s.forLog(fail)))
	}
	if s.upstream.answer.Assembler != nil || s.upstream.unstreamed || s.job.isLeg {
		return // the code that assembles the answer writes its end
	}
	fail = cmp.Or(fail, failure.None)
	errorType := fail.TypeFor(s.job.req.Endpoint.Path())
	s.upstream.answer.out = s.upstream.answer.Ending(s.upstream.answer.out, s.broken != nil, fail.Message, errorType, fail.Code)
}

// forLog is the reason why a stream failed, without the engine's own words. Only the client gets these words, because many engines repeat
// parts of the prompt in them.
func (s *stream) forLog(fail *openai.Error) string {
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

// movedOut is the error of an answer that was cut at the deadline of a drain, and that no other engine can continue.
func (srv *Server) movedOut() *openai.Error {
	return srv.drained("its engine was taken out of service and the answer cannot go on elsewhere; send the request again")
}

// drained is the error of a request whose engine was taken out of service. If the proxy shuts down, the error says this instead.
func (srv *Server) drained(why string) *openai.Error {
	if srv.Serving().Err() != nil {
		return failure.Leaving
	}
	return openai.Unavailable("engine_drained", why, 1)
}

// Close settles the request, however it ended. It first removes the callback for the client's departure: the engine's connection may serve
// another request soon, and a late departure of this client must not end it.
func (s *stream) Close() {
	if s.state == settled {
		return
	}
	s.job.client.OnGone(nil)
	s.fails(lifecycle.Left, failure.Gone, nil) // takes effect if the client's side ended first
	s.finish(failure.Gone)                     // takes effect if a panic has ended the request's lifecycle
	s.report()
	s.job.forget() // takes effect if something panicked before the lifecycle knew of the kept bytes
	s.settle(board.Cancelled)
}

// report writes into the record and the metrics how the request's answer ended.
func (s *stream) report() {
	now, j, tokens := time.Now(), s.job, s.tokens()
	if j.passthrough != nil {
		j.passthrough.Took.Observe(now.Sub(j.record.Arrival).Seconds())
		j.record.EndAttempt(s.broken)
		j.srv.Conclude(j.incoming, s.broken)
		return
	}
	j.record.Report(journal.Event{Kind: journal.Relayed, Took: now.Sub(s.firstAt), Tokens: tokens})
	if tokens > 1 && s.broken == nil && !s.upstream.unstreamed && !s.upstream.buffered { // other answers do not show the engine's pace
		j.record.Report(journal.Event{Kind: journal.Paced, Took: s.lastTokenAt.Sub(s.firstTokenAt), Tokens: tokens})
	}
	reconcile(s)
	s.reportLocal()
	if failedEngine := s.upstream.failedOn(); s.broken != nil && failedEngine != "" {
		j.record.Report(journal.Event{Kind: journal.Failed, Cause: journal.Outcome(s.broken), On: failedEngine, Answer: s.broken})
	}
	j.record.EndAttempt(s.broken)
	if !j.isLeg {
		j.srv.Conclude(j.incoming, s.broken)
	}
}

// reconcile compares two counts of an answer's tokens: the one made while they came, and the engine's final one. The first count serves as
// the load of the ranks. So reconcile learns how many tokens the engine puts in a chunk, and counts an answer that is off by over 1 %. It
// leaves out answers without a final count, and answers that are not counted chunk by chunk.
func reconcile(s *stream) {
	if s.broken != nil || s.upstream.unstreamed || s.upstream.buffered {
		return
	}
	s.upstream.rank.Traffic.Learn(s.upstream.answer.Filter.TokensPerChunk)
	usage, _ := s.upstream.answer.Filter.Usage()
	if drift, ok := s.upstream.answer.Filter.Drift(); ok && max(drift, -drift)*100 > usage.Completion {
		s.job.srv.metrics.miscounted.Inc()
	}
}

// collect reads the answer to its end and returns it as one body, for a client that has not asked for a stream. It settles the request,
// with an answer or with an error.
func (s *stream) collect() ([]byte, *openai.Error) {
	defer s.Close()
	for s.state < ended {
		if err := s.fill(); err != nil {
			return nil, failure.Stream("upstream_broken", err)
		}
	}
	switch {
	case s.broken != nil:
		return nil, s.broken
	case s.upstream.unstreamed:
		// The buffer has the engine's body as one event, because readWhole makes an event of it. The body is copied, because Close gives
		// the buffer to other requests.
		return bytes.TrimSpace(bytes.TrimPrefix(bytes.Clone(s.upstream.answer.out), []byte("data:"))), nil
	}
	body, err := s.upstream.answer.Assembler.JSON(nil)
	if err != nil {
		s.broken = failure.Stream("upstream_broken", err)
		return nil, s.broken
	}
	return body, nil
}

// settle gives back everything that the stream still holds: its slot, its call and its buffers. kind tells the dispatcher how the request
// ended.
func (s *stream) settle(kind board.Kind) {
	if s.state == settled {
		return
	}
	s.state = settled
	s.release(kind)
	s.upstream.hangUp(lifecycle.Spent)
	s.detach()
}

// detach gives back the call's connection and buffers. If the answer is complete but the end of the HTTP body has not come yet, another
// goroutine reads it, so that the client does not wait for it.
func (s *stream) detach() {
	resp, b := s.upstream.resp, s.upstream.answer
	s.upstream.answer = nil
	if resp != nil && b.Reader.Done() && !resp.Ended() {
		finish := func() {
			finishBody(resp, b)
			b.putBack()
		}
		if s.job.srv.tails.Run(mostTails, finish) == nil {
			return
		}
	}
	if resp != nil {
		resp.Close()
	}
	b.putBack()
}

// release gives the slot back, once, and tells the dispatcher how the answer ended. If the answer is not whole, it first waits until the
// engine has dropped the request, so that the next request of this slot does not run beside it. If the engine keeps the KV of the answer,
// the KV is remembered for the next turn of the conversation.
func (s *stream) release(kind board.Kind) {
	if s.upstream.slot == nil {
		return
	}
	if kind != board.Finished {
		s.upstream.awaitEnd()
		if s.upstream.call.IgnoredClose() {
			s.job.srv.metrics.heedless.Inc()
		}
	}
	if s.upstream.partner != nil && !s.firstAt.IsZero() { // the end of a call without a first event was reported by lostBeside
		s.upstream.partner.close(kind == board.Cancelled)
	}
	outcome := s.outcome(kind)
	if outcome.Kept {
		keepTurn(s)
	}
	s.job.srv.Dispatcher.Release(s.upstream.slot, outcome)
	s.upstream.slot = nil
}

// hangUp removes a call that is over from the rank's traffic, and from the calls that a drain may end. If disposition is Free, the
// engine has computed nothing.
func (u *upstreamCall) hangUp(disposition lifecycle.Disposition) {
	u.settleCompute(disposition == lifecycle.Free)
	if u.heard {
		u.heard = false
		u.rank.Traffic.End()
	}
	if u.beyond {
		u.beyond = false
		u.rank.Traffic.AddSentWithoutSlot(-1)
	}
	u.job.srv.Fleet.Untrack(u.tracked)
}

// Conclude is the last step of a request. It gives back the request's share of its caller's limits, and has the journal write how the
// request ended. Only the first call does this. fail is the request's error; nil: the answer was whole.
func (srv *Server) Conclude(in *Incoming, fail *openai.Error) {
	if !in.concluded.CompareAndSwap(false, true) {
		return // Broken ended the request before its answer was closed
	}
	defer srv.open.Add(-1)
	if in.forgetName != nil {
		in.forgetName()
	}
	tokens := in.Record.PromptTokens + in.Record.OutputTokens
	if tokens == 0 && in.Record.Route != "" && fail != nil && fail.Status == journal.StatusClientClosed {
		tokens = -1 // unknown: the client left while an engine computed the prompt, before the engine reported its length
	}
	in.CorrectEstimate(tokens)
	in.Body.Release()
	if in.From != nil {
		srv.Peers.CountReceived(in.Record.Origin, journal.Outcome(fail))
	}
	in.Record.End(fail)
}

// awaitEnd ends the call, and returns when the decode engine has noticed this. Otherwise the slot could go to another request while the
// engine still runs this one. It waits for upstream.Notice at most.
func (u *upstreamCall) awaitEnd() {
	if u.resp == nil || u.resp.Ended() {
		return
	}
	u.call.Disconnect(upstream.NoticeTimeout)
	var rest [1 << 10]byte
	for {
		if _, err := u.resp.Read(rest[:]); err != nil {
			return
		}
	}
}
