package request

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/valyala/fasthttp"

	"evenkeel/gateway/edge"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/pump"
	"evenkeel/geo"
	"evenkeel/mooncake"
	"evenkeel/prefill"
	"evenkeel/sse"
)

// Incoming begins the record of a request. It counts as open until Refuse, or the end
// of its answer.
func (srv *Server) Incoming(facts journal.Facts) *Incoming {
	srv.open.Add(1)
	return &Incoming{Record: srv.Journal.Request(facts)}
}

// NewID returns 128 random bits in hex. All ids of a request on engines contain this id.
func NewID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails, by its documentation
	return hex.EncodeToString(b[:])
}

// Serve answers a request, or forwards it to another dispatcher. If it returns an error, the client has got no answer yet, so the caller
// must send the error.
func (srv *Server) Serve(ctx *fasthttp.RequestCtx, in *Incoming, req *openai.Request, model fleet.Route, legs []openai.Part) *openai.Error {
	conn, ok := edge.ConnOf(ctx)
	if !ok {
		return &openai.Error{Status: http.StatusInternalServerError, Code: "internal_error", Message: "the connection is not watched"}
	}
	in.way = wayLocal
	j := &job{srv: srv, req: req, body: req.Body, client: reader{conn}, id: in.Record.ID, model: model, incoming: in, record: in.Record}
	req.Body, req.Prompts = mooncake.Body{}, nil // the jobs keep the body, and can drop it early only if req does not keep it too
	if req.Stream {
		srv.keepAlive(ctx, in, in.Record.Arrival)
	}
	j.ask = sse.Ask{Usage: req.IncludeUsage || !req.Stream, ContinuousUsage: req.ContinuousUsage, TokenIDs: req.ReturnTokenIDs, Choice: -1,
		Cached: -1, Form: sse.FormOf(req.Endpoint.Path())}
	switch req.Endpoint {
	case mooncake.Tokens:
		j.ask.TokenIDs, j.ask.ID = true, openai.NameTokens(&j.body, in.Record.ClientID, j.id)
	case mooncake.Generate:
		j.ask.ID = openai.NameGenerate(&j.body, j.id)
	case mooncake.Chat, mooncake.Completions, mooncake.Responses, mooncake.Messages:
	}
	if len(legs) > 1 || req.Listed {
		return srv.fanOut(ctx, conn, j, legs)
	}
	j.changes = &legs[0].Changes
	makeNameable(j, conn)
	s, fail := j.serve(ctx)
	if s == nil && fail == nil {
		return nil // another dispatcher answers
	}
	if fail != nil && answerAborted(ctx, j, conn, fail) {
		return nil
	}
	edge.EndWait(ctx) // if the client already has the answer's headers, those that are set below do not reach it
	srv.exposeRoute(ctx, in)
	srv.markRoute(ctx, in)
	in.Body.Give() // the parts that are kept for another attempt count on an account of their own
	if fail != nil {
		return fail
	}
	if in.From != nil {
		srv.markForPeer(ctx, in, nil)
	}
	if req.Stream {
		tokens := s.from.maxTokens
		if s.stage == ended {
			tokens = 0
		}
		srv.Stream(ctx, s.from.contentType(), s, tokens)
		return nil
	}
	answer, fail := s.collect()
	if fail != nil {
		srv.Fail(ctx, fail)
		return nil
	}
	Piece(ctx, "application/json", answer, nil)
	return nil
}

// Pass passes a request through to one engine and relays the answer. If it returns an error, the client has got no answer yet, so the
// caller must send the error.
func (srv *Server) Pass(ctx *fasthttp.RequestCtx, in *Incoming, req *openai.Request, p *Passed) *openai.Error {
	conn, ok := edge.ConnOf(ctx)
	if !ok {
		p.Seat.Give()
		return openai.NewError(http.StatusInternalServerError, "internal_error", "the connection is not watched")
	}
	j := &job{srv: srv, req: req, client: reader{conn}, id: in.Record.ID, incoming: in, record: in.Record, passed: p}
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
	if !s.from.whole {
		srv.Stream(ctx, s.from.resp.ContentType(), s, 0)
		return nil
	}
	if meta := s.from.resp.Header(metadataHeader); len(meta) > 0 {
		h.SetBytesV(metadataHeader, meta)
	}
	Piece(ctx, string(s.from.resp.ContentType()), p.answer, p.Memory)
	s.Close()
	return nil
}

// Refuse ends a request that never had an answer.
func (srv *Server) Refuse(ctx *fasthttp.RequestCtx, in *Incoming, e *openai.Error) {
	edge.EndWait(ctx)
	if in.Explain {
		markReason(ctx, e)
	}
	if in.From != nil {
		srv.markForPeer(ctx, in, e)
	}
	srv.Conclude(in, e)
	srv.Fail(ctx, e)
}

// Broken settles a request whose handler has panicked. The code that recovers the panic writes the answer.
func (srv *Server) Broken(in *Incoming) {
	srv.Conclude(in, failure.Broken)
}

// Score asks every prefill policy where a request would go, without sending it.
func (srv *Server) Score(req *openai.Request, model fleet.Route) ([]prefill.Scored, error) {
	legs := req.Parts()
	j := &job{srv: srv, req: req, body: req.Body, changes: &legs[0].Changes, model: model, id: NewID(), incoming: &Incoming{},
		record: srv.Journal.Request(journal.Facts{})}
	return srv.Tier.Score(j.arrival())
}

// Headers of a request and of its answer.
const (
	SessionHeader    = "X-Evenkeel-Session"
	SessionEndHeader = "X-Evenkeel-Session-End"
	ClassHeader      = "X-Evenkeel-Class"       // batch or online
	DeadlineHeader   = "X-Evenkeel-Deadline-Ms" // time from the request's arrival to the first token, at most
	PolicyHeader     = "X-Evenkeel-Policy"      // the prefill policy: in a request the wanted one, in an answer the one that was used
)

// Headers of an answer that say where its request was served.
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

// Ways of a request, as x-evenkeel-route names them.
const (
	wayLocal     = "local"
	wayForwarded = "forwarded"
	wayFallback  = "fallback"
)

// keepAlive sends SSE comments to the client of ctx while it waits for its answer (limits.keep_alive), until Stream or Fail. Another
// dispatcher gets no comments: the first comment would fix the status of the answer, which that dispatcher needs, and it sends comments to
// its client itself.
func (srv *Server) keepAlive(ctx *fasthttp.RequestCtx, in *Incoming, since time.Time) {
	if interval := srv.Settings().Limits.KeepAlive; interval > 0 && in.From == nil {
		edge.KeepClient(ctx, interval, since, sse.Silence(sse.FormOf(string(ctx.Path()))), srv.Log)
	}
}

// Fail writes an error answer. A client that already has the headers of a stream gets the error as an event, and the stream ends.
func (srv *Server) Fail(ctx *fasthttp.RequestCtx, e *openai.Error) {
	if path := string(ctx.Path()); edge.EndWait(ctx) {
		end := sse.OnlyFailure(nil, sse.FormOf(path), e.Words(), e.TypeIn(path), e.Code)
		edge.NewPull(bytes.NewReader(end), func(error) {}, srv.Log).Answer(ctx)
		return
	}
	ctx.SetStatusCode(e.Status)
	body, contentType := e.Typed(string(ctx.Path()))
	if e.RetryAfter > 0 {
		ctx.Response.Header.Set("Retry-After", strconv.Itoa(e.RetryAfter))
	}
	if srv.Settings().ExposeRoute {
		markReason(ctx, e)
	}
	Piece(ctx, contentType, body, nil)
}

func markReason(ctx *fasthttp.RequestCtx, e *openai.Error) {
	if e.Code != "" {
		ctx.Response.Header.Set(reasonHeader, e.Code)
	}
}

// exposeRoute says in an answer's headers which engines served the request, and how long it waited in each phase before its first event, in
// the form of a Server-Timing header. Only some callers may see this, because the names of engines are addresses.
func (srv *Server) exposeRoute(ctx *fasthttp.RequestCtx, in *Incoming) {
	record := in.Record
	if !srv.Settings().ExposeRoute && !in.Explain || record.Route == "" {
		return
	}
	h := &ctx.Response.Header
	h.Set(decodeHeader, record.Rank)
	h.Set(waitsHeader, fmt.Sprintf("queue;dur=%.1f, probe;dur=%.1f, pool;dur=%.1f, transfer;dur=%.1f", record.QueueMs, record.ProbeMs,
		record.WaitMs, record.TransferMs))
	if record.Route == journal.Disaggregated {
		h.Set(prefillHeader, record.Prefill)
		h.Set(PolicyHeader, record.PrefillPolicy)
	}
	h.Set(hitHeader, strconv.Itoa(record.HitTokens))
	h.Set(attemptsHeader, strconv.Itoa(record.Attempts))
	h.Set(routeHeader, record.Route)
}

// markRoute says in the answer's headers where the request was served, if there are other dispatchers.
func (srv *Server) markRoute(ctx *fasthttp.RequestCtx, in *Incoming) {
	if srv.Node != nil && in.From == nil && in.way != "" {
		ctx.Response.Header.Set(routeHeader, in.way)
	}
}

// markForPeer sets headers for the dispatcher that forwarded the request: the number of cached tokens, or a code for the refusal, from
// which that dispatcher decides whether to serve the request elsewhere.
func (srv *Server) markForPeer(ctx *fasthttp.RequestCtx, in *Incoming, fail *openai.Error) {
	if fail == nil {
		if in.Record.PromptTokens > 0 {
			ctx.Response.Header.Set(geo.CachedHeader, strconv.Itoa(in.Record.CachedTokens))
		}
		return
	}
	switch fail.Code {
	case geo.RejectBusy, geo.RejectDraining, geo.RejectOwner:
		srv.Node.Rejected(fail.Code)
		ctx.Response.Header.Set(geo.RejectHeader, fail.Code)
	case "deadline_unmet":
		ctx.Response.Header.Set(geo.RejectHeader, geo.RejectDeadline)
	case "model_not_found":
		srv.Node.Rejected(geo.RejectModel)
		ctx.Response.Header.Set(geo.RejectHeader, geo.RejectModel)
	}
}

// Events is an answer that comes event by event. It may have the optional methods Pending and Ended, see edge.NewPull. Close settles the
// request, however it ended.
type Events interface {
	io.Reader
	Close()
}

// Stream answers the client of ctx event by event, once the handler has returned. If the answer may have more than shortAnswer further
// tokens and an event loop can carry it, the loop does so. Else the connection's own goroutine reads the events, so that a slow client
// slows its engine down.
func (srv *Server) Stream(ctx *fasthttp.RequestCtx, contentType []byte, answer Events, tokens int) {
	if !edge.EndWait(ctx) {
		ctx.SetStatusCode(http.StatusOK)
		edge.StreamHead(&ctx.Response.Header, contentType)
	}
	if flow, ok := answer.(pump.Stream); !ok || tokens <= shortAnswer || !pump.Start(ctx, srv.Log, srv.Loops, flow) {
		edge.NewPull(answer, func(error) { answer.Close() }, srv.Log).Answer(ctx)
	}
}

// Piece answers the client of ctx in one piece. room is the memory that was charged for the body, and is given back once the body is
// written; nil: no memory was charged.
func Piece(ctx *fasthttp.RequestCtx, contentType string, body []byte, room *edge.Charge) {
	ctx.SetContentType(contentType)
	if room == nil {
		ctx.SetBody(body)
		return
	}
	ctx.SetBodyStream(&charged{bytes.NewReader(body), room}, len(body))
}

// charged is an answer in one piece whose memory is given back when it is written.
type charged struct {
	*bytes.Reader
	room *edge.Charge
}

func (c *charged) Close() error {
	c.room.Give()
	return nil
}

// makeNameable lets the client end the job's request by name, if the endpoint has such names. For a request with several answers,
// fanned.nameable does this.
func makeNameable(j *job, conn *edge.Conn) {
	if j.ask.ID == nil {
		return
	}
	share := edge.NewDisconnect(j.srv.Log)
	conn.OnGone(share.Leave)
	j.client = reader{abortable{share}}
	j.abort = &aborting{endpoint: j.req.Endpoint, leave: share.Leave, outputMode: openai.OutputMode(&j.body)}
	j.ask.Aborted = j.abort.asked.Load
	forget := j.srv.Running.Enter(j.incoming.Record.Key, string(j.ask.ID), func() { j.abort.end(j.srv) })
	j.incoming.forgetName = func() {
		forget()
		conn.OnGone(nil) // the job has removed only the callback of share, not that of conn
	}
}

// answerAborted answers a request that its client has ended by name before a rank began the answer: with an answer that has no tokens.
// It returns false, and does nothing, for any other request.
func answerAborted(ctx *fasthttp.RequestCtx, j *job, conn client, fail *openai.Error) bool {
	if !j.abort.endedByClient() || conn.Left() || fail.Status != failure.Gone.Status {
		return false
	}
	if j.req.Stream {
		j.srv.Stream(ctx, []byte("text/event-stream"), &readyEvents{bytes.NewReader(unanswered(j)),
			func() { j.srv.Conclude(j.incoming, fail) }}, 0)
		return true
	}
	Piece(ctx, "application/json", unanswered(j), nil)
	j.srv.Conclude(j.incoming, fail)
	return true
}

// readyEvents is a stream whose events have all been written already.
type readyEvents struct {
	*bytes.Reader
	over func()
}

// Close settles the request.
func (r *readyEvents) Close() { r.over() }
