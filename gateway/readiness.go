package gateway

import (
	"context"
	"time"

	"go.uber.org/zap"
)

const (
	readyEvery = time.Second      // the proxy looks whether it is ready
	readyAgain = 10 * time.Minute // and says again why it is not
)

// tellReadiness logs why the proxy is not ready: when that begins, when the
// reason changes, and seldom while it lasts.
func (g *Gateway) tellReadiness(ctx context.Context) {
	tick := time.NewTicker(readyEvery)
	defer tick.Stop()
	var said string
	var at time.Time
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		ok, why := g.Ready()
		switch {
		case ok && said != "":
			g.log.Info("the proxy is ready again", zap.String("was", said))
			said = ""
		case ok:
		case why != said || time.Since(at) >= readyAgain:
			said, at = why, time.Now()
			g.log.Warn("not ready: "+why, zap.Strings("engines", g.fleet.Missing()))
		}
	}
}
