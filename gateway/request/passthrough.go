package request

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"time"

	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/upstream"
	"evenkeel/mooncake"
	"evenkeel/sse"
)

// Why an answer that is passed through cannot be used.
var (
	errNoRoom         = errors.New("the caller's requests and answers take all the memory that it may use")
	errEngineReported = errors.New("the engine sent an event that says it failed")
)

func (r *executor) doPassthrough(effect lifecycle.Effect) (event lifecycle.Event) {
	p := r.job.passthrough
	switch effect.Kind {
	case lifecycle.Remember: // it does not have the endpoint
		p.Engines.NoteMissingEndpoint(p.chosen.Instance, p.Path)
	// The last call says only that its engine lacks the endpoint, or that a second connection broke,
	// so the client gets the error of the call before.
	case lifecycle.Recall:
		if r.fault = p.earlierFault; r.fault != nil { // nil: no engine failed before
			r.lastError = r.fault.ClientError
		}
	case lifecycle.Complain:
		r.job.srv.Log.Warn("an engine did not answer a request that was passed through to it", zap.String("request_id", r.job.id),
			zap.String("endpoint", p.Path), zap.String("engine", p.chosen.Instance), zap.Int("attempt", r.job.record.Attempts),
			zap.Int("status", r.fault.Status), zap.Error(r.fault.Err))
	case lifecycle.Choose:
		if p.chosen, event.Kind, p.noEngine = p.Engines.Choose(r.job.req.Model, p.Path, p.triedEngines); p.noEngine == nil {
			p.triedEngines = append(p.triedEngines, p.chosen.Instance)
		}
	case lifecycle.SendOver: // for the first time
		const redial = false
		return r.sendOver(redial, effect.Until)
	case lifecycle.SendAnew:
		const redial = true
		return r.sendOver(redial, effect.Until)
	default:
	}
	return event
}

// sendOver sends the request to the chosen engine; redial: once more, over a new connection.
func (r *executor) sendOver(redial bool, until lifecycle.Timeout) lifecycle.Event {
	j, p := r.job, r.job.passthrough
	r.stream = nil
	if redial { // Choose has counted only the first call
		p.Engines.AddRunning(p.chosen.Instance, 1)
	}
	if j.record.Attempts > 0 {
		j.record.Report(journal.Event{Kind: journal.Retried})
	}
	j.record.Report(journal.Event{Kind: journal.Attempted})
	j.record.Report(journal.Event{Kind: journal.Entered, Phase: journal.Transfer, Left: j.client.Left(), Call: "pass", Engine: p.chosen.ID})
	rank := &roster.Rank{Instance: p.chosen.Instance, Target: p.chosen.Target, Traffic: p.chosen.Traffic}
	const engineChoice = -1 // the engine's index of a choice stays
	// The client gets the events as the engine sends them.
	unchanged := sse.Options{Form: sse.Verbatim, Choice: engineChoice, Cached: sse.OwnCached}
	r.stream = newSlotlessStream(j, rank, unchanged)
	fault := callPassthrough(r.stream, redial, until)
	if fault == nil {
		return lifecycle.Event{Kind: lifecycle.First}
	}
	if r.stream.upstream.endedByDrain() && !j.client.Left() {
		fault = failure.NewFault(fault.CallEnd, j.srv.drainedError(drainedMessage), failure.ErrMoved)
		fault.Moved = true // the engine has not failed, and the lifecycle lets another one have the request
	}
	p.earlierFault = r.fault // the client may get this error after all (Recall)
	return r.callFailed(fault)
}

// callPassthrough reads all of an answer in one piece, and a stream up to its first event.
func callPassthrough(s *stream, redial bool, until lifecycle.Timeout) (fault *failure.Fault) {
	j, p := s.job, s.job.passthrough
	call := newPassthroughCall(s, redial, until)
	countPassthrough(s, p.MaxTokens)
	j.client.OnGone(func() { call.Disconnect(upstream.NoticeTimeout) })
	headers := engine.JSONHeaders(j.callID(idOfPassthrough, j.record.Attempts))
	headers[0].Value = p.ContentType // the first header is Content-Type
	s.upstream.resp, fault = call.Open(j.record.WithTraceHeaders(headers), p.Body)
	if refused := fault != nil && fault.Status > 0 && fault.BlamedEngine == ""; refused { // by an engine that works
		return p.classifyRefusal(s.upstream.resp, call, fault)
	}
	if fault == nil {
		fault = readPassthroughStart(s, call)
	}
	switch {
	case fault == nil:
		j.srv.Monitor.Answered(call.Engine)
	case fault.BlamedEngine != "" && !j.client.Left(): // else perhaps the client's leaving ended it
		j.srv.Monitor.ReportFailure(fault.BlamedEngine, fault.Err)
	}
	return fault
}

// newPassthroughCall also registers the call, so that a drain can end it.
func newPassthroughCall(s *stream, redial bool, until lifecycle.Timeout) *upstream.Call {
	j, p, limits := s.job, s.job.passthrough, &s.job.srv.Settings().Limits
	var noProfile *mooncake.Profile // no profile sets the time limits of these calls
	call := &upstream.Call{
		Call: j.srv.Client.NewCall(p.chosen.Target), Kind: lifecycle.Sole, Engine: p.chosen.Instance, Path: p.Path,
		Limits: engine.Deadlines{Connect: limits.ConnectTimeout, FirstByte: timeoutOf(until, j.srv.Settings(), noProfile),
			Idle: limits.EventTimeout}, Log: j.srv.Log,
	}
	if redial {
		call.Fresh()
	}
	s.upstream.call = call.Call
	const anyRank = -1 // the request names no rank of the engine
	s.upstream.tracked = j.srv.Fleet.Track(roster.Location{Instance: p.chosen.Instance, Rank: anyRank}, call.Call, fleet.Elsewhere)
	return call
}

// countPassthrough adds the request to the counts of the engine's traffic until endAccounting.
// maxTokens is 0 if the endpoint does not run the model.
func countPassthrough(s *stream, maxTokens int64) {
	if maxTokens <= 0 {
		return
	}
	s.upstream.tokensToCompute, s.upstream.countedWithoutSlot = maxTokens, true
	s.upstream.rank.Traffic.AddSentWithoutSlot(1)
	s.upstream.rank.Traffic.ExpectComputed(s.upstream.tokensToCompute)
}

// classifyRefusal sets the reason of an answer with an error status.
func (p *Passthrough) classifyRefusal(resp *engine.Response, call *upstream.Call, fault *failure.Fault) *failure.Fault {
	// Not fault.Status: the two differ if the engine refuses the credential of the proxy.
	fault.Reason = lifecycle.ReasonOfStatus(fault.ClientError.Status)
	switch {
	case lacksEndpoint(fault.Status, call.RefusalBody):
		fault.Reason = lifecycle.Lacks
	case fault.Status == http.StatusNotImplemented:
		fault.Reason, fault.ClientError = lifecycle.Unable, failure.RelayedRefusal(fault.Status, resp, call.RefusalBody)
	}
	return fault
}

// lacksEndpoint: the engine's HTTP router answers with one of these two bodies. A 404 with another
// body concerns the request, for example an unknown model.
func lacksEndpoint(status int, body []byte) bool {
	return status == http.StatusNotFound && string(body) == `{"detail":"Not Found"}` ||
		status == http.StatusMethodNotAllowed && string(body) == `{"detail":"Method Not Allowed"}`
}

// readPassthroughStart: the client gets nothing until it returns.
func readPassthroughStart(s *stream, call *upstream.Call) *failure.Fault {
	limits := &s.job.srv.Settings().Limits
	if !bytes.HasPrefix(s.upstream.resp.ContentType(), []byte("text/event-stream")) {
		s.upstream.unstreamed = true
		s.upstream.resp.SetDeadline(s.upstream.began.Add(call.Limits.FirstByte))
		return readOnePiece(s, call, limits.AnswerBytes)
	}
	s.upstream.answer.Reader.Reset(sse.Limits{Event: limits.EventBytes, Bytes: int64(limits.AnswerBytes), First: call.Limits.FirstByte,
		Gap: limits.EventTimeout})
	for !s.upstream.answer.Filter.Started() && s.state == flowing {
		_ = s.fill() // after any failure, s.upstream.fault says why
	}
	switch {
	case s.upstream.answer.Filter.Started(): // the answer has begun
		s.firstAt = time.Now()
		s.job.enterPhase(journal.Streaming, "")
		return nil
	case s.upstream.answer.Filter.Failure().Status > 0: // by an event, from which ClientError was made
		return failure.UnusableAnswer(lifecycle.Sole, lifecycle.Erred, s.upstream.fault.ClientError, errEngineReported)
	}
	return call.FaultOf(s.upstream.fault.Err) // for example because the connection broke
}

// readOnePiece reads an answer in one piece, of any content type, and the token counts in it or its
// metadata.
func readOnePiece(s *stream, call *upstream.Call, limit int) *failure.Fault {
	p := s.job.passthrough
	isJSON := bytes.HasPrefix(s.upstream.resp.ContentType(), []byte("application/json"))
	whole, err := p.readAll(s.upstream.resp, limit)
	switch {
	case errors.Is(err, errNoRoom):
		return failure.UnusableAnswer(lifecycle.Sole, lifecycle.TooLarge, failure.NoRoomForAnswer, err)
	case errors.Is(err, engine.ErrTooLarge):
		tooLarge := failure.BadGateway(failure.Engine,
			"its answer is larger than limits.answer_bytes, or than the room in limits.bodies_bytes; ask for less at once")
		return failure.UnusableAnswer(lifecycle.Sole, lifecycle.TooLarge, tooLarge, err)
	case err != nil:
		return call.FaultOf(err)
	}
	usageJSON := whole // has the token counts
	if !isJSON {
		usageJSON = s.upstream.resp.Header(metadataHeader)
	}
	const defaultDepth = 0 // nested as deeply as in a request by default
	switch _, err = mooncake.ScanBody(usageJSON, defaultDepth); {
	case err == nil:
		s.upstream.answer.Filter.ReadUsage(usageJSON)
	case isJSON && !json.Valid(whole): // other JSON, such as a list, has no counts but is an answer
		return failure.UnusableAnswer(lifecycle.Sole, lifecycle.Garbled, failure.BadGateway(failure.Engine, "its answer is not JSON"), err)
	}
	p.answer, s.state, s.firstAt = whole, ended, time.Now()
	return nil
}

// firstBufferBytes: a reservation may take this much even if its quota is full.
const firstBufferBytes = 4 << 10

// readAll charges the client's caller for the memory as the answer grows. errNoRoom: the caller may
// have no more now. ErrTooLarge: the answer would not fit even alone, or exceeds limit.
func (p *Passthrough) readAll(resp *engine.Response, limit int) (whole []byte, err error) {
	room := p.Memory.Most(limit + 1) // what the request could hold alone, but at most limit+1
	limit = room - 1                 // one byte more shows a longer answer
	for {
		if len(whole) == cap(whole) { // twice its size, but not beyond limit+1
			more := min(max(firstBufferBytes, cap(whole)), limit+1-cap(whole))
			if !p.Memory.Acquire(more) {
				return nil, errNoRoom
			}
			larger := make([]byte, len(whole), cap(whole)+more) // append might allocate more than was charged
			copy(larger, whole)
			whole = larger
		}
		n, err := resp.Read(whole[len(whole):cap(whole)])
		switch whole = whole[:len(whole)+n]; {
		case len(whole) > limit:
			return nil, engine.ErrTooLarge
		case errors.Is(err, io.EOF):
			return whole, nil
		case err != nil:
			return nil, err
		}
	}
}

// givePassthroughBack: a body or memory that is passed on is given back by the code that writes the
// client's answer.
func (r *executor) givePassthroughBack(resource lifecycle.Resource, disposition lifecycle.Disposition) {
	j, p := r.job, r.job.passthrough
	switch {
	case resource == lifecycle.Seat:
		p.Seat.Release()
	case resource == lifecycle.Body && disposition == lifecycle.Back: // no engine gets it again
		p.Body, j.req.Body = nil, mooncake.Body{}
		j.incoming.Body.Release()
	case resource == lifecycle.Memory && disposition == lifecycle.Back:
		p.Memory.Release()
	}
}

// endPassthroughCall records the tokens of a call that has ended, or an estimate if the engine may
// have computed some (Spent).
func (r *executor) endPassthroughCall(disposition lifecycle.Disposition) {
	p, record := r.job.passthrough, r.job.record
	p.Engines.AddRunning(p.chosen.Instance, -1)
	if r.stream == nil { // a panic came before the stream was made
		return
	}
	if usage, counted := r.stream.upstream.answer.Filter.Usage(); counted {
		record.PromptTokens, record.OutputTokens = usage.Prompt, usage.Completion
	}
	if disposition == lifecycle.Spent && record.PromptTokens+record.OutputTokens == 0 {
		record.PromptTokens = p.EstimatedTokens
	}
}
