package dispatcher

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/policy"
	"evenkeel/pool"
)

func TestShadowsTellHowLevelTheGroupWouldBe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		registry := prometheus.NewRegistry()
		// In force: everything to the last rank that has a slot.
		worst := &fake{Spec: "worst", Decides: func(s *policy.Snapshot, dst []policy.Assignment) []policy.Assignment {
			for _, w := range s.Workers {
				if w.Free > 0 && len(s.Pool) > 0 {
					dst = append(dst[:0], policy.Assignment{Entry: s.Pool[0].ID, Worker: w.ID})
				}
			}
			return dst
		}}
		cfg := testConfig(worst)
		cfg.Policy, cfg.Shadow, cfg.Registerer = "worst", []string{"pooled"}, registry
		d := start(t, cfg)
		d.SetWorkers(ranks(2, 2, 0))
		for id := range 2 {
			<-d.Enqueue(&pool.Entry{ID: uint64(id) + 1, Model: "m", Prompt: 100})
			synctest.Wait()
		}
		text := scrape(t, registry)
		for _, line := range []string{
			`evenkeel_shadow_imbalance_tokens{group="main",policy="worst"} 150`, // 100, then 200
			`evenkeel_shadow_imbalance_tokens{group="main",policy="pooled"} 50`, // 100, then 0
			`evenkeel_shadow_rounds_total{group="main",policy="pooled"} 2`,
			`evenkeel_shadow_disagreements_total{group="main",policy="pooled"} 2`,
			`evenkeel_shadow_missed_total 0`,
		} {
			require.Contains(t, text, line)
		}
		want := []board.ComparedPolicy{
			{Policy: "worst", InForce: true, ImbalanceTokens: 150, IdleShare: 0.5, Rounds: 2},
			{Policy: "pooled", ImbalanceTokens: 50, IdleShare: 0.25, Rounds: 2},
		}
		require.Equal(t, want, d.Status(t.Context()).Models[0].Groups[0].Compared)
		loads, _ := d.Loads(t.Context())
		require.Equal(t, []board.GroupCompared{{Model: "m", Group: "main", Policies: want}}, loads.Compared)
		d.SetWorkers(nil)
		synctest.Wait()
		require.NotContains(t, scrape(t, registry), `evenkeel_shadow_imbalance_tokens{`, "the group is gone")
	})
}

func TestTheLatestRoundWinsAndATickNeverWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow := &fake{Spec: "slow"}
		var saw []int
		slow.Decides = func(s *policy.Snapshot, dst []policy.Assignment) []policy.Assignment {
			saw = append(saw, len(s.Workers[0].Running))
			time.Sleep(time.Minute)
			return dst
		}
		registry := prometheus.NewRegistry()
		cfg := testConfig(slow)
		cfg.Shadow, cfg.Registerer = []string{"slow"}, registry
		d := start(t, cfg)
		d.SetWorkers(ranks(1, 9, 0))
		began := time.Now()
		for id := range 5 {
			<-d.Enqueue(&pool.Entry{ID: uint64(id) + 1, Model: "m", Prompt: 100})
			synctest.Wait()
		}
		require.Equal(t, began, time.Now())
		time.Sleep(time.Hour)
		synctest.Wait()
		require.Equal(t, []int{0, 4}, saw, "the first, and the last of those that came meanwhile")
		require.Contains(t, scrape(t, registry), "evenkeel_shadow_missed_total 3")
	})
}

func TestAShadowThatFailsHarmsNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		calls := 0
		bad := &fake{Spec: "bad", Decides: func(s *policy.Snapshot, dst []policy.Assignment) []policy.Assignment {
			if calls++; calls == 1 {
				panic("index out of range")
			}
			return dst
		}}
		registry := prometheus.NewRegistry()
		cfg := testConfig(bad)
		cfg.Shadow, cfg.Registerer = []string{"bad"}, registry
		d := start(t, cfg)
		d.SetWorkers(ranks(1, 9, 0))
		for id := range 2 {
			require.NoError(t, (<-d.Enqueue(&pool.Entry{ID: uint64(id) + 1, Model: "m"})).Err)
			synctest.Wait()
		}
		text := scrape(t, registry)
		require.Contains(t, text, `evenkeel_shadow_failures_total{policy="bad"} 1`)
		require.Contains(t, text, `evenkeel_shadow_rounds_total{group="main",policy="bad"} 1`)
	})
}

func TestShadowsHavePredictionsOfTheirOwn(t *testing.T) {
	cfg := realConfig("br0")
	cfg.Shadow = []string{"brh:horizon=40", "evenkeel"}
	h := newHand(t, cfg)
	h.fleet(ranks(2, 9, 0))
	h.teach(lengths(100))
	s := h.put(pool.Entry{}).slotNow(t)
	h.put(pool.Entry{}).slotNow(t)
	require.True(t, h.shadows.decideAll())
	require.False(t, h.shadows.decideAll())
	seen := h.shadowed[board.GroupKey{Model: "m", Name: "main", Barrier: true}].current.Snapshot.Workers[s.Worker].Running[0]
	require.EqualValues(t, 1, seen.ID)
	require.NotZero(t, seen.Rhat, "brh reads it")
	require.Equal(t, 100, h.status(h.at).Models[0].Predictors[0].Outputs)
}

func TestShadowsThatCannotBeComparedAreRefused(t *testing.T) {
	for spec, refused := range map[string]string{
		"jsq":                  "shadow jsq sends everything on at once",
		"nonsense":             `unknown policy "nonsense"`,
		"brh:predictor=oracle": "only a replay can",
	} {
		cfg := realConfig("br0")
		cfg.Shadow = []string{spec}
		_, err := Start(t.Context(), cfg)
		require.ErrorContains(t, err, refused)
	}
}
