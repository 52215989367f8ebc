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
	"evenkeel/mooncake"
	"evenkeel/sse"
)

// readFirst reads an answer up to its first data event, or all of an answer in one piece.
func (s *stream) readFirst(deadline time.Time) error {
	if s.upstream.unstreamed {
		s.upstream.resp.SetDeadline(deadline)
		return s.readWhole()
	}
	if contentType := s.upstream.resp.ContentType(); !bytes.HasPrefix(contentType, []byte("text/event-stream")) {
		s.upstream.resp.SetDeadline(deadline)
		s.upstream.wrongType = fmt.Errorf("the engine answered 200 with %s instead of an event stream",
			failure.DescribeContentType(contentType))
		if bytes.HasPrefix(contentType, []byte("application/json")) { // some routes answer 200 with an error
			if err := s.readWhole(); err != nil {
				return err
			}
		}
		return s.upstream.wrongType
	}
	s.upstream.answer.Reader.Reset(s.upstream.streamLimits(time.Until(deadline)))
	for !s.upstream.answer.Filter.Started() && s.state == flowing {
		if err := s.fill(); err != nil {
			return err
		}
	}
	if s.endError != nil { // a failure of the engine, or its refusal
		return errRefusal
	}
	return nil
}

var errNotJSON = errors.New("the engine's answer is not JSON")

// readWhole handles an answer in one piece like the only event of a stream, so that the filter
// counts its tokens, corrects its cached_tokens and notices a failure.
func (s *stream) readWhole() error {
	body, err := s.upstream.resp.ReadAll(maxBodyBytes(s.job.srv.Settings(), s.upstream.unstreamed))
	if err != nil {
		return err
	}
	return processWhole(s, body)
}

// processWhole writes the answer on one line, as an event needs it.
func processWhole(s *stream, body []byte) error {
	event := bytes.NewBuffer(make([]byte, 0, len(body)+16)) // for "data: " and the line ends
	event.WriteString("data: ")
	if err := json.Compact(event, body); err != nil {
		return errNotJSON
	}
	event.WriteString("\n\n")
	s.readAt = time.Now()
	for e := range sse.Events(event.Bytes()) {
		s.processEvent(e)
	}
	// No [DONE] follows an answer in one piece.
	if s.endError == nil && s.upstream.answer.Filter.Finished() {
		s.endWhole()
	}
	return requireComplete(s)
}

// requireComplete ends an answer whose last byte has been read. errRefusal only says that the
// stream has failed: s.upstream.fault and s.endError say why.
func requireComplete(s *stream) error {
	if s.state < ended {
		s.endFailed(lifecycle.Garbled, failure.StreamBroke("upstream_incomplete", errNotWhole), errNotWhole)
	}
	if s.endError != nil {
		return errRefusal
	}
	return nil
}

// maxBodyBytes: if the body is not the answer, a stream was asked for, so the body is an error.
func maxBodyBytes(settings *fleet.Settings, isAnswer bool) int {
	if isAnswer {
		return max(settings.Limits.AnswerBytes, settings.Limits.EventBytes)
	}
	return settings.Limits.EventBytes
}

// answerTooLarge: a retry at another engine would not help, because the request itself asked for an
// answer of this size.
func (u *upstreamCall) answerTooLarge(err error) bool {
	return u.unstreamed && errors.Is(err, engine.ErrTooLarge)
}

// alsoPrefills: the roster sets Group only for ranks that prefill and decode.
func (u *upstreamCall) alsoPrefills() bool { return u.rank.Group != "" }

// sideName is the name of the call's engine in error messages.
func (u *upstreamCall) sideName() string {
	if u.alsoPrefills() {
		return failure.Engine
	}
	return "decode"
}

// decodeFault: Open says that the engine had begun its answer (status 200), so that it may still
// work on the request.
func (s *stream) decodeFault(err error) *failure.Fault {
	answerTooLarge := s.upstream.answerTooLarge(err)
	var fault *failure.Fault
	switch {
	case answerTooLarge || errors.Is(s.upstream.answer.Err(), sse.ErrLargeEvent):
		fault = tooLargeFault(s, err)
	case s.upstream.fault == nil: // the connection or the body failed
		fault = brokenCallFault(s, err)
	default:
		fault = reportedFault(s, err)
	}
	fault.Progress, fault.Open = lifecycle.Headed, true // the head does not show that the KV was read
	firstEventCame := s.upstream.answer.Filter.Started()
	if firstEventCame || answerTooLarge { // both consist of tokens that were computed from the KV
		fault.Progress = lifecycle.Through // the engine had read the KV
	}
	return fault
}

func brokenCallFault(s *stream, err error) *failure.Fault {
	rank := s.upstream.rank
	return (&upstream.Call{Kind: lifecycle.Decode, Engine: rank.Instance, Aggregated: s.upstream.alsoPrefills()}).FaultOf(err)
}

// tooLargeFault: the request has asked for so much, so no engine is blamed.
func tooLargeFault(s *stream, err error) *failure.Fault {
	fault := brokenCallFault(s, err)
	fault.Reason, fault.BlamedEngine = lifecycle.TooLarge, ""
	why := "the event that begins its answer is larger than limits.event_bytes; ask for less"
	if s.upstream.unstreamed {
		why = "its answer is larger than limits.answer_bytes; ask for less, or for a stream"
	}
	fault.ClientError = failure.BadGateway(s.upstream.sideName(), why)
	return fault
}

// reportedFault completes the fault of a first event that reported a failure, or could not be read.
func reportedFault(s *stream, err error) *failure.Fault {
	fault := s.upstream.fault
	// The client has nothing, so another engine may be tried, as after Garbled.
	if fault.Reason == lifecycle.Unusable {
		fault.Reason = lifecycle.Garbled
	}
	if errors.Is(err, errRefusal) { // name the engine and its status in the log
		err = fmt.Errorf("engine %s: %w: %s", s.upstream.rank.Target.ID, err, s.logText(s.endError))
	}
	// KV that did not arrive gets a mark, by which the request is not taken for the cause.
	fault.Err = failure.MarkUndelivered(err, s.upstream.answer.Filter.Failure().Message)
	fault.MostLosses = maxRecomputes(s.upstream.rank.Profile) // for want of KV memory
	switch {
	case fault.ClientError.Status/100 == 4: // the client gets the engine's refusal as it is
	case fault.Reason == lifecycle.Silent:
		fault.ClientError = failure.NoAnswer(s.upstream.sideName(), err)
	default:
		fault.ClientError = failure.BadGateway(s.upstream.sideName(), fault.ClientError.Message)
	}
	return fault
}

// countLateAnswer counts an answer that the client does not get, because its KV may have been
// another prompt's.
func (u *upstreamCall) countLateAnswer() { u.job.srv.metrics.latePulls.Inc() }

// withholdIfAnothers is called after the first event, or the whole of an answer in one piece. The
// client must not get an answer that may be made of another prompt's KV.
func (s *stream) withholdIfAnothers(h *handoff.Handoff) (withheld bool) {
	u := s.upstream
	freed := mooncake.FreedUnknown
	if u.unstreamed && h != nil && !s.readAt.Before(h.FirstEventBy()) {
		freed = h.FreedSince(u.job.srv.Serving(), u.job.srv.Monitor, u.job.srv.Engines())
	}
	answer := u.pull.FirstEvent(s.readAt)
	answer.Freed = freed
	if !answer.MayBeAnotherPrompts() {
		return false
	}
	u.pull.Withhold()
	u.countLateAnswer()
	return true
}
