package admission

import (
	"net/http"
	"time"

	"github.com/valyala/fasthttp"

	"evenkeel/gateway/failure"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/request"
	"evenkeel/geo"
	"evenkeel/mooncake"
)

// Receive serves a request that another dispatcher sent for a tenant.
func (d *Handler) Receive(ctx *fasthttp.RequestCtx, ep mooncake.Endpoint, from *geo.Hop, tenant string, came time.Time) {
	in := d.newIncoming(journal.Facts{ID: request.NewID(), ClientID: from.RID, Arrival: came, Key: tenant, Origin: from.Origin})
	in.From = from
	ctx.Response.Header.Set("X-Request-Id", from.RID)
	in.Record.Witness(headersOf(ctx), true, ep.Path()) // another dispatcher has decided what is sampled
	d.end(ctx, in, func() *openai.Error { return d.answer(ctx, ep, in) })
}

// busy refuses a request of another dispatcher for whose model too many wait here already.
func (d *Handler) busy(from *geo.Hop, m fleet.Route) *openai.Error {
	if from.N >= from.Max && !d.host.Fleet.Now().Begins(m.Board, m.Name) { // the request may go no further, and could only wait here
		return failure.NotOurs
	}
	if d.host.Requests.Node.Accepts(from.Sender(), d.host.Requests.Tier.Waiting(m.Name)) {
		return nil
	}
	return &openai.Error{Status: http.StatusServiceUnavailable, Code: geo.RejectBusy, Message: "too many requests wait in this region",
		RetryAfter: 1}
}
