package predictor

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestGate(t *testing.T) {
	r := Rules{H: 80, Tau: 0.5, Every: 20}
	for _, row := range []struct {
		name string
		p    Prediction
		rhat float32
		open bool
	}{
		{"a likely end is mixed with the horizon", Prediction{0.75, 20}, 35, true},
		{"the threshold itself passes", Prediction{0.5, 40}, 60, true},
		{"an unlikely end is anchored at the horizon", Prediction{0.49, 10}, 80, false},
		{"never less than a step", Prediction{1, 0.2}, 1, true},
		{"never past the horizon", Prediction{1, 90}, 80, true},
	} {
		rhat, open := r.Gate(row.p)
		require.Equal(t, row.rhat, rhat, row.name)
		require.Equal(t, row.open, open, row.name)
	}
	r.Tau = 0
	_, open := r.Gate(Prediction{0, 80})
	require.False(t, open, "without any chance no threshold is low enough")
}

// letter is 5.2 token by token.
func letter(r Rules, outputs []int32, tokens int) []float64 {
	rhat, open := 0.0, false
	query := func(age int) {
		p := counted(outputs, age, r.H)
		rhat, open = float64(r.H), p.P > 0 && p.P >= r.Tau
		if open {
			exact := min(max(p.P*p.Mu+(1-p.P)*float64(r.H), 1), float64(r.H))
			rhat = float64(float32(exact)) // as State keeps it, or 1 and nearly 1 part ways
		}
	}
	query(0)
	life := []float64{rhat}
	for a := 1; a <= tokens; a++ {
		if open || r.DecrementAnchor {
			rhat--
		}
		if a%r.Every == 0 || rhat < 1 {
			query(a)
		}
		life = append(life, rhat)
	}
	return life
}

func TestFollowIsTheLetter(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		outputs := rapid.SliceOfN(rapid.Int32Range(1, 200), 1, 64).Draw(t, "outputs")
		r := Rules{
			H:               rapid.IntRange(1, 120).Draw(t, "H"),
			Tau:             rapid.SampledFrom([]float64{0, 0.3, 0.5, 0.9}).Draw(t, "tau"),
			Every:           rapid.IntRange(1, 40).Draw(t, "every"),
			DecrementAnchor: rapid.Bool().Draw(t, "decrement anchor"),
		}
		tokens := rapid.IntRange(0, 150).Draw(t, "tokens")
		got, want := r.Follow(NewSurvival(outputs), Query{}, tokens), letter(r, outputs, tokens)
		require.Len(t, got, len(want))
		for a := range got {
			require.InDelta(t, want[a], float64(got[a]), 1e-3, "after %d tokens", a)
			require.True(t, got[a] >= 1 && got[a] <= float32(r.H), "r̂ = %v after %d tokens leaves [1, %d]", got[a], a, r.H)
		}
	})
}

func TestAdvanceInBurstsIsAdvanceByToken(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := Rules{H: 80, Tau: 0.5, Every: rapid.IntRange(0, 30).Draw(t, "every"), DecrementAnchor: rapid.Bool().Draw(t, "decrement anchor")}
		burst := State{Rhat: float32(rapid.Float64Range(1, 80).Draw(t, "rhat")), Open: rapid.Bool().Draw(t, "open")}
		single, from := burst, rapid.Int32Range(0, 1000).Draw(t, "from")
		to := from + rapid.Int32Range(0, 50).Draw(t, "tokens")

		due := false
		for a := from; a < to; a++ {
			due = r.Advance(&single, a, a+1) || due
		}
		require.Equal(t, due, r.Advance(&burst, from, to))
		require.InDelta(t, single.Rhat, burst.Rhat, 1e-4)
	})
}

func TestAnAnchoredRequestDoesNotCountDown(t *testing.T) {
	s := State{Rhat: 80}
	require.False(t, DefaultRules(80).Advance(&s, 1, 19))
	require.Equal(t, float32(80), s.Rhat)
	paper := DefaultRules(80)
	paper.DecrementAnchor = true
	require.False(t, paper.Advance(&s, 1, 19))
	require.Equal(t, float32(62), s.Rhat)
}

func TestAnAgeThatDoesNotMoveAsksNothing(t *testing.T) {
	s := State{Rhat: 3, Open: true}
	require.False(t, DefaultRules(80).Advance(&s, 40, 40))
	require.False(t, DefaultRules(80).Advance(&s, 40, 39), "progress that arrives late is not undone")
	require.Equal(t, State{Rhat: 3, Open: true}, s)
}
