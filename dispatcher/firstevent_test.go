package dispatcher

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/board"
	"evenkeel/engine/circuit"
	"evenkeel/pool"
)

// The whole answer of a hand-off may come at once. Then its slot is back before its caller reports
// the first event, and the hand-off has worked all the same.
func TestAWholeAnswerShowsThatItsHandoffWorked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		d, err := Start(ctx, testConfig())
		require.NoError(t, err)
		fleet := ranks(2, 4, 0)
		fleet[0].Engine, fleet[1].Engine = "d0", "d1"
		d.SetWorkers(fleet)
		id := uint64(0)
		bind := func(prefiller string, worker int32) *Slot {
			id++
			r := <-d.Enqueue(&pool.Entry{ID: id, Model: "m", Prompt: 1, Prefiller: prefiller, Only: []int32{worker}})
			require.NoError(t, r.Err)
			return r.Slot
		}
		lost, finished := board.Outcome{Kind: board.Failed, Lost: true}, board.Outcome{Kind: board.Finished}
		d.Release(bind("p0", 0), lost)
		for _, works := range []*Slot{bind("p0", 1), bind("p1", 0)} {
			works.ReportStarted()
			d.Release(works, finished)
		}
		d.Release(bind("p0", 0), lost)
		d.Release(bind("p0", 0), lost)
		pairs := func() []board.PairStatus { return d.Status(ctx).Models[0].Pairs }
		require.True(t, pairs()[0].Quarantined)

		time.Sleep(circuit.FirstOut)
		trial := bind("p0", 0)
		d.Release(trial, finished)
		trial.ReportStarted()
		synctest.Wait()
		require.Empty(t, pairs())
	})
}
