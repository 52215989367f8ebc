package dispatcher

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/board"
	"evenkeel/pool"
	"evenkeel/predictor"
)

func TestConfigure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := start(t, Config{Config: board.Config{Policy: "br0"}})
		d.SetWorkers(ranks(2, 1, 0))
		held := <-d.Enqueue(&pool.Entry{ID: 1, Model: "m"})
		<-d.Enqueue(&pool.Entry{ID: 2, Model: "m"})
		early := d.Enqueue(&pool.Entry{ID: 3, Model: "m"})
		good := board.Settings{TTL: 5 * time.Second, Window: time.Millisecond, StepModel: board.StepModel{C0Ms: 7, C1Ms: 0.1},
			Predictor: board.PredictorConfig{Kind: predictor.KindSurvival}}
		require.NoError(t, d.CheckSettings(good))
		require.NoError(t, d.Configure(good))
		require.Equal(t, "br0", d.Policy(), "none was named")
		late := d.Enqueue(&pool.Entry{ID: 4, Model: "m"})
		time.Sleep(5*time.Second + time.Millisecond)
		require.ErrorIs(t, (<-late).Err, board.ErrPoolTimeout)
		require.Empty(t, early, "it came under another TTL")
		require.InDelta(t, 7, d.Status(t.Context()).Models[0].Groups[0].Step.C0Ms, 1e-9)

		for _, bad := range []board.Settings{
			{TTL: -1}, {Policy: "fastest"}, {StepModel: board.StepModel{C0Ms: -1}},
			{Policy: "brh:predictor=oracle"}, {Predictor: board.PredictorConfig{Kind: predictor.KindOracle}},
		} {
			require.Error(t, d.CheckSettings(bad), "%+v", bad)
			require.Error(t, d.Configure(bad), "%+v", bad)
		}
		require.Equal(t, "br0", d.Policy())
		require.NoError(t, d.Configure(board.Settings{Policy: "jsq"}))
		require.Equal(t, "jsq", d.Policy())
		d.Release(held.Slot, board.Outcome{})
		require.NotNil(t, (<-early).Slot, "who waits is served by the new policy")
	})
}
