package prefill

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/mooncake"
)

// doBoth are groups of ranks that prefill and decode.
func doBoth(ids ...string) (all []Candidate) {
	profile := mooncake.Profile{Connector: mooncake.None}.WithDefaults().Alone()
	for _, c := range up(ids...) {
		c.Aggregated, c.Profile, c.Board = true, &profile, "board"
		all = append(all, c)
	}
	return all
}

// As many requests wait for the ranks of a group as have a slot, and half as many again; what was
// sent waits for nothing here.
func TestHowManyRequestsAGroupMayHaveWaiting(t *testing.T) {
	for free, want := range map[int]int{0: 1, 1: 1, 2: 3, 4: 6} {
		scheduler := newScheduler(t, doBoth("g"), func(c *Config) { c.Free = func(string, string) (int, bool) { return free, false } })
		var waiting []*Lease
		for range want {
			waiting = append(waiting, acquire(t, scheduler, request(1)))
		}
		mustWait(t, scheduler, request(2))
		waiting[0].MarkSent()
		more := acquire(t, scheduler, request(3))
		for i, l := range append(waiting, more) {
			if i > 0 {
				l.MarkSent()
			}
			l.Answered(Usage{PromptTokens: 10, CachedTokens: -1}, time.Time{})
			l.Release()
		}
		requireIdle(t, scheduler)
	}
}

// Where a model has engines of both kinds, those that come second take a prompt only if no other
// can, or if it names them.
func TestSecondCandidatesServeWhenNoOtherCan(t *testing.T) {
	second := doBoth("g")
	second[0].Fallback = true
	scheduler := newScheduler(t, append(up("a"), second...), withPolicy("round-robin"))
	for range 3 {
		require.Equal(t, "a", acquire(t, scheduler, request(1)).Candidate.ID)
	}
	named := request(2)
	named.Target = "g"
	require.Equal(t, "g", acquire(t, scheduler, named).Candidate.ID)
	down := up("a")
	down[0].Live = false
	scheduler.SetCandidates(append(down, second...))
	require.Equal(t, "g", acquire(t, scheduler, request(3)).Candidate.ID)
}

// A request that each of the first ones has failed goes to those that come second, if they are of
// any use.
func TestSecondCandidatesServeWhatTheFirstOnesFailed(t *testing.T) {
	for _, row := range []struct {
		name  string
		tried []string
		idle  bool
		want  string
	}{
		{"no other was tried", nil, false, "a"},
		{"the other was tried", []string{"a"}, false, "g"},
		{"the other was tried, and no rank would fetch what this one computes", []string{"a"}, true, "a"},
	} {
		t.Run(row.name, func(t *testing.T) {
			second := doBoth("g")
			second[0].Fallback, second[0].NoDecodeRank = true, row.idle
			r := request(1)
			r.Exclude = row.tried
			require.Equal(t, row.want, acquire(t, newScheduler(t, append(up("a"), second...)), r).Candidate.ID)
		})
	}
}

// A scrape of a group would ask one of its engines for what all of them have.
func TestAGroupIsNotScraped(t *testing.T) {
	scheduler := newScheduler(t, append(up("a"), doBoth("g")...), func(c *Config) {
		c.Scrape = ScrapeConfig{Interval: time.Second, Timeout: time.Second}
		c.Scraper = func(context.Context, Candidate) (Sample, error) { return Sample{}, nil }
	})
	live, _ := watcher{Scheduler: scheduler}.scrapeTargets()
	require.Len(t, live, 1)
}

// Requests for a model that has ranks of its own within its group are counted apart: neither do
// they hold the others up while their ranks are full, nor the others them.
func TestRequestsForANameAreCountedApart(t *testing.T) {
	free := map[string]int{testModel: 2, "x": 0}
	own := true
	candidates := doBoth("g")
	candidates[0].Models = append(candidates[0].Models, "x")
	scheduler := newScheduler(t, candidates, func(c *Config) {
		c.Free = func(_, model string) (int, bool) { return free[model], own && model == "x" }
	})
	of := func(i int, model string) Request {
		r := request(i)
		r.Model = model
		return r
	}
	named := acquire(t, scheduler, of(0, "x"))
	mustWait(t, scheduler, of(1, "x"))
	var all []*Lease
	for i := range 3 {
		all = append(all, acquire(t, scheduler, of(i, testModel)))
	}
	mustWait(t, scheduler, of(4, testModel))
	free["x"] = 2
	all = append(all, acquire(t, scheduler, of(5, "x")))
	named.MarkSent()
	all = append(all, acquire(t, scheduler, of(6, "x")), acquire(t, scheduler, of(7, "x")))
	mustWait(t, scheduler, of(8, "x"))
	all[0].Release() // unsent
	own = false      // all ranks list it: what comes from now on is counted together
	all = append(all, acquire(t, scheduler, of(9, testModel)))
	mustWait(t, scheduler, of(10, testModel))
	named.Answered(Usage{PromptTokens: 10, CachedTokens: -1}, time.Time{})
	named.Release()
	for _, l := range all[1:] {
		l.Release()
	}
	scheduler.lock()
	require.NotEmpty(t, scheduler.candidates["g"].byModel)
	for _, counts := range scheduler.candidates["g"].byModel {
		require.Zero(t, *counts)
	}
	scheduler.unlock()
	requireIdle(t, scheduler)
}

// Whoever has no rank up that lists a model takes its prompts only if no other can.
func TestACandidateIsBehindForSomeModels(t *testing.T) {
	both := up("a", "b")
	both[0].Models = append(both[0].Models, "x")
	both[1].Models = both[0].Models
	both[0].FallbackFor = []string{"x"}
	scheduler := newScheduler(t, both, withPolicy("round-robin"))
	named := request(0)
	named.Model = "x"
	got := map[string]int{}
	for range 2 {
		require.Equal(t, "b", acquire(t, scheduler, named).Candidate.ID)
		got[acquire(t, scheduler, request(1)).Candidate.ID]++
	}
	require.Equal(t, map[string]int{"a": 1, "b": 1}, got)
	scored, err := scheduler.Score(named)
	require.NoError(t, err)
	for _, s := range scored {
		require.Equal(t, "b", s.Candidate, s.Policy)
		require.Len(t, s.Scores, 1, s.Policy)
	}
	both[1].Live = false
	scheduler.SetCandidates(both)
	require.Equal(t, "a", acquire(t, scheduler, named).Candidate.ID)
}
