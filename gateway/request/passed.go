package request

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"time"

	"evenkeel/engine"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/upstream"
	"evenkeel/mooncake"
	"evenkeel/sse"
)

// Why an answer that is passed on is of no use.
var (
	errNoRoom = errors.New("the caller's requests and answers take all the memory that it may use")
	errTold   = errors.New("the engine sent an event that says it failed")
)

// openPassed sends the request, and reads its answer or the beginning of it.
func openPassed(s *stream, anew bool, until lifecycle.Limit) (f *failure.Fault) {
	j, p, limits := s.job, s.job.passed, &s.job.srv.Settings().Limits
	call := &upstream.Call{
		Call: j.srv.Client.NewCall(p.to.Target), Leg: lifecycle.Sole, Engine: p.to.Instance, Path: p.Path,
		Limits: engine.Deadlines{Connect: limits.ConnectTimeout, FirstByte: waitAtMost(until, j.srv.Settings(), nil),
			Idle: limits.EventTimeout}, Log: j.srv.Log,
	}
	if s.call = call.Call; anew {
		call.Fresh()
	}
	s.run = j.srv.Fleet.Track(fleet.Place{Instance: p.to.Instance, Rank: -1}, call.Call, true)
	if p.Most > 0 {
		s.may, s.beyond = p.Most, true
		s.rank.Traffic.Beyond(1)
		s.rank.Traffic.Sends(s.may)
	}
	j.client.OnGone(func() { call.Leave(upstream.Notice) })
	headers := engine.JSONHeaders(j.legID("x", j.record.Attempts))
	headers[0].Value = p.Kind
	switch s.resp, f = call.Open(j.record.Carry(headers), p.Body); {
	case f != nil && f.Status > 0 && f.Engine == "":
		return p.refused(s.resp, call, f)
	case f == nil:
		f = beginsPassed(s, call)
	}
	switch {
	case f == nil:
		j.srv.Monitor.Answered(call.Engine)
	case f.Engine != "" && !j.client.Left():
		j.srv.Monitor.Report(f.Engine, f.Err)
	}
	return f
}

// refused says more of an error status than that it is one.
func (p *Passed) refused(resp *engine.Response, call *upstream.Call, f *failure.Fault) *failure.Fault {
	f.Why = lifecycle.ByStatus(f.Answer.Status) // a refusal of our own credential is not the request's fault
	switch {
	case lacksRoute(f.Status, call.Refusal):
		f.Why = lifecycle.Lacks
	case f.Status == http.StatusNotImplemented: // its model cannot do what this one asks for
		f.Why, f.Answer = lifecycle.Unable, failure.Relayed(f.Status, resp, call.Refusal)
	}
	return f
}

// lacksRoute says whether an engine's refusal is the one of its router, which does not have the
// endpoint. All other words are about one request, a 404 of a model for example.
func lacksRoute(status int, body []byte) bool {
	return status == http.StatusNotFound && string(body) == `{"detail":"Not Found"}` ||
		status == http.StatusMethodNotAllowed && string(body) == `{"detail":"Method Not Allowed"}`
}

// beginsPassed reads an answer that comes in one piece, or of a stream the first event. Until then nothing is promised to the client.
func beginsPassed(s *stream, call *upstream.Call) *failure.Fault {
	limits := &s.job.srv.Settings().Limits
	if !bytes.HasPrefix(s.resp.ContentType(), []byte("text/event-stream")) {
		s.whole = true
		s.resp.SetDeadline(s.began.Add(call.Limits.FirstByte))
		return takePiece(s, call, limits.AnswerBytes)
	}
	s.answer.Reader.Reset(sse.Limits{Event: limits.EventBytes, Bytes: int64(limits.AnswerBytes), First: call.Limits.FirstByte, Gap: limits.EventTimeout})
	for !s.answer.Mirror.Started() && s.stage == flows {
		_ = s.fill() // its error is in s.fault, too
	}
	switch {
	case s.answer.Mirror.Started():
		s.firstAt = time.Now()
		s.job.enter(journal.Streaming, "")
		return nil
	case s.answer.Mirror.Failure().Status > 0:
		return failure.Useless(lifecycle.Sole, lifecycle.Erred, s.fault.Answer, errTold)
	}
	return call.Broke(s.fault.Err)
}

// takePiece reads an answer in one piece. It may be anything.
func takePiece(s *stream, call *upstream.Call, limit int) *failure.Fault {
	p := s.job.passed
	isJSON := bytes.HasPrefix(s.resp.ContentType(), []byte("application/json"))
	whole, err := p.readAll(s.resp, limit)
	switch {
	case errors.Is(err, errNoRoom):
		full := openai.Unavailable("overloaded", "requests and answers, of all callers or of you alone, take all the memory that they may use; retry later", 1)
		return failure.Useless(lifecycle.Sole, lifecycle.TooLarge, full, err)
	case errors.Is(err, engine.ErrTooLarge):
		large := failure.BadGateway(failure.Engine, "its answer is larger than limits.answer_bytes, or than the room in limits.bodies_bytes; ask for less at once")
		return failure.Useless(lifecycle.Sole, lifecycle.TooLarge, large, err)
	case err != nil:
		return call.Broke(err)
	}
	says := whole // how many tokens it has
	if !isJSON {
		says = s.resp.Header(metadataHeader)
	}
	switch _, err = mooncake.ScanBody(says, 0); {
	case err == nil:
		s.answer.Mirror.ReadUsage(says)
	case isJSON && !json.Valid(whole):
		return failure.Useless(lifecycle.Sole, lifecycle.Garbled, failure.BadGateway(failure.Engine, "its answer is not JSON"), err)
	}
	p.piece, s.stage, s.firstAt = whole, ended, time.Now()
	return nil
}

// firstRoom is what every caller may have.
const firstRoom = 4 << 10

// readAll reads the body, and charges its caller for the memory as it grows.
func (p *Passed) readAll(resp *engine.Response, limit int) (whole []byte, err error) {
	limit = p.Memory.Most(limit+1) - 1 // one byte more shows that the answer is too large
	for {
		if len(whole) == cap(whole) {
			more := min(max(firstRoom, cap(whole)), limit+1-cap(whole))
			if !p.Memory.Acquire(more) {
				return nil, errNoRoom
			}
			larger := make([]byte, len(whole), cap(whole)+more) // exactly as many bytes as the charge has taken
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
