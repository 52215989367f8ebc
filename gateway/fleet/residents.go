package fleet

import (
	"cmp"
	"context"
	"sync"
	"time"

	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/geo"
)

// askPatience bounds the wait for an engine that is asked what runs there.
const askPatience = time.Second

// LoadOf is what our own requests hold of a scope's decode ranks, and with ask what its
// engines say that runs there.
func (f *Fleet) LoadOf(ctx context.Context, scope string, ask bool) (ours, all []geo.Resident, silent []string) {
	for _, m := range f.host.Dispatch(ctx).Models {
		for _, w := range m.Workers {
			if r := f.Rank(w.ID); w.Used > 0 && r != nil && r.Scope != nil && r.Scope.Name == scope {
				ours = append(ours, geo.Resident{ID: w.Name, Requests: w.Used, KVTokens: w.KVTokens})
			}
		}
	}
	if ask {
		all, silent = f.residents(ctx, f.decodes(func(in *instance) bool { return f.scopeOf(in) == scope }))
	}
	return ours, all, silent
}

// residents are what runs on decode ranks by the engines' own gauges; silent are the ranks
// whose engine does not tell. All engines are asked at the same time and have a moment
// each: the caller has claims to look after, and must not wait for an engine that hangs.
func (f *Fleet) residents(ctx context.Context, engines []*instance) (found []geo.Resident, silent []string) {
	ctx, cancel := context.WithTimeout(ctx, askPatience)
	defer cancel()
	samples, errs := make([]*engine.Sample, len(engines)), make([]error, len(engines))
	var all sync.WaitGroup
	for i, in := range engines {
		all.Go(func() {
			samples[i], errs[i] = engine.MetricNames(in.profile.Metrics).Scrape(ctx, f.host.Client, in.target(-1))
		})
	}
	all.Wait()
	for i, in := range engines {
		sample, err := samples[i], errs[i]
		if err != nil {
			f.host.Log.Debug("this proxy does not know what runs on an engine that it took over", zap.String("engine", in.id), zap.Error(err))
		}
		for _, r := range ranksOf(in) {
			id := in.target(r).ID
			if err != nil {
				silent = append(silent, id)
				continue
			}
			running, told := sample.Running(max(0, r))
			usage, also := sample.KVUsage(max(0, r))
			if !told || !also {
				silent = append(silent, id)
				continue
			}
			found = append(found, geo.Resident{ID: id, Requests: int(running), KVTokens: int64(usage * float64(capacityOf(in, r)))})
		}
	}
	return found, silent
}

// OnSample passes on how many KV tokens are in use on ranks that may keep blocks for requests whose prefill never
// ended: their engines' gauges tell when they do no more. The gauges of a core that stands still are those of its last step, so
// that they tell of nothing that came after its last sign of life.
func (f *Fleet) OnSample(key string, s *engine.Sample) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	in := f.instances[key]
	if in == nil || in.role != Decode || !in.profile.Early() {
		return
	}
	for _, r := range ranksOf(in) {
		usage, told := s.KVUsage(max(0, r))
		capacity := cmp.Or(in.conf.KV, capacityOf(in, r))
		at := in.target(r)
		if id, known := f.ids[at.ID]; known && told && capacity > 0 {
			f.host.Gauged(id, int64(usage*float64(capacity)), f.host.Monitor.Traffic(key).Signs(at.Rank).Last())
		}
	}
}
