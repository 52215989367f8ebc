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

// BeginRequest begins the record of a request. The request counts as open until Refuse, or until its answer ends.
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

// Serve answers a request, or has another proxy answer it. legs has one part for each answer of the request: if there are several, the
// request is fanned out. If Serve returns an error, the client has no answer yet, and the caller writes the error.
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
	// While the client waits for the first event of its answer, it gets comments. Another proxy gets none: it needs the final status,
	// and sends comments to its client itself.
	if interval := srv.Settings().Limits.KeepAlive; interval > 0 && req.Stream && in.From == nil {
		edge.StartKeepAlive(ctx, interval, in.Record.Arrival, sse.Silence(sse.FormOf(string(ctx.Path()))), srv.Log)
	}
	if len(legs) > 1 || req.AnswerIsList { // an answer that is a list is put together from legs, even if there is only one
		return srv.fanOut(ctx, conn, j, legs)
	}
	j.changes = &legs[0].Patch
	allowCancelByName(j, conn)
	s, fail := j.serve(ctx)
	if s == nil && fail == nil {
		return nil // another proxy answers
	}
	if fail != nil && answerAborted(ctx, j, conn, fail) {
		return nil // the client has ended the request by name, and has got an answer without tokens
	}
	edge.StopKeepAlive(ctx)        // if the client has the head of the answer already, the headers set below do not reach it
	srv.setRouteHeaders(ctx, in)   // which engines served the request, for callers that may know it
	srv.setServedByHeader(ctx, in) // whether this proxy or another one did
	in.Body.Release()              // bytes kept to continue the answer at another engine are counted separately (resumeBytes)
	if fail != nil {
		return fail
	}
	srv.setPeerHeaders(ctx, in, nil) // for the proxy that forwarded the request, if one did; nil: there is no error
	answerClient(ctx, s)
	return nil
}

// newJob makes the job of a client's request. From then on only jobs hold the request's body, and drop it when they no longer need it. At
// some endpoints the client may name its answer in the request, or evenkeel names it. The filter then writes this id into the answer, and
// the client can end the request by it (see allowCancelByName).
func (srv *Server) newJob(in *Incoming, req *openai.Request, model roster.Route, conn *edge.Conn) *job {
	j := &job{srv: srv, req: req, body: req.Body, client: conn, id: in.Record.ID, model: model, incoming: in, record: in.Record}
	req.Body, req.Prompts = mooncake.Body{}, nil
	const unchanged, unknown = -1, -1 // the engine's index of a choice stays; the number of cached tokens is not known yet
	j.filterOptions = sse.Options{Usage: req.IncludeUsage || !req.Stream, ContinuousUsage: req.ContinuousUsage, TokenIDs: req.ReturnTokenIDs,
		Choice: unchanged, Cached: unknown, Form: sse.FormOf(req.Endpoint.Path())}
	switch req.Endpoint { // the answers of these endpoints have such ids, which are read from the request, or made from j.id
	case mooncake.Tokens:
		j.filterOptions.TokenIDs = true // the answers of this endpoint are token ids
		j.filterOptions.ID = openai.NameTokens(&j.body, in.Record.ClientID, j.id)
	case mooncake.Generate:
		j.filterOptions.ID = openai.NameGenerate(&j.body, j.id)
	}
	return j
}

// answerClient gives the client the answer that s has begun: as a stream, or collected into one
// piece. If the answer cannot be collected, or the caller may hold no more memory for answers, the
// client gets an error.
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
	tokensToCome := s.upstream.maxTokens // at most; Stream gives only an answer that may be long to an event loop
	if s.state == ended {                // the whole answer came at once
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

// ServePassthrough has an engine answer a request that is passed through. If it returns an error, the client has no answer yet.
func (srv *Server) ServePassthrough(ctx *fasthttp.RequestCtx, in *Incoming, req *openai.Request, p *Passthrough) *openai.Error {
	conn, ok := edge.ConnOf(ctx)
	if !ok {
		p.Seat.Release() // no lifecycle was begun that would give the seat back
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
		// An event loop carries only an answer of which it is known how many tokens may come, which is not known here. So the
		// goroutine of the client's connection reads the answer.
		srv.Stream(ctx, s.upstream.resp.ContentType(), s, withoutLoop)
		return nil
	}
	if meta := s.upstream.resp.Header(metadataHeader); len(meta) > 0 {
		h.SetBytesV(metadataHeader, meta)
	}
	edge.AnswerWhole(ctx, string(s.upstream.resp.ContentType()), p.answer, p.Memory) // serve has read the whole answer into p.answer
	s.Close()
	return nil
}

// Refuse ends a request that never had an answer.
func (srv *Server) Refuse(ctx *fasthttp.RequestCtx, in *Incoming, e *openai.Error) {
	edge.StopKeepAlive(ctx) // ends the comments that the client gets while it waits; its connection stays open
	if in.Explain {
		setReasonHeader(ctx, e)
	}
	srv.setPeerHeaders(ctx, in, e)
	srv.Conclude(in, e)
	srv.Fail(ctx, e)
}

// ConcludePanicked concludes a request whose handler panicked. The code that recovers the panic writes the answer.
func (srv *Server) ConcludePanicked(in *Incoming) {
	srv.Conclude(in, failure.InternalError)
}

// Score asks every prefill policy where a request would go, without sending it.
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
	ClassHeader      = "X-Evenkeel-Class"       // batch or online
	DeadlineHeader   = "X-Evenkeel-Deadline-Ms" // milliseconds from arrival to the first token, at most
	GeoHeader        = "X-Evenkeel-Geo"         // with the value GeoLocal, the request is never forwarded to another region
	PolicyHeader     = "X-Evenkeel-Policy"      // the prefill policy: asked for by a request, or used for an answer
)

// Headers of an answer that say which engines served the request, and how.
const (
	prefillHeader  = "X-Evenkeel-Prefill"
	hitHeader      = "X-Evenkeel-Hit-Tokens"
	attemptsHeader = "X-Evenkeel-Attempts"
	routeHeader    = "X-Evenkeel-Route"
	reasonHeader   = "X-Evenkeel-Reason"
	decodeHeader   = "X-Evenkeel-Decode"
	waitsHeader    = "X-Evenkeel-Waits"
)

// metadataHeader is the header in which vLLM describes the bytes of an answer that is not JSON.
const metadataHeader = "Metadata"

// Where a request was served, as x-evenkeel-route names it.
const (
	servedLocally     = "local"
	servedByPeer      = "forwarded"
	servedAfterReturn = "fallback"
)

// Fail answers with an error. If the client already has the head of a stream, it gets the error as
// the last event of this stream. The text of an engine's refusal may be long. If the caller may
// hold no more memory for it, Fail answers with that error instead.
func (srv *Server) Fail(ctx *fasthttp.RequestCtx, e *openai.Error) {
	// While the client waits, it gets comments of a stream, the first of which sends the head.
	headSent := edge.StopKeepAlive(ctx)
	path := string(ctx.Path())
	if headSent { // the status is sent already, so the error goes into the stream
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

// failureEvents are the events of a stream that has nothing but an error.
func failureEvents(path string, e *openai.Error) []byte {
	return sse.OnlyFailure(nil, sse.FormOf(path), e.Text(), e.TypeFor(path), e.Code)
}

// setReasonHeader names the error's code in a header, if the error has one.
func setReasonHeader(ctx *fasthttp.RequestCtx, e *openai.Error) {
	if e.Code != "" {
		ctx.Response.Header.Set(reasonHeader, e.Code)
	}
}

// setRouteHeaders sets the headers that name the engines of the request, and its waits up to the first event in the form of a Server-Timing
// header. Only some callers may see them, because the names of engines are network addresses.
func (srv *Server) setRouteHeaders(ctx *fasthttp.RequestCtx, in *Incoming) {
	record := in.Record
	mayName := srv.Settings().ExposeRoute || in.Explain
	if !mayName || record.Route == "" { // no route: no engine was chosen
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

// setServedByHeader says in a header whether the request was served here or by another proxy. Without other regions there is no such
// header.
func (srv *Server) setServedByHeader(ctx *fasthttp.RequestCtx, in *Incoming) {
	if srv.Peers != nil && in.From == nil && in.servedBy != "" {
		ctx.Response.Header.Set(routeHeader, in.servedBy)
	}
}

// setPeerHeaders adds headers for the dispatcher that forwarded the request, if one did: the number of cached tokens, or, after a refusal,
// a code by which that dispatcher decides where the request goes next. fail is the request's error; nil: it has an answer.
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
	case "deadline_unmet": // the other proxy passes this error on to its client, so it is not counted as a refusal
		ctx.Response.Header.Set(geo.RejectHeader, geo.RejectDeadline)
	case "model_not_found":
		srv.Peers.CountRejected(geo.RejectModel)
		ctx.Response.Header.Set(geo.RejectHeader, geo.RejectModel)
	}
}

// withoutLoop as the number of tokens for Stream says that no event loop carries the answer.
const withoutLoop = 0

// Events is an answer that comes event by event. Close ends its request and gives back what it holds, whether or not the answer is whole.
// An Events may have further methods, which edge.NewBodyStream describes, to report how much Read can return without waiting and where the
// answer ends.
type Events interface {
	io.Reader
	Close()
}

// Stream answers the client of ctx event by event. tokens is how many tokens may still come. If they are more than shortAnswerTokens and an
// event loop (package loop) can carry the answer, a loop does. Otherwise the goroutine of the client's connection reads the events once the
// handler has returned, so that a slow client slows its engine down.
func (srv *Server) Stream(ctx *fasthttp.RequestCtx, contentType []byte, answer Events, tokens int) {
	if headSent := edge.StopKeepAlive(ctx); !headSent { // otherwise a comment for the waiting client has sent status and headers already
		ctx.SetStatusCode(http.StatusOK)
		edge.StreamHead(&ctx.Response.Header, contentType)
	}
	flow, fitsLoop := answer.(pump.Stream)
	wantsLoop := fitsLoop && tokens > shortAnswerTokens
	if !wantsLoop || !pump.Start(ctx, srv.Log, srv.Loops, flow) { // Start fails if no loop can take the answer
		edge.NewBodyStream(answer, func(error) { answer.Close() }, srv.Log).Answer(ctx)
	}
}

// allowCancelByName lets the client end the job by the name of its answer, if the endpoint has such names. For a fan-out,
// fannedOut.allowCancelByName does the same. When the client asks for the end, the register (srv.Running) calls abort.
func allowCancelByName(j *job, conn *edge.Conn) {
	if j.filterOptions.ID == nil {
		return
	}
	// The job's client has left if the client of conn did, or if it has ended the request by name and no engine ends the answer.
	jobClient := edge.NewCloseNotifier(j.srv.Log)
	conn.OnGone(jobClient.MarkGone)
	j.client = jobClient
	namedAbort := letAbort(j, jobClient, openai.OutputMode(&j.body))
	forget := j.srv.Running.Register(j.incoming.Record.Key, string(j.filterOptions.ID), func() { namedAbort.abort(j.srv) })
	j.incoming.forgetName = func() {
		forget()
		conn.OnGone(nil) // removes jobClient.MarkGone; the job itself only sets and removes callbacks of jobClient
	}
}

// answerAborted is called when a job has failed with fail before its answer began. If the client has ended the request by the id of its
// answer, that was no failure: evenkeel has ended the job as if the client had left, but the client is still there and waits. So it gets an
// answer without tokens, and the request is concluded with fail. For any other request answerAborted does nothing and returns false.
func answerAborted(ctx *fasthttp.RequestCtx, j *job, conn client, fail *openai.Error) bool {
	if !failedOnlyByAbort(j, conn, fail) {
		return false
	}
	if j.req.Stream { // the client expects events, even if all of them are known: the finish_reason, the usage and the end
		conclude := func() { j.srv.Conclude(j.incoming, fail) } // called when the events are written, or the client has left
		events := &readyEvents{bytes.NewReader(emptyAnswer(j)), conclude}
		j.srv.Stream(ctx, []byte("text/event-stream"), events, withoutLoop) // no engine sends them, so no event loop can read them
		return true
	}
	edge.AnswerWhole(ctx, "application/json", emptyAnswer(j), nil) // nil: it is short, so no memory is charged
	j.srv.Conclude(j.incoming, fail)
	return true
}

// readyEvents is a stream whose events are all known when it begins.
type readyEvents struct {
	*bytes.Reader
	settle func()
}

// Close concludes the request, whether or not the client has read all events.
func (r *readyEvents) Close() { r.settle() }
