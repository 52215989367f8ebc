package twin

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/board"
)

func TestAKeyAfterACommaBelongsToThePolicyBefore(t *testing.T) {
	for text, want := range map[string][]string{
		"auto:br0":                                     {"br0"},
		"auto:br0,evenkeel,evenkeel:kappa=0":           {"br0", "evenkeel", "evenkeel:kappa=0"},
		"auto:brh:horizon=30,window=4, evenkeel,jsq":   {"brh:horizon=30,window=4", "evenkeel", "jsq"},
		"auto:br0:window=4,theta=0,evenkeel:kappa=0.5": {"br0:window=4,theta=0", "evenkeel:kappa=0.5"},
	} {
		specs, ok := Auto(text)
		require.True(t, ok)
		require.Equal(t, want, specs, text)
	}
	_, ok := Auto("evenkeel:near=0,kappa=1")
	require.False(t, ok)
}

var noon = time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)

// found is a verdict of a model with 50 requests inside under br0, and so many fewer under another policy, with
// this error.
func found(model string, after time.Duration, fewer map[string]float64, wrong float64) Verdict {
	v := Verdict{Group: board.GroupKey{Model: model, Name: "main", Barrier: true}, Policy: "br0", To: noon.Add(after), Owed: 50, TwinOwed: 50, OwedError: wrong, Sure: true}
	for _, spec := range []string{"evenkeel", "jsq"} {
		v.Against = append(v.Against, Against{Spec: spec, Policy: spec, Owed: 50 - fewer[spec]})
	}
	return v
}

func TestTheChooserWaitsUntilItIsSure(t *testing.T) {
	better := map[string]float64{"evenkeel": 3, "jsq": 2}
	c := NewChooser([]string{"br0", "evenkeel", "jsq"})
	hear := func(after time.Duration, v ...Verdict) string {
		choice, change := c.Consider(v, noon.Add(after))
		require.Equal(t, change, choice.Spec != "")
		return choice.Spec
	}
	minute := func(n int) time.Duration { return time.Duration(n) * time.Minute }
	again := func(n int, fewer map[string]float64, wrong float64) string {
		return hear(minute(n), found("a", minute(n), fewer, wrong))
	}
	require.Empty(t, again(0, better, 0.01))
	require.Empty(t, again(1, better, 0.01))
	require.Equal(t, "evenkeel", again(2, better, 0.01), "the better of two, by more than the error, three times")
	for n := 3; n < 7; n++ {
		require.Empty(t, again(n, better, 0.01), "the last change is less than five minutes ago")
	}
	require.Equal(t, "evenkeel", again(7, better, 0.01))
	require.Empty(t, again(13, better, 0.01), "it counts anew")
	require.Empty(t, again(14, better, 0.01))
	require.Empty(t, again(15, better, 0.07), "the twin is wrong by more than that")
	require.Empty(t, again(16, better, 0.01), "which breaks the row")
	other := map[string]float64{"evenkeel": 1, "jsq": 2}
	require.Empty(t, again(17, other, 0.01), "another is best")
	require.Empty(t, again(18, other, 0.01))
	require.Equal(t, "jsq", again(19, other, 0.01))
	require.Empty(t, hear(minute(20)))
}

func TestTheChooserForgetsWhatIsGoneAndWhatIsOnlyCompared(t *testing.T) {
	c := NewChooser([]string{"br0", "evenkeel"})
	gone := found("gone", 0, nil, 0)
	gone.Sure = false
	_, _ = c.Consider([]Verdict{gone}, noon)
	for n := 20; ; n++ {
		at := time.Duration(n) * time.Minute
		if choice, change := c.Consider([]Verdict{found("a", at, map[string]float64{"evenkeel": 3, "jsq": 9}, 0.01)}, noon.Add(at)); change {
			require.Equal(t, "evenkeel", choice.Spec)
			return
		}
		require.Less(t, n, 30)
	}
}

func TestTheChooserWeighsAllModels(t *testing.T) {
	c := NewChooser([]string{"br0", "evenkeel", "jsq"})
	for n := range 10 {
		at := time.Duration(n) * time.Minute
		_, _ = c.Consider([]Verdict{found("b", at, map[string]float64{"evenkeel": -3}, 0.01)}, noon.Add(at))
		choice, change := c.Consider([]Verdict{found("a", at, map[string]float64{"evenkeel": 3}, 0.01)}, noon.Add(at))
		require.False(t, change, "%v: what one model gains, the other loses", choice)
	}
}
