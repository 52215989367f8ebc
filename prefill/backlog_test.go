package prefill

import (
	"context"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"
)

func TestBacklogIsTheTimeOfWhatWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		scheduler := newScheduler(t, up("a", "b"), withPlaces(newPlaces(0)), func(c *Config) {
			c.Calibration = CalibrationConfig{TPMs: 2, T0Ms: 10, Known: true}
		})
		require.Empty(t, scheduler.Backlogs())
		ctx, stop := context.WithCancel(t.Context())
		first := start(ctx, scheduler, Request{ID: "x", PromptTokens: 100})
		second := start(ctx, scheduler, Request{ID: "y", PromptTokens: 500})
		got := scheduler.Backlogs()[testModel]
		require.Equal(t, 2, got.Requests)
		require.InDelta(t, 0.001*(2*10+2*600), got.Seconds, 1e-9)
		scheduler.cache.Totals.Prompt, scheduler.cache.Totals.Predicted = 1000, 250
		require.InDelta(t, 0.001*(2*10+2*450), scheduler.Backlogs()[testModel].Seconds, 1e-9, "a quarter of all prompts are prefix hits")
		stop()
		<-first
		<-second
		require.Empty(t, scheduler.Backlogs())
	})
}
