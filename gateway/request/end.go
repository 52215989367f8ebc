package request

import (
	"cmp"
	"errors"
	"fmt"

	"go.uber.org/zap"

	"evenkeel/dispatcher/board"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/life"
	"evenkeel/gateway/openai"
)

// fails ends the source before the answer was whole. Where the answer has begun, its life says what follows.
func (s *stream) fails(why life.Why, answer *openai.Error, err error) {
	if s.stage >= ended {
		return
	}
	if s.job.client.Left() { // that is why it broke
		why, answer = life.Left, failure.Gone()
	}
	begun := !s.firstAt.IsZero()
	switch {
	case begun && why == life.Throttled:
		why = life.Rejected
	case begun && why == life.Rejected && answer.Status/100 == 5: // it refuses our own credential
		why = life.Erred
	}
	s.fault = failure.Of(life.Ended{Leg: life.Decode, Far: life.Through, Why: why, Open: true, Moved: begun && s.run.Moved()}, answer, err)
	s.fault.Status, s.fault.Engine = s.Mirror.Failure().Status, s.rank.Instance
	if !begun {
		s.stage, s.broken = ended, answer
		return
	}
	e := s.job.fell(s.fault)
	e.Faulty = answer.Status/100 == 5 && why >= life.Rejected && why != life.GivenBack
	s.step(e)
}

// ends ends an answer that is whole.
func (s *stream) ends() {
	if s.stage >= ended {
		return
	}
	if s.firstAt.IsZero() { // all of it came at once
		s.finish(nil)
	}
	s.step(life.Event{What: life.Ends})
}

// step tells the life of an answer that has begun what became of it, and carries out what is to be done.
func (s *stream) step(e life.Event) {
	j := s.job
	e.Left, e.Engine = j.client.Left(), s.rank.Instance
	var room [6]life.Effect
	for _, x := range j.tell(e, room[:0]) {
		switch x.Do {
		case life.Confirm: // the decode engine is done with it, whatever the prefill engine says
			e := life.Event{What: life.Believed}
			if f := s.partner.Believe(s.Mirror.Prompt(), j.client.Gone()); f != nil {
				s.fault, e.What = f, life.Fell
			}
			s.step(e)
		case life.GoOn: // fill does, once the client has what came so far
			s.stage = lost
		case life.EndWhole:
			s.finish(nil)
		case life.BreakOff:
			s.finish(s.fault.Answer)
		case life.Settle:
			s.release(kinds[x.How])
		case life.Find:
			j.find(x.Finding)
		default:
			s.judge(x)
		}
	}
}

// kinds are the ways in which a slot goes back.
var kinds = map[life.How]board.Kind{life.Failing: board.Failed, life.Cancelled: board.Cancelled, life.Finish: board.Finished}

// finish closes the stream's contents: whole when fail is nil, else with an error event, never as if whole.
func (s *stream) finish(fail *openai.Error) {
	if s.stage >= ended {
		return
	}
	if fail != nil && s.job.client.Left() {
		fail = failure.Gone()
	}
	s.stage, s.broken = ended, fail
	switch {
	case fail == nil:
		s.out = s.Owed(s.out)
	case fail.Status == journal.StatusClientClosed:
		return
	default:
		s.job.srv.Log.Warn("an answer broke off", zap.Inline(s.job), zap.String("engine", s.rank.Target.ID),
			zap.Int("tokens", s.tokens()), zap.String("outcome", journal.Outcome(fail)), zap.String("cause", s.forLog(fail)))
	}
	if s.Assembler != nil || s.whole || s.job.client.isLeg() {
		return // whoever puts the answer together says how it ended
	}
	fail = cmp.Or(fail, failure.None)
	s.out = s.Ending(s.out, s.broken != nil, fail.Message, fail.TypeIn(s.job.req.Endpoint.Path()), fail.Code)
}

// forLog is why a stream failed, without the words of the engine. Only the client
// may get those, because many engines repeat what they were sent.
func (s *stream) forLog(fail *openai.Error) string {
	if said := s.Mirror.Failure(); said.Status != 0 && said.Message == fail.Message {
		return fmt.Sprintf("an error event of status %d; the engine's log has its text", said.Status)
	}
	return fail.Message
}

// What a decode engine can do wrong beneath a 200.
var (
	errNotWhole = errors.New("the engine's stream ended without a finish_reason")
	errRefusal  = errors.New("the engine's first event was a failure")
)

// movedOut is the end of an answer that a drain's deadline cut and that no other
// engine takes up.
func (srv *Server) movedOut() *openai.Error {
	if srv.Serving().Err() != nil {
		return failure.Leaving()
	}
	return openai.Unavailable("engine_drained", "its engine was taken out of service and the answer cannot go on elsewhere; send the request again", 1)
}
