package fleet

import (
	"context"
	"maps"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// exchanges remembers what the bootstrap servers of vllm-mooncake prefillers
// answered, by candidate.
type exchanges struct {
	mu    sync.Mutex
	known map[string]learned
}

type learned struct {
	x  mooncake.Exchange
	at time.Time
}

// forget drops what is known of the candidates of an engine.
func (e *exchanges) forget(engine string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	maps.DeleteFunc(e.known, func(candidate string, _ learned) bool { return strings.HasPrefix(candidate, engine+"/") })
}

// exchangeLife bounds how long a restarted engine is called by its old name.
const exchangeLife = 5 * time.Second

// Exchange is what the proxy brings to a probe itself: nothing for connectors whose
// prefiller answers with the hand-off.
func (f *Fleet) Exchange(c prefill.Candidate, transfer string) (*mooncake.Exchange, error) {
	if c.Profile.Connector != mooncake.VLLMMooncake {
		return nil, nil
	}
	f.exchanges.mu.Lock()
	known, ok := f.exchanges.known[c.ID]
	f.exchanges.mu.Unlock()
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
			f.host.Log.Warn("a bootstrap server did not answer in time: its last answer is used", zap.String("candidate", c.ID), zap.Error(err))
		}
		known.at = time.Now()
		f.exchanges.mu.Lock()
		if f.exchanges.known == nil {
			f.exchanges.known = map[string]learned{}
		}
		f.exchanges.known[c.ID] = known
		f.exchanges.mu.Unlock()
	}
	x := known.x
	x.TransferID = transfer
	return &x, nil
}
