package gateway_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// What is predicted without events against what engines count, while
// conversations push each other out of the cache.
func TestPredictedAgainstCountedHits(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name    string
		told    int64 // blocks
		suspect string
	}{
		{"the capacity is known", cached, ""},
		{"the engine has a quarter of what it is told to have", 4 * cached, "less"},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			c := start(t, options{
				prefill: []refengine.Config{{PrefixCache: cached, KVTokens: 1 << 20, PromptTokensDetails: true}},
				profile: mooncake.Profile{KVTokensPerRank: 128 * row.told}, configure: func(cfg *config.Config) { cfg.ExposeRoute = true },
			})
			c.eventually("the size of a block is known", func() bool { return c.gw.Prefill().BlockTokens(model) == 128 })
			talk, predicted, off := newTalks(24), 0, 0
			for range 250 {
				p, a := c.hits(talk.next())
				predicted += p
				off += max(p-a, a-p)
			}
			share := float64(off) / float64(predicted)
			t.Logf("%d tokens predicted, %.1f %% off", predicted, 100*share)
			s := c.candidates()[0]
			require.EqualValues(t, row.suspect, s.CapacitySuspect)
			suspect := c.metric(fmt.Sprintf("evenkeel_prefix_capacity_suspect{candidate=%q,holds=\"less\"}", s.ID))
			if row.suspect == "" {
				require.Less(t, share, 0.1)
				require.Less(t, c.metric("evenkeel_prefix_misprediction_ratio"), 0.1)
				require.Zero(t, suspect)
			} else {
				require.Greater(t, c.metric("evenkeel_prefix_misprediction_ratio"), 0.2)
				require.Equal(t, 1.0, suspect)
				require.Equal(t, 1, c.logs.FilterMessageSnippet("prefix cache holds less than").Len())
			}
			require.Equal(t, 1.0, c.metric(fmt.Sprintf("evenkeel_prefix_feedback_available{model=%q}", model)))
		})
	}
}
