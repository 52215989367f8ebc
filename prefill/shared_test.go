package prefill

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestWhatOtherDispatchersHaveCounts(t *testing.T) {
	tier := newTier(t, up("a/0", "b/0"), func(c *Config) { c.Policy, c.Push = "finish", 4 })
	tier.SetShares(map[string]Share{"a/0": {Unanswered: 1, NewTokens: 5_000, KVTokens: 5_000}}, map[string]Share{"a/0": {Unanswered: 1, NewTokens: 3_000, KVTokens: 4_000}})
	first := acquire(t, tier, Request{ID: "1", PromptTokens: 1_000})
	require.Equal(t, "b/0", first.Candidate.ID, "8000 tokens of others are before it at a/0")
	require.Equal(t, map[string]Share{"b/0": {Unanswered: 1, NewTokens: 1_000, KVTokens: 1_000}}, tier.Shares(), "of ours alone")
	for _, s := range tier.Status() {
		if s.ID == "a/0" {
			require.InDelta(t, 0.09, s.OwnUsage, 1e-9)
			require.InDelta(t, 2, s.Batch, 1e-9)
		}
	}

	tier.SetShares(map[string]Share{"a/0": {Unanswered: 4}, "b/0": {Unanswered: 3}})
	mustWait(t, tier, Request{ID: "2", PromptTokens: 10})
	tier.SetShares(map[string]Share{"a/0": {KVTokens: 95_000}})
	require.Equal(t, "b/0", acquire(t, tier, Request{ID: "3", PromptTokens: 10}).Candidate.ID, "the gate of a/0 is closed")
	tier.SetShares()
	require.Equal(t, "a/0", acquire(t, tier, Request{ID: "4", PromptTokens: 10}).Candidate.ID, "those that are gone have nothing there")
}
