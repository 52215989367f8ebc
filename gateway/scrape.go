package gateway

import (
	"context"
	"math"
	"sync"
	"time"

	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/geo"
	"evenkeel/prefill"
)

// pages are the engines' last metric pages. The ranks of one engine share a
// page: it is fetched once an interval and never twice at a time.
type pages struct {
	mu sync.Mutex
	of map[string]*page // by instance
}

type page struct {
	mu     sync.Mutex // held while it is fetched
	at     time.Time
	sample *engine.Sample
	err    error
}

func (p *pages) find(instance string) *page {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.of == nil {
		p.of = map[string]*page{}
	}
	if p.of[instance] == nil {
		p.of[instance] = &page{}
	}
	return p.of[instance]
}

// residents are what runs on engines' decode ranks by their own gauges; silent
// are those that do not tell. They are asked at the same time and have a moment
// each: the caller has claims to look after, and must not wait for an engine that
// hangs.
func (g *Gateway) residents(ctx context.Context, engines []*instance) (found []geo.Resident, silent []string) {
	ctx, cancel := context.WithTimeout(ctx, publishPatience)
	defer cancel()
	samples, errs := make([]*engine.Sample, len(engines)), make([]error, len(engines))
	var all sync.WaitGroup
	for i, in := range engines {
		all.Go(func() {
			samples[i], errs[i] = engine.MetricNames(in.profile.Metrics).Scrape(ctx, g.client, in.target(-1))
		})
	}
	all.Wait()
	for i, in := range engines {
		sample, err := samples[i], errs[i]
		if err != nil {
			g.log.Debug("what runs on an engine that was taken over is not known", zap.String("engine", in.id), zap.Error(err))
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

// scrape reads a prefill candidate's gauges; NaN is what it does not report.
func (g *Gateway) scrape(ctx context.Context, c prefill.Candidate) (prefill.Sample, error) {
	p := g.pages.find(c.Instance)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.at.IsZero() || time.Since(p.at) > g.conf().Prefill.Scrape.Interval/2 {
		asked := time.Now()
		p.sample, p.err = engine.MetricNames(c.Profile.Metrics).Scrape(ctx, g.client, c.Target)
		p.at = time.Now()
		if p.err == nil {
			g.monitor.Heard(c.Instance)
			g.fleet.lives(c.Instance, p.sample.StartTime, asked)
		}
	}
	if p.err != nil {
		return prefill.Sample{}, p.err
	}
	orNaN := func(v float64, ok bool) float64 {
		if !ok {
			return math.NaN()
		}
		return v
	}
	rank := c.Target.Rank
	capacity, _ := p.sample.CacheTokens(rank)
	return prefill.Sample{
		KVUsage: orNaN(p.sample.KVUsage(rank)), Running: orNaN(p.sample.Running(rank)), Waiting: orNaN(p.sample.Waiting(rank)),
		CapacityTokens: capacity, BlockTokens: p.sample.BlockTokens, StartTime: p.sample.StartTime, RTT: g.monitor.RTT(c.Instance),
	}, nil
}
