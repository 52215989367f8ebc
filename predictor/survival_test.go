package predictor

import (
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// lengths draws outputs that tie, jump and now and then pass what arrays index.
func lengths(t *rapid.T, label string, least int) []int32 {
	one := rapid.OneOf(rapid.Int32Range(1, 40), rapid.Int32Range(1, 2000),
		rapid.SampledFrom([]int32{1, 512, maxArrayLength - 1, maxArrayLength, maxArrayLength + 1, math.MaxInt32}))
	return rapid.SliceOfN(one, least, 60).Draw(t, label)
}

// counted is 5.1 by its words.
func counted(outputs []int32, age, h int) Prediction {
	alive, ended, rest := 0, 0, 0
	for _, o := range outputs {
		if r := int(o) - age; r > 0 {
			alive++
			if r <= h {
				ended++
				rest += r
			}
		}
	}
	if ended == 0 {
		return Prediction{0, float64(h)}
	}
	return Prediction{float64(ended) / float64(alive), float64(rest) / float64(ended)}
}

func ask(p Predictor, h int, q Query) Prediction {
	var out [1]Prediction
	p.Predict(h, []Query{q}, out[:])
	return out[0]
}

func requirePrediction(t require.TestingT, want, got Prediction, of ...any) {
	require.InDelta(t, want.P, got.P, 1e-9, of...)
	require.InDelta(t, want.Mu, got.Mu, 1e-6, of...)
}

func TestSurvivalIsCounting(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		outputs := lengths(t, "outputs", 0)
		before := slices.Clone(outputs)
		s := NewSurvival(outputs)
		require.Equal(t, before, outputs, "the caller's slice was sorted")
		for range 8 {
			age, h := ageNear(t, outputs), rapid.IntRange(1, 300).Draw(t, "h")
			requirePrediction(t, counted(outputs, age, h), ask(s, h, Query{Age: int32(age)}), "age %d, h %d", age, h)
		}
	})
}

// ageNear draws an age, often at the edge of a length.
func ageNear(t *rapid.T, outputs []int32) int {
	if len(outputs) > 0 && rapid.Bool().Draw(t, "at a length") {
		return max(int(rapid.SampledFrom(outputs).Draw(t, "length"))-rapid.IntRange(0, 2).Draw(t, "less"), 0)
	}
	return rapid.IntRange(0, 3000).Draw(t, "age")
}

func TestSurvivalOfNothing(t *testing.T) {
	for name, s := range map[string]*Survival{"nil": nil, "zero": {}, "no outputs": NewSurvival(nil),
		"outputs of no tokens": NewSurvival([]int32{0, -3})} {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, Prediction{0, 80}, ask(s, 80, Query{Age: 5}))
			require.Zero(t, s.MeanOutput())
			require.Zero(t, s.Len())
			require.Empty(t, s.Outputs())
		})
	}
}

func TestVersionIsTheContents(t *testing.T) {
	a, b := NewSurvival([]int32{3, 1, 2}), NewSurvival([]int32{1, 2, 3})
	require.Equal(t, a.Version(), b.Version(), "the same outputs in another order")
	for _, other := range [][]int32{{1, 2}, {1, 2, 3, 3}, {1, 2, 4}, nil} {
		require.NotEqual(t, a.Version(), NewSurvival(other).Version(), "%v", other)
	}
	require.Equal(t, 2.0, a.MeanOutput())
}

func TestKinds(t *testing.T) {
	for _, k := range []Kind{KindNone, KindOracle, KindSurvival, KindExact} {
		got, err := ParseKind(string(k))
		require.NoError(t, err)
		require.Equal(t, k, got)
	}
	_, err := ParseKind("clairvoyant")
	require.ErrorContains(t, err, "clairvoyant")
}

func TestNoneKnowsNothing(t *testing.T) {
	require.Equal(t, Prediction{0, 80}, ask(None{}, 80, Query{Age: 7}))
}

func TestWhatIsCertainPassesTheGate(t *testing.T) {
	r := DefaultRules(80)
	for _, row := range []struct {
		name string
		is   Prediction
		want float32
	}{
		{"ends past the horizon", unknown(80), 80},
		{"ends at the horizon", Prediction{P: 1, Mu: 80}, 80},
		{"ends inside", Prediction{P: 1, Mu: 50}, 50},
		{"is about to end", Prediction{P: 1, Mu: 1}, 1},
		{"should have ended", Prediction{P: 1, Mu: -30}, 1},
	} {
		got, _ := r.Gate(row.is)
		require.Equal(t, row.want, got, row.name)
	}
}
