package request

import (
	"crypto/rand"
	"encoding/hex"
	"net/http"
	"strconv"

	"github.com/valyala/fasthttp"

	"evenkeel/gateway/edge"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/openai"
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

// NewID is 128 random bits: the stem of every id a request has on engines.
func NewID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails, by its documentation
	return hex.EncodeToString(b[:])
}

// Serve answers a request, or has another dispatcher answer it. An error it returns
// has not been answered yet.
func (srv *Server) Serve(ctx *fasthttp.RequestCtx, in *Incoming, req *openai.Request, m fleet.Route, legs []openai.Leg) *openai.Error {
	conn, ok := edge.ConnOf(ctx)
	if !ok {
		return &openai.Error{Status: http.StatusInternalServerError, Code: "internal_error", Message: "the connection is not watched"}
	}
	in.way = wayLocal
	j := &job{srv: srv, req: req, body: req.Body, client: reader{conn}, id: in.Record.ID, model: m, arrive: in.Record.Arrival, in: in, record: in.Record}
	req.Body, req.Prompts = mooncake.Body{}, nil // the jobs have it, as long as they need it
	if req.Stream {
		srv.keep(ctx, in, in.Record.Arrival)
	}
	if len(legs) > 1 {
		return srv.fanOut(ctx, conn, j, legs)
	}
	j.leg = &legs[0].Leg
	j.ask = sse.Ask{Usage: req.IncludeUsage || !req.Stream, ContinuousUsage: req.ContinuousUsage, TokenIDs: req.ReturnTokenIDs, Choice: -1, Cached: -1, Form: sse.FormOf(req.Endpoint.Path())}
	s, fail := j.serve(ctx)
	if s == nil && fail == nil {
		return nil // another dispatcher answers
	}
	edge.EndWait(ctx) // what is set in the head from here on is lost if it is
	srv.expose(ctx, in)
	srv.markRoute(ctx, in)
	in.Body.Give() // what is kept to go on elsewhere is on an account of its own
	if fail != nil {
		return fail
	}
	if in.From != nil {
		srv.explain(ctx, in, nil)
	}
	if req.Stream {
		tokens := s.mayHave
		if s.stage == ended {
			tokens = 0
		}
		srv.Stream(ctx, s.contentType(), s, tokens)
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
		srv.Stream(ctx, s.resp.ContentType(), s, 0)
		return nil
	}
	if meta := s.resp.Header(metadataHeader); len(meta) > 0 {
		h.SetBytesV(metadataHeader, meta)
	}
	Piece(ctx, string(s.resp.ContentType()), p.piece, p.Memory)
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
		srv.explain(ctx, in, e)
	}
	srv.Account(in, e)
	srv.Fail(ctx, e)
}

// Broken ends a request whose handler panics. Whoever recovers answers it.
func (srv *Server) Broken(in *Incoming) {
	srv.Account(in, failure.Broken())
}

// Score asks every prefill policy where a request would go, without sending it.
func (srv *Server) Score(req *openai.Request, m fleet.Route) ([]prefill.Scored, error) {
	legs := req.Legs()
	j := &job{srv: srv, req: req, body: req.Body, leg: &legs[0].Leg, model: m, id: NewID(), in: &Incoming{}, record: srv.Journal.Request(journal.Facts{})}
	return srv.Tier.Score(j.arrival())
}
