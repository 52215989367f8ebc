package gateway

import (
	"context"
	"fmt"
	"time"

	"evenkeel/gateway/fleet/roster"
	"go.uber.org/zap"
)

const (
	readyCheckEvery = time.Second      // time between two checks whether the proxy is ready
	readyLogEvery   = 10 * time.Minute // time between two logs of the same reason why the proxy is not ready
)

// Ready says whether a request could be served now, and if not why. If no prefill or no decode
// engine is healthy, the proxy is still ready if other regions serve its requests. It needs no
// prefill engine if it passes all requests through to decode engines.
func (g *Gateway) Ready() (ok bool, why string) {
	// Proxies that share decode groups send requests only to groups that one of them owns.
	whyNoOwner, engines := g.owner.UnreadyReason(time.Now()), g.fleet.Now()
	switch prefills, decodes := engines.CountInService(); {
	case g.service.Draining():
		return false, "draining"
	case whyNoOwner != "": // no proxy owns any group
		return false, whyNoOwner
	case !g.callbacks.Listening():
		return false, "nothing listens for callbacks of decode engines at bind.listen"
	case (prefills == 0 || decodes == 0) && g.peers != nil && len(g.peers.Geo().Models()) > 0: // ready: other regions serve its requests
	case prefills == 0 && decodes > 0 && g.onlyPassesThrough(): // ready: decode engines are enough
	case prefills == 0:
		return false, "no healthy " + engines.RoleText(roster.Prefill) + " engine" + g.whyNoEngine(engines)
	case decodes == 0:
		return false, "no healthy " + engines.RoleText(roster.Decode) + " engine" + g.whyNoEngine(engines)
	}
	return true, ""
}

// whyNoEngine is the end of a text that says that an engine is missing: a group waits for it, or
// discovery fails. It has no addresses, because everybody may ask whether the proxy is ready.
func (g *Gateway) whyNoEngine(engines *roster.Snapshot) string {
	if group := engines.IncompleteGroup(""); group != "" {
		return fmt.Sprintf("; group %q waits for an engine", group)
	}
	return g.discovery.Failure()
}

// Pauses lists the groups of engines that operators have paused. A pause does not make the proxy
// unready, because requests wait meanwhile.
func (g *Gateway) Pauses() []roster.Pause { return g.fleet.Now().Pauses() }

// Missing returns a line for each engine that takes no requests, with the reason. It returns
// nothing while at least one prefill and one decode engine take requests.
func (g *Gateway) Missing() []string {
	engines := g.fleet.Now()
	if p, d := engines.CountInService(); p > 0 && d > 0 {
		return nil
	}
	return engines.Missing()
}

// onlyPassesThrough says whether this proxy has no prefill engines, and is not meant to have any:
// each request is then passed through to one engine, as requests for embeddings are.
func (g *Gateway) onlyPassesThrough() bool {
	prefills, _ := g.fleet.Now().CountKnown()
	return prefills == 0 && len(g.conf().Engines.Prefill) == 0 && g.discovery == nil
}

// logReadiness logs why the proxy is not ready: at once, when the reason changes, and every
// readyLogEvery while it stays the same. It also logs when the proxy is ready again.
func (g *Gateway) logReadiness(ctx context.Context) {
	tick := time.NewTicker(readyCheckEvery)
	defer tick.Stop()
	var logged string // the reason that was logged last; empty: the proxy has been ready since
	var at time.Time  // when that reason was logged
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		ok, why := g.Ready()
		switch {
		case ok && logged != "":
			g.log.Info("the proxy is ready again", zap.String("was", logged))
			logged = ""
		case ok: // the proxy was ready before, too, so there is nothing to log
		case why != logged || time.Since(at) >= readyLogEvery:
			logged, at = why, time.Now()
			g.log.Warn("not ready: "+why, zap.Strings("engines", g.fleet.Now().Missing()))
		}
	}
}
