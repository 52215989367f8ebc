package gateway

import (
	"context"
	"net/http"
	"time"

	"github.com/valyala/fasthttp"

	"evenkeel/gateway/abroad"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/request"
	"evenkeel/geo"
	"evenkeel/mooncake"
)

func (g *Gateway) abroadHost() abroad.Host {
	return abroad.Host{
		Context: g.ctx, Go: g.background.Go, Log: g.log, Registerer: g.reg, Config: g.config, Service: g.service,
		Fleet: g.fleet, Tier: g.tier, Dispatcher: g.dispatcher, Owner: g.owner, Bodies: g.bodies,
		Fail:  func(ctx *fasthttp.RequestCtx, e *openai.Error) { g.requests.Fail(ctx, e) },
		Serve: g.receive,
	}
}

// receive serves a request that another dispatcher sent.
func (g *Gateway) receive(ctx *fasthttp.RequestCtx, ep mooncake.Endpoint, from *abroad.Hop, came time.Time) {
	in := g.begin(journal.Facts{ID: request.NewID(), ClientID: from.RID, Arrival: came, Key: from.Tenant, Origin: from.Origin})
	in.From = &from.Hop
	ctx.Response.Header.Set("X-Request-Id", from.RID)
	in.Told.Witness(headersOf(ctx), true, ep) // another dispatcher has decided what is sampled
	if fail := g.answer(ctx, ep, in); fail != nil {
		g.requests.Refuse(ctx, in.Incoming, fail)
	}
}

// busy refuses a request of another dispatcher for whose model too many wait here already.
func (g *Gateway) busy(from *geo.Hop, m fleet.Route) *openai.Error {
	if from.N >= from.Max && !g.fleet.Begins(m.Board) { // it could only wait here
		return request.ErrNotOurs()
	}
	if g.peers.Node().Accepts(from.Sender(), g.tier.Waiting(m.Name)) {
		return nil
	}
	return &openai.Error{Status: http.StatusServiceUnavailable, Code: geo.RejectBusy, Message: "too many requests wait in this region", RetryAfter: 1}
}

// publishPatience bounds the wait until the dispatcher has taken up who owns what.
const publishPatience = time.Second

// publishOwners has all that binds requests take up who admits to what.
func (g *Gateway) publishOwners(ctx context.Context) {
	g.fleet.Publish()
	ctx, cancel := context.WithTimeout(ctx, publishPatience)
	defer cancel()
	g.peers.Look(ctx) // the dispatcher has taken the news up once it answers
	g.tier.Wake()
}
