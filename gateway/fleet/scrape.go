package fleet

import (
	"context"
	"errors"
	"math"
	"sync"
	"time"

	"evenkeel/engine"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/prefill"
)

// metricPage is fetched once per interval for all ranks of an engine, and never twice at the same
// time.
type metricPage struct {
	mu     sync.Mutex // held while the page is fetched
	at     time.Time
	sample *engine.Sample
	err    error
}

// Scrape reads a candidate's gauges, at most half an interval old; NaN: not reported. A start time
// of another process goes into the roster.
func (f *Fleet) Scrape(ctx context.Context, c prefill.Candidate) (prefill.Sample, error) {
	known, _ := f.pages.LoadOrStore(c.Instance, &metricPage{})
	p := known.(*metricPage)
	p.mu.Lock()
	defer p.mu.Unlock()
	isFirst := p.at.IsZero()
	if isFirst || time.Since(p.at) > f.deps.Settings().Prefill.Scrape.Interval/2 {
		sample, err := engine.MetricNames(c.Profile.Metrics).Scrape(ctx, f.deps.Client, c.Target)
		// The caller has ended the scrape, which says nothing about the engine.
		if err != nil && errors.Is(ctx.Err(), context.Canceled) {
			return prefill.Sample{}, err
		}
		p.sample, p.err, p.at = sample, err, time.Now()
		if p.err == nil {
			f.deps.Monitor.Answered(c.Instance)
			f.recordStart(c.Instance, sample.StartTime)
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
	return prefill.Sample{
		KVUsage: orNaN(p.sample.KVUsage(rank)), KVHeld: orNaN(p.sample.HeldShare(rank)),
		Running: orNaN(p.sample.Running(rank)), Waiting: orNaN(p.sample.Waiting(rank)),
		StartTime: p.sample.StartTime, RTT: f.deps.Monitor.RTT(c.Instance),
	}, nil
}

func (f *Fleet) recordStart(key string, start float64) {
	alreadyKnown := func() bool {
		e := f.Now().Engine(key)
		return e == nil || !e.StartIsNews(start) // nil: the engine has left
	}
	if !alreadyKnown() {
		f.applyUnless(alreadyKnown, roster.Lived{Key: key, Start: start})
	}
}

// dropPagesOfGone: otherwise pages would pile up if each new engine came with a new address.
func (f *Fleet) dropPagesOfGone(now *roster.Snapshot) {
	for instance := range f.pages.Range {
		if now.Engine(instance.(string)) == nil {
			f.pages.Delete(instance)
		}
	}
}
