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

// fails ends the answer of the present engine before it is complete. answer is the error for the client, and err the cause. If the client
// has a part of the answer, the request's lifecycle decides whether another engine goes on with it.
func (s *stream) fails(why lifecycle.Why, answer *openai.Error, err error) {
	if s.stage >= ended {
		return
	}
	if s.job.client.Left() { // the answer broke off because the client left
		why, answer = lifecycle.Left, failure.Gone
	}
	begun, leg := !s.firstAt.IsZero(), lifecycle.Decode
	if s.job.passed != nil {
		leg = lifecycle.Sole
	}
	switch {
	case begun && why == lifecycle.Throttled:
		why = lifecycle.Rejected
	case begun && why == lifecycle.Rejected && answer.Status/100 == 5: // the engine refuses the proxy's own key, not the request
		why = lifecycle.Erred
	}
	end := lifecycle.Ended{Leg: leg, Far: lifecycle.Through, Why: why, Open: true, Moved: begun && s.from.run.Moved()}
	s.from.fault = failure.Of(end, answer, err)
	s.from.fault.Status, s.from.fault.Engine = s.from.answer.Mirror.Failure().Status, s.from.rank.Instance
	switch {
	case !begun && leg == lifecycle.Sole && s.from.answer.Mirror.Started(): // events for the client and the failure came in one read
		s.finish(answer)
		return
	case !begun:
		s.stage, s.broken = ended, answer
		return
	}
	event := s.job.fell(s.from.fault)
	event.Faulty = answer.Status/100 == 5 && why >= lifecycle.Rejected && why != lifecycle.GivenBack && !s.from.fault.Moved
	s.step(event)
}

// ends notes that the engine has sent all of the answer.
func (s *stream) ends() {
	if s.stage >= ended {
		return
	}
	if s.firstAt.IsZero() { // the whole answer came with the first event
		s.finish(nil)
	}
	s.step(lifecycle.Event{What: lifecycle.Ends})
}

// step reports an event of an answer that has begun to the request's lifecycle, and carries out the effects that the lifecycle asks for.
func (s *stream) step(event lifecycle.Event) {
	r := runner{job: s.job, stream: s, fault: s.from.fault, answerBegun: true}
	event.Left, event.Engine = s.job.client.Left(), s.from.rank.Instance
	var buffer [6]lifecycle.Effect
	effects := s.job.tell(event, buffer[:0])
	defer onPanic(func() { // the effects that are left must still give back the slot and the leases
		for _, effect := range effects {
			if effect.Do == lifecycle.Settle || effect.Do == lifecycle.Find {
				r.do(effect)
			}
		}
	})
	for len(effects) > 0 {
		effect := effects[0]
		effects = effects[1:]
		if event = r.do(effect); effect.Do == lifecycle.Confirm {
			s.step(event)
		}
	}
}

var kinds = map[lifecycle.How]board.Kind{lifecycle.Failing: board.Failed, lifecycle.Cancelled: board.Cancelled,
	lifecycle.Finish: board.Finished}

// finish writes the end of the client's answer; only its first call counts. If fail is nil, the answer is complete. Else it ends with an
// error event, and without the end that a complete answer has.
func (s *stream) finish(fail *openai.Error) {
	if s.stage >= ended {
		return
	}
	if fail != nil && s.job.client.Left() {
		fail = leftError(s.job)
	}
	if s.stage, s.broken = ended, fail; fail != nil {
		s.from.answer.out = s.from.answer.Unend(s.from.answer.out)
	}
	switch {
	case fail == nil:
		s.from.answer.out = s.from.answer.Owed(s.from.answer.out)
	case fail.Status == journal.StatusClientClosed:
		return
	case s.job.passed != nil: // no warning: the request's receipt has the error
	default:
		s.job.srv.Log.Warn("an answer broke off", zap.Inline(s.job), zap.String("engine", s.from.rank.Target.ID),
			zap.Int("tokens", s.tokens()), zap.String("outcome", journal.Outcome(fail)), zap.String("cause", s.forLog(fail)))
	}
	if s.from.answer.Assembler != nil || s.from.whole || s.job.client.isLeg() {
		return // the code that makes one answer of these events writes the end
	}
	fail = cmp.Or(fail, failure.None)
	errorType := fail.TypeIn(s.job.req.Endpoint.Path())
	s.from.answer.out = s.from.answer.Ending(s.from.answer.out, s.broken != nil, fail.Message, errorType, fail.Code)
}

// forLog is why a stream failed, without the engine's own message. Only the client may get this message, because many engines repeat parts
// of the prompt in it.
func (s *stream) forLog(fail *openai.Error) string {
	if said := s.from.answer.Mirror.Failure(); said.Status != 0 && said.Message == fail.Message {
		return fmt.Sprintf("an error event of status %d; the engine's log has its text", said.Status)
	}
	return fail.Message
}

// Errors of decode engines that have answered with status 200.
var (
	errNotWhole = errors.New("the engine's stream ended without a finish_reason")
	errRefusal  = errors.New("the engine's first event was a failure")
)

// movedOut is the error at the end of an answer whose engine was drained, and which no other engine can continue.
func (srv *Server) movedOut() *openai.Error {
	return srv.drained("its engine was taken out of service and the answer cannot go on elsewhere; send the request again")
}

// drained is the error of a request whose engine was taken out of service. If the proxy shuts down, it is failure.Leaving instead.
func (srv *Server) drained(why string) *openai.Error {
	if srv.Serving().Err() != nil {
		return failure.Leaving
	}
	return openai.Unavailable("engine_drained", why, 1)
}

// Close settles the request, however it ended. It first removes the callback for a client that leaves: if the client closes its connection
// later, the callback would end a call that may belong to another request by then.
func (s *stream) Close() {
	if s.stage == settled {
		return
	}
	s.job.client.OnGone(nil)
	s.fails(lifecycle.Left, failure.Gone, nil) // does nothing unless the client ended first
	s.finish(failure.Gone)                     // does nothing unless a panic has ended the request
	s.report()
	s.job.forget() // does nothing unless a panic came before the lifecycle knew of the kept bytes
	s.settle(board.Cancelled)
}

// report writes the outcome, the times and the token counts of the answer into the record and the metrics.
func (s *stream) report() {
	now, j, tokens := time.Now(), s.job, s.tokens()
	if j.passed != nil {
		j.passed.Took.Observe(now.Sub(j.record.Arrival).Seconds())
		j.record.EndAttempt(s.broken)
		j.srv.Conclude(j.incoming, s.broken)
		return
	}
	j.record.Report(journal.Event{What: journal.Relayed, Took: now.Sub(s.firstAt), Tokens: tokens})
	if tokens > 1 && s.broken == nil && !s.from.whole && !s.from.muffled {
		j.record.Report(journal.Event{What: journal.Paced, Took: s.lastTokenAt.Sub(s.firstTokenAt), Tokens: tokens})
	}
	reconcile(s)
	s.reportLocal()
	if failedEngine := s.from.failedOn(); s.broken != nil && failedEngine != "" {
		j.record.Report(journal.Event{What: journal.Failed, Cause: journal.Outcome(s.broken), On: failedEngine, Answer: s.broken})
	}
	j.record.EndAttempt(s.broken)
	if !j.client.isLeg() {
		j.srv.Conclude(j.incoming, s.broken)
	}
}

// reconcile compares two counts of an answer's tokens: the proxy's, made while the chunks came, and the engine's final usage. The proxy's
// count is the load of the ranks, so reconcile learns from the difference how many tokens the engine puts in a chunk.
func reconcile(s *stream) {
	if s.broken != nil || s.from.whole || s.from.muffled {
		return
	}
	s.from.rank.Traffic.Learn(s.from.answer.Mirror.TokensPerChunk)
	usage, _ := s.from.answer.Mirror.Usage()
	if drift, ok := s.from.answer.Mirror.Drift(); ok && max(drift, -drift)*100 > usage.Completion {
		s.job.srv.metrics.miscounted.Inc()
	}
}

// collect reads the answer to its end and returns it as one body, for a client that has not asked for a stream. It settles the request,
// with an answer or with an error.
func (s *stream) collect() ([]byte, *openai.Error) {
	defer s.Close()
	for s.stage < ended {
		if err := s.fill(); err != nil {
			return nil, failure.Stream("upstream_broken", err)
		}
	}
	switch {
	case s.broken != nil:
		return nil, s.broken
	case s.from.whole:
		// readWhole has made one event of the engine's body. The body is copied, because Close gives the buffer to other requests.
		return bytes.TrimSpace(bytes.TrimPrefix(bytes.Clone(s.from.answer.out), []byte("data:"))), nil
	}
	body, err := s.from.answer.Assembler.JSON(nil)
	if err != nil {
		s.broken = failure.Stream("upstream_broken", err)
		return nil, s.broken
	}
	return body, nil
}

// settle gives back the stream's slot, call and buffers, as far as it still holds them. kind tells the dispatcher how the request ended.
func (s *stream) settle(kind board.Kind) {
	if s.stage == settled {
		return
	}
	s.stage = settled
	s.release(kind)
	s.from.hangUp(lifecycle.Spent)
	s.detach()
}

// detach gives back the connection to the engine and the buffers. If the end of the engine's body has not come yet, another goroutine waits
// for it, so that the client does not have to.
func (s *stream) detach() {
	resp, b := s.from.resp, s.from.answer
	s.from.answer = nil
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

// release gives the slot back, once. If the answer is not complete, it first waits until the engine has dropped the request, so that this
// request and the next one with the slot do not run at the same time.
func (s *stream) release(kind board.Kind) {
	if s.from.slot == nil {
		return
	}
	if kind != board.Finished {
		s.from.awaitEnd()
		if s.from.call.Heedless() {
			s.job.srv.metrics.heedless.Inc()
		}
	}
	if s.from.partner != nil && !s.firstAt.IsZero() {
		s.from.partner.close(kind == board.Cancelled)
	}
	outcome := s.outcome(kind)
	if outcome.Kept {
		keepTurn(s)
	}
	s.job.srv.Dispatcher.Release(s.from.slot, outcome)
	s.from.slot = nil
}

// hangUp removes a call that is over from the engine's traffic, and from the calls that a drain may end. If how is Free, the engine has
// computed nothing.
func (s *source) hangUp(how lifecycle.How) {
	s.settleCompute(how == lifecycle.Free)
	if s.heard {
		s.heard = false
		s.rank.Traffic.End()
	}
	if s.beyond {
		s.beyond = false
		s.rank.Traffic.Beyond(-1)
	}
	s.job.srv.Fleet.Untrack(s.run)
}

// Conclude is the end of a request: it gives back the request's share of its caller's limits, and writes the journal's record. Only the
// first call does this. fail is nil if the answer was complete.
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
		tokens = -1 // unknown: the client left before an engine had counted the prompt
	}
	in.Limits.GiveBack(tokens)
	in.Body.Give()
	if in.From != nil {
		srv.Node.Received(in.Record.Origin, journal.Outcome(fail))
	}
	in.Record.End(fail)
}

// awaitEnd ends the call and returns when the decode engine has closed it, so that no other request gets the slot while the engine still
// runs this one. It waits for upstream.Notice at most.
func (s *source) awaitEnd() {
	if s.resp == nil || s.resp.Ended() {
		return
	}
	s.call.Leave(upstream.Notice)
	var rest [1 << 10]byte
	for {
		if _, err := s.resp.Read(rest[:]); err != nil {
			return
		}
	}
}
