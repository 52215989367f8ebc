package gateway

import (
	"context"
	"time"

	"github.com/valyala/fasthttp"

	"evenkeel/gateway/openai"
	"evenkeel/gateway/peerserver"
	"evenkeel/mooncake"
)

func (g *Gateway) abroadHost() peerserver.Host {
	return peerserver.Host{
		Context: g.ctx, Go: g.background.Go, Log: g.log, Registerer: g.reg, Config: g.config, Service: g.service,
		Fleet: g.fleet, Tier: g.tier, Dispatcher: g.dispatcher, Owner: g.owner, Bodies: g.bodies,
		Fail: func(ctx *fasthttp.RequestCtx, e *openai.Error) { g.requests.Fail(ctx, e) },
		Serve: func(ctx *fasthttp.RequestCtx, ep mooncake.Endpoint, from *peerserver.Hop, came time.Time) {
			g.door.Receive(ctx, ep, &from.Hop, from.Tenant, came)
		},
	}
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
