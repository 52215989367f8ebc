package prefill

import (
	"context"
	"math"
	"sync"
	"time"

	"go.uber.org/zap"
)

// Run scrapes the live candidates and follows the KV events of those that have
// some, until ctx is done, and waits for all that to end.
func (t *Tier) Run(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	running, followed := map[*candidate]context.CancelFunc{}, streams{}
	defer func() {
		for c, s := range followed {
			t.unfollow(c, s)
		}
	}()
	var current ScrapeConfig
	for {
		t.follow(followed)
		wanted, settings := t.liveCandidates()
		if settings != current { // every loop has an interval of its own
			for c, stop := range running {
				stop()
				delete(running, c)
			}
			current = settings
		}
		for c, stop := range running {
			if !wanted[c] {
				stop()
				delete(running, c)
			}
		}
		for c := range wanted {
			if running[c] == nil {
				loop, stop := context.WithCancel(ctx)
				running[c] = stop
				wg.Go(func() { t.scrapeEvery(loop, c, settings) })
			}
		}
		select {
		case <-t.changed:
		case <-ctx.Done():
			for _, stop := range running {
				stop()
			}
			return
		}
	}
}

// liveCandidates are those to be scraped: none where nothing is.
func (t *Tier) liveCandidates() (map[*candidate]bool, ScrapeConfig) {
	t.lock()
	defer t.unlock()
	live := map[*candidate]bool{}
	if t.cfg.Scrape.Interval == 0 {
		return live, t.cfg.Scrape
	}
	for _, c := range t.candidates {
		if c.configured && c.Live {
			live[c] = true
		}
	}
	return live, t.cfg.Scrape
}

// scrapeEvery has one scrape in flight at most: a slow engine is asked less
// often, not more.
func (t *Tier) scrapeEvery(ctx context.Context, c *candidate, s ScrapeConfig) {
	tick := time.NewTicker(s.Interval)
	defer tick.Stop()
	for {
		t.scrape(ctx, c, s)
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// Scrape reads a candidate's gauges now: for who does without Run.
func (t *Tier) Scrape(ctx context.Context, id string) {
	t.mu.Lock()
	c, settings := t.candidates[id], t.cfg.Scrape
	t.mu.Unlock()
	if c != nil {
		t.scrape(ctx, c, settings)
	}
}

func (t *Tier) scrape(ctx context.Context, c *candidate, s ScrapeConfig) {
	t.lock()
	target, at := c.Candidate, t.mark(c)
	c.asked = t.now
	t.unlock()

	scrape, stop := context.WithTimeout(ctx, s.Timeout)
	defer stop()
	sample, err := t.cfg.Scraper(scrape, target)

	t.lock()
	c.asked = time.Time{}
	if ctx.Err() != nil {
		t.unlock()
		return // not wanted any more, whatever it says
	}
	c.took = t.now.Sub(at.sent)
	before := c.stale(s.Misses)
	if err != nil {
		c.misses++
		c.missed++
	} else {
		t.take(c, sample, at)
	}
	now := c.stale(s.Misses)
	unbounded := err == nil && c.capacityTokens() == 0 && !c.unbounded
	c.unbounded = c.unbounded || unbounded
	t.updateGate(c)
	t.unlock()

	if unbounded {
		t.cfg.Log.Warn("nobody says how many KV tokens a prefiller holds, so that the prefix index may promise more than it has; set kv_tokens_per_rank in its profile",
			zap.String("candidate", target.ID))
	}
	switch {
	case now && !before:
		t.cfg.Log.Warn("a prefiller does not tell its gauges: the proxy uses its own accounts for it, and prefers prefillers that tell theirs",
			zap.String("candidate", target.ID), zap.Int("misses", s.Misses), zap.Error(err))
	case before && !now:
		t.cfg.Log.Info("a prefiller tells its gauges again", zap.String("candidate", target.ID))
	}
}

// mark is where a candidate's accounts stood when a scrape was sent.
type mark struct {
	sent           time.Time
	unanswered     int
	sends, answers int
}

func (t *Tier) mark(c *candidate) mark {
	return mark{t.now, c.account.leases[probing], c.sends, c.answers}
}

// take books a sample. What the engine counts beyond our own unanswered probes
// came from others.
func (t *Tier) take(c *candidate, s Sample, at mark) {
	if c.startTime > 0 && s.StartTime > 0 && s.StartTime != c.startTime {
		t.freeOrphans(c, c.sampleSent)
		c.cache.Restarted(t.now)
	}
	if s.StartTime > 0 {
		c.startTime = s.StartTime
	}
	if s.CapacityTokens > 0 {
		c.capacity = s.CapacityTokens
	}
	if s.BlockTokens > 0 {
		c.block = s.BlockTokens
	}
	if s.RTT > 0 {
		c.rtt = s.RTT
	}
	c.usage = s.KVUsage
	c.foreign, c.foreignQueue, c.waits = 0, 0, 0
	if there := s.Running + s.Waiting; !math.IsNaN(there) {
		c.foreign = max(0, there-float64(at.unanswered))
		c.foreignQueue, c.waits = max(0, s.Waiting-float64(at.unanswered)), s.Waiting
		if s.Waiting == 0 {
			c.idle = idle{s.Running, at.sends, at.answers}
		}
	}
	c.noteSample(s, at.sends, at.answers)
	c.sampleSent = at.sent
	c.misses = 0
}
