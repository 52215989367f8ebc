package twin

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/internal/race"
)

func TestLengthsCountThoseThatWereNotSeenToTheEnd(t *testing.T) {
	l := estimateLengths(4, slices.Values([]observation{
		{0, 10, true},
		{0, 20, false}, // it was longer than 20
		{5, 30, true},  // it was only looked for from 5 on
		{40, 40, false},
	}))
	third := 1. / 3
	require.Equal(t, []survival{{10, 1 - third}, {30, 0}}, l.steps)
	require.Equal(t, 1., l.shareLongerThan(9))
	require.InDelta(t, 2./3, l.shareLongerThan(10), 1e-12)
	require.InDelta(t, 2./3, l.shareLongerThan(29), 1e-12)
	require.Zero(t, l.shareLongerThan(31))
	for id := range uint64(100) {
		require.EqualValues(t, 30, l.draw(10, id), "all that were longer than 10 and were seen to the end")
	}
	require.EqualValues(t, endless, l.draw(30, 1), "none was longer")
	require.EqualValues(t, endless, lengths{}.draw(0, 1))
}

// Whoever looks only for a while at answers that begin at any time, and knows of long ones only that they were
// longer, draws lengths like those that there are.
func TestDrawnLengthsAreLikeTheRealOnes(t *testing.T) {
	race.Alone(t)
	rapid.Check(t, func(t *rapid.T) {
		r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
		mean := rapid.Float64Range(20, 500).Draw(t, "mean")
		var all []observation
		for range 20_000 {
			length := 1 + int32(r.ExpFloat64()*mean)
			from, most := int32(0), int32(3*mean)
			if r.IntN(2) == 0 { // it was under way already
				from = int32(r.Float64() * mean)
			}
			if length > from {
				all = append(all, observation{from, min(length, most), length <= most})
			}
		}
		l := estimateLengths(len(all), slices.Values(all))
		sum, n := 0.0, 0
		for id := range uint64(20_000) {
			if x := l.draw(0, id); x < endless {
				require.Positive(t, x)
				sum, n = sum+float64(x), n+1
			}
		}
		const share = 0.95 // of an exponential distribution that is below three times its mean
		require.InDelta(t, share, float64(n)/20_000, 0.02)
		require.InEpsilon(t, mean*0.843, sum/float64(n), 0.08, "the mean of that part")
		least := int32(mean)
		require.Greater(t, l.draw(least, 7), least)
		require.Equal(t, l.draw(least, 7), l.draw(least, 7), "an answer is as long in each replay")
	})
}
