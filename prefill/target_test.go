package prefill

import (
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"
)

func TestARequestForOneCandidateGoesThereOrWaits(t *testing.T) {
	scheduler := newScheduler(t, up("a", "b"), func(c *Config) { c.Push.MaxUnanswered = 1 })
	at := func(id string) Request { return Request{ID: "r", Model: testModel, PromptTokens: 100, Target: id} }
	require.NoError(t, scheduler.CheckTarget(testModel, "b"))
	require.ErrorIs(t, scheduler.CheckTarget(testModel, "c"), ErrBadTarget)
	require.ErrorIs(t, scheduler.CheckTarget("another", "b"), ErrBadTarget)

	first := acquire(t, scheduler, at("b"))
	require.Equal(t, "b", first.Candidate.ID)
	w, lease, err := scheduler.enter(at("b"))
	require.NoError(t, err)
	require.Nil(t, lease, "b has what it can take, and a is not asked")
	passed, err := scheduler.Acquire(t.Context(), Request{ID: "s", Model: testModel, PromptTokens: 100})
	require.NoError(t, err)
	require.Equal(t, "a", passed.Candidate.ID, "nobody waits behind it")
	first.Release()
	<-w.done
	require.Equal(t, "b", w.lease.Candidate.ID)
}

// However many requests wait for one candidate that takes none, they keep no other request from the
// other candidates.
func TestRequestsForOneCandidateKeepNoOthersFromTheRest(t *testing.T) {
	for _, n := range []int{1, 64, 200} { // a round looks past 64 that are held
		synctest.Test(t, func(t *testing.T) {
			scheduler := newScheduler(t, up("a", "b"), func(c *Config) { c.Push.MaxUnanswered = 1 })
			at := Request{ID: "r", Model: testModel, PromptTokens: 100, Target: "b"}
			first := acquire(t, scheduler, at)
			var waits []<-chan outcome
			for range n {
				waits = append(waits, start(t.Context(), scheduler, at))
			}
			passed := start(t.Context(), scheduler, request(1))
			require.Len(t, passed, 1, "%d wait for b", n)
			require.Equal(t, "a", (<-passed).lease.Candidate.ID)
			first.Release()
			for _, w := range waits {
				synctest.Wait()
				require.Len(t, w, 1, "b takes one after another")
				(<-w).lease.Release()
			}
		})
	}
}

// A retry that may not leave its region waits for the engines there. The requests behind it may go
// to another one.
func TestARequestOfOneRegionKeepsNoOtherFromAnotherRegion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		candidates := up("a", "b")
		candidates[0].Region, candidates[1].Region = "ra", "rb"
		scheduler := newScheduler(t, candidates, withPlaces(newPlaces(8)))
		full := hold(t, scheduler, "a", pooled, 95_000)
		stays := request(0)
		stays.HasPlace, stays.MayGoTo = true, func(region string) bool { return region == "ra" }
		first := start(t.Context(), scheduler, stays)
		synctest.Wait()
		require.Empty(t, first)
		second := start(t.Context(), scheduler, request(1))
		synctest.Wait()
		require.Len(t, second, 1)
		full[0].Release()
		require.NoError(t, (<-first).err)
	})
}

// The same holds if the candidate leaves while requests wait for it.
func TestRequestsForACandidateThatLeftKeepNoOthersFromTheRest(t *testing.T) {
	for _, n := range []int{1, 64, 200} {
		synctest.Test(t, func(t *testing.T) {
			scheduler := newScheduler(t, up("a", "b"), func(c *Config) { c.Push.MaxUnanswered = 1 })
			at := Request{ID: "r", Model: testModel, PromptTokens: 100, Target: "b"}
			first := acquire(t, scheduler, at)
			var waits []<-chan outcome
			for range n {
				waits = append(waits, start(t.Context(), scheduler, at))
			}
			scheduler.SetCandidates(up("a"))
			passed := start(t.Context(), scheduler, request(1))
			synctest.Wait()
			require.Len(t, passed, 1, "%d wait for b", n)
			(<-passed).lease.Release()
			first.Release()
			for _, w := range waits {
				require.Error(t, (<-w).err)
			}
		})
	}
}
