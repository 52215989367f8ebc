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

// readFirst reads an answer up to its first data event. If the answer comes in one piece, it reads all of it. deadline is when the first
// event must have arrived.
func (s *stream) readFirst(deadline time.Time) error {
	if s.upstream.unstreamed {
		s.upstream.resp.SetDeadline(deadline)
		return s.readWhole()
	}
	if contentType := s.upstream.resp.ContentType(); !bytes.HasPrefix(contentType, []byte("text/event-stream")) {
		s.upstream.resp.SetDeadline(deadline)
		if bytes.HasPrefix(contentType, []byte("application/json")) { // some routes answer 200 with an error as JSON
			if err := s.readWhole(); err != nil {
				return err
			}
		}
		return fmt.Errorf("the engine answered 200 with %s instead of an event stream", failure.KindOf(contentType))
	}
	s.upstream.answer.Reader.Reset(s.upstream.limits(time.Until(deadline)))
	for !s.upstream.answer.Filter.Started() && s.state == flows {
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

// readWhole reads an answer that comes in one piece, and handles it like the only event of a stream. So the filter counts its tokens,
// corrects its cached_tokens and notices a failure.
func (s *stream) readWhole() error {
	body, err := s.upstream.resp.ReadAll(maxBodyBytes(s.job.srv.Settings(), s.upstream.unstreamed))
	if err != nil {
		return err
	}
	return takeWhole(s, body)
}

// takeWhole handles an answer in one piece that was already read. body is the whole answer.
func takeWhole(s *stream, body []byte) error {
	event := bytes.NewBuffer(make([]byte, 0, len(body)+16)) // 16: room for "data: " and the line ends
	event.WriteString("data: ")
	if err := json.Compact(event, body); err != nil {
		return errNotJSON
	}
	event.WriteString("\n\n")
	s.now = time.Now()
	for e := range sse.Events(event.Bytes()) {
		s.event(e)
	}
	if s.broken == nil && s.upstream.answer.Filter.Finished() {
		s.ends()
	}
	return complete(s)
}

// complete ends an answer whose last byte has been read. It returns an error if the answer lacks its proper end, or ended with an error.
func complete(s *stream) error {
	if s.state < ended {
		s.fails(lifecycle.Garbled, failure.Stream("upstream_incomplete", errNotWhole), errNotWhole)
	}
	if s.broken != nil {
		return errRefusal
	}
	return nil
}

// maxBodyBytes is how many bytes a body in one piece may have. If whole is true, the body is an answer. Otherwise a stream was asked for,
// so the body is an error.
func maxBodyBytes(settings *fleet.Settings, whole bool) int {
	if whole {
		return max(settings.Limits.AnswerBytes, settings.Limits.EventBytes)
	}
	return settings.Limits.EventBytes
}

// tooLong says whether err means that an answer in one piece is larger than allowed. A retry at another engine would not help, because the
// request itself asked for an answer of this size.
func (u *upstreamCall) tooLong(err error) bool {
	return u.unstreamed && errors.Is(err, engine.ErrTooLarge)
}

// side is the name of the call's engine in error messages for clients and operators: "decode", or failure.Engine for a rank that also
// prefills.
func (u *upstreamCall) side() string {
	if u.rank.Group != "" {
		return failure.Engine
	}
	return "decode"
}

// decodeFault returns the fault of a decode call that ended with err before the client got anything. If the engine refused the request
// in an event of its stream, the client gets this refusal. Every other end counts as a failure of the engine.
func (s *stream) decodeFault(err error) *failure.Fault {
	tooLong := s.upstream.tooLong(err)
	tooLarge := tooLong || errors.Is(s.upstream.answer.Err(), sse.ErrLargeEvent)
	fault := s.upstream.fault // nil: err does not come from the events of the answer
	if fault == nil || tooLarge {
		fault = (&upstream.Call{Kind: lifecycle.Decode, Engine: s.upstream.rank.Instance, Mixed: s.upstream.rank.Group != ""}).Broke(err)
	}
	fault.Progress, fault.Open = lifecycle.Headed, true
	if s.upstream.answer.Filter.Started() || tooLong {
		fault.Progress = lifecycle.Through // the engine had read the KV before the call broke
	}
	switch {
	case tooLarge:
		fault.Reason, fault.Engine = lifecycle.TooLarge, ""
		fault.Answer = failure.BadGateway(s.upstream.side(), "the event that begins its answer is larger than limits.event_bytes; ask for less")
		if s.upstream.unstreamed {
			fault.Answer = failure.BadGateway(s.upstream.side(), "its answer is larger than limits.answer_bytes; ask for less, or for a stream")
		}
		return fault
	case fault != s.upstream.fault: // made above, with the error for the client
		return fault
	case fault.Reason == lifecycle.Unusable: // the client has nothing of the answer yet
		fault.Reason = lifecycle.Garbled
	}
	if errors.Is(err, errRefusal) {
		err = fmt.Errorf("engine %s: %w: %s", s.upstream.rank.Target.ID, err, s.forLog(s.broken))
	}
	fault.Err, fault.MostLosses = failure.Undelivered(err, s.upstream.answer.Filter.Failure().Message), recomputeMax(s.upstream.rank.Profile)
	switch {
	case fault.Answer.Status/100 == 4: // the client gets the refusal as it is
	case fault.Reason == lifecycle.Silent:
		fault.Answer = failure.Transport(s.upstream.side(), err)
	default:
		fault.Answer = failure.BadGateway(s.upstream.side(), fault.Answer.Message)
	}
	return fault
}

// discard frees the KV of a hand-off that no decode will use. If the client has left, the record notes the moment when the KV is free.
func (j *job) discard(h *handoff.Handoff) {
	if j.client.Left() {
		j.srv.discards.Discard(h, j.freed)
	} else {
		j.srv.discards.Discard(h, nil)
	}
}

// overdue says whether a first event would now come too late to be believed, because the prefill engine may have freed the KV of the
// hand-off. If so, it also counts the answer as late.
func (s *stream) overdue(h *handoff.Handoff) bool {
	tooLate := h != nil && s.upstream.pull.CheckExpired(time.Now())
	if tooLate && !s.upstream.unstreamed {
		s.upstream.countLate()
	}
	return tooLate
}

// countLate counts an answer that is not believed, because its KV may have been another prompt's when the decode engine read it.
func (u *upstreamCall) countLate() {
	u.job.srv.metrics.latePulls.Inc()
	u.rank.RecordLateRead(u.job.req.Endpoint)
}

// believed says whether the prefill engine certainly kept the KV until the decode engine had read it. It is called at the first event.
func (s *stream) believed(h *handoff.Handoff) bool {
	if s.upstream.pull.RecordFirstEvent(s.now) && !h.MayHaveExpired(s.job.srv.Serving(), s.job.srv.Monitor, s.upstream.pull, s.now) {
		return true
	}
	s.upstream.countLate()
	return false
}
