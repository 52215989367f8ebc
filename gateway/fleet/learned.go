package fleet

import (
	"context"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// learned is how decode engines reach prefill engines, as the prefill engines have reported it.
type learned struct {
	host        *Host
	now         func() *Published
	coordinates sync.Map // placed values, by candidate
	exchanges   sync.Map // exchange values, by candidate: the answers of the bootstrap servers of vllm-mooncake prefillers
}

// placed is where decode engines reach a candidate, and the process for which that holds.
type placed struct {
	born Birth
	at   *mooncake.Coordinates
}

// exchange is what a bootstrap server answered, and when.
type exchange struct {
	answer mooncake.Exchange
	at     time.Time
}

// Coordinates are where decode engines reach a prefill engine that writes KV to them; nil: this is not known yet, or
// another process runs there now.
func (l *learned) Coordinates(c prefill.Candidate) *mooncake.Coordinates {
	stored, _ := l.coordinates.Load(c.ID)
	engines := l.now()
	if p, ok := stored.(placed); ok && p.born == engines.Born(c.Instance) {
		return p.at
	} else if e := engines.Engine(c.Instance); e != nil && !ok { // the configured coordinates hold for the first process that is seen
		return e.Conf.Coordinates()
	}
	return nil
}

// Learn stores the coordinates that a candidate has reported, and that its process was b.
func (l *learned) Learn(c prefill.Candidate, b Birth, at *mooncake.Coordinates) {
	l.coordinates.Store(c.ID, placed{b, at})
}

// forget drops the exchanges of an engine's candidates.
func (l *learned) forget(engine string) {
	for candidate := range l.exchanges.Range {
		if strings.HasPrefix(candidate.(string), engine+"/") {
			l.exchanges.Delete(candidate)
		}
	}
}

// exchangeLife bounds how long a restarted engine is called by its old engine id.
const exchangeLife = 5 * time.Second

// Exchange is what the proxy itself must add to a probe, as the engine's bootstrap server tells it; nil for connectors whose prefill engine
// answers with the hand-off. An answer of the server is used for exchangeLife, also a second time if the server is slow. The caller gives
// the result a new TransferID.
func (l *learned) Exchange(c prefill.Candidate) (*mooncake.Exchange, error) {
	if c.Profile.Connector != mooncake.VLLMMooncake {
		return nil, nil
	}
	last, ok := l.exchanges.Load(c.ID)
	known, _ := last.(exchange)
	if !ok || time.Since(known.at) > exchangeLife {
		ctx, cancel := context.WithTimeout(l.host.Context, l.host.Settings().Limits.ConnectTimeout)
		defer cancel()
		x, err := engine.Bootstrap(ctx, l.host.Client, c.Target, c.Profile.BootstrapPort)
		switch {
		case err == nil:
			known.answer = x
		case !ok || ctx.Err() == nil:
			return nil, err
		default: // the server is slow: its last answer is used for the same time again
			l.host.Log.Warn("a bootstrap server did not answer in time; the proxy uses its last answer", zap.String("candidate", c.ID),
				zap.Error(err))
		}
		known.at = time.Now()
		l.exchanges.Store(c.ID, known)
	}
	x := known.answer
	return &x, nil
}
