package dispatcher

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/delivery"
	"evenkeel/pool"
)

func TestWhatAnEngineKeepsOfAnswersIsInUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := start(t, testConfig())
		ws := ranks(2, 4, 100)
		ws[0].KeepsKVFor = 8 * time.Minute
		d.SetWorkers(ws)
		told := func(kept, share string) {
			t.Helper()
			require.NoError(t, testutil.CollectAndCompare(gauges{d}, strings.NewReader(`
# HELP evenkeel_rank_kept_tokens KV tokens of answers that have ended, which the rank's engine keeps for the next turns of their chats, by the proxy's own count. The proxy does not use this room. Only ranks whose profile has hand_back: counted have this series.
# TYPE evenkeel_rank_kept_tokens gauge
evenkeel_rank_kept_tokens{group="main",rank="d0"} `+kept+`
# HELP evenkeel_rank_kv_usage_ratio Share of the rank's KV memory in use. own: by the proxy's own count, where the rank's room is known. scraped: by the engine's gauge, read at every tenth health check; it may also count what its prefix cache keeps. There is no scraped series while the engine's metrics cannot be read.
# TYPE evenkeel_rank_kv_usage_ratio gauge
evenkeel_rank_kv_usage_ratio{group="main",rank="d0",source="own"} `+share+`
evenkeel_rank_kv_usage_ratio{group="main",rank="d1",source="own"} 0
`), "evenkeel_rank_kept_tokens", "evenkeel_rank_kv_usage_ratio"))
		}
		told("0", "0")
		s := (<-d.Enqueue(&pool.Entry{ID: 1, Model: "m", Prompt: 25})).Slot
		require.Zero(t, s.Worker)
		d.Release(s, board.Outcome{Kind: board.Finished, Generated: 5, Kept: true})
		synctest.Wait()
		told("30", "0.3")
		time.Sleep(8 * time.Minute) // nothing else happens meanwhile
		synctest.Wait()
		told("0", "0")
	})
}

// The proxy's own counts of a rank stand beside what its engine says; what the engine does not say,
// or said long ago, has no series.
func TestWhatEnginesSayStandsBesideOwnCounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := testConfig()
		cfg.EngineMetrics = func(worker int32) (EngineMetrics, bool) {
			return []EngineMetrics{{Running: 5, Waiting: 0, KVShare: 0.75}, {Running: 2, Waiting: -1, KVShare: -1}, {}}[worker], worker < 2
		}
		d := start(t, cfg)
		ws := ranks(3, 4, 100)
		ws[1].Capacity = 0
		d.SetWorkers(ws)
		s := (<-d.Enqueue(&pool.Entry{ID: 1, Model: "m", Prompt: 25})).Slot
		require.Zero(t, s.Worker)
		require.NoError(t, testutil.CollectAndCompare(gauges{d}, strings.NewReader(`
# HELP evenkeel_rank_kv_usage_ratio Share of the rank's KV memory in use. own: by the proxy's own count, where the rank's room is known. scraped: by the engine's gauge, read at every tenth health check; it may also count what its prefix cache keeps. There is no scraped series while the engine's metrics cannot be read.
# TYPE evenkeel_rank_kv_usage_ratio gauge
evenkeel_rank_kv_usage_ratio{group="main",rank="d0",source="own"} 0.25
evenkeel_rank_kv_usage_ratio{group="main",rank="d0",source="scraped"} 0.75
evenkeel_rank_kv_usage_ratio{group="main",rank="d2",source="own"} 0
# HELP evenkeel_rank_scraped_requests Requests on the rank by the engine's own metrics, read at every tenth health check, in its batch (running) or in its queue (waiting). If running differs from evenkeel_rank_running for minutes, other clients use the engine, or it goes on with requests that have ended for evenkeel. There is no series while the engine's metrics cannot be read.
# TYPE evenkeel_rank_scraped_requests gauge
evenkeel_rank_scraped_requests{group="main",rank="d0",state="running"} 5
evenkeel_rank_scraped_requests{group="main",rank="d0",state="waiting"} 0
evenkeel_rank_scraped_requests{group="main",rank="d1",state="running"} 2
`), "evenkeel_rank_kv_usage_ratio", "evenkeel_rank_scraped_requests"))
		d.Release(s, board.Outcome{Kind: board.Finished, NoUsage: true})
		synctest.Wait()
		require.NoError(t, testutil.CollectAndCompare(gauges{d}, strings.NewReader(`
# HELP evenkeel_rank_answers_without_usage_total Complete answers of the rank for which its engine reported no token usage. Their tokens are the proxy's own count, in limits and in the load of ranks.
# TYPE evenkeel_rank_answers_without_usage_total counter
evenkeel_rank_answers_without_usage_total{group="main",rank="d0"} 1
evenkeel_rank_answers_without_usage_total{group="main",rank="d1"} 0
evenkeel_rank_answers_without_usage_total{group="main",rank="d2"} 0
`), "evenkeel_rank_answers_without_usage_total"))
	})
}

// A pair has series as long as its decode engine is in the fleet.
func TestTheSeriesOfAPairLeaveWithItsDecodeEngine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := start(t, testConfig())
		ws := ranks(2, 4, 100)
		for i := range ws {
			ws[i].Engine = ws[i].Name
		}
		d.SetWorkers(ws)
		d.inbox.push(func(r *scheduler) {
			for _, engine := range []string{"d0", "d1"} {
				for _, prefiller := range []string{"p0", "p1"} {
					pair := delivery.Link{Prefiller: prefiller, Engine: engine}
					r.carryOutOne(&board.Effect{Kind: board.EffectQuarantine, Pair: pair, Duration: time.Second}, 0)
				}
			}
		})
		d.SetWorkers(ws)
		require.Equal(t, 4, testutil.CollectAndCount(d.metrics.quarantines))
		ws[0].Up, ws[0].Down = false, true
		d.SetWorkers(ws)
		require.Equal(t, 4, testutil.CollectAndCount(d.metrics.quarantines), "d0 is down, and may come back")
		d.SetWorkers(ws[1:])
		require.Equal(t, 2, testutil.CollectAndCount(d.metrics.quarantines))
		require.EqualValues(t, 1, testutil.ToFloat64(d.metrics.quarantines.WithLabelValues("p0", "d1")))
		d.SetWorkers(nil)
		require.Zero(t, testutil.CollectAndCount(d.metrics.quarantines))
	})
}
