package dispatcher

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/policy"
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

func TestAStartIsToldUntilTheFirstEvent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reg := prometheus.NewRegistry()
		cfg := testConfig()
		starts := make(chan int32, 10)
		cfg.Parse = fakePolicies(&fake{Spec: "pooled", Decides: func(s *policy.Snapshot, dst []policy.Assignment) []policy.Assignment {
			starts <- s.Pool[0].Start
			for _, q := range s.Workers[0].Running {
				starts <- q.Start
			}
			return append(dst, policy.Assignment{Entry: s.Pool[0].ID, Worker: s.Workers[0].ID})
		}})
		cfg.Registerer = reg
		d := early(t, cfg)
		put := func(id uint64, lead time.Duration) *Slot {
			return (<-d.Enqueue(&pool.Entry{ID: id, Model: "m", Prompt: 10, Early: true, Lead: lead})).Slot
		}
		bound := func() string { return "evenkeel_rank_bound" }
		require.Equal(t, 1, testutil.CollectAndCount(gauges{d}, bound()), "only of ranks that are early")

		s := put(1, 100*time.Millisecond)
		require.EqualValues(t, 5, <-starts)
		_, known := s.StartError()
		require.False(t, known)
		time.Sleep(30 * time.Millisecond)
		s.Foresee(time.Now().Add(50*time.Millisecond), 120*time.Millisecond)
		other := put(2, 0)
		require.Equal(t, []int32{0, 9}, []int32{<-starts, <-starts})
		require.NoError(t, testutil.CollectAndCompare(gauges{d}, strings.NewReader(`
# HELP evenkeel_rank_bound Requests on the rank that were bound before their prefill and have no event yet. Only ranks whose connector binds so early have this series.
# TYPE evenkeel_rank_bound gauge
evenkeel_rank_bound{group="main",rank="d0"} 2
`), bound()))
		time.Sleep(130 * time.Millisecond)
		put(3, 0).Started()
		require.Equal(t, []int32{0, 6, 0}, []int32{<-starts, <-starts, <-starts}, "what was before it is 80 ms late")
		s.Started()
		s.Started()
		other.Started()
		put(4, 0)
		require.Equal(t, []int32{0, 0, 0, 0}, []int32{<-starts, <-starts, <-starts, <-starts})
		steps, known := s.StartError()
		require.True(t, known)
		require.Equal(t, -3, steps, "8 steps, and 5 were predicted")
		_, known = other.StartError()
		require.False(t, known, "nothing was predicted")
		require.Zero(t, testing.AllocsPerRun(100, func() { other.Foresee(time.Now(), time.Second) }))
	})
}

func TestAnEarlyEntryHoldsAPlaceAndEndsByItsArrival(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := testConfig()
		cfg.TTL, cfg.Places = time.Minute, pool.NewPlaces(3)
		d := early(t, cfg)
		ws := ranks(1, 0, 0)
		ws[0].Early = true
		d.SetWorkers(ws)
		require.True(t, cfg.Places.TryReserve())
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
