package gateway

import (
	"context"
	"time"

	"github.com/valyala/fasthttp"

	"evenkeel/gateway/openai"
	"evenkeel/gateway/peerserver"
	"evenkeel/mooncake"
)

// peerDeps returns what the part that serves the other proxies needs from this proxy.
func (g *Gateway) peerDeps() peerserver.Deps {
	return peerserver.Deps{
		Context: g.ctx, Go: g.background.Go, Log: g.log, Registerer: g.reg, Config: g.config, Service: g.service,
		Fleet: g.fleet, Prefill: g.scheduler, Dispatcher: g.dispatcher, Owner: g.owner, Bodies: g.bodies,
		Fail: func(ctx *fasthttp.RequestCtx, e *openai.Error) { g.requests.Fail(ctx, e) },
		Serve: func(ctx *fasthttp.RequestCtx, ep mooncake.Endpoint, from *peerserver.Hop, arrival time.Time) {
			g.admission.ServeForwarded(ctx, ep, &from.Hop, from.Tenant, arrival)
		},
	}
}

// publishTimeout bounds how long publishOwners waits for the dispatcher.
const publishTimeout = time.Second

// publishOwners makes the fleet, the dispatcher and the prefill tier act on which engines this
// proxy owns now. It waits for the dispatcher, for publishTimeout at most, so that no request is
// bound to an engine that this proxy no longer owns after publishOwners has returned.
func (g *Gateway) publishOwners(ctx context.Context) {
	g.fleet.Publish()
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	// This asks the dispatcher, which answers only after it has read the engines published above.
	g.peers.RefreshDecodeLoad(ctx)
	g.scheduler.Wake()
}
