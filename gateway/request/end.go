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

// fails ends the source before the answer was whole. answer is the error for the client, and err the cause. If the answer has begun, the
// request's lifecycle says what follows, so it may still go on elsewhere.
func (s *stream) fails(why lifecycle.Why, answer *openai.Error, err error) {
	if s.stage >= ended {
		return
	}
	if s.job.client.Left() { // that is why it broke
		why, answer = lifecycle.Left, failure.Gone
	}
	begun, leg := !s.firstAt.IsZero(), lifecycle.Decode
	if s.job.passed != nil {
		leg = lifecycle.Sole
	}
	switch {
	case begun && why == lifecycle.Throttled:
		why = lifecycle.Rejected
	case begun && why == lifecycle.Rejected && answer.Status/100 == 5: // it refuses our own credential
		why = lifecycle.Erred
	}
	end := lifecycle.Ended{Leg: leg, Far: lifecycle.Through, Why: why, Open: true, Moved: begun && s.from.run.Moved()}
	s.from.fault = failure.Of(end, answer, err)
	s.from.fault.Status, s.from.fault.Engine = s.from.answer.Mirror.Failure().Status, s.from.rank.Instance
	switch {
	case !begun && leg == lifecycle.Sole && s.from.answer.Mirror.Started(): // its first event came with the end, and is for the client
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
	if s.firstAt.IsZero() { // all of it came at once
		s.finish(nil)
	}
	s.step(lifecycle.Event{What: lifecycle.Ends})
}

// step reports to the life what became of an answer that has begun, and carries out the effects.
func (s *stream) step(event lifecycle.Event) {
	r := runner{job: s.job, stream: s, fault: s.from.fault, answerBegun: true}
	event.Left, event.Engine = s.job.client.Left(), s.from.rank.Instance
	var buffer [6]lifecycle.Effect
	effects := s.job.tell(event, buffer[:0])
	defer onPanic(func() { // give back what the remaining effects were to give back
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

// finish ends what the client reads, once. The answer is whole if fail is nil. Else it ends with an error event, and never as if it were
// whole.
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
	case s.job.passed != nil: // the request's receipt says it
	default:
		s.job.srv.Log.Warn("an answer broke off", zap.Inline(s.job), zap.String("engine", s.from.rank.Target.ID),
			zap.Int("tokens", s.tokens()), zap.String("outcome", journal.Outcome(fail)), zap.String("cause", s.forLog(fail)))
	}
	if s.from.answer.Assembler != nil || s.from.whole || s.job.client.isLeg() {
		return // the code that puts the answer together writes how it ended
	}
	fail = cmp.Or(fail, failure.None)
	errorType := fail.TypeIn(s.job.req.Endpoint.Path())
	s.from.answer.out = s.from.answer.Ending(s.from.answer.out, s.broken != nil, fail.Message, errorType, fail.Code)
}

// forLog is why a stream failed, without the engine's own words. Only the client may get those, because many engines repeat parts of the
// prompt in them.
func (s *stream) forLog(fail *openai.Error) string {
	if said := s.from.answer.Mirror.Failure(); said.Status != 0 && said.Message == fail.Message {
		return fmt.Sprintf("an error event of status %d; the engine's log has its text", said.Status)
	}
	return fail.Message
}

// What a decode engine can do wrong after a status of 200.
var (
	errNotWhole = errors.New("the engine's stream ended without a finish_reason")
	errRefusal  = errors.New("the engine's first event was a failure")
)

// movedOut is the end of an answer that a drain's deadline cut and that no other
// engine takes up.
func (srv *Server) movedOut() *openai.Error {
	return srv.drained("its engine was taken out of service and the answer cannot go on elsewhere; send the request again")
}

// drained is the end of a request whose engine was taken out of service, unless the proxy shuts down.
func (srv *Server) drained(why string) *openai.Error {
	if srv.Serving().Err() != nil {
		return failure.Leaving
	}
	return openai.Unavailable("engine_drained", why, 1)
}

// Close settles the request, however it ended. The client's callback is removed first: a late FIN of the client must not end a connection
// that another request has by then.
func (s *stream) Close() {
	if s.stage == settled {
		return
	}
	s.job.client.OnGone(nil)
	s.fails(lifecycle.Left, failure.Gone, nil) // if the client's side ended first
	s.finish(failure.Gone)                     // if the life is over, because something panicked
	s.report()
	s.job.forget() // if something panicked before the life knew of the kept bytes
	s.settle(board.Cancelled)
}

// report writes into the record and the metrics how the answer went.
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

// reconcile compares an answer's tokens, as counted while they came, with the engine's final count. The count while they come is the
// load of the ranks, so it learns from the difference how many tokens the engine puts in a chunk.
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
		// The buffer has the engine's body as one event, because readWhole makes an event of it. The body is copied, because Close gives
		// the buffer to other requests.
		return bytes.TrimSpace(bytes.TrimPrefix(bytes.Clone(s.from.answer.out), []byte("data:"))), nil
	}
	body, err := s.from.answer.Assembler.JSON(nil)
	if err != nil {
		s.broken = failure.Stream("upstream_broken", err)
		return nil, s.broken
	}
	return body, nil
}

// settle gives back all that the stream still holds: its slot, its call and its buffers. kind is how the request ended for the
// dispatcher.
func (s *stream) settle(kind board.Kind) {
	if s.stage == settled {
		return
	}
	s.stage = settled
	s.release(kind)
	s.from.hangUp(lifecycle.Spent)
	s.detach()
}

// detach gives back the source's connection and buffers. If the end of the body has
// not come yet, another goroutine waits for it, so that the client does not.
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

// release gives the slot back, once. If the answer is not whole, it first waits until the engine has dropped the request, so that the
// next request of this slot does not run beside it.
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

// hangUp takes a call that is over out of the engine's traffic, and out of what a drain may end. The engine has computed nothing if how
// is Free.
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

// Conclude gives back what a finished request holds of its caller's limits, and has
// the journal write what became of it. It is the very end of a request, and does this
// once. fail is nil for an answer that was whole.
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
		tokens = -1 // the client left while an engine computed the prompt, and had not been told its length
	}
	in.Limits.GiveBack(tokens)
	in.Body.Give()
	if in.From != nil {
		srv.Node.Received(in.Record.Origin, journal.Outcome(fail))
	}
	in.Record.End(fail)
}

// awaitEnd ends the call and returns when the decode engine has noticed, so that no other request has the slot while the engine still
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
