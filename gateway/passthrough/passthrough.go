// Package passthrough serves requests that are not split into prefill and decode: token counts,
// embeddings, scores, what is heard. Each goes as it came to one engine that has its model
// and its endpoint, and the engine's answer goes to the client as it comes.
package passthrough

import (
	"fmt"
	"net/http"
	"strconv"

	"github.com/valyala/fasthttp"

	"evenkeel/gateway/edge"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/request"
)

// Parse reads and checks the body of a request to one of the endpoints.
func Parse(path string, raw []byte, contentType string, lim openai.Limits) (*openai.Request, *openai.Error) {
	switch {
	case hears(path):
		return openai.ParseForm(raw, contentType, lim)
	case path == openai.CountPath:
		return openai.ParseCount(raw, lim)
	}
	return openai.ParsePassed(raw, lim)
}

// Serve has an engine answer a request. raw is its body. An error it returns has not been
// answered yet.
func (s *Server) Serve(ctx *fasthttp.RequestCtx, in *request.Incoming, req *openai.Request, path string, raw []byte) *openai.Error {
	conn, ok := edge.ConnOf(ctx)
	if !ok {
		return openai.NewError(http.StatusInternalServerError, "internal_error", "the connection is not watched")
	}
	seat := s.seats.For(in.Body)
	if !seat.Acquire(1) {
		return s.full()
	}
	j := &job{srv: s, in: in, req: req, path: path, conn: conn, raw: raw, kind: string(ctx.Request.Header.ContentType()), seat: seat}
	if fail := j.run(lifecycle.Event{What: lifecycle.Begun, Script: lifecycle.Passed}); fail != nil {
		return fail
	}
	a, h := j.answer, &ctx.Response.Header
	if a.metadata != "" {
		h.Set(metadataHeader, a.metadata)
	}
	if s.Settings().ExposeRoute || in.Explain {
		h.Set("X-Evenkeel-Route", in.Record.Route)
		h.Set("X-Evenkeel-Engine", in.Record.Engine)
		h.Set("X-Evenkeel-Attempts", strconv.Itoa(in.Record.Attempts))
	}
	if a.whole == nil {
		s.Requests.Stream(ctx, []byte(a.kind), a, 0)
		return nil
	}
	a.Close()
	request.Piece(ctx, a.kind, a.whole, a.room)
	return nil
}

// full refuses a request for which there is no seat.
func (s *Server) full() *openai.Error {
	e := &openai.Error{
		Status: http.StatusTooManyRequests, Code: "queue_full", RetryAfter: 1, Own: !s.seats.Full(),
		Message: "too many requests are passed through to engines already; retry later",
		Why:     fmt.Sprintf("as many requests are passed through to engines as limits.passed_through allows: %d", s.Settings().Limits.PassedThrough),
	}
	if e.Own {
		e.Message = "too many of your requests are passed through to engines already; send the next when some have ended"
		e.Why = fmt.Sprintf("one caller has its share of the requests that may be passed through at once (limits.passed_through: %d): as many as are free beside it", s.Settings().Limits.PassedThrough)
	}
	return e
}
