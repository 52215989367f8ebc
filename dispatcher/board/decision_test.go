package board

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestGroundsNameTheBestAndTheChosen(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		all := make([]Alternative, rapid.IntRange(1, 40).Draw(t, "ranks"))
		for i := range all {
			all[i] = Alternative{Worker: int32(i), Score: float64(rapid.IntRange(-5, 5).Draw(t, "score")), KVTokens: int64(i)}
		}
		chosen := int32(rapid.IntRange(0, len(all)-1).Draw(t, "chosen"))
		e := &Explanation{LowerIsBetter: rapid.Bool().Draw(t, "less")}
		for _, c := range all {
			e.Keep(c, chosen)
		}
		slices.SortStableFunc(all, func(a, b Alternative) int {
			if e.isBetter(&a, &b) {
				return -1
			}
			return 1
		})
		want := all[:min(len(all), mostAlternatives)]
		if at := slices.IndexFunc(all, func(c Alternative) bool { return c.Worker == chosen }); at >= mostAlternatives {
			want = append(slices.Clone(all[:mostAlternatives-1]), all[at])
		}
		require.Equal(t, want, e.Best())
	})
}
