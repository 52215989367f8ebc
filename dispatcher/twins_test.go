package dispatcher

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/twin"
	"evenkeel/dispatcher/verdict"
)

func TestATwinThatFailsEndsNothingElse(t *testing.T) {
	_, more, failure := replaySlice(nil, 1)
	require.ErrorContains(t, failure, "panic")
	require.False(t, more)
}

// What is told of an hour goes with the verdict: both are old after a while, or of another policy.
func TestAnHourThatIsOldIsNotTold(t *testing.T) {
	now := time.Now()
	key := board.GroupKey{Model: "m", Name: "main", Barrier: true}
	tw := &twins{results: map[board.GroupKey]*groupResults{}}
	tw.results[key] = &groupResults{against: map[string]*savings{}}
	tw.addVerdict(&twin.Verdict{Group: key, From: now.Add(-4 * time.Minute), To: now, Policy: "evenkeel", StepMs: 44, Against: []twin.Against{
		{Policy: "jsq-kv", StepMs: 47, SavedMs: 3, Hour: twin.Hour{Seconds: 1800, To: now, StepMs: 47, SavedMs: 3, Error: 0.01}},
	}})
	told := func(policy string, at time.Time) verdict.Against { return tw.resultsOf(key, policy, at).Against[0] }
	require.Equal(t, &verdict.Hour{AgeSeconds: 60, Seconds: 1800, StepMs: 47, SavedMs: 3, ErrorRatio: 0.01},
		told("evenkeel", now.Add(time.Minute)).Hour)
	for _, old := range []verdict.Against{told("evenkeel", now.Add(2*twin.Stale)), told("br0", now)} {
		require.Nil(t, old.Hour)
		require.Equal(t, "against jsq-kv: nothing was replayed lately", old.Says)
	}
}
