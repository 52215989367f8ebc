package fleet

import (
	"cmp"
	"context"
	"sync"
	"time"

	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/geo"
)

const residentsTimeout = time.Second

// LoadOf returns the requests and KV tokens on the decode ranks of a scope: this proxy's (ours)
// and, with askEngines, those of all proxies by the engines' gauges. silent: ranks whose engines do
// not report them.
func (f *Fleet) LoadOf(ctx context.Context, scope string, askEngines bool) (ours, all []geo.Resident, silent []string) {
	now := f.Now()
	indexOf := map[int32]int{}
	for _, m := range f.deps.Dispatch(ctx).Models {
		for _, w := range m.Workers {
			r := now.Rank(w.ID)
			isOfScope := r != nil && r.Scope != nil && r.Scope.Name == scope
			if w.Used == 0 || !isOfScope {
				continue
			}
			// listed: the rank has changed its board, and requests of the former board still run on it
			i, listed := indexOf[w.ID]
			if !listed {
				i = len(ours)
				indexOf[w.ID] = i
				ours = append(ours, geo.Resident{ID: w.Name})
			}
			ours[i].Requests += w.Used
			ours[i].KVTokens += w.KVTokens
		}
	}
	if askEngines {
		var engines []*roster.Engine
		for _, e := range now.Engines() {
			if e.Decodes() && e.Status.Up && e.Scope == scope {
				engines = append(engines, e)
			}
		}
		all, silent = f.deps.residentsOn(ctx, engines)
	}
	return ours, all, silent
}

// residentsOn asks all engines at the same time. The caller has to renew claims on engines, so it
// must not wait for an engine that hangs.
func (d *Deps) residentsOn(ctx context.Context, engines []*roster.Engine) (found []geo.Resident, silent []string) {
	ctx, cancel := context.WithTimeout(ctx, residentsTimeout)
	defer cancel()
	samples, errs := make([]*engine.Sample, len(engines)), make([]error, len(engines))
	var all sync.WaitGroup
	for i, e := range engines {
		all.Go(func() {
			samples[i], errs[i] = engine.MetricNames(e.Profile.Metrics).Scrape(ctx, d.Client, e.At(roster.NoRank))
		})
	}
	all.Wait()
	for i, e := range engines {
		sample, err := samples[i], errs[i]
		if err != nil {
			d.Log.Debug("this proxy does not know what runs on an engine that it took over", zap.String("engine", e.ID), zap.Error(err))
		}
		for _, r := range e.Ranks() {
			id := e.At(r).ID
			if err != nil {
				silent = append(silent, id)
				continue
			}
			number := max(0, r) // an only rank counts as rank 0
			running, hasRunning := sample.Running(number)
			usage, hasUsage := sample.HeldShare(number)
			if !hasRunning || !hasUsage {
				silent = append(silent, id)
				continue
			}
			found = append(found, geo.Resident{ID: id, Requests: int(running), KVTokens: int64(usage * float64(kvCapacity(e, r)))})
		}
	}
	return found, silent
}

// kvCapacity is first what the engine reports, because its usage is a share of this number; 0:
// unknown. Boards prefer the config, which may leave a part of the memory to others.
func kvCapacity(e *roster.Engine, rank int) int64 {
	return cmp.Or(e.Status.Memories.Of(rank).Capacity.Tokens, e.Conf.KV)
}

// OnSample passes on how many KV tokens are in use on an engine's decode ranks. Only gauges show
// when an engine frees the blocks of ended answers, or of requests whose KV never came. An engine
// core that hangs still reports its last step, so the number is valid for the time of the rank's
// last sign of life, unless this is after asked.
func (f *Fleet) OnSample(key string, s *engine.Sample, asked time.Time) {
	now := f.Now()
	e := now.Engine(key)
	// an aggregated engine pulls no KV, and its gauge also counts prompts that it computes
	if e == nil || e.Role != roster.Decode {
		return
	}
	for _, r := range e.Ranks() {
		number := max(0, r) // an only rank counts as rank 0
		usage, isReported := s.HeldShare(number)
		capacity := kvCapacity(e, r)
		target := e.At(r)
		rank, _ := now.RankByName(target.ID)
		usageKnown := isReported && capacity > 0
		if rank == nil || !usageKnown { // nil: the rank is on no board
			continue
		}
		validAt := e.Traffic.Liveness(target.Rank).LastSign()
		if asked.Before(validAt) {
			validAt = asked
		}
		f.deps.Gauged(rank.Worker, int64(usage*float64(capacity)), validAt)
	}
}
