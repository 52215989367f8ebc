package prefill

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestARequestForOneCandidateGoesThereOrWaits(t *testing.T) {
	tier := newTier(t, up("a", "b"), func(c *Config) { c.Push.MaxUnanswered = 1 })
	at := func(id string) Request { return Request{ID: "r", Model: testModel, PromptTokens: 100, Target: id} }
	require.NoError(t, tier.CheckTarget(testModel, "b"))
	require.ErrorIs(t, tier.CheckTarget(testModel, "c"), ErrBadTarget)
	require.ErrorIs(t, tier.CheckTarget("another", "b"), ErrBadTarget)

	first := acquire(t, tier, at("b"))
	require.Equal(t, "b", first.Candidate.ID)
	w, lease, err := tier.enter(at("b"))
	require.NoError(t, err)
	require.Nil(t, lease, "b has what it can take, and a is not asked")
	passed, err := tier.Acquire(t.Context(), Request{ID: "s", Model: testModel, PromptTokens: 100})
	require.NoError(t, err)
	require.Equal(t, "a", passed.Candidate.ID, "nobody waits behind it")
	first.Release()
	<-w.done
	require.Equal(t, "b", w.lease.Candidate.ID)
}
