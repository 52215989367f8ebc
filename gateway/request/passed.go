package request

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/valyala/fasthttp"
	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/gateway/edge"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/upstream"
	"evenkeel/mooncake"
	"evenkeel/sse"
)

// Passed is a request that goes to one engine as it came. It has no slot, so it takes a seat, of which there are not more than may run
// at once.
type Passed struct {
	Engines  Choice
	Path     string
	Kind     string   // Content-Type of the body
	Body     [][]byte // dropped once no engine is sent it any more
	Most     int64    // tokens that the engine computes at most; 0: it does not run its model
	Estimate int      // tokens that the request costs if no engine counts them
	Seat     *edge.Charge
	Memory   *edge.Charge // for an answer in one piece
	Took     prometheus.Observer

	tried  []string
	to     fleet.Whole    // the engine that was chosen last
	before *failure.Fault // the last but one
	none   *openai.Error  // why there is no engine
	piece  []byte         // the answer, if it comes in one
}

// Choice is which engine gets a request that is passed through.
type Choice interface {
	// Choose looks for an engine that was not tried: Chosen, NoneLeft or NoRoute. One that was chosen has one call more.
	Choose(model, path string, tried []string) (fleet.Whole, lifecycle.What, *openai.Error)
	// Count adds to the calls that an engine has.
	Count(instance string, calls int)
	// Without notes that an engine does not have an endpoint.
	Without(instance, path string)
}

// metadataHeader is where vLLM says what the bytes of an answer are that is not JSON.
const metadataHeader = "Metadata"

// Why an answer that is passed on is of no use, or not whole.
var (
	errNoRoom = errors.New("the caller's requests and answers take all the memory that it may use")
	errCut    = errors.New("the engine's stream ended in the middle of an event")
	errTold   = errors.New("the engine sent an event that says it failed")
	errNoData = errors.New("the engine's stream ended without an event")
)

// Pass has an engine answer a request. An error it returns has not been answered yet.
func (srv *Server) Pass(ctx *fasthttp.RequestCtx, in *Incoming, req *openai.Request, p *Passed) *openai.Error {
	conn, ok := edge.ConnOf(ctx)
	if !ok {
		p.Seat.Give()
		return openai.NewError(http.StatusInternalServerError, "internal_error", "the connection is not watched")
	}
	j := &job{srv: srv, req: req, client: reader{conn}, id: in.Record.ID, arrive: in.Record.Arrival, in: in, record: in.Record, passed: p}
	s, fail := j.serve(ctx)
	if fail != nil {
		return fail
	}
	h := &ctx.Response.Header
	if srv.Settings().ExposeRoute || in.Explain {
		h.Set(routeHeader, in.Record.Route)
		h.Set("X-Evenkeel-Engine", in.Record.Engine)
		h.Set(attemptsHeader, strconv.Itoa(in.Record.Attempts))
	}
	if !s.whole {
		srv.Stream(ctx, s.resp.ContentType(), flow{s}, 0)
		return nil
	}
	if meta := s.resp.Header(metadataHeader); len(meta) > 0 {
		h.SetBytesV(metadataHeader, meta)
	}
	Piece(ctx, string(s.resp.ContentType()), p.piece, p.Memory)
	s.close()
	return nil
}

// pass carries out what only a request has that is passed through.
func (r *runner) pass(x lifecycle.Effect) (e lifecycle.Event) {
	p := r.passed
	switch x.Do {
	case lifecycle.Remember:
		p.Engines.Without(p.to.Instance, p.Path)
	case lifecycle.Recall:
		if r.fault = p.before; r.fault != nil {
			r.fail = r.fault.Answer
		}
	case lifecycle.Complain:
		r.srv.Log.Warn("an engine did not answer a request that was passed through to it", zap.String("request_id", r.id), zap.String("endpoint", p.Path),
			zap.String("engine", p.to.Instance), zap.Int("attempt", r.record.Attempts), zap.Int("status", r.fault.Status), zap.Error(r.fault.Err))
	case lifecycle.Choose:
		if p.to, e.What, p.none = p.Engines.Choose(r.req.Model, p.Path, p.tried); p.none == nil {
			p.tried = append(p.tried, p.to.Instance)
		}
	default:
		return r.sendOver(x.Do == lifecycle.SendAnew)
	}
	return e
}

// sendOver sends the request to the engine that was chosen, over a new connection if anew is set, and says what came of it.
func (r *runner) sendOver(anew bool) lifecycle.Event {
	if r.stream = nil; anew {
		r.passed.Engines.Count(r.passed.to.Instance, 1)
	}
	if r.record.Attempts > 0 {
		r.record.Report(journal.Event{What: journal.Retried})
	}
	r.record.Report(journal.Event{What: journal.Attempted})
	r.record.Report(journal.Event{What: journal.Entered, Phase: journal.Transfer, Left: r.client.Left(), Call: "pass", Engine: r.passed.to.ID})
	f := r.openPassed(anew)
	if f == nil {
		return lifecycle.Event{What: lifecycle.First}
	}
	if r.stream.run.Moved() && !r.client.Left() {
		f = failure.Of(f.Ended, r.srv.drained(notAnswered), failure.ErrMoved)
		f.Moved = true
	}
	r.passed.before = r.fault
	return r.fell(f)
}

// openPassed sends the request, and reads its answer or the beginning of it.
func (r *runner) openPassed(anew bool) (f *failure.Fault) {
	j, p, limits := r.job, r.passed, &r.srv.Settings().Limits
	s := slotless(j, &fleet.Rank{Instance: p.to.Instance, Target: p.to.Target, Traffic: p.to.Traffic}, sse.Ask{Form: sse.Verbatim, Choice: -1, Cached: sse.OwnCached})
	r.stream = s
	call := &upstream.Call{
		Call: j.srv.Client.NewCall(p.to.Target), Leg: lifecycle.Sole, Engine: p.to.Instance, Path: p.Path,
		Limits: engine.Deadlines{Connect: limits.ConnectTimeout, FirstByte: limits.ProbeTimeout, Idle: limits.EventTimeout}, Log: j.srv.Log,
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
		f = passing{s}.begins(call)
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

// passing is the stream of a request that is passed through.
type passing struct{ *stream }

// begins reads an answer that comes in one piece, or of a stream the first event. Until then nothing is promised to the client.
func (s passing) begins(call *upstream.Call) *failure.Fault {
	limits := &s.job.srv.Settings().Limits
	if !bytes.HasPrefix(s.resp.ContentType(), []byte("text/event-stream")) {
		s.whole = true
		s.resp.SetDeadline(s.began.Add(limits.ProbeTimeout))
		return s.takePiece(call, limits.AnswerBytes)
	}
	s.Reader.Reset(sse.Limits{Event: limits.EventBytes, Bytes: int64(limits.AnswerBytes), First: limits.ProbeTimeout, Gap: limits.EventTimeout})
	for !s.Mirror.Started() && s.stage == flows {
		_ = s.fill() // its error is in s.fault, too
	}
	switch {
	case s.Mirror.Started():
		s.firstAt = time.Now()
		s.job.enter(journal.Streaming, "")
		return nil
	case s.Mirror.Failure().Status > 0:
		return failure.Useless(lifecycle.Sole, lifecycle.Erred, s.fault.Answer, errTold)
	}
	return call.Broke(s.fault.Err)
}

// takePiece reads an answer in one piece. It may be anything.
func (s passing) takePiece(call *upstream.Call, limit int) *failure.Fault {
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
		s.Mirror.ReadUsage(says)
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

// cut ends an answer that is passed on, whose body ended with err or is not read any further. What that means before the first event,
// begins says.
func (s passing) cut(err error) {
	err = cmp.Or(s.Err(), err) // whatever else came, not all of it was read
	begun, over := s.Mirror.Started(), errors.Is(err, io.EOF)
	switch {
	case over && s.Closed() == sse.Whole: // engines differ in whether they send [DONE]
		s.ends()
		return
	case over && s.Reader.Buffered() > 0:
		err = errCut
	case over:
		err = errNoData
	}
	answer := openai.NewError(http.StatusBadGateway, "upstream_broken", failure.Transport(failure.Engine, err).Message)
	switch {
	case begun && s.run.Moved():
		answer = s.job.srv.drained(notAnswered)
	case begun && !s.job.client.Left():
		s.job.srv.Monitor.Report(s.rank.Instance, err)
	}
	s.fails(lifecycle.Broke, answer, err)
}

// notAnswered is what becomes of a request whose engine was taken out of service.
const notAnswered = "its engine was taken out of service; send the request again"

// giveUp settles a thing of a request. Its last call is that of s, which is nil if something panicked before.
func (p *Passed) giveUp(j *job, s *stream, t lifecycle.Thing, how lifecycle.How) {
	switch {
	case t == lifecycle.Seat:
		p.Seat.Give()
	case t == lifecycle.Body && how == lifecycle.Back: // no engine is sent it any more
		p.Body, j.req.Body = nil, mooncake.Body{}
		j.in.Body.Give()
	case t == lifecycle.Memory && how == lifecycle.Back:
		p.Memory.Give()
	case t == lifecycle.Call:
		j.client.OnGone(nil)
		if p.Engines.Count(p.to.Instance, -1); s != nil {
			passing{s}.accountFor(how)
		}
		j.freed()
	}
}

// accountFor takes note of what the engine has computed. What no engine counts is not free.
func (s passing) accountFor(how lifecycle.How) {
	told, p := s.job.record, s.job.passed
	u, counted := s.Mirror.Usage()
	if counted {
		told.PromptTokens, told.OutputTokens = u.Prompt, u.Completion
	}
	if how == lifecycle.Spent && told.PromptTokens+told.OutputTokens == 0 {
		told.PromptTokens = p.Estimate
	}
	s.job.srv.Fleet.Untrack(s.run)
	if s.beyond {
		computed := cmp.Or(int64(u.Prompt), s.may)
		if how == lifecycle.Free {
			computed = 0
		}
		s.rank.Traffic.Settles(s.may, computed)
		s.rank.Traffic.Beyond(-1)
		s.beyond = false
	}
}
