package prefill

import (
	"context"
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"evenkeel/prefill/index"
	"evenkeel/prefill/ledger"
	"evenkeel/prefill/policy"
	"evenkeel/prefill/steer"
)

// prompt is a request whose prompt is a text, four bytes a token.
func prompt(id, text string) Request {
	var h index.Hasher
	quoted := []byte(`"` + text + `"`)
	keys := h.Prompt(nil, index.Scope{Model: testModel}.Root(index.Bytes, index.BlockBytes), quoted)
	return Request{ID: id, Model: testModel, PromptTokens: len(text) / 4,
		Prompt: Prompt{Keys: keys.Keys, Bytes: keys.Bytes, Media: keys.Media}}
}

func text(word string, bytes int) string { return strings.Repeat(word, bytes/len(word)) }

func TestAPromptGoesWhereItsPrefixIs(t *testing.T) {
	scheduler := newScheduler(t, up("a", "b", "c"), withPolicy("lmetric"))
	system := text("rule", 8192)
	first := acquire(t, scheduler, prompt("1", system+text("x", 512)))
	require.Zero(t, first.HitTokens)
	first.Answered(Usage{PromptTokens: 2176, CachedTokens: 0}, time.Time{})
	for _, id := range []string{"2", "3", "4"} {
		l := acquire(t, scheduler, prompt(id, system+text(id, 512)))
		require.Equal(t, first.Candidate.ID, l.Candidate.ID)
		require.Equal(t, 2048, l.HitTokens)
		l.Release()
	}
}

func TestAProbeInFlightCountsAsAHolder(t *testing.T) {
	scheduler := newScheduler(t, up("a", "b", "c"), withPolicy("bailian:lambda=1"))
	p := text("rule", 8192)
	l := acquire(t, scheduler, prompt("1", p))
	require.Equal(t, l.Candidate.ID, acquire(t, scheduler, prompt("2", p)).Candidate.ID)
	l.Failed(false, 0)
	scheduler.ForgetPrefixes("")
	require.Zero(t, acquire(t, scheduler, prompt("3", p)).HitTokens)
}

func TestAFailedProbeLeavesNothing(t *testing.T) {
	for _, tt := range []struct {
		name string
		end  func(l *Lease)
	}{
		{"refused", func(l *Lease) { l.Failed(false, 0) }},
		{"the client left", (*Lease).Release},
	} {
		t.Run(tt.name, func(t *testing.T) {
			scheduler := newScheduler(t, up("a"))
			tt.end(acquire(t, scheduler, prompt("1", text("rule", 8192))))
			require.Zero(t, acquire(t, scheduler, prompt("2", text("rule", 8192))).HitTokens)
		})
	}
}

func TestALostProbesPromptCountsForAWhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		scheduler := newScheduler(t, up("a"))
		acquire(t, scheduler, prompt("1", text("rule", 8192))).Failed(true, 0)
		again := acquire(t, scheduler, prompt("2", text("rule", 8192)))
		require.NotZero(t, again.HitTokens)
		again.Release()
		time.Sleep(2 * time.Second)
		require.Zero(t, acquire(t, scheduler, prompt("3", text("rule", 8192))).HitTokens)
	})
}

func TestTheEnginesCountCorrectsTheIndex(t *testing.T) {
	scheduler := newScheduler(t, up("a"))
	p := text("rule", 8192)
	acquire(t, scheduler, prompt("1", p)).Answered(Usage{PromptTokens: 2048, CachedTokens: 0}, time.Time{})
	second := acquire(t, scheduler, prompt("2", p+text("x", 2048)))
	require.Equal(t, 2048, second.HitTokens)
	second.Answered(Usage{PromptTokens: 2560, CachedTokens: 1024}, time.Time{}) // it had evicted half
	require.InDelta(t, 2560, acquire(t, scheduler, prompt("3", p+text("x", 2048)+text("y", 1024))).HitTokens, 16,
		"and has computed it again since")
	require.Equal(t, uint64(1024), scheduler.cache.Totals.Actual)
}

func TestARestartedEngineHasAnEmptyCache(t *testing.T) {
	scheduler := newScheduler(t, up("a"))
	p := text("rule", 8192)
	acquire(t, scheduler, prompt("1", p)).Answered(Usage{}, time.Time{})
	require.NotZero(t, acquire(t, scheduler, prompt("2", p)).HitTokens)
	down := up("a")
	down[0].Live = false
	scheduler.SetCandidates(down)
	scheduler.SetCandidates(up("a"))
	require.Zero(t, acquire(t, scheduler, prompt("3", p)).HitTokens)
}

func TestAnEnginePromisesNoMoreThanItHolds(t *testing.T) {
	small := up("a")
	small[0].CapacityTokens = 1024
	scheduler := newScheduler(t, small, func(c *Config) { c.KVThreshold = 1 })
	p := text("rule", 8192)
	first := acquire(t, scheduler, prompt("1", p))
	first.Answered(Usage{PromptTokens: 100, CachedTokens: -1}, time.Time{})
	first.Release()
	require.LessOrEqual(t, acquire(t, scheduler, prompt("2", p)).HitTokens, 1024*4)
	require.LessOrEqual(t, scheduler.cache.Stats().Entries, 1024*16/index.BlockBytes)
}

func TestTheLengthOfATokenIsLearned(t *testing.T) {
	scheduler := newScheduler(t, up("a"))
	acquire(t, scheduler, prompt("1", text("x", 9000))).Answered(Usage{PromptTokens: 3000, CachedTokens: -1}, time.Time{})
	r := prompt("2", text("y", 7900))
	require.Equal(t, 2000, scheduler.choose.tokensOf(&r))
	r.Counted, r.PromptTokens = true, 1234
	require.Equal(t, 1234, scheduler.choose.tokensOf(&r))
}

func TestTheLineIsLearnedFromProbesThatAreAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		scheduler := newScheduler(t, up("a"), withPolicy("finish"))
		require.Equal(t, "lmetric", acquire(t, scheduler, request(0)).Policy, "no line is known")
		scheduler = newScheduler(t, up("a"), withPolicy("finish"))
		for n := range 30 {
			tokens := 1000 * (1 + n%4)
			l := acquire(t, scheduler, Request{ID: "r", PromptTokens: tokens, Counted: true})
			time.Sleep(time.Duration(100+tokens/10) * time.Millisecond)
			l.Answered(Usage{PromptTokens: tokens, CachedTokens: 0}, time.Time{})
			l.Release()
		}
		latency, known := scheduler.fit.Latency(testModel, "")
		require.True(t, known)
		require.InDelta(t, 0.1, latency.TPMs, 1e-6)
		require.InDelta(t, 100, latency.T0Ms, 1e-3)
		require.Equal(t, "finish", acquire(t, scheduler, request(1)).Policy)
	})
}

func TestTheWayToAnEngineIsNoPartOfItsLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		scheduler := newScheduler(t, up("a"))
		scheduler.SetCandidates([]Candidate{{ID: "a", Instance: "a", Models: []string{testModel}, CapacityTokens: 1 << 20, Live: true,
			Region: "far", RTT: 80 * time.Millisecond}})
		for n := range 30 {
			tokens := 1000 * (1 + n%4)
			l := acquire(t, scheduler, Request{ID: "r", PromptTokens: tokens, Counted: true})
			time.Sleep(time.Duration(80+100+tokens/10) * time.Millisecond)
			l.Answered(Usage{PromptTokens: tokens, CachedTokens: 0}, time.Time{})
			l.Release()
		}
		latency, rtt, known := scheduler.LearnedLatency(testModel)
		require.True(t, known)
		require.InDelta(t, 0.1, latency.TPMs, 1e-6)
		require.InDelta(t, 100, latency.T0Ms, 1e-3)
		require.Equal(t, 80*time.Millisecond, rtt, "added once, beside the line")
	})
}

// Engines that are never idle, and that also decode, teach as much: the next prompt is sent
// before the last is answered, and decodes run beside it.
func TestTheLineIsLearnedBesideProbesAndDecodes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		both := up("a")
		both[0].Decodes, both[0].CapacityTokens = true, 0
		scheduler := newScheduler(t, both, withPolicy("finish"))
		decodes := 0
		scheduler.ledger.Configure(ledger.Config{Interval: 500 * time.Millisecond, KVThreshold: 1})
		scheduler.cfg.Scraper = func(context.Context, Candidate) (Sample, error) {
			return Sample{KVUsage: math.NaN(), Running: float64(decodes + 1), Waiting: 1}, nil // 1 and 1: ours
		}
		next := acquire(t, scheduler, Request{ID: "r", PromptTokens: 1000, Counted: true})
		for n := range 200 {
			running := next
			next = acquire(t, scheduler, Request{ID: "r", PromptTokens: 1000 * (1 + n%7), Counted: true})
			decodes = n * 13 % 40
			scheduler.Scrape(t.Context(), "a")
			prompt := int(running.inFlight.Weight.Tokens)
			time.Sleep(100*time.Millisecond + time.Duration(prompt)*(100+time.Duration(decodes))*time.Microsecond)
			running.Answered(Usage{PromptTokens: prompt, CachedTokens: 0}, time.Time{})
			running.Release()
		}
		fitted, known := scheduler.fit.Latency(testModel, "")
		require.True(t, known)
		require.InDelta(t, 100, fitted.T0Ms, 1e-3)
		require.InDelta(t, 100, fitted.T0Ms, 1e-3)
		require.InDelta(t, 0.1, fitted.TPMs, 1e-6)
		require.InDelta(t, 0.001, fitted.ConcurrentTPMs, 1e-6, "a microsecond per token and decode")
		latency, _ := scheduler.latencyFor(testModel, scheduler.candidates["a"])
		require.InDelta(t, 0.1+0.001*float64(decodes), latency.TPMs, 1e-6, "as many as run now")
		require.Equal(t, "finish", acquire(t, scheduler, request(1)).Policy)
	})
}

func TestABacklogIsCorrectedByWhatTheEngineTook(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		scheduler := newScheduler(t, up("a", "b"), withPolicy("finish"), func(c *Config) {
			c.Calibration = CalibrationConfig{TPMs: 0.1, T0Ms: 100, Known: true}
		})
		took := map[string]time.Duration{"a": 300 * time.Millisecond, "b": 100 * time.Millisecond}
		for range 19 { // too few for a law of their own; all should take 200 ms
			for _, id := range []string{"a", "b"} {
				l := acquire(t, scheduler, Request{ID: "r", PromptTokens: 1000, Counted: true, Target: id})
				time.Sleep(took[id])
				l.Answered(Usage{PromptTokens: 1000, CachedTokens: 0}, time.Time{})
				l.Release()
			}
		}
		a, b := scheduler.Status()[0], scheduler.Status()[1]
		require.InDelta(t, 75, a.ResidualMs, 10)
		require.InDelta(t, -75, b.ResidualMs, 10)
		require.Zero(t, a.BacklogMs, "it has nothing to do")
		next := func(c string) float64 {
			ms, _ := scheduler.backlogMs(scheduler.candidates[c], policy.Latency{}, 1)
			return ms
		}
		require.InDelta(t, a.ResidualMs, next("a"), 1e-6, "for the next one")
		require.Zero(t, next("b"), "nothing is shorter than no backlog")
		hold(t, scheduler, "b", probing, 1000, 1000, 1000)
		b = scheduler.Status()[1]
		require.InDelta(t, 600+3*b.ResidualMs, b.BacklogMs, 1e-6, "for each there is")
	})
}

func TestPromptsOfOthersTeachNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		scheduler := newScheduler(t, up("a"))
		for n := range 30 {
			tokens := 1000 * (1 + n%4)
			scheduler.SetShares(map[string]Share{"a": {Unanswered: 1, NewTokens: 500}})
			l := acquire(t, scheduler, Request{ID: "r", PromptTokens: tokens, Counted: true})
			scheduler.SetShares()
			time.Sleep(time.Duration(100+tokens/10) * time.Millisecond)
			l.Answered(Usage{PromptTokens: tokens, CachedTokens: 0}, time.Time{})
			l.Release()
		}
		require.Zero(t, scheduler.fit.Samples(testModel, ""))
	})
}

func TestProbesThatOvertakeTeachNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		scheduler := newScheduler(t, up("a"))
		acquire(t, scheduler, request(0)) // for ever
		for n := range 30 {
			tokens := 1000 * (1 + n%4)
			l := acquire(t, scheduler, Request{ID: "r", PromptTokens: tokens, Counted: true})
			time.Sleep(time.Duration(100+tokens/10) * time.Millisecond)
			l.Answered(Usage{PromptTokens: tokens, CachedTokens: 0}, time.Time{})
			l.Release()
		}
		_, known := scheduler.fit.Latency(testModel, "")
		require.False(t, known)
	})
}

// What a candidate has to do counts down from when its engine got to it.
func TestTheNextProbeRunsFromTheAnswerToTheLast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		scheduler := newScheduler(t, up("a"), func(c *Config) { c.Calibration.TPMs, c.Calibration.T0Ms = 0.1, 100 })
		left := func() float64 { return scheduler.candidates["a"].load.Backlog(time.Now()) }
		probes := hold(t, scheduler, "a", probing, 5000, 9000) // 600 and 1,000 ms
		require.InDelta(t, 1600, left(), 1e-6)
		time.Sleep(500 * time.Millisecond)
		require.InDelta(t, 1150, left(), 1e-6, "a quarter of the first, at least")
		probes[0].Answered(Usage{}, time.Time{})
		require.InDelta(t, 1000, left(), 1e-6)
		time.Sleep(300 * time.Millisecond)
		require.InDelta(t, 700, left(), 1e-6)
	})
}

func TestARetryIsNoFurtherRequest(t *testing.T) {
	scheduler := newScheduler(t, up("a", "b"), func(c *Config) {
		c.Hotspot = HotspotConfig{Enabled: true}
	})
	r := prompt("r", text("rule", 8192))
	failed := acquire(t, scheduler, r)
	failed.Failed(false, 0)
	r.Exclude = []string{failed.Candidate.ID}
	acquire(t, scheduler, r)
	r.Exclude, r.HasPlace = nil, true // without a place lost
	acquire(t, scheduler, r)
	require.Equal(t, 1, scheduler.steering.Hotspots.Requests())
}

func TestARequestThatWaitsIsWeighedOnce(t *testing.T) {
	scheduler := newScheduler(t, up("a", "b", "c", "d"), withPolicy("bailian:lambda=1"), withPush(1), func(c *Config) {
		c.Hotspot = HotspotConfig{Enabled: true}
	})
	for range 19 {
		acquire(t, scheduler, prompt("r", text("rule", 8192))).Answered(Usage{}, time.Time{})
	}
	acquire(t, scheduler, prompt("r", text("rule", 8192))) // the 20th: alarm, and its holder is full now
	waits(t, scheduler, prompt("w", text("rule", 8192)))
	for range 9 {
		scheduler.Wake()
	}
	classes := scheduler.Hotspots()
	require.Len(t, classes, 1)
	require.Equal(t, steer.Alarm, classes[0].State)
	require.Equal(t, 2, classes[0].K)
}

func TestAHotClassIsSentToOthers(t *testing.T) {
	scheduler := newScheduler(t, up("a", "b", "c", "d"), withPolicy("bailian:lambda=1"), func(c *Config) {
		c.Hotspot = HotspotConfig{Enabled: true}
	})
	used := map[string]int{}
	for n := range 60 {
		l := acquire(t, scheduler, prompt("r", text("rule", 8192)+text(string(rune('a'+n%26)), 512)))
		used[l.Candidate.ID]++
		l.Answered(Usage{}, time.Time{})
		l.Release()
	}
	require.Len(t, used, 4, "with hits alone, one would have them all")
	require.InDelta(t, 3, testutil.ToFloat64(scheduler.metrics.hotFiltered), 0, "each time until it is held there, too")
	require.Equal(t, steer.OK, scheduler.Hotspots()[0].State)
}

func TestASessionStays(t *testing.T) {
	scheduler := newScheduler(t, up("a", "b", "c", "d"), withPolicy("round-robin"), func(c *Config) {
		c.Affinity = AffinityConfig{Enabled: true, MaxKeys: 10, TTL: time.Minute, LoadFactor: 1.25}
	})
	of := func(id string) *Lease { return acquire(t, scheduler, Request{ID: id, PromptTokens: 10, Session: 7}) }
	first := of("1")
	first.Release()
	second := of("2")
	require.Equal(t, first.Candidate.ID, second.Candidate.ID)
	third := of("3") // a second one there while the others are idle is more than its share
	require.NotEqual(t, first.Candidate.ID, third.Candidate.ID)
	second.Release()
	third.Release()
	require.Equal(t, third.Candidate.ID, of("4").Candidate.ID, "the session has moved")
	for outcome, want := range map[string]float64{"new": 1, "kept": 2, "overloaded": 1} {
		require.InDelta(t, want, testutil.ToFloat64(scheduler.metrics.affinity.WithLabelValues(outcome)), 0, outcome)
	}
}
