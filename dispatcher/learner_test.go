package dispatcher

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/board"
	"evenkeel/pool"
)

// fitOf is a fit of a kind with these outputs.

func TestFinishedRequestsAreInTheTablesWithinASecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := realConfig("evenkeel")
		registry := prometheus.NewRegistry()
		cfg.Registerer = registry
		d := start(t, cfg)
		d.SetWorkers(ranks(1, 100, 0))
		leave := func(kind board.Kind, age, generated int) {
			r := <-d.Enqueue(&pool.Entry{ID: 1, Model: "m", Prompt: 30 + age, Age: age})
			require.NoError(t, r.Err)
			d.Release(r.Slot, board.Outcome{Kind: kind, Generated: generated})
		}
		table := func() board.PredictorStatus {
			synctest.Wait()
			return d.Status(t.Context()).Models[0].Predictors[0]
		}
		time.Sleep(2 * time.Second)
		leave(board.Finished, 0, 40)
		require.Equal(t, 1, table().Outputs, "at once: the last table is old")
		leave(board.Finished, 0, 40)
		leave(board.Finished, 0, 40)
		require.Equal(t, 1, table().Outputs, "at most once a second")
		time.Sleep(time.Second)
		require.Equal(t, 3, table().Outputs)

		leave(board.Cancelled, 0, 5)
		leave(board.Failed, 0, 6)
		for range 64 {
			leave(board.Finished, 0, 40)
		}
		require.Equal(t, 67, table().Outputs, "sixty-four are a table at once, and no cancelled or failed one among them")
		text := scrape(t, registry)
		require.Contains(t, text, `evenkeel_predictor_outputs{kind="survival",model="m"} 67`)
		require.Contains(t, text, `evenkeel_predictor_dropped_total 0`)
	})
}

func TestEndingsBeyondTheBoundAreDroppedAndCounted(t *testing.T) {
	h := newHand(t, realConfig("evenkeel"))
	for range maxQueuedSamples + 3 {
		h.learner.add(board.OutputSample{Finished: true, Output: 5})
	}
	require.Len(t, h.learner.finished, maxQueuedSamples)
	require.EqualValues(t, 3, count(t, h.metrics.endingsDropped))
}
