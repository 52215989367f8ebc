package predictor

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestQuantilesAreResidInOneCall(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := NewSurvival(rapid.SliceOfN(rapid.Int32Range(1, 60), 0, 40).Draw(t, "outputs"))
		age, phase := rapid.IntRange(0, 70).Draw(t, "age"), rapid.Float64Range(0, 0.999).Draw(t, "phase")
		left := make([]int32, rapid.SampledFrom([]int{1, 2, 4, 8}).Draw(t, "scenarios"))
		s.Quantiles(age, phase, left)
		for k, got := range left {
			u := phase + float64(k)/float64(len(left))
			if u >= 1 {
				u--
			}
			want := s.Resid(age, u)
			if math.IsInf(want, 1) {
				want = math.MaxInt32
			}
			require.EqualValues(t, want, got)
			require.Positive(t, got)
		}
	})
}

func TestExactOutlookReadsTheNarrowestBucket(t *testing.T) {
	all := NewSurvival([]int32{10, 20, 30, 40})
	of := func(n int32) *history { h := newHistory([]int32{n, n, n, n, n}); return &h }
	long := make([]int32, MinLengthOutputs)
	for i := range long {
		long[i] = 500
	}
	e := &Exact{
		all: all, edges: []int32{100}, byLength: []*Survival{NewSurvival([]int32{9}), NewSurvival(long)},
		byKey: map[uint64]*history{7: of(70)},
	}
	for _, c := range []struct {
		name        string
		prompt      int32
		key         uint64
		ratio, left float64 // of age 25, 10 ahead; at the median
	}{
		{"a known key", 50, 7, 1, 45},
		{"an unknown key and a length with enough outputs", 200, 8, 1, 475},
		{"no key and a length with too few", 50, 0, 0.5, 15},
	} {
		t.Run(c.name, func(t *testing.T) {
			require.Equal(t, c.ratio, e.RatioOf(c.prompt, c.key, 25, 10))
			require.Equal(t, c.left, e.ResidOf(c.prompt, c.key, 25, 0.5))
		})
	}
	require.Equal(t, 1.0, e.RatioOf(50, 7, 70, 10), "no history of this key exceeds the age")
	require.True(t, math.IsInf(e.ResidOf(50, 7, 70, 0.5), 1))
	require.Equal(t, all.MeanOutput(), e.MeanOutput())
	require.Equal(t, all.Version(), e.Version())
	require.Equal(t, all.Ratio(5, 10), e.Ratio(5, 10))
	require.Equal(t, all.Resid(5, 0.5), e.Resid(5, 0.5))
}
