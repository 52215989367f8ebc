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
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
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

// scraped runs a scheduler that scrapes g every 500 ms from now on.
func scraped(t *testing.T, g *gauges, candidates []Candidate) *Scheduler {
	scheduler := newScheduler(t, candidates, func(c *Config) {
		c.Scrape.Interval = 500 * time.Millisecond
		c.Scraper = g.scrape
	})
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { scheduler.Run(ctx); close(done) }()
	t.Cleanup(func() { stop(); <-done })
	synctest.Wait()
	return scheduler
}

func TestAFullEngineIsClosedWhileItHoldsSomethingOfOurs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gauges{sample: Sample{KVUsage: .97}}
		scheduler := scraped(t, g, up("a"))
		time.Sleep(time.Second)
		lease := acquire(t, scheduler, request(1)) // an idle engine's gauge is frozen
		mustWait(t, scheduler, request(2))

		waits := start(t.Context(), scheduler, request(3))
		g.set(func(g *gauges) { g.sample.KVUsage = .50 })
		require.LessOrEqual(t, (<-waits).after, 500*time.Millisecond, "woken by the scrape")
		lease.Release()
	})
}

// A question that is not answered must not stop the work: the engine goes on by
// what is known, behind those that answer.
func TestAnEngineThatDoesNotTellItsGaugesServesBehindThoseThatDo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		core, logs := observer.New(zap.InfoLevel)
		g := &gauges{sample: Sample{KVUsage: .1}}
		slow := map[string]bool{}
		scheduler := newScheduler(t, up("a", "b"), func(c *Config) {
			c.Push.MaxUnanswered, c.Log = 2, zap.New(core)
			c.Scrape.Interval = 500 * time.Millisecond
			c.Scraper = func(ctx context.Context, of Candidate) (Sample, error) {
				g.mu.Lock()
				late := slow[of.ID]
				g.mu.Unlock()
				if late {
					<-ctx.Done()
					return Sample{}, ctx.Err()
				}
				return g.scrape(ctx, of)
			}
		})
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { scheduler.Run(ctx); close(done) }()
		defer func() { stop(); <-done }()
		of := func(id string) CandidateStatus {
			for _, c := range scheduler.Status() {
				if c.ID == id {
					return c
				}
			}
			return CandidateStatus{}
		}
		setSlow := func(ids ...string) {
			g.set(func(*gauges) {
				clear(slow)
				for _, id := range ids {
					slow[id] = true
				}
			})
			time.Sleep(time.Minute)
		}

		setSlow("a")
		require.True(t, of("a").Stale)
		require.Equal(t, "open", of("a").State)
		require.True(t, of("a").GateOpen)
		require.Nil(t, of("a").ScrapedUsage, "a gauge that is a minute old is not shown as one")
		require.NotZero(t, of("a").missed)
		busy := []*Lease{acquire(t, scheduler, request(1)), acquire(t, scheduler, request(2))}
		for _, l := range busy {
			require.Equal(t, "b", l.Candidate.ID, "one that tells its gauges comes first")
		}
		behind := acquire(t, scheduler, request(3))
		require.Equal(t, "a", behind.Candidate.ID, "nobody waits while it has room")
		for _, l := range append(busy, behind) {
			l.Release()
		}

		setSlow("a", "b") // all of them: an overloaded proxy does this to itself
		for n := range 4 {
			acquire(t, scheduler, request(10+n)).Release()
		}
		acquire(t, scheduler, request(20)).Release()

		setSlow()
		require.False(t, of("a").Stale)
		require.NotNil(t, of("a").ScrapedUsage)
		time.Sleep(time.Minute)
		for _, id := range []string{"a", "b"} {
			require.Equal(t, 1, logs.FilterMessageSnippet("gauges cannot be read").FilterField(zap.String("candidate", id)).Len())
			require.Equal(t, 1, logs.FilterMessageSnippet("gauges can be read again").FilterField(zap.String("candidate", id)).Len())
		}
		requireIdle(t, scheduler)
	})
}

func TestAStaleGaugeDoesNotCloseTheGate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gauges{sample: Sample{KVUsage: .97}}
		scheduler := scraped(t, g, up("a"))
		time.Sleep(time.Second)
		lease := acquire(t, scheduler, request(1))
		mustWait(t, scheduler, request(2)) // it said that it is full
		g.set(func(g *gauges) { g.err = errors.New("refused") })
		time.Sleep(time.Minute)
		acquire(t, scheduler, request(3)).Release()
		lease.Release()
	})
}

func TestMissesFromBeforeACandidateWentDownAreForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gauges{err: errors.New("refused")}
		scheduler := scraped(t, g, up("a"))
		time.Sleep(2 * time.Second)
		require.True(t, scheduler.Status()[0].Stale)
		scheduler.SetCandidates([]Candidate{{ID: "a", Models: []string{testModel}}})
		scheduler.SetCandidates(up("a"))
		require.False(t, scheduler.Status()[0].Stale)
	})
}

func TestASilentEngineIsAskedOnceAtATimeAndMissed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gauges{takes: time.Hour}
		scheduler := scraped(t, g, up("a"))
		time.Sleep(20 * time.Second)
		require.True(t, scheduler.Status()[0].Stale)
		g.set(func(g *gauges) { require.Equal(t, 1, g.most) })
	})
}

// A page that takes seconds is old when it comes, and is still the best there is.
func TestASlowSampleSpeaksOfOthersUntilTheNextOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gauges{sample: Sample{Running: 3, Waiting: 4}, takes: 4 * time.Second}
		scheduler := scraped(t, g, up("a"))
		time.Sleep(4001 * time.Millisecond)
		for range 60 {
			require.InDelta(t, 7, scheduler.Status()[0].Batch, 0)
			time.Sleep(200 * time.Millisecond)
		}
		require.False(t, scheduler.Status()[0].Stale)
	})
}

func TestAMissingGaugeLeavesTheGateToOurAccounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gauges{sample: Sample{KVUsage: math.NaN(), Running: math.NaN(), Waiting: math.NaN()}}
		scheduler := scraped(t, g, up("a"))
		hold(t, scheduler, "a", pooled, 89_000)
		time.Sleep(time.Second)
		l := acquire(t, scheduler, Request{PromptTokens: 2_000})
		mustWait(t, scheduler, request(2))
		require.Nil(t, scheduler.Status()[0].ScrapedUsage)
		require.Zero(t, scheduler.Status()[0].Foreign)
		l.Release()
	})
}

func TestForeignRequestsCountUntilTheSampleIsThreeIntervalsOld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gauges{sample: Sample{Running: 3, Waiting: 4}}
		scheduler := scraped(t, g, up("a"))
		hold(t, scheduler, "a", probing, 10, 10)
		time.Sleep(501 * time.Millisecond)
		batch := func() float64 {
			scheduler.lock()
			defer scheduler.unlock()
			return scheduler.candidates["a"].load.BatchSize(scheduler.now)
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
		scheduler := scraped(t, g, up("a"))
		hold(t, scheduler, "a", orphaned, 50_000)
		live := hold(t, scheduler, "a", pooled, 1_000)
		time.Sleep(time.Second)
		require.EqualValues(t, 51_000, scheduler.Status()[0].KVTokens)
		g.set(func(g *gauges) { g.sample.StartTime = 2000 })
		time.Sleep(time.Second)
		require.EqualValues(t, 1_000, scheduler.Status()[0].KVTokens, "what is live ends with its own lease")
		live[0].Release()
		requireIdle(t, scheduler)
	})
}

func TestAnEngineThatStartedAnewBetweenScrapesHasAnEmptyCache(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gauges{sample: Sample{StartTime: 1000}}
		scheduler := scraped(t, g, up("a"))
		acquire(t, scheduler, prompt("1", text("rule", 8192))).Answered(Usage{}, time.Time{})
		time.Sleep(time.Second)
		again := acquire(t, scheduler, prompt("2", text("rule", 8192)))
		require.NotZero(t, again.HitTokens)
		again.Release()
		g.set(func(g *gauges) { g.sample.StartTime = 2000 })
		time.Sleep(time.Second)
		require.Zero(t, acquire(t, scheduler, prompt("3", text("rule", 8192))).HitTokens)
	})
}

func TestOnlyLiveConfiguredCandidatesAreScraped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gauges{}
		candidates := up("a")
		candidates[0].Live = false
		scheduler := scraped(t, g, candidates)
		asked := func() (n int) {
			g.set(func(g *gauges) { n, g.asked = g.asked, 0 })
			return n
		}
		time.Sleep(time.Minute)
		require.Zero(t, asked())
		scheduler.SetCandidates(up("a"))
		time.Sleep(999 * time.Millisecond)
		require.Equal(t, 2, asked())
		scheduler.SetCandidates(nil)
		time.Sleep(time.Minute)
		require.Zero(t, asked())
	})
}

func TestWithoutAnIntervalNothingIsScraped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gauges{err: errors.New("refused")}
		scheduler := newScheduler(t, up("a"), func(c *Config) { c.Scraper = g.scrape })
		ctx, stop := context.WithTimeout(t.Context(), time.Minute)
		defer stop()
		scheduler.Run(ctx)
		require.Zero(t, g.asked)
		acquire(t, scheduler, request(1)).Release()
	})
}

func TestACallerMayScrapeForItself(t *testing.T) {
	now := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	g := &gauges{sample: Sample{KVUsage: math.NaN(), Running: 1, Waiting: 2}}
	scheduler := newScheduler(t, up("a"), func(c *Config) {
		c.Scrape.Interval = 500 * time.Millisecond
		c.Scraper = g.scrape
		c.Clock = func() time.Time { return now }
	})
	scheduler.Scrape(t.Context(), "a")
	scheduler.Scrape(t.Context(), "nobody")
	require.Equal(t, 1, g.asked)
	require.EqualValues(t, 3, scheduler.Status()[0].Foreign)
}

// An engine that starts anew may be gone from the list and back on it while it is asked.
func TestALateScrapeOfACandidateThatCameBackDoesNotDropIt(t *testing.T) {
	started, during := 1.0, func() {}
	scheduler := newScheduler(t, up("a"), func(c *Config) {
		c.Scraper = func(context.Context, Candidate) (Sample, error) {
			during()
			started++
			return Sample{KVUsage: math.NaN(), Running: math.NaN(), Waiting: math.NaN(), StartTime: started}, nil
		}
		c.Scrape = ScrapeConfig{Interval: time.Second, Timeout: time.Second}
	})
	scheduler.Scrape(t.Context(), "a")
	during = func() {
		scheduler.SetCandidates(nil)
		scheduler.SetCandidates(up("a"))
	}
	scheduler.Scrape(t.Context(), "a")
	require.Len(t, scheduler.Status(), 1)
}
