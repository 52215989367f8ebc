package dispatcher

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/board"
	"evenkeel/pool"
)

// Two ranks of four slots that prefill, half of which decode: a prompt of 1,000 tokens alone is
// held for 50 ms.
func TestAPromptIsHeldForARoundAndTheMetricsSaySo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		places := pool.NewSemaphore(10)
		d := start(t, Config{Config: board.Config{Policy: "prr", StepModel: board.StepModel{C0Ms: 10, C1Ms: 1e-4, OwnPromptMs: 0.1}},
			Places: places})
		ws := ranks(2, 4, 0)
		for i := range ws {
			ws[i].Mixed, ws[i].Budget = true, 1000
		}
		d.SetWorkers(ws)
		id := uint64(0)
		put := func(e pool.Entry, hits ...board.Hit) <-chan Result {
			id++
			e.ID, e.Model = id, "m"
			require.True(t, places.TryAcquire())
			return d.EnqueueAggregated(&e, hits)
		}
		for range 4 {
			s := (<-put(pool.Entry{Prompt: 10})).Slot
			s.ReportStarted()
			s.Progress(1)
		}
		require.NoError(t, d.SetPolicy("evenkeel"))
		began := time.Now()
		held := put(pool.Entry{Prompt: 1000}, board.Hit{Worker: 0, Tokens: 200})
		time.Sleep(10 * time.Millisecond)
		synctest.Wait()
		require.Empty(t, held)
		require.Equal(t, 1, places.Used())
		s := (<-held).Slot
		require.Zero(t, places.Used())
		require.EqualValues(t, 800, s.NewTokens, "where its prefix is")
		require.InDelta(t, 40, float64(time.Since(began).Microseconds())/1000, 0.1)
		require.InDelta(t, 40, float64(s.Held.Microseconds())/1000, 0.1)
		require.NoError(t, testutil.CollectAndCompare(gauges{d}, strings.NewReader(`
# HELP evenkeel_rank_backlog_tokens Prompt tokens that were sent to the rank and that it has yet to compute, by the proxy's own count. Only ranks that prefill and decode have this series.
# TYPE evenkeel_rank_backlog_tokens gauge
evenkeel_rank_backlog_tokens{group="main",rank="d0"} 800
evenkeel_rank_backlog_tokens{group="main",rank="d1"} 0
# HELP evenkeel_backlog_imbalance_ratio Largest backlog of a rank of the group (evenkeel_rank_backlog_tokens) divided by the mean backlog. 1: all ranks have the same. There is no series while no rank has any.
# TYPE evenkeel_backlog_imbalance_ratio gauge
evenkeel_backlog_imbalance_ratio{group="main"} 2
# HELP evenkeel_rounds_total Rounds that were sent to the ranks of a group that prefills and decodes. Requests that go beside a round, because they lengthen no step, are no rounds.
# TYPE evenkeel_rounds_total counter
evenkeel_rounds_total{group="main"} 1
`), "evenkeel_rounds_total", "evenkeel_rank_backlog_tokens", "evenkeel_backlog_imbalance_ratio"))
		d.Preempted(0)
		require.EqualValues(t, 811, d.Status(t.Context()).Models[0].Workers[0].Backlog, "the last one that decodes is computed again")
		d.CorrectPrompt(s, 900)
		require.EqualValues(t, 711, d.Status(t.Context()).Models[0].Workers[0].Backlog)
	})
}
