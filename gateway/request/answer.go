package request

import (
	"fmt"
	"net/http"
	"strconv"

	"github.com/valyala/fasthttp"

	"evenkeel/gateway/journal"
	"evenkeel/gateway/openai"
	"evenkeel/geo"
)

// Headers of a request and of its answer.
const (
	SessionHeader = "X-Evenkeel-Session"
	PolicyHeader  = "X-Evenkeel-Policy" // of prefill: asked for, or used
)

// Headers of an answer that say where it went.
const (
	prefillHeader  = "X-Evenkeel-Prefill"
	hitHeader      = "X-Evenkeel-Hit-Tokens"
	attemptsHeader = "X-Evenkeel-Attempts"
	routeHeader    = "X-Evenkeel-Route"
	reasonHeader   = "X-Evenkeel-Reason"
	decodeHeader   = "X-Evenkeel-Decode"
	waitsHeader    = "X-Evenkeel-Waits"
)

// Ways of a request, as x-evenkeel-route names them.
const (
	wayLocal     = "local"
	wayForwarded = "forwarded"
	wayFallback  = "fallback"
)

// Fail writes an error answer.
func (srv *Server) Fail(ctx *fasthttp.RequestCtx, e *openai.Error) {
	ctx.SetStatusCode(e.Status)
	body, contentType := e.Typed(string(ctx.Path()))
	ctx.SetContentType(contentType)
	if e.RetryAfter > 0 {
		ctx.Response.Header.Set("Retry-After", strconv.Itoa(e.RetryAfter))
	}
	if srv.Settings().ExposeRoute {
		markReason(ctx, e)
	}
	ctx.SetBody(body)
}

// markReason says in an answer's headers which error it is.
func markReason(ctx *fasthttp.RequestCtx, e *openai.Error) {
	if e.Code != "" {
		ctx.Response.Header.Set(reasonHeader, e.Code)
	}
}

// expose says in an answer's headers which way the request went, and what it
// waited for up to its first event, as a Server-Timing header would. Not every
// caller may see it: names of engines are addresses.
func (srv *Server) expose(ctx *fasthttp.RequestCtx, in *Incoming) {
	told := in.Told
	if !srv.Settings().ExposeRoute && !in.Explain || told.Route == "" {
		return
	}
	h := &ctx.Response.Header
	h.Set(decodeHeader, told.Rank)
	h.Set(waitsHeader, fmt.Sprintf("queue;dur=%.1f, probe;dur=%.1f, pool;dur=%.1f, transfer;dur=%.1f", told.QueueMs, told.ProbeMs, told.WaitMs, told.TransferMs))
	if told.Route == journal.Disaggregated {
		h.Set(prefillHeader, told.Prefill)
		h.Set(PolicyHeader, told.PrefillPolicy)
	}
	h.Set(hitHeader, strconv.Itoa(told.HitTokens))
	h.Set(attemptsHeader, strconv.Itoa(told.Attempts))
	h.Set(routeHeader, told.Route)
}

// markRoute says in the answer where the request was served, where there is
// more than one place.
func (srv *Server) markRoute(ctx *fasthttp.RequestCtx, in *Incoming) {
	if srv.Node != nil && in.From == nil && in.way != "" {
		ctx.Response.Header.Set(routeHeader, in.way)
	}
}

// explain marks an answer to another dispatcher with what it needs to know of
// the refusal: which of them are its own to mend.
func (srv *Server) explain(ctx *fasthttp.RequestCtx, in *Incoming, fail *openai.Error) {
	if fail == nil {
		if in.Told.PromptTokens > 0 {
			ctx.Response.Header.Set(geo.CachedHeader, strconv.Itoa(in.Told.CachedTokens))
		}
		return
	}
	switch fail.Code {
	case geo.RejectBusy, geo.RejectDraining, geo.RejectOwner:
		srv.Node.Rejected(fail.Code)
		ctx.Response.Header.Set(geo.RejectHeader, fail.Code)
	case "model_not_found":
		srv.Node.Rejected(geo.RejectModel)
		ctx.Response.Header.Set(geo.RejectHeader, geo.RejectModel)
	}
}

// streamHead writes the head of a streamed answer.
func streamHead(ctx *fasthttp.RequestCtx, contentType []byte) {
	ctx.SetStatusCode(http.StatusOK)
	ctx.Response.Header.SetContentTypeBytes(contentType)
	ctx.Response.Header.Set("Cache-Control", "no-cache")
	ctx.Response.Header.Set("X-Accel-Buffering", "no") // an nginx in front must not gather tokens
}
