package admission

import (
	"net/http"
	"time"

	"github.com/valyala/fasthttp"

	"evenkeel/gateway/failure"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/request"
	"evenkeel/geo"
	"evenkeel/mooncake"
)

// ServeForwarded serves a request that another proxy forwarded. tenant is the name of the client's
// key, and arrival is when the request came here.
func (d *Handler) ServeForwarded(ctx *fasthttp.RequestCtx, ep mooncake.Endpoint, from *geo.Hop, tenant string, arrival time.Time) {
	in := d.newIncoming(journal.LogEntry{ID: request.NewID(), ClientID: from.RID, Arrival: arrival, Key: tenant, Origin: from.Origin})
	in.From = from
	ctx.Response.Header.Set("X-Request-Id", from.RID)
	const trusted = true // the proxy that forwarded the request has decided whether it is traced
	in.Record.OpenViews(headersOf(ctx), trusted, ep.Path())
	d.serveOrRefuse(ctx, in, func() *openai.Error { return d.admitAndServe(ctx, ep, in) })
}

// checkBusy refuses a request of another proxy if too many requests for its model wait here
// already.
func (d *Handler) checkBusy(from *geo.Hop, route roster.Route) *openai.Error {
	mayBeForwarded := from.N < from.Max
	if !mayBeForwarded && !d.deps.Fleet.Now().AcceptsNew(route.Board, route.Name) {
		return failure.NotOurs // no engine of this proxy may begin the request, so it could only wait
	}
	if d.deps.Requests.Peers.Accepts(from.Sender(), d.deps.Requests.Prefill.Waiting(route.Name)) {
		return nil
	}
	return &openai.Error{Status: http.StatusServiceUnavailable, Code: geo.RejectBusy, Message: "too many requests wait in this region",
		RetryAfter: 1}
}
