package gateway

import (
	"context"
	"time"

	"github.com/valyala/fasthttp"

	"evenkeel/gateway/openai"
	"evenkeel/gateway/peerserver"
	"evenkeel/mooncake"
)

func (g *Gateway) peersHost() peerserver.Deps {
	return peerserver.Deps{
		Context: g.ctx, Go: g.background.Go, Log: g.log, Registerer: g.reg, Config: g.config, Service: g.service,
		Fleet: g.fleet, Prefill: g.scheduler, Dispatcher: g.dispatcher, Owner: g.owner, Bodies: g.bodies,
		Fail: func(ctx *fasthttp.RequestCtx, e *openai.Error) { g.requests.Fail(ctx, e) },
		Serve: func(ctx *fasthttp.RequestCtx, ep mooncake.Endpoint, from *peerserver.Hop, came time.Time) {
			g.door.Receive(ctx, ep, &from.Hop, from.Tenant, came)
		},
	}
}

// publishPatience bounds how long publishOwners waits for the dispatcher.
const publishPatience = time.Second

// publishOwners tells the fleet, the dispatcher and the prefill tier which engines this proxy owns now.
func (g *Gateway) publishOwners(ctx context.Context) {
	g.fleet.Publish()
	ctx, cancel := context.WithTimeout(ctx, publishPatience)
	defer cancel()
	g.peers.Look(ctx) // the dispatcher answers only after it has read what was published before
	g.scheduler.Wake()
}
