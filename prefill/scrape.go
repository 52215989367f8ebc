package prefill

import (
	"context"
	"sync"
	"time"

	"go.uber.org/zap"

	"evenkeel/prefill/cache"
)

// Run scrapes the live candidates, and follows the KV events of those that publish them, until ctx
// ends. It returns when all of its goroutines have ended.
func (s *Scheduler) Run(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	w := watcher{s, map[*candidate]cache.Feed{}}
	defer w.stopStreams()
	running := map[*candidate]context.CancelFunc{} // loops that scrape one candidate each
	var runningSettings ScrapeConfig
	for {
		w.updateStreams()
		wanted, settings := w.scrapeTargets()
		for c, stop := range running {
			if !wanted[c] || settings != runningSettings { // a loop cannot change its settings: it is started again below
				stop()
				delete(running, c)
			}
		}
		runningSettings = settings
		for c := range wanted {
			if running[c] == nil {
				scrapeCtx, stop := context.WithCancel(ctx)
				running[c] = stop
				wg.Go(func() { w.scrapeEvery(scrapeCtx, c, settings) })
			}
		}
		select {
		case <-s.changed:
		case <-ctx.Done():
			for _, stop := range running {
				stop()
			}
			return
		}
	}
}

// scrapeTargets leaves out groups of ranks that prefill and decode: they are no single engine, and
// have no KV gate.
func (w watcher) scrapeTargets() (targets map[*candidate]bool, settings ScrapeConfig) {
	w.lock()
	defer w.unlock()
	targets = map[*candidate]bool{}
	if w.cfg.Scrape.Interval == 0 {
		return targets, w.cfg.Scrape
	}
	for _, c := range w.candidates {
		if c.configured && c.Live && !c.Aggregated {
			targets[c] = true
		}
	}
	return targets, w.cfg.Scrape
}

// scrapeEvery waits for each scrape, so that a slow engine is scraped less often.
func (w watcher) scrapeEvery(ctx context.Context, c *candidate, cfg ScrapeConfig) {
	tick := time.NewTicker(cfg.Interval)
	defer tick.Stop()
	for {
		w.scrape(ctx, c, cfg)
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// Scrape reads a candidate's gauges now, for callers that do not use Run.
func (s *Scheduler) Scrape(ctx context.Context, id string) {
	s.mu.Lock()
	c, settings := s.candidates[id], s.cfg.Scrape
	s.mu.Unlock()
	if c != nil {
		s.scrape(ctx, c, settings)
	}
}

// scrape reads a candidate's gauges and books the result. If ctx ends during the scrape, the result
// is ignored.
func (s *Scheduler) scrape(ctx context.Context, c *candidate, cfg ScrapeConfig) {
	s.lock()
	target, start := c.Candidate, c.load.StartScrape(s.now)
	s.unlock()

	scrapeCtx, stop := context.WithTimeout(ctx, cfg.Timeout)
	defer stop()
	sample, err := s.cfg.Scraper(scrapeCtx, target)

	s.lock()
	if ctx.Err() != nil {
		c.load.AbandonScrape()
		s.unlock()
		return
	}
	wasStale := c.load.Stale()
	if err != nil {
		c.load.RecordFailedScrape(start, s.now)
	} else if restarted := c.load.StoreSample(sample, start, s.now); restarted {
		c.cache.EngineRestarted(s.now)
		s.dropIfUnused(c) // the restart may have ended the last charge of a removed candidate
	}
	isStale := c.load.Stale()
	warnCapacity := err == nil && c.load.Capacity() == 0 && !c.capacityWarned
	c.capacityWarned = c.capacityWarned || warnCapacity
	s.unlock()

	if warnCapacity {
		s.cfg.Log.Warn("the KV capacity of a prefill engine is not known, so the prefix index may promise more than the engine has; set "+
			"kv_tokens_per_rank in its profile",
			zap.String("candidate", target.ID))
	}
	switch {
	case isStale && !wasStale:
		s.cfg.Log.Warn("a prefill engine's gauges cannot be read; the proxy uses its own accounts for it, and prefers engines whose gauges it "+
			"can read",
			zap.String("candidate", target.ID), zap.Error(err))
	case wasStale && !isStale:
		s.cfg.Log.Info("a prefill engine's gauges can be read again", zap.String("candidate", target.ID))
	}
}
