package request

import (
	"context"
	"fmt"
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

// exchange is what the proxy brings to a probe itself: nothing for connectors
// whose prefiller answers with the hand-off.
func (srv *Server) exchange(c prefill.Candidate, id string, attempt int) (*mooncake.Exchange, error) {
	if c.Profile.Connector != mooncake.VLLMMooncake {
		return nil, nil
	}
	srv.exchanges.mu.Lock()
	known, ok := srv.exchanges.known[c.ID]
	srv.exchanges.mu.Unlock()
	if !ok || time.Since(known.at) > exchangeLife {
		ctx, cancel := context.WithTimeout(srv.Context, srv.Settings().Limits.ConnectTimeout)
		defer cancel()
		x, err := engine.Bootstrap(ctx, srv.Client, c.Target, c.Profile.BootstrapPort)
		switch {
		case err == nil:
			known.x = x
		case !ok || ctx.Err() == nil:
			return nil, err
		default: // it is slow: the work goes on with its last answer, for as long again
			srv.Log.Warn("a bootstrap server did not answer in time: its last answer is used", zap.String("candidate", c.ID), zap.Error(err))
		}
		known.at = time.Now()
		srv.exchanges.mu.Lock()
		if srv.exchanges.known == nil {
			srv.exchanges.known = map[string]learned{}
		}
		srv.exchanges.known[c.ID] = known
		srv.exchanges.mu.Unlock()
	}
	x := known.x
	x.TransferID = fmt.Sprintf("ek-%s-t%d", id, attempt)
	return &x, nil
}
