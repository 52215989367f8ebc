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

// readFirst reads an answer up to its first data event, or all of an answer in one piece. deadline is when the first event must be here.
func (s *stream) readFirst(deadline time.Time) error {
	if s.from.whole {
		s.from.resp.SetDeadline(deadline)
		return s.readWhole()
	}
	if contentType := s.from.resp.ContentType(); !bytes.HasPrefix(contentType, []byte("text/event-stream")) {
		s.from.resp.SetDeadline(deadline)
		if bytes.HasPrefix(contentType, []byte("application/json")) { // some routes report an error in this way
			if err := s.readWhole(); err != nil {
				return err
			}
		}
		return fmt.Errorf("the engine answered 200 with %s instead of an event stream", failure.KindOf(contentType))
	}
	s.from.answer.Reader.Reset(s.from.limits(time.Until(deadline)))
	for !s.from.answer.Mirror.Started() && s.stage == flows {
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

// readWhole reads an answer that comes in one piece, and treats it as the only event of a stream. So the mirror counts its tokens, corrects
// its cached_tokens and notices a failure.
func (s *stream) readWhole() error {
	body, err := s.from.resp.ReadAll(maxBodyBytes(s.job.srv.Settings(), s.from.whole))
	if err != nil {
		return err
	}
	return takeWhole(s, body)
}

// takeWhole does the work of readWhole for an answer that was read already; body is the complete answer.
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
	if s.broken == nil && s.from.answer.Mirror.Finished() {
		s.ends()
	}
	return complete(s)
}

// complete ends an answer that has come in full. It fails if the answer did not end by itself, or ended with an error.
func complete(s *stream) error {
	if s.stage < ended {
		s.fails(lifecycle.Garbled, failure.Stream("upstream_incomplete", errNotWhole), errNotWhole)
	}
	if s.broken != nil {
		return errRefusal
	}
	return nil
}

// maxBodyBytes is how many bytes a body in one piece may have. If whole is true, the body is an answer. Else the engine was asked for a
// stream, so the body is an error.
func maxBodyBytes(settings *fleet.Settings, whole bool) int {
	if whole {
		return max(settings.Limits.AnswerBytes, settings.Limits.EventBytes)
	}
	return settings.Limits.EventBytes
}

// tooLong says whether err means that an answer in one piece is larger than allowed. The request asked for such a long answer, so another
// attempt would fail in the same way.
func (s *source) tooLong(err error) bool { return s.whole && errors.Is(err, engine.ErrTooLarge) }

// side names the stream's engine in errors for clients and operators: "decode", or failure.Engine for a rank that also prefills.
func (s *source) side() string {
	if s.rank.Group != "" {
		return failure.Engine
	}
	return "decode"
}

// decodeFault returns the fault of a decode call that ended with err before the client got anything. If the engine refused the request
// in an event of its stream, the client gets this refusal. All else counts as the engine's failure.
func (s *stream) decodeFault(err error) *failure.Fault {
	fault := s.from.fault
	if fault == nil || s.from.tooLong(err) || errors.Is(s.from.answer.Err(), sse.ErrLargeEvent) {
		fault = (&upstream.Call{Leg: lifecycle.Decode, Engine: s.from.rank.Instance, Mixed: s.from.rank.Group != ""}).Broke(err)
	}
	if fault.Far, fault.Open = lifecycle.Headed, true; s.from.answer.Mirror.Started() || s.from.tooLong(err) {
		fault.Far = lifecycle.Through // an event has come, so the engine had pulled the KV before the call failed
	}
	switch {
	case s.from.tooLong(err) || errors.Is(s.from.answer.Err(), sse.ErrLargeEvent):
		fault.Why, fault.Engine = lifecycle.TooLarge, ""
		fault.Answer = failure.BadGateway(s.from.side(), "the event that begins its answer is larger than limits.event_bytes; ask for less")
		if s.from.whole {
			fault.Answer = failure.BadGateway(s.from.side(), "its answer is larger than limits.answer_bytes; ask for less, or for a stream")
		}
		return fault
	case fault != s.from.fault:
		return fault
	case fault.Why == lifecycle.Unusable: // the client has no part of the answer, so another attempt is possible
		fault.Why = lifecycle.Garbled
	}
	if errors.Is(err, errRefusal) {
		err = fmt.Errorf("engine %s: %w: %s", s.from.rank.Target.ID, err, s.forLog(s.broken))
	}
	fault.Err, fault.MostLosses = failure.Undelivered(err, s.from.answer.Mirror.Failure().Message), recomputeMax(s.from.rank.Profile)
	switch {
	case fault.Answer.Status/100 == 4:
	case fault.Why == lifecycle.Silent:
		fault.Answer = failure.Transport(s.from.side(), err)
	default:
		fault.Answer = failure.BadGateway(s.from.side(), fault.Answer.Message)
	}
	return fault
}

// discard makes the prefill engine free the KV of a hand-off that will not be used. If the client has left, the record notes when the KV
// was freed.
func (j *job) discard(h *handoff.Handoff) {
	if j.client.Left() {
		j.srv.discards.Discard(h, j.freed)
	} else {
		j.srv.discards.Discard(h, nil)
	}
}

// overdue says whether a first event would by now come too late: the decode engine may then have pulled another prompt's KV. If so, overdue
// also counts the answer as given up for this reason.
func (s *stream) overdue(h *handoff.Handoff) bool {
	over := h != nil && s.from.wait.Over(time.Now())
	if over && !s.from.whole {
		s.from.countLate()
	}
	return over
}

// countLate counts an answer that is thrown away because the decode engine may have pulled another prompt's KV.
func (s *source) countLate() {
	s.job.srv.metrics.latePulls.Inc()
	s.rank.Lost(s.job.req.Endpoint)
}

// believed says, at the first event of an answer, whether the prefill engine certainly kept the KV until the decode engine had pulled it.
func (s *stream) believed(h *handoff.Handoff) bool {
	if s.from.wait.Arrived(s.now) && !h.Refuted(s.job.srv.Serving(), s.job.srv.Monitor, s.from.wait, s.now) {
		return true
	}
	s.from.countLate()
	return false
}
