package request

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"evenkeel/engine"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/handoff"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/upstream"
	"evenkeel/sse"
)

func (s *stream) first(deadline time.Time) error {
	if s.whole {
		s.resp.SetDeadline(deadline)
		return s.readWhole()
	}
	if ct := s.resp.ContentType(); !bytes.HasPrefix(ct, []byte("text/event-stream")) {
		s.resp.SetDeadline(deadline)
		if bytes.HasPrefix(ct, []byte("application/json")) { // some routes answer so with an error
			if err := s.readWhole(); err != nil {
				return err
			}
		}
		return fmt.Errorf("the engine answered 200 with %s instead of an event stream", failure.KindOf(ct))
	}
	s.answer.Reader.Reset(s.limits(time.Until(deadline)))
	for !s.answer.Mirror.Started() && s.stage == flows {
		if err := s.fill(); err != nil {
			return err
		}
	}
	if s.broken != nil {
		return errRefusal
	}
	return nil
}

var errNotJSON = errors.New("the engine's answer is not JSON")

// readWhole takes an answer that comes in one piece as if it were the one event
// of a stream: so the mirror counts it, corrects its cached_tokens and knows a
// failure.
func (s *stream) readWhole() error {
	body, err := s.resp.ReadAll(mostBytes(s.job.srv.Settings(), s.whole))
	if err != nil {
		return err
	}
	return takeWhole(s, body)
}

// takeWhole is readWhole of an answer that has been read.
func takeWhole(s *stream, body []byte) error {
	line := bytes.NewBuffer(make([]byte, 0, len(body)+16))
	line.WriteString("data: ")
	if err := json.Compact(line, body); err != nil {
		return errNotJSON
	}
	line.WriteString("\n\n")
	s.now = time.Now()
	for e := range sse.Events(line.Bytes()) {
		s.event(e)
	}
	if s.broken == nil && s.answer.Mirror.Finished() {
		s.ends()
	}
	return complete(s)
}

// complete ends an answer that has come in full. If the answer has not ended by itself, that is a failure.
func complete(s *stream) error {
	if s.stage < ended {
		s.fails(lifecycle.Garbled, failure.Stream("upstream_incomplete", errNotWhole), errNotWhole)
	}
	if s.broken != nil {
		return errRefusal
	}
	return nil
}

// mostBytes is how many bytes a body in one piece may have. It is an answer if whole is set. Else the engine should have streamed, and the
// body is its error.
func mostBytes(set *fleet.Settings, whole bool) int {
	if whole {
		return max(set.Limits.AnswerBytes, set.Limits.EventBytes)
	}
	return set.Limits.EventBytes
}

// tooLong says whether a whole answer is larger than allowed. The request asked for so
// much, so no other engine would answer otherwise.
func (s *source) tooLong(err error) bool { return s.whole && errors.Is(err, engine.ErrTooLarge) }

// side is what the stream's engine is called in errors.
func (s *source) side() string {
	if s.rank.Group != "" {
		return failure.Engine
	}
	return "decode"
}

// failure is the fault of a decode that forwarded nothing. The client gets a refusal that
// came late. All else counts as the engine's failure.
func (s *stream) failure(err error) *failure.Fault {
	f := s.fault
	if f == nil || s.tooLong(err) || errors.Is(s.answer.Err(), sse.ErrLargeEvent) {
		f = (&upstream.Call{Leg: lifecycle.Decode, Engine: s.rank.Instance, Alone: s.rank.Group != ""}).Broke(err)
	}
	if f.Far, f.Open = lifecycle.Headed, true; s.answer.Mirror.Started() || s.tooLong(err) {
		f.Far = lifecycle.Through // the KV had been read when it broke
	}
	switch {
	case s.tooLong(err) || errors.Is(s.answer.Err(), sse.ErrLargeEvent):
		f.Why, f.Engine = lifecycle.TooLarge, ""
		f.Answer = failure.BadGateway(s.side(), "the event that begins its answer is larger than limits.event_bytes; ask for less")
		if s.whole {
			f.Answer = failure.BadGateway(s.side(), "its answer is larger than limits.answer_bytes; ask for less, or for a stream")
		}
		return f
	case f != s.fault:
		return f
	case f.Why == lifecycle.Unusable: // the client has nothing of what came so far
		f.Why = lifecycle.Garbled
	}
	if errors.Is(err, errRefusal) {
		err = fmt.Errorf("engine %s: %w: %s", s.rank.Target.ID, err, s.forLog(s.broken))
	}
	f.Err, f.Rooms = failure.Undelivered(err, s.answer.Mirror.Failure().Message), recomputeMax(s.rank.Profile)
	switch {
	case f.Answer.Status/100 == 4:
	case f.Why == lifecycle.Silent:
		f.Answer = failure.Transport(s.side(), err)
	default:
		f.Answer = failure.BadGateway(s.side(), f.Answer.Message)
	}
	return f
}

func (j *job) discard(h *handoff.Handoff) {
	if j.client.Left() {
		j.srv.discards.Discard(h, j.freed)
	} else {
		j.srv.discards.Discard(h, nil)
	}
}

// overdue says whether a first event would by now come too late to be believed, and counts the answer that was given up then.
func (s *stream) overdue(h *handoff.Handoff) bool {
	over := h != nil && s.wait.Over(time.Now())
	if over && !s.whole {
		s.late()
	}
	return over
}

// late counts an answer whose KV may have been another prompt's.
func (s *source) late() {
	s.job.srv.metrics.latePulls.Inc()
	s.rank.Lost(s.job.req.Endpoint)
}

// believed says whether the KV of an answer whose first event has come was certainly kept until it was read.
func (s *stream) believed(h *handoff.Handoff) bool {
	if s.wait.Arrived(s.now) && !h.Refuted(s.job.srv.Serving(), s.job.srv.Monitor, s.wait, s.now) {
		return true
	}
	s.late()
	return false
}
