// Package passthrough has the requests that are not split into prefill and decode: token counts,
// embeddings, scores, what is heard. Each goes as it came to one engine that has its model
// and its endpoint. This package says which one; gateway/request sends it there, and relays the answer.
package passthrough

import (
	"fmt"
	"net/http"

	"github.com/valyala/fasthttp"

	"evenkeel/gateway/openai"
	"evenkeel/gateway/request"
	"evenkeel/mooncake"
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
	seat := s.seats.For(in.Body)
	if !seat.Acquire(1) {
		return s.full()
	}
	p := &request.Passed{
		Engines: s, Path: path, Kind: "application/json", Estimate: Estimate(path, req), Seat: seat, Memory: s.Bodies.For(in.Body), Took: s.took.WithLabelValues(path),
	}
	if hears(path) {
		p.Kind, p.Body = string(ctx.Request.Header.ContentType()), [][]byte{raw}
	} else {
		p.Body = req.Body.Splice(nil, mooncake.Reserved, nil)
	}
	if computes(path) {
		p.Most = int64(len(raw)) // no token has less than a byte
	}
	return s.Requests.Pass(ctx, in, req, p)
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
