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

// askPatience bounds the wait for the answer of an engine about what runs there.
const askPatience = time.Second

// LoadOf returns what this proxy's own requests hold of a scope's decode ranks, and if ask is true, what the requests of all proxies hold
// there, by the engines' own gauges. silent are the ranks whose engine does not say.
func (f *Fleet) LoadOf(ctx context.Context, scope string, ask bool) (ours, all []geo.Resident, silent []string) {
	now := f.Now()
	for _, m := range f.host.Dispatch(ctx).Models {
		for _, w := range m.Workers {
			if r := now.Rank(w.ID); w.Used > 0 && r != nil && r.Scope != nil && r.Scope.Name == scope {
				ours = append(ours, geo.Resident{ID: w.Name, Requests: w.Used, KVTokens: w.KVTokens})
			}
		}
	}
	if ask {
		var engines []*roster.Engine
		for _, e := range now.Engines() {
			if e.Decodes() && e.Status.Up && e.Scope == scope {
				engines = append(engines, e)
			}
		}
		all, silent = f.host.residents(ctx, engines)
	}
	return ours, all, silent
}

// residents returns what runs on decode ranks by the engines' own gauges; silent are the ranks whose engine does not
// say. All engines are asked at the same time, for askPatience at most: the caller has claims to look after, and must
// not wait for an engine that hangs.
func (h *Host) residents(ctx context.Context, engines []*roster.Engine) (found []geo.Resident, silent []string) {
	ctx, cancel := context.WithTimeout(ctx, askPatience)
	defer cancel()
	samples, errs := make([]*engine.Sample, len(engines)), make([]error, len(engines))
	var all sync.WaitGroup
	for i, in := range engines {
		all.Go(func() {
			samples[i], errs[i] = engine.MetricNames(in.Profile.Metrics).Scrape(ctx, h.Client, in.At(-1))
		})
	}
	all.Wait()
	for i, in := range engines {
		sample, err := samples[i], errs[i]
		if err != nil {
			h.Log.Debug("this proxy does not know what runs on an engine that it took over", zap.String("engine", in.ID), zap.Error(err))
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
			found = append(found, geo.Resident{ID: id, Requests: int(running), KVTokens: int64(usage * float64(in.Capacity(r)))})
		}
	}
	return found, silent
}

// OnSample passes on how many KV tokens are in use on decode ranks. They may keep blocks of answers, or blocks for requests
// whose KV never came: the engine's gauges show when these are freed. The gauges of a core that stands still are
// those of its last step, so they hold only for the time of its last sign of life. asked is when the sample was asked for: a sign that came
// while the sample was on its way says nothing of it.
func (f *Fleet) OnSample(key string, s *engine.Sample, asked time.Time) {
	now := f.Now()
	in := now.Engine(key)
	if in == nil || in.Role != Decode {
		return
	}
	for _, r := range in.Ranks() {
		usage, reported := s.KVUsage(max(0, r))
		capacity := cmp.Or(in.Conf.KV, in.Capacity(r))
		at := in.At(r)
		if rank, _ := now.Named(at.ID); rank != nil && reported && capacity > 0 {
			holds := in.Traffic.Signs(at.Rank).Last()
			if asked.Before(holds) {
				holds = asked
			}
			f.host.Gauged(rank.Worker, int64(usage*float64(capacity)), holds)
		}
	}
}
