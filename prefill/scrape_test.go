package prefill

import (
	"context"
	"errors"
	"math"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// gauges is an engine's answer to scrapes.
type gauges struct {
	mu       sync.Mutex
	sample   Sample
	err      error
	takes    time.Duration
	inFlight int
	most     int // in flight at once
	asked    int
}

func (g *gauges) set(f func(*gauges)) {
	g.mu.Lock()
	defer g.mu.Unlock()
	f(g)
}

func (g *gauges) scrape(ctx context.Context, _ Candidate) (Sample, error) {
	g.mu.Lock()
	g.asked++
	g.inFlight++
	g.most = max(g.most, g.inFlight)
	takes := g.takes
	g.mu.Unlock()

	var late error
	select {
	case <-time.After(takes):
	case <-ctx.Done():
		late = ctx.Err()
	}

	g.mu.Lock()
	defer g.mu.Unlock()
	g.inFlight--
	return g.sample, errors.Join(g.err, late)
}

// scraped runs a tier that scrapes g every 500 ms from now on.
func scraped(t *testing.T, g *gauges, candidates []Candidate) *Tier {
	tier := newTier(t, candidates, func(c *Config) {
		c.Scrape.Interval = 500 * time.Millisecond
		c.Scraper = g.scrape
	})
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { tier.Run(ctx); close(done) }()
	t.Cleanup(func() { stop(); <-done })
	synctest.Wait()
	return tier
}

func TestAFullEngineIsClosedWhileItHoldsSomethingOfOurs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gauges{sample: Sample{KVUsage: .97}}
		tier := scraped(t, g, up("a"))
		time.Sleep(time.Second)
		lease := acquire(t, tier, request(1)) // an idle engine's gauge is frozen
		mustWait(t, tier, request(2))

		waits := start(t.Context(), tier, request(3))
		g.set(func(g *gauges) { g.sample.KVUsage = .50 })
		require.LessOrEqual(t, (<-waits).after, 500*time.Millisecond, "woken by the scrape")
		lease.Release()
	})
}

func TestThreeMissesCloseTheGateAndOneGoodScrapeOpensIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gauges{sample: Sample{KVUsage: .1}, err: errors.New("refused")}
		tier := scraped(t, g, up("a"))
		time.Sleep(999 * time.Millisecond) // misses at 0 and 500 ms
		inFlight := acquire(t, tier, request(1))
		time.Sleep(2 * time.Millisecond)
		mustWait(t, tier, request(2))
		require.Equal(t, "closed", stateOf(tier, "a"))
		inFlight.Answered(Usage{}, time.Time{}) // what is in flight goes on
		inFlight.Release()

		waits := start(t.Context(), tier, request(3))
		g.set(func(g *gauges) { g.err = nil })
		require.LessOrEqual(t, (<-waits).after, 500*time.Millisecond)
	})
}

func TestMissesFromBeforeACandidateWentDownAreForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gauges{err: errors.New("refused")}
		tier := scraped(t, g, up("a"))
		time.Sleep(2 * time.Second)
		require.Equal(t, "closed", stateOf(tier, "a"))
		tier.SetCandidates([]Candidate{{ID: "a", Models: []string{testModel}}})
		tier.SetCandidates(up("a"))
		require.Equal(t, "open", stateOf(tier, "a"))
	})
}

func TestASilentEngineIsAskedOnceAtATimeAndMissed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gauges{takes: time.Hour}
		tier := scraped(t, g, up("a"))
		time.Sleep(2 * time.Second)
		require.Equal(t, "closed", stateOf(tier, "a"))
		g.set(func(g *gauges) { require.Equal(t, 1, g.most) })
	})
}

func TestAMissingGaugeLeavesTheGateToOurAccounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gauges{sample: Sample{KVUsage: math.NaN(), Running: math.NaN(), Waiting: math.NaN()}}
		tier := scraped(t, g, up("a"))
		hold(t, tier, "a", pooled, 89_000)
		time.Sleep(time.Second)
		l := acquire(t, tier, Request{PromptTokens: 2_000})
		mustWait(t, tier, request(2))
		require.Nil(t, tier.Status()[0].ScrapedUsage)
		require.Zero(t, tier.Status()[0].Foreign)
		l.Release()
	})
}

func TestTheCapacityIsScrapedUnlessConfigured(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		candidates := up("a", "b")
		candidates[0].CapacityTokens = 0
		tier := scraped(t, &gauges{sample: Sample{CapacityTokens: 4096}}, candidates)
		time.Sleep(time.Second)
		require.EqualValues(t, 4096, tier.Status()[0].CapacityTokens)
		require.EqualValues(t, 100_000, tier.Status()[1].CapacityTokens)
	})
}

func TestForeignRequestsCountUntilTheSampleIsThreeIntervalsOld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gauges{sample: Sample{Running: 3, Waiting: 4}}
		tier := scraped(t, g, up("a"))
		hold(t, tier, "a", probing, 10, 10)
		time.Sleep(501 * time.Millisecond)
		batch := func() float64 {
			tier.lock()
			defer tier.unlock()
			return tier.candidates["a"].batch(tier.now, tier.cfg.Scrape.Interval)
		}
		require.InDelta(t, 7, batch(), 0, "2 ours of 7 there")
		g.set(func(g *gauges) { g.err = errors.New("refused") })
		time.Sleep(1499 * time.Millisecond)
		require.InDelta(t, 7, batch(), 0)
		time.Sleep(time.Millisecond)
		require.InDelta(t, 2, batch(), 0, "too old to speak of others")
	})
}

func TestARestartedEngineHoldsNoOrphans(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gauges{sample: Sample{StartTime: 1000}}
		tier := scraped(t, g, up("a"))
		hold(t, tier, "a", orphaned, 50_000)
		live := hold(t, tier, "a", pooled, 1_000)
		time.Sleep(time.Second)
		require.EqualValues(t, 51_000, tier.Status()[0].KVTokens)
		g.set(func(g *gauges) { g.sample.StartTime = 2000 })
		time.Sleep(time.Second)
		require.EqualValues(t, 1_000, tier.Status()[0].KVTokens, "what is live ends with its own lease")
		live[0].Release()
		requireIdle(t, tier)
	})
}

func TestAnEngineThatStartedAnewBetweenScrapesHasAnEmptyCache(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gauges{sample: Sample{StartTime: 1000}}
		tier := scraped(t, g, up("a"))
		acquire(t, tier, prompt("1", text("rule", 8192))).Answered(Usage{}, time.Time{})
		time.Sleep(time.Second)
		again := acquire(t, tier, prompt("2", text("rule", 8192)))
		require.NotZero(t, again.HitTokens)
		again.Release()
		g.set(func(g *gauges) { g.sample.StartTime = 2000 })
		time.Sleep(time.Second)
		require.Zero(t, acquire(t, tier, prompt("3", text("rule", 8192))).HitTokens)
	})
}

func TestOnlyLiveConfiguredCandidatesAreScraped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gauges{}
		candidates := up("a")
		candidates[0].Live = false
		tier := scraped(t, g, candidates)
		asked := func() (n int) {
			g.set(func(g *gauges) { n, g.asked = g.asked, 0 })
			return n
		}
		time.Sleep(time.Minute)
		require.Zero(t, asked())
		tier.SetCandidates(up("a"))
		time.Sleep(999 * time.Millisecond)
		require.Equal(t, 2, asked())
		tier.SetCandidates(nil)
		time.Sleep(time.Minute)
		require.Zero(t, asked())
	})
}

func TestWithoutAnIntervalNothingIsScraped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gauges{err: errors.New("refused")}
		tier := newTier(t, up("a"), func(c *Config) { c.Scraper = g.scrape })
		ctx, stop := context.WithTimeout(t.Context(), time.Minute)
		defer stop()
		tier.Run(ctx)
		require.Zero(t, g.asked)
		acquire(t, tier, request(1)).Release()
	})
}

func TestACallerMayScrapeForItself(t *testing.T) {
	now := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	g := &gauges{sample: Sample{KVUsage: math.NaN(), Running: 1, Waiting: 2, CapacityTokens: 5000}}
	tier := newTier(t, up("a"), func(c *Config) {
		c.Scrape.Interval = 500 * time.Millisecond
		c.Scraper = g.scrape
		c.Clock = func() time.Time { return now }
	})
	tier.Scrape(t.Context(), "a")
	tier.Scrape(t.Context(), "nobody")
	require.Equal(t, 1, g.asked)
	require.EqualValues(t, 3, tier.Status()[0].Foreign)
}
