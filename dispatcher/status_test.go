package dispatcher

import (
	"encoding/json"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/expfmt"
	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/step"
	"evenkeel/pool"
)

func TestStatusAndMetrics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		registry := prometheus.NewRegistry()
		cfg := testConfig()
		cfg.Registerer = registry
		d := start(t, cfg)
		fleet := ranks(4, 1, 1000)
		fleet[2].Up, fleet[3].Up, fleet[3].Down = false, false, true // one drains, one is dead
		d.SetWorkers(fleet)
		a, b := (<-d.Enqueue(&pool.Entry{ID: 1, Model: "m", Prompt: 300})).Slot, (<-d.Enqueue(&pool.Entry{ID: 2, Model: "m", Prompt: 100})).Slot
		a.ReportStarted()
		a.Progress(20)
		d.Enqueue(&pool.Entry{ID: 3, Model: "m"})
		time.Sleep(5 * time.Second)

		s := d.Status(t.Context())
		s.Models[0].Groups[0].Steps = board.StepHistogram{} // has a test of its own
		require.Equal(t, board.Status{Policy: "pooled", Models: []board.ModelStatus{{
			Model: "m", Pool: 1, OldestSeconds: 5, PoolAges: []int{0, 0, 0, 0, 1, 0, 0}, Ticks: 2,
			Groups: []board.GroupStatus{{GroupLoads: board.GroupLoads{Name: "main", Barrier: true, Policy: "pooled", SteppingRanks: 3, KVTokens: 420,
				MeanTokens: 140, MostTokens: 320, ImbalanceTokens: 220 + 320, IdleShare: 540. / 960}, Budget: 4000,
				Step: &board.StepStatus{RequestTokens: step.UsualWeight, Why: "it is learned from 200 steps, and 0 were told so far"}}},
			Workers: []board.WorkerStatus{
				{ID: 0, Name: "d0", Group: "main", Barrier: true, Up: true, Slots: 1, Limit: 1, Used: 1, Running: 1, Output: 20, KVTokens: 320, Capacity: 1000},
				{ID: 1, Name: "d1", Group: "main", Barrier: true, Up: true, Slots: 1, Limit: 1, Used: 1, Transferring: 1, KVTokens: 100, Capacity: 1000},
				{ID: 2, Name: "d2", Group: "main", Barrier: true, Slots: 1, Capacity: 1000},
				{ID: 3, Name: "d3", Group: "main", Barrier: true, Down: true, Slots: 1, Capacity: 1000},
			},
		}}}, s)
		loads, ok := d.Loads(t.Context())
		require.True(t, ok)
		require.ElementsMatch(t, []board.Load{{Worker: 0, KVTokens: 320, Running: 1, Output: 20}, {Worker: 1, KVTokens: 100}, {Worker: 2}},
			loads.Ranks)
		loads.Ranks = nil
		require.Equal(t, board.Loads{Pool: 1, OutputTokens: 20}, loads)

		page, err := json.Marshal(s)
		require.NoError(t, err)
		require.Contains(t, string(page), `"kv_tokens":320`)

		text := scrape(t, registry)
		for _, line := range []string{
			`evenkeel_rank_kv_tokens{group="main",rank="d0"} 320`,
			`evenkeel_rank_slots{group="main",rank="d0",state="free"} 0`,
			`evenkeel_rank_slots{group="main",rank="d0",state="used"} 1`,
			`evenkeel_rank_slots{group="main",rank="d2",state="free"} 0`,
			`evenkeel_rank_running{group="main",rank="d0"} 1`,
			`evenkeel_rank_running{group="main",rank="d1"} 0`,
			`evenkeel_imbalance_tokens{group="main"} 540`,
			`evenkeel_idle_share_ratio{group="main"} 0.5625`,
			`evenkeel_pool_entries 1`,
			`evenkeel_pool_oldest_seconds 5`,
			`evenkeel_audit_drift{kind="slots"} 0`,
			`evenkeel_audit_drift{kind="kv_tokens"} 0`,
			`evenkeel_double_releases_total 0`,
			`evenkeel_tick_seconds_count{group="main",policy="pooled"} 2`,
			`evenkeel_tick_seconds_bucket{group="main",policy="pooled",le="1e-05"}`,
		} {
			require.Contains(t, text, line)
		}
		require.NotContains(t, text, `rank="d3"`, "a zero of the dead rank would enter every mean")
		d.Release(a, board.Outcome{})
		d.Release(b, board.Outcome{})
	})
}

// The series of a group are there before its first round, and go with it.
func TestRoundsAreTimedByGroup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		registry := prometheus.NewRegistry()
		cfg := testConfig()
		cfg.Registerer = registry
		d := start(t, cfg)
		one, two := ranks(1, 1, 1000), ranks(2, 1, 1000)[1:]
		two[0].Group = "other"
		d.SetWorkers(append(one, two...))
		text := scrape(t, registry)
		require.Contains(t, text, `evenkeel_tick_seconds_count{group="main",policy="pooled"} 0`)
		require.Contains(t, text, `evenkeel_tick_seconds_count{group="other",policy="pooled"} 0`)
		for id := range 2 { // a slot each
			require.NoError(t, (<-d.Enqueue(&pool.Entry{ID: uint64(id), Model: "m", Prompt: 300})).Err)
		}
		text = scrape(t, registry)
		require.Contains(t, text, `evenkeel_tick_seconds_count{group="main",policy="pooled"} 1`)
		require.Contains(t, text, `evenkeel_tick_seconds_count{group="other",policy="pooled"} 1`)
		d.SetWorkers(one)
		require.NoError(t, d.SetPolicy("pooled"))
		text = scrape(t, registry)
		require.Contains(t, text, `evenkeel_tick_seconds_count{group="main",policy="pooled"} 1`)
		require.NotContains(t, text, `evenkeel_tick_seconds_count{group="other"`)
	})
}

// A duplicate series fails the whole scrape, so names that collide are told
// apart.
func TestNamesThatCollideDoNotBreakTheScrape(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		registry := prometheus.NewRegistry()
		cfg := testConfig()
		cfg.Registerer = registry
		d := start(t, cfg)
		fleet := ranks(3, 1, 0)
		fleet[1].Name, fleet[2].Model, fleet[2].Name = "d0", "n", ""
		d.SetWorkers(fleet)
		text := scrape(t, registry)
		for _, series := range []string{
			`{group="m/main",rank="d0#0"}`, `{group="m/main",rank="d0#1"}`, `{group="n/main",rank="#2"}`,
			`evenkeel_imbalance_tokens{group="n/main"}`,
		} {
			require.Contains(t, text, series)
		}
	})
}

func scrape(t *testing.T, g prometheus.Gatherer) string {
	t.Helper()
	families, err := g.Gather()
	require.NoError(t, err)
	var text strings.Builder
	for _, f := range families {
		_, err := expfmt.MetricFamilyToText(&text, f)
		require.NoError(t, err)
	}
	return text.String()
}
