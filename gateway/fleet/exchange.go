package fleet

import (
	"context"
	"strings"
	"time"

	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// learned is what a bootstrap server answered, and when.
type learned struct {
	x  mooncake.Exchange
	at time.Time
}

// forgetExchanges drops what is known of the candidates of an engine.
func (f *Fleet) forgetExchanges(engine string) {
	for candidate := range f.exchanges.Range {
		if strings.HasPrefix(candidate.(string), engine+"/") {
			f.exchanges.Delete(candidate)
		}
	}
}

// exchangeLife bounds how long a restarted engine is called by its old name.
const exchangeLife = 5 * time.Second

// Exchange is what the proxy brings to a probe itself: nothing for connectors whose
// prefiller answers with the hand-off. The caller gives it a new TransferID.
func (f *Fleet) Exchange(c prefill.Candidate) (*mooncake.Exchange, error) {
	if c.Profile.Connector != mooncake.VLLMMooncake {
		return nil, nil
	}
	last, ok := f.exchanges.Load(c.ID)
	known, _ := last.(learned)
	if !ok || time.Since(known.at) > exchangeLife {
		ctx, cancel := context.WithTimeout(f.host.Context, f.host.Settings().Limits.ConnectTimeout)
		defer cancel()
		x, err := engine.Bootstrap(ctx, f.host.Client, c.Target, c.Profile.BootstrapPort)
		switch {
		case err == nil:
			known.x = x
		case !ok || ctx.Err() == nil:
			return nil, err
		default: // it is slow: the work goes on with its last answer, for as long again
			f.host.Log.Warn("a bootstrap server did not answer in time; the proxy uses its last answer", zap.String("candidate", c.ID), zap.Error(err))
		}
		known.at = time.Now()
		f.exchanges.Store(c.ID, known)
	}
	x := known.x
	return &x, nil
}
