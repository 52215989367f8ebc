package prefill

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// Candidate b is closed for requests 1 to 4.
func TestRoundRobinGoesOnBehindTheLastChosen(t *testing.T) {
	scheduler := newScheduler(t, up("a", "b", "c"), withPolicy("round-robin"))
	shut := hold(t, scheduler, "b", pooled, 90_000)
	var chosen string
	for n := 1; n <= 7; n++ {
		if n == 5 {
			shut[0].Release()
		}
		chosen += acquire(t, scheduler, request(n)).Candidate.ID
	}
	require.Equal(t, "acacabc", chosen)
}

func TestRoundRobinGoesOnWhenCandidatesChange(t *testing.T) {
	for _, tt := range []struct {
		name   string
		passed int // requests before the change
		then   []string
		want   string
	}{
		{"one in front leaves", 2, []string{"b", "c", "d"}, "c"},
		{"the last chosen leaves", 2, []string{"a", "c", "d"}, "c"},
		{"all that were passed leave", 2, []string{"c", "d"}, "c"},
		{"one joins in front", 2, []string{"x", "a", "b", "c", "d"}, "c"},
		{"the same set again", 3, []string{"a", "b", "c", "d"}, "d"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			scheduler := newScheduler(t, up("a", "b", "c", "d"), withPolicy("round-robin"))
			for n := range tt.passed {
				acquire(t, scheduler, request(n))
			}
			scheduler.SetCandidates(up(tt.then...))
			require.Equal(t, tt.want, acquire(t, scheduler, request(9)).Candidate.ID)
		})
	}
}

func TestRoundRobinHasACursorForEachModel(t *testing.T) {
	candidates := up("a", "b", "c", "d")
	candidates[2].Models, candidates[3].Models = []string{"n"}, []string{"n"}
	scheduler := newScheduler(t, candidates, withPolicy("round-robin"))
	var chosen string
	for range 2 { // alternating, one shared cursor would always come to a and c
		chosen += acquire(t, scheduler, Request{Model: testModel}).Candidate.ID
		chosen += acquire(t, scheduler, Request{Model: "n"}).Candidate.ID
	}
	require.Equal(t, "acbd", chosen)
}

// Active and held tokens are weighed, held ones by 0.3.
func TestLeastTokensPrefersHeldOverRunning(t *testing.T) {
	scheduler := newScheduler(t, up("a", "b"))
	hold(t, scheduler, "a", probing, 3000)
	hold(t, scheduler, "b", pooled, 10_000)
	require.Equal(t, "b", acquire(t, scheduler, request(1)).Candidate.ID)
}

// The vllm-ascend proxy's weights.
func TestLeastTokensWithTheWorkOfVLLMAscend(t *testing.T) {
	scheduler := newScheduler(t, up("a", "b"), withPolicy("least-tokens:work=vllm-ascend"))
	hold(t, scheduler, "a", probing, 1000)
	hold(t, scheduler, "b", pooled, 10_000, 10_000)
	require.Equal(t, "a", acquire(t, scheduler, request(1)).Candidate.ID)
}

// Computed over four candidates that are alike.
func TestTiesGoWhereTheRequestHashes(t *testing.T) {
	scheduler := newScheduler(t, up("p0/0", "p0/1", "p1/0", "p1/1"))
	for id, want := range map[string]string{"req-1": "p1/1", "req-2": "p1/1", "req-3": "p0/1"} {
		lease := acquire(t, scheduler, Request{ID: id, PromptTokens: 10})
		require.Equal(t, want, lease.Candidate.ID, "request %s", id)
		lease.Release()
	}
}

func TestATieGoesToTheSmallerBatch(t *testing.T) {
	scheduler := newScheduler(t, up("a", "b"))
	hold(t, scheduler, "a", probing, 500, 500)
	hold(t, scheduler, "b", probing, 1000)
	for n := range 10 {
		lease := acquire(t, scheduler, request(n))
		require.Equal(t, "b", lease.Candidate.ID)
		lease.Release()
	}
}

func TestOnlyEqualScoresAreATie(t *testing.T) {
	scheduler := newScheduler(t, up("a", "b"))
	hold(t, scheduler, "a", probing, 500, 500)
	hold(t, scheduler, "b", probing, 1001)
	require.Equal(t, "a", acquire(t, scheduler, request(1)).Candidate.ID, "the larger batch holds a token less")
}

func TestUnknownPoliciesAreRefusedByNameWithTheKnownOnes(t *testing.T) {
	_, err := New(Config{Policy: "fnish"})
	require.ErrorIs(t, err, ErrBadPolicy)
	require.ErrorContains(t, err, `prefill: unknown policy "fnish" (did you mean "finish"?); there are round-robin, least-tokens`)

	scheduler := newScheduler(t, up("a"))
	require.ErrorIs(t, scheduler.SetPolicy("metric"), ErrBadPolicy)
	_, err = scheduler.Acquire(t.Context(), Request{Model: testModel, Policy: "metric"})
	require.ErrorIs(t, err, ErrBadPolicy)
	require.Equal(t, "least-tokens", scheduler.Policy())
}

func TestThePolicyCanBeChangedForAllAndForOne(t *testing.T) {
	scheduler := newScheduler(t, up("a"))
	require.Equal(t, "least-tokens", acquire(t, scheduler, request(1)).Policy)
	require.Equal(t, "round-robin", acquire(t, scheduler, Request{Policy: "round-robin"}).Policy)
	require.NoError(t, scheduler.SetPolicy("round-robin"))
	require.Equal(t, "round-robin", acquire(t, scheduler, request(2)).Policy)
}
