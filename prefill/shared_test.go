package prefill

import (
	"math"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/prefill/policy"
)

func TestWhatOtherDispatchersHaveCounts(t *testing.T) {
	scheduler := newScheduler(t, up("a/0", "b/0"), func(c *Config) {
		c.Policy, c.Push.MaxUnanswered, c.Calibration.Known = "finish", 4, true
	})
	scheduler.SetShares(map[string]Share{"a/0": {Unanswered: 1, NewTokens: 5_000, KVTokens: 5_000}},
		map[string]Share{"a/0": {Unanswered: 1, NewTokens: 3_000, KVTokens: 4_000}})
	first := acquire(t, scheduler, Request{ID: "1", PromptTokens: 1_000})
	require.Equal(t, "b/0", first.Candidate.ID, "8000 tokens of others are before it at a/0")
	require.Equal(t, map[string]Share{"b/0": {Unanswered: 1, NewTokens: 1_000, KVTokens: 1_000}}, scheduler.Shares(), "of ours alone")
	for _, s := range scheduler.Status() {
		if s.ID == "a/0" {
			require.InDelta(t, 0.09, s.OwnUsage, 1e-9)
			require.InDelta(t, 2, s.Batch, 1e-9)
		}
	}

	scheduler.SetShares(map[string]Share{"a/0": {Unanswered: 4}, "b/0": {Unanswered: 3}})
	mustWait(t, scheduler, Request{ID: "2", PromptTokens: 10})
	scheduler.SetShares(map[string]Share{"a/0": {KVTokens: 95_000}})
	require.Equal(t, "b/0", acquire(t, scheduler, Request{ID: "3", PromptTokens: 10}).Candidate.ID, "the gate of a/0 is closed")
	scheduler.SetShares()
	require.Equal(t, "a/0", acquire(t, scheduler, Request{ID: "4", PromptTokens: 10}).Candidate.ID, "those that are gone have nothing there")
}

// finish, with its line known: what others have there is before it, whether they
// tell of it or only the engine's gauges do.
func TestFinishCountsTheWorkOfOthers(t *testing.T) {
	latency := policy.Latency{TPMs: 0.5, T0Ms: 20}
	for _, tt := range []struct {
		name    string
		load    func(t *testing.T, scheduler *Scheduler)
		decodes bool
		want    float64 // ms of others at a
		chosen  string
	}{
		{"told by another proxy", func(_ *testing.T, scheduler *Scheduler) {
			scheduler.SetShares(map[string]Share{"a": {Unanswered: 3, NewTokens: 7_680}})
		}, false, 3*20 + 0.5*7_680, "b"},
		{"waiting by the engine's gauges", func(t *testing.T, scheduler *Scheduler) { showAt(t, scheduler, "a", Sample{Waiting: 4}) }, false, 4 * (20 + 0.5*1000), "b"},
		{"running there", func(t *testing.T, scheduler *Scheduler) { showAt(t, scheduler, "a", Sample{Running: 2}) }, false, 20 + 0.5*1000, "b"},
		{"running on an engine that decodes, too", func(t *testing.T, scheduler *Scheduler) { showAt(t, scheduler, "a", Sample{Running: 2}) }, true, 0, "a"},
		{"told and shown is the same", func(t *testing.T, scheduler *Scheduler) {
			scheduler.SetShares(map[string]Share{"a": {Unanswered: 4, NewTokens: 8_000}})
			showAt(t, scheduler, "a", Sample{Waiting: 3, Running: 1})
		}, false, 4*20 + 0.5*8_000, "b"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			now := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
			candidates := up("a", "b")
			candidates[0].Decodes = tt.decodes
			scheduler := newScheduler(t, candidates, func(c *Config) {
				c.Policy, c.Calibration = "finish", CalibrationConfig{TPMs: latency.TPMs, T0Ms: latency.T0Ms, Beta2: latency.Beta2, Known: true}
				c.Clock = func() time.Time { return now }
				c.Scrape.Interval, c.Scraper = 500*time.Millisecond, (&gauges{}).scrape
			})
			usual := acquire(t, scheduler, Request{ID: "0", PromptTokens: 1000})
			usual.Answered(Usage{}, time.Time{})
			usual.Release()
			tt.load(t, scheduler)
			for _, s := range scheduler.Status() {
				if s.ID == "a" {
					require.InDelta(t, tt.want, s.OthersMs, 1e-6)
					require.InDelta(t, tt.want, s.BacklogMs, 1e-6)
				}
			}
			for n := range 8 { // idle b is sooner; where a is idle, too, each gets some
				l := acquire(t, scheduler, Request{ID: strconv.Itoa(n), PromptTokens: 1000})
				require.Equal(t, "finish", l.Policy)
				if tt.chosen == "b" {
					require.Equal(t, "b", l.Candidate.ID)
				}
				l.Release()
			}
		})
	}
}

// showAt has a candidate's engine report gauges.
func showAt(t *testing.T, scheduler *Scheduler, id string, s Sample) {
	t.Helper()
	scheduler.lock()
	defer scheduler.unlock()
	c := scheduler.candidates[id]
	s.KVUsage = math.NaN()
	c.load.StoreSample(s, c.load.StartScrape(scheduler.now), scheduler.now)
}
