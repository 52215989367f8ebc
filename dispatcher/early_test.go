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

// early is a rank that is bound before the prefill, with steps of 20 ms, and one that is not.
func early(t *testing.T, cfg Config) *Dispatcher {
	cfg.StepModel = board.StepModel{C0Ms: 20, C1Ms: 1e-9}
	d := start(t, cfg)
	ws := ranks(2, 4, 0)
	ws[0].Early = true
	ws[1].Model, ws[1].Group = "other", "late"
	d.SetWorkers(ws)
	return d
}

func TestRanksTellWhatIsBoundToThemAndHasNoEvent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := early(t, testConfig())
		put := func(id uint64) *Slot {
			return (<-d.Enqueue(&pool.Entry{ID: id, Model: "m", Prompt: 10, Early: true})).Slot
		}
		bound := "evenkeel_rank_bound"
		require.Equal(t, 1, testutil.CollectAndCount(gauges{d}, bound), "only of ranks that are early")
		put(1)
		put(2)
		put(3).ReportStarted()
		require.NoError(t, testutil.CollectAndCompare(gauges{d}, strings.NewReader(`
# HELP evenkeel_rank_bound Requests on the rank that were bound before their prefill and have no event yet. Only ranks whose connector binds so early have this series.
# TYPE evenkeel_rank_bound gauge
evenkeel_rank_bound{group="main",rank="d0"} 2
`), bound))
	})
}

func TestAnEarlyEntryHoldsAPlaceAndEndsByItsArrival(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := testConfig()
		cfg.TTL, cfg.Places = time.Minute, pool.NewSemaphore(3)
		d := early(t, cfg)
		ws := ranks(1, 0, 0)
		ws[0].Early = true
		d.SetWorkers(ws)
		require.True(t, cfg.Places.TryAcquire())
		arrival := time.Now()
		time.Sleep(20 * time.Second)
		waits := d.Enqueue(&pool.Entry{ID: 1, Model: "m", Arrival: arrival, Early: true})
		time.Sleep(40*time.Second - 1)
		synctest.Wait()
		require.Empty(t, waits)
		require.Equal(t, 1, cfg.Places.Used())
		time.Sleep(2 * time.Nanosecond)
		require.ErrorIs(t, (<-waits).Err, pool.ErrUnbound)
		require.Zero(t, cfg.Places.Used())
	})
}

// Room that an engine keeps for a request which has left is counted on a rank that was bound late,
// too, until the engine's gauges show that it is free.
func TestARankThatIsBoundLateTellsWhatItsEngineKeeps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := start(t, testConfig())
		ws := ranks(1, 4, 1000)
		d.SetWorkers(ws)
		kept := func() int64 { return d.Status(t.Context()).Models[0].Workers[0].Orphans }
		got := <-d.Enqueue(&pool.Entry{ID: 1, Model: "m", Prompt: 400})
		time.Sleep(time.Second)
		d.Release(got.Slot, board.Outcome{Kind: board.Failed, Orphaned: true})
		require.EqualValues(t, 400, kept())
		require.NoError(t, testutil.CollectAndCompare(gauges{d}, strings.NewReader(`
# HELP evenkeel_bind_orphan_tokens KV tokens of requests that left the rank before a prefill engine had written them. The engine may keep them until it restarts. The proxy does not use this room until the engine's process is another one, or its gauges show that less is in use.
# TYPE evenkeel_bind_orphan_tokens gauge
evenkeel_bind_orphan_tokens{group="main",rank="d0"} 400
`), "evenkeel_bind_orphan_tokens"))
		d.Gauged(ws[0].ID, 0, time.Now().Add(-time.Second))
		require.EqualValues(t, 400, kept(), "they are of a time before it left")
		time.Sleep(time.Second)
		d.Gauged(ws[0].ID, 0, time.Now())
		require.Zero(t, kept())
	})
}
