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

// learned is how decode engines reach prefill engines, as these have reported it.
type learned struct {
	host        *Host
	now         func() *Published
	coordinates sync.Map // of placed, by candidate
	exchanges   sync.Map // of exchange: what the bootstrap servers of vllm-mooncake prefillers answered, by candidate
}

// placed is where a candidate is reached by decode engines, and the process of which that is true.
type placed struct {
	born Birth
	at   *mooncake.Coordinates
}

// exchange is what a bootstrap server answered, and when.
type exchange struct {
	x  mooncake.Exchange
	at time.Time
}

// Coordinates are where decode engines reach a prefill engine that writes to them; nil: nobody knows
// yet, or it is another process now.
func (l *learned) Coordinates(c prefill.Candidate) *mooncake.Coordinates {
	known, _ := l.coordinates.Load(c.ID)
	engines := l.now()
	if p, ok := known.(placed); ok && p.born == engines.Born(c.Instance) {
		return p.at
	} else if e := engines.Engine(c.Instance); e != nil && !ok { // what was configured is true of the first process that is seen
		return e.Conf.Coordinates()
	}
	return nil
}

// Learn keeps what a candidate that was born at b has said about that.
func (l *learned) Learn(c prefill.Candidate, b Birth, at *mooncake.Coordinates) {
	l.coordinates.Store(c.ID, placed{b, at})
}

// forget drops what is known of the exchanges of an engine's candidates.
func (l *learned) forget(engine string) {
	for candidate := range l.exchanges.Range {
		if strings.HasPrefix(candidate.(string), engine+"/") {
			l.exchanges.Delete(candidate)
		}
	}
}

// exchangeLife bounds how long a restarted engine is called by its old name.
const exchangeLife = 5 * time.Second

// Exchange is what the proxy brings to a probe itself: nothing for connectors whose
// prefiller answers with the hand-off. The caller gives it a new TransferID.
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
			known.x = x
		case !ok || ctx.Err() == nil:
			return nil, err
		default: // it is slow: the work goes on with its last answer, for as long again
			l.host.Log.Warn("a bootstrap server did not answer in time; the proxy uses its last answer", zap.String("candidate", c.ID),
				zap.Error(err))
		}
		known.at = time.Now()
		l.exchanges.Store(c.ID, known)
	}
	x := known.x
	return &x, nil
}
