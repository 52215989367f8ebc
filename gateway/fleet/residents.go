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

// askPatience bounds the wait for engines to report how many requests and KV tokens they hold.
const askPatience = time.Second

// LoadOf returns how many requests and KV tokens this proxy has on the decode ranks of a scope (ours). If ask is true, it also returns
// those of all proxies (all), from the engines' own gauges. silent lists the ranks whose engines do not report them.
func (f *Fleet) LoadOf(ctx context.Context, scope string, ask bool) (ours, all []geo.Resident, silent []string) {
	now := f.Now()
	at := map[int32]int{} // by worker: the index in ours
	for _, m := range f.deps.Dispatch(ctx).Models {
		for _, w := range m.Workers {
			r := now.Rank(w.ID)
			isOfScope := r != nil && r.Scope != nil && r.Scope.Name == scope
			if w.Used == 0 || !isOfScope {
				continue
			}
			i, known := at[w.ID] // known: the rank has changed its board, and requests still run from the former one
			if !known {
				i = len(ours)
				at[w.ID] = i
				ours = append(ours, geo.Resident{ID: w.Name})
			}
			ours[i].Requests += w.Used
			ours[i].KVTokens += w.KVTokens
		}
	}
	if ask {
		var engines []*roster.Engine
		for _, e := range now.Engines() {
			if e.Decodes() && e.Status.Up && e.Scope == scope {
				engines = append(engines, e)
			}
		}
		all, silent = f.deps.residents(ctx, engines)
	}
	return ours, all, silent
}

// residents returns the requests and KV tokens on decode ranks, from the engines' own gauges. silent lists the ranks whose engines do not
// report them. All engines are asked at the same time, for askPatience at most: the caller has to renew claims on engines, so it must not
// wait for an engine that hangs.
func (d *Deps) residents(ctx context.Context, engines []*roster.Engine) (found []geo.Resident, silent []string) {
	ctx, cancel := context.WithTimeout(ctx, askPatience)
	defer cancel()
	samples, errs := make([]*engine.Sample, len(engines)), make([]error, len(engines))
	var all sync.WaitGroup
	for i, in := range engines {
		all.Go(func() {
			samples[i], errs[i] = engine.MetricNames(in.Profile.Metrics).Scrape(ctx, d.Client, in.At(-1))
		})
	}
	all.Wait()
	for i, in := range engines {
		sample, err := samples[i], errs[i]
		if err != nil {
			d.Log.Debug("this proxy does not know what runs on an engine that it took over", zap.String("engine", in.ID), zap.Error(err))
		}
		for _, r := range in.Ranks() {
			id := in.At(r).ID
			if err != nil {
				silent = append(silent, id)
				continue
			}
			running, hasRunning := sample.Running(max(0, r))
			usage, hasUsage := sample.KVUsage(max(0, r))
			if !hasRunning || !hasUsage {
				silent = append(silent, id)
				continue
			}
			found = append(found, geo.Resident{ID: id, Requests: int(running), KVTokens: int64(usage * float64(kvCapacity(in, r)))})
		}
	}
	return found, silent
}

// kvCapacity returns how many KV tokens a rank's memory can hold: as its engine reports it, because the engine's usage is a share of this
// number, or else by the config. 0: unknown. The boards prefer the config, which may leave a part of the memory to others.
func kvCapacity(in *roster.Engine, rank int) int64 { return cmp.Or(in.Capacity(rank), in.Conf.KV) }

// OnSample passes on how many KV tokens are in use on an engine's decode ranks, and for which time each number is valid. Only gauges show
// when an engine frees the blocks of ended answers, or of requests whose KV never came. asked is when the sample was requested. An engine
// core that hangs still reports the gauges of its last step, so the number is valid for the time of the rank's last sign of life. A sign
// after asked does not count, because the engine may have read its gauges before it.
func (f *Fleet) OnSample(key string, s *engine.Sample, asked time.Time) {
	now := f.Now()
	in := now.Engine(key)
	if in == nil || in.Role != roster.Decode {
		return
	}
	for _, r := range in.Ranks() {
		usage, reported := s.KVUsage(max(0, r))
		capacity := kvCapacity(in, r)
		target := in.At(r)
		if rank, _ := now.RankByName(target.ID); rank != nil && reported && capacity > 0 {
			validAt := in.Traffic.Liveness(target.Rank).LastSign()
			if asked.Before(validAt) {
				validAt = asked
			}
			f.deps.Gauged(rank.Worker, int64(usage*float64(capacity)), validAt)
		}
	}
}
