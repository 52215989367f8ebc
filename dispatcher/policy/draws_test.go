package policy

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/predictor"
)

// slow hides Quantiles, so that ends are asked for one by one.
type slow struct{ Outlook }

func TestDrawsHoldUntilOneIsOutlived(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		table := predictor.NewSurvival(rapid.SliceOfN(rapid.Int32Range(1, 90), 1, 40).Draw(t, "outputs"))
		id, n := rapid.Uint64().Draw(t, "id"), rapid.SampledFrom([]int{1, 2, 4, 8}).Draw(t, "samples")
		var d, one draws
		d.resolve(n, table, false)
		one.resolve(n, slow{table}, false)
		record := make([]int32, recordEnds+n)
		for age := range int32(100) {
			ends := d.draw(record, id, 0, 0, age)
			for _, end := range ends {
				require.Greater(t, end, age, "nobody has ended that runs")
			}
			from, until := record[recordFrom], record[recordFrom]+record[recordValid]
			require.LessOrEqual(t, from, age)
			require.Greater(t, until, age)
			require.LessOrEqual(t, until-from, int32(redrawEvery))
			kept := append([]int32(nil), ends...)
			for other := from; other < until; other++ {
				require.Equal(t, kept, d.draw(record, id, 0, 0, other), "the same at every age for which they hold")
			}
			require.Equal(t, kept, one.draw(record, id, 0, 0, age))
		}
	})
}

func TestAnotherTableIsDrawnFromAtOnce(t *testing.T) {
	s := Snapshot{Workers: []Worker{{Up: true, Free: 1, Running: []Request{{ID: 5, Prompt: 900, Generated: 8, Age: 8}}}}, Pool: entries(10)}
	p, err := Parse("evenkeel:mode=sampled")
	require.NoError(t, err)
	for _, n := range []int32{10, 1000, 10} {
		s.Outlook = outputs(n)
		p.Decide(&s, nil)
		require.Equal(t, n, p.(*evenkeel).look.draws.of(0)[recordEnds])
	}
}

func TestDrawsOfARequestCoverTheDistribution(t *testing.T) {
	var all []int32
	for n := range int32(400) {
		all = append(all, n+1)
	}
	var d draws
	d.resolve(4, predictor.NewSurvival(all), false)
	for id := range uint64(50) {
		quarters := [4]int{}
		for _, end := range d.draw(d.own, id, 0, 0, 0) {
			quarters[(end-1)/100]++
		}
		require.Equal(t, [4]int{1, 1, 1, 1}, quarters, "request %d", id)
	}
}

func TestPhasesSpreadEvenly(t *testing.T) {
	var tenths [10]int
	for id := range uint64(10_000) {
		u := phaseOf(id)
		require.True(t, u >= 0 && u < 1)
		tenths[int(10*u)]++
	}
	for _, n := range tenths {
		require.InDelta(t, 1000, n, 120)
	}
}

func TestARequestPastAllHistoryNeverEnds(t *testing.T) {
	var d draws
	for _, table := range []Outlook{predictor.NewSurvival([]int32{5}), slow{predictor.NewSurvival([]int32{5})}} {
		d.resolve(2, table, false)
		for _, age := range []int32{5, 1 << 29, math.MaxInt32, -7} {
			for _, end := range d.draw(d.own, 1, 0, 0, age) {
				require.Greater(t, end, min(age, 1<<30))
			}
		}
	}
}

// byPrompt ends requests at their prompt's length.
type byPrompt struct{ Outlook }

func (byPrompt) RatioOf(int32, uint64, int, int) float64 { return 1 }
func (byPrompt) ResidOf(prompt int32, _ uint64, age int, _ float64) float64 {
	return float64(int(prompt) - age)
}

func TestAKeyedTableIsAskedForTheRequestItself(t *testing.T) {
	var d draws
	d.resolve(2, byPrompt{predictor.NewSurvival([]int32{5})}, true)
	require.Equal(t, []int32{77, 77}, d.draw(d.own, 1, 77, 0, 10))
	d.resolve(2, byPrompt{predictor.NewSurvival([]int32{5, 6})}, false)
	require.NotEqual(t, []int32{77, 77}, d.draw(d.own, 1, 77, 0, 1))
}

func TestWeightsStandForEveryStepOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		horizon, gamma := rapid.IntRange(0, 300).Draw(t, "horizon"), rapid.Float64Range(0, 1).Draw(t, "gamma")
		steps, weights := Grid(horizon), Weights(horizon, gamma)
		want, sum := make([]float64, len(steps)), 0.0
		for h := range steps[len(steps)-1] + 1 {
			nearest := 0
			for i, step := range steps {
				if math.Abs(float64(step-h)) <= math.Abs(float64(steps[nearest]-h)) {
					nearest = i
				}
			}
			want[nearest] += math.Pow(gamma, float64(h))
			sum += math.Pow(gamma, float64(h))
		}
		for i := range want {
			require.InDelta(t, want[i]/sum, weights[i], 1e-9)
		}
	})
}
