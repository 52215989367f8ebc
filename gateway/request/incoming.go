package request

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"strconv"

	"github.com/valyala/fasthttp"

	"evenkeel/gateway/edge"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/pump"
	"evenkeel/geo"
	"evenkeel/mooncake"
	"evenkeel/prefill"
	"evenkeel/sse"
)

// BeginRequest begins the record. The request counts as open until Refuse, or until its answer
// ends.
func (srv *Server) BeginRequest(facts journal.LogEntry) *Incoming {
	srv.openRequests.Add(1)
	return &Incoming{Record: srv.Journal.Begin(facts)}
}

// NewID returns 128 random bits in hex. Every id under which engines get the request contains it.
func NewID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails, by its documentation
	return hex.EncodeToString(b[:])
}

// Serve answers a request, or has another proxy answer it. It is fanned out if there are several
// legs. After an error, the client has no answer yet, and the caller writes the error.
func (srv *Server) Serve(
	ctx *fasthttp.RequestCtx, in *Incoming, req *openai.Request, model roster.Route, legs []openai.SubRequest,
) *openai.Error {
	conn, ok := edge.ConnOf(ctx)
	if !ok {
		return &openai.Error{Status: http.StatusInternalServerError, Code: "internal_error", Message: "the connection is not watched"}
	}
	in.servedBy = servedLocally
	for i := range legs {
		legs[i].Patch.Adapter = mooncake.Adapter{Base: model.Board, Name: model.Adapter}
	}
	j := srv.newJob(in, req, model, conn)
	// A waiting client gets comments. Another proxy does not: it needs the final status, and sends
	// comments itself.
	if interval := srv.Settings().Limits.KeepAlive; interval > 0 && req.Stream && in.From == nil {
		edge.StartKeepAlive(ctx, interval, in.Record.Arrival, sse.Silence(sse.FormOf(string(ctx.Path()))), srv.Log)
	}
	if len(legs) > 1 || req.AnswerIsList { // a list is put together from legs, even if there is only one
		return srv.fanOut(ctx, conn, j, legs)
	}
	j.changes = &legs[0].Patch
	allowCancelByName(j, conn)
	s, fail := j.serve(ctx)
	if s == nil && fail == nil {
		return nil
	}
	if fail != nil && answerAborted(ctx, j, conn, fail) {
		return nil // the client has ended the request by name
	}
	edge.StopKeepAlive(ctx) // the headers set below may come too late
	srv.setRouteHeaders(ctx, in)
	srv.setServedByHeader(ctx, in)
	in.Body.Release() // bytes kept to continue the answer are counted apart (resumeBytes)
	if fail != nil {
		return fail
	}
	srv.setPeerHeaders(ctx, in, nil) // for the proxy that forwarded the request
	answerClient(ctx, s)
	return nil
}

// newJob: from then on only jobs hold the request's body, and drop it when they no longer need it.
// At some endpoints the answer has an id by which the client can end the request (see
// allowCancelByName).
func (srv *Server) newJob(in *Incoming, req *openai.Request, model roster.Route, conn *edge.Conn) *job {
	j := &job{srv: srv, req: req, body: req.Body, client: conn, id: in.Record.ID, model: model, incoming: in, record: in.Record}
	j.avoid.prefill = j.avoid.firstPrefill[:0]
	req.Body, req.Prompts = mooncake.Body{}, nil
	const unchanged, unknown = -1, -1 // the index of a choice stays; the cached tokens are not known yet
	j.filterOptions = sse.Options{Usage: req.IncludeUsage || !req.Stream, ContinuousUsage: req.ContinuousUsage, TokenIDs: req.ReturnTokenIDs,
		Choice: unchanged, Cached: unknown, Form: sse.FormOf(req.Endpoint.Path())}
	switch req.Endpoint { // answers with ids, which are read from the request, or made from j.id
	case mooncake.Tokens:
		j.filterOptions.TokenIDs = true // the answers are token ids
		j.filterOptions.ID = openai.NameTokens(&j.body, in.Record.ClientID, j.id)
	case mooncake.Generate:
		j.filterOptions.ID = openai.NameGenerate(&j.body, j.id)
	}
	return j
}

// answerClient gives the client the answer as a stream, or in one piece.
func answerClient(ctx *fasthttp.RequestCtx, s *stream) {
	srv := s.job.srv
	if !s.job.req.Stream {
		memory := edge.NewAnswer(ctx)
		answer, fail := s.collect(memory)
		if fail != nil {
			srv.Fail(ctx, fail)
			return
		}
		edge.AnswerWhole(ctx, "application/json", answer, memory)
		return
	}
	tokensToCome := s.upstream.maxTokens // at most
	if s.state == ended {                // it came at once
		tokensToCome = 0
		var ok bool
		if s.memory, ok = edge.ChargeAnswer(ctx, s.Pending()); !ok {
			s.endError = failure.NoRoomForAnswer
			s.Close()
			srv.Fail(ctx, failure.NoRoomForAnswer)
			return
		}
	}
	srv.Stream(ctx, s.upstream.contentType(), s, tokensToCome)
}

// ServePassthrough has an engine answer a request that is passed through. After an error, the
// client has no answer yet.
func (srv *Server) ServePassthrough(ctx *fasthttp.RequestCtx, in *Incoming, req *openai.Request, p *Passthrough) *openai.Error {
	conn, ok := edge.ConnOf(ctx)
	if !ok {
		p.Seat.Release() // no lifecycle was begun that would give it back
		return openai.NewError(http.StatusInternalServerError, "internal_error", "the connection is not watched")
	}
	j := &job{srv: srv, req: req, client: conn, id: in.Record.ID, incoming: in, record: in.Record, passthrough: p}
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
	if !s.upstream.unstreamed {
		// An event loop must know how many tokens may come.
		srv.Stream(ctx, s.upstream.resp.ContentType(), s, withoutLoop)
		return nil
	}
	if meta := s.upstream.resp.Header(metadataHeader); len(meta) > 0 {
		h.SetBytesV(metadataHeader, meta)
	}
	edge.AnswerWhole(ctx, string(s.upstream.resp.ContentType()), p.answer, p.Memory) // all of it was read
	s.Close()
	return nil
}

// Refuse ends a request that never had an answer.
func (srv *Server) Refuse(ctx *fasthttp.RequestCtx, in *Incoming, e *openai.Error) {
	edge.StopKeepAlive(ctx) // this only ends the comments; the client's connection stays open
	if in.Explain {
		setReasonHeader(ctx, e)
	}
	srv.setPeerHeaders(ctx, in, e)
	srv.Conclude(in, e)
	srv.Fail(ctx, e)
}

// ConcludePanicked concludes a request whose handler panicked. The code that recovers the panic
// writes the answer.
func (srv *Server) ConcludePanicked(in *Incoming) {
	srv.Conclude(in, failure.InternalError)
}

// Score asks every prefill policy where a request would go.
func (srv *Server) Score(req *openai.Request, model roster.Route) ([]prefill.Scored, error) {
	legs := req.Parts()
	j := &job{srv: srv, req: req, body: req.Body, changes: &legs[0].Patch, model: model, id: NewID(), incoming: &Incoming{},
		record: srv.Journal.Begin(journal.LogEntry{})}
	return srv.Prefill.Score(j.arrivalRequest())
}

// Headers of a request and of its answer.
const (
	SessionHeader    = "X-Evenkeel-Session"
	SessionEndHeader = "X-Evenkeel-Session-End"
	ClassHeader      = "X-Evenkeel-Class"
	DeadlineHeader   = "X-Evenkeel-Deadline-Ms" // milliseconds from arrival to the first token, at most
	GeoHeader        = "X-Evenkeel-Geo"         // with GeoLocal, the request stays in its region
	PolicyHeader     = "X-Evenkeel-Policy"      // asked for by a request, or used for an answer
)

// Headers of an answer that say how it was served.
const (
	prefillHeader  = "X-Evenkeel-Prefill"
	hitHeader      = "X-Evenkeel-Hit-Tokens"
	attemptsHeader = "X-Evenkeel-Attempts"
	routeHeader    = "X-Evenkeel-Route"
	reasonHeader   = "X-Evenkeel-Reason"
	decodeHeader   = "X-Evenkeel-Decode"
	waitsHeader    = "X-Evenkeel-Waits"
)

// In metadataHeader vLLM describes the bytes of an answer that is not JSON.
const metadataHeader = "Metadata"

// Where a request was served, as x-evenkeel-route names it.
const (
	servedLocally     = "local"
	servedByPeer      = "forwarded"
	servedAfterReturn = "fallback"
)

// Fail answers with an error, as the last event if the client has the head of a stream. An engine's
// refusal may be long, so it is charged to the caller's memory.
func (srv *Server) Fail(ctx *fasthttp.RequestCtx, e *openai.Error) {
	// A comment for the waiting client may have sent the head of a stream.
	headSent := edge.StopKeepAlive(ctx)
	path := string(ctx.Path())
	if headSent {
		end := failureEvents(path, e)
		memory, ok := edge.ChargeAnswer(ctx, len(end))
		if !ok {
			end = failureEvents(path, failure.NoRoomForAnswer)
		}
		edge.NewBodyStream(bytes.NewReader(end), func(error) { memory.Release() }, srv.Log).Answer(ctx)
		return
	}
	body, contentType := e.BodyAndTypeFor(path)
	memory, ok := edge.ChargeAnswer(ctx, len(body))
	if !ok {
		e = failure.NoRoomForAnswer
		body, contentType = e.BodyAndTypeFor(path)
	}
	ctx.SetStatusCode(e.Status)
	if e.RetryAfter > 0 {
		ctx.Response.Header.Set("Retry-After", strconv.Itoa(e.RetryAfter))
	}
	if srv.Settings().ExposeRoute {
		setReasonHeader(ctx, e)
	}
	edge.AnswerWhole(ctx, contentType, body, memory)
}

// failureEvents are a stream with nothing but an error.
func failureEvents(path string, e *openai.Error) []byte {
	return sse.OnlyFailure(nil, sse.FormOf(path), e.Text(), e.TypeFor(path), e.Code)
}

func setReasonHeader(ctx *fasthttp.RequestCtx, e *openai.Error) {
	if e.Code != "" {
		ctx.Response.Header.Set(reasonHeader, e.Code)
	}
}

// setRouteHeaders names the engines, and the waits in the form of Server-Timing. Only some callers
// may see them, because the names of engines are network addresses.
func (srv *Server) setRouteHeaders(ctx *fasthttp.RequestCtx, in *Incoming) {
	record := in.Record
	mayName := srv.Settings().ExposeRoute || in.Explain
	if !mayName || record.Route == "" { // no engine was chosen
		return
	}
	h := &ctx.Response.Header
	h.Set(decodeHeader, record.Rank)
	h.Set(waitsHeader, fmt.Sprintf("queue;dur=%.1f, probe;dur=%.1f, pool;dur=%.1f, transfer;dur=%.1f", record.QueueMs, record.ProbeMs,
		record.WaitMs, record.TransferMs))
	if record.Route == journal.Disaggregated { // a prefill engine computed the prompt
		h.Set(prefillHeader, record.Prefill)
		h.Set(PolicyHeader, record.PrefillPolicy)
	}
	h.Set(hitHeader, strconv.Itoa(record.HitTokens))
	h.Set(attemptsHeader, strconv.Itoa(record.Attempts))
	h.Set(routeHeader, record.Route)
}

// Without other regions there is no such header.
func (srv *Server) setServedByHeader(ctx *fasthttp.RequestCtx, in *Incoming) {
	if srv.Peers != nil && in.From == nil && in.servedBy != "" {
		ctx.Response.Header.Set(routeHeader, in.servedBy)
	}
}

// setPeerHeaders is for the dispatcher that forwarded the request: the cached tokens, or a code by
// which it decides where a refused request goes next.
func (srv *Server) setPeerHeaders(ctx *fasthttp.RequestCtx, in *Incoming, fail *openai.Error) {
	if in.From == nil {
		return
	}
	if fail == nil {
		if in.Record.PromptTokens > 0 {
			ctx.Response.Header.Set(geo.CachedHeader, strconv.Itoa(in.Record.CachedTokens))
		}
		return
	}
	switch fail.Code {
	case geo.RejectBusy, geo.RejectDraining, geo.RejectOwner:
		srv.Peers.CountRejected(fail.Code)
		ctx.Response.Header.Set(geo.RejectHeader, fail.Code)
	case "deadline_unmet": // passed on to the client, so it is not counted as a refusal
		ctx.Response.Header.Set(geo.RejectHeader, geo.RejectDeadline)
	case "model_not_found":
		srv.Peers.CountRejected(geo.RejectModel)
		ctx.Response.Header.Set(geo.RejectHeader, geo.RejectModel)
	}
}

// withoutLoop is for Stream: no event loop carries the answer.
const withoutLoop = 0

// Events is an answer that comes event by event. Close ends its request at any time.
// edge.NewBodyStream describes further methods.
type Events interface {
	io.Reader
	Close()
}

// Stream answers event by event. An event loop carries the answer if more than shortAnswerTokens
// may come. Otherwise the goroutine of the client's connection reads it once the handler has
// returned, so that a slow client slows its engine down.
func (srv *Server) Stream(ctx *fasthttp.RequestCtx, contentType []byte, answer Events, tokens int) {
	// Otherwise a comment has sent status and headers already.
	if headSent := edge.StopKeepAlive(ctx); !headSent {
		ctx.SetStatusCode(http.StatusOK)
		edge.StreamHead(&ctx.Response.Header, contentType)
	}
	flow, fitsLoop := answer.(pump.Stream)
	wantsLoop := fitsLoop && tokens > shortAnswerTokens
	if !wantsLoop || !pump.Start(ctx, srv.Log, srv.Loops, flow) { // Start fails if no loop can take the answer
		edge.NewBodyStream(answer, func(error) { answer.Close() }, srv.Log).Answer(ctx)
	}
}

// allowCancelByName lets the client end the job by the name of its answer. fannedOut has its own.
func allowCancelByName(j *job, conn *edge.Conn) {
	if j.filterOptions.ID == nil {
		return
	}
	// The job's client has also left if it has ended the request by name and no engine ends the
	// answer.
	jobClient := edge.NewCloseNotifier(j.srv.Log)
	conn.OnGone(jobClient.MarkGone)
	j.client = jobClient
	namedAbort := letAbort(j, jobClient, openai.OutputMode(&j.body))
	forget := j.srv.Running.Register(j.incoming.Record.Key, string(j.filterOptions.ID), func() { namedAbort.abort(j.srv) })
	j.incoming.forgetName = func() {
		forget()
		conn.OnGone(nil) // removes jobClient.MarkGone
	}
}

// answerAborted: a client that has ended the request by the id of its answer, before it began,
// still waits. So it gets an answer without tokens.
func answerAborted(ctx *fasthttp.RequestCtx, j *job, conn client, fail *openai.Error) bool {
	if !failedOnlyByAbort(j, conn, fail) {
		return false
	}
	if j.req.Stream { // the client expects events, even if all are known
		// The stream calls conclude when the events are written, or the client has left.
		conclude := func() { j.srv.Conclude(j.incoming, fail) }
		events := &readyEvents{bytes.NewReader(emptyAnswer(j)), conclude}
		j.srv.Stream(ctx, []byte("text/event-stream"), events, withoutLoop) // no engine sends them
		return true
	}
	edge.AnswerWhole(ctx, "application/json", emptyAnswer(j), nil) // short, so no memory is charged
	j.srv.Conclude(j.incoming, fail)
	return true
}

type readyEvents struct {
	*bytes.Reader
	settle func()
}

func (r *readyEvents) Close() { r.settle() }
