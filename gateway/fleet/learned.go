package fleet

import (
	"context"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// learned holds how decode engines reach prefill engines, as the prefill engines have reported it.
type learned struct {
	deps        *Deps
	now         func() *roster.Snapshot
	coordinates sync.Map // placed values, by the candidate's ID
	exchanges   sync.Map // exchange values, by the candidate's ID: answers of the bootstrap servers of vllm-mooncake prefill engines
}

// placed holds the coordinates at which decode engines reach a candidate, and the engine process that reported them.
type placed struct {
	process roster.ProcessID
	at      *mooncake.KVAddress
}

// exchange is an answer of a bootstrap server, with its time.
type exchange struct {
	answer mooncake.BootstrapInfo
	at     time.Time
}

// Coordinates says where decode engines reach a prefill engine that writes KV to them; nil: not known yet, or another process has replaced
// the one that reported its coordinates.
func (l *learned) Coordinates(c prefill.Candidate) *mooncake.KVAddress {
	engines := l.now()
	stored, reported := l.coordinates.Load(c.ID)
	if !reported { // until the engine reports coordinates, the configured ones count
		if e := engines.Engine(c.Instance); e != nil {
			return e.Conf.Coordinates()
		}
		return nil
	}
	if p := stored.(placed); p.process == engines.ProcessAt(c.Instance) {
		return p.at
	}
	return nil
}

// Learn stores the coordinates that a process of a candidate's engine has reported.
func (l *learned) StoreCoordinates(c prefill.Candidate, process roster.ProcessID, at *mooncake.KVAddress) {
	l.coordinates.Store(c.ID, placed{process, at})
}

// forget drops the exchanges of an engine's candidates.
func (l *learned) forget(engine string) {
	for candidate := range l.exchanges.Range {
		if strings.HasPrefix(candidate.(string), engine+"/") {
			l.exchanges.Delete(candidate)
		}
	}
}

// exchangeLife bounds how long requests to a restarted engine may still name its old engine id.
const exchangeLife = 5 * time.Second

// BootstrapInfo returns the part of a hand-off that prefill engines of the vllm-mooncake connector do not return: the proxy asks the
// engine's bootstrap server for it. nil: the candidate has another connector. An answer of the server is used for exchangeLife, and once
// more for that time if the server does not answer the next question in time. The caller gives the result a new TransferID.
func (l *learned) BootstrapInfo(c prefill.Candidate) (*mooncake.BootstrapInfo, error) {
	if c.Profile.Connector != mooncake.VLLMMooncake {
		return nil, nil
	}
	last, hasLast := l.exchanges.Load(c.ID)
	known, _ := last.(exchange)
	if !hasLast || time.Since(known.at) > exchangeLife {
		ctx, cancel := context.WithTimeout(l.deps.Context, l.deps.Settings().Limits.ConnectTimeout)
		defer cancel()
		info, err := engine.Bootstrap(ctx, l.deps.Client, c.Target, c.Profile.BootstrapPort)
		switch {
		case err == nil:
			known.answer = info
		case !hasLast || ctx.Err() == nil: // there is no earlier answer, or the call failed before its time was over
			return nil, err
		default: // the server is slow, so its last answer is used for another exchangeLife
			l.deps.Log.Warn("a bootstrap server did not answer in time; the proxy uses its last answer", zap.String("candidate", c.ID),
				zap.Error(err))
		}
		known.at = time.Now()
		l.exchanges.Store(c.ID, known)
	}
	info := known.answer
	return &info, nil
}
