package twin

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestAnErrorIsTwiceTheDeviationAndAtLeastWhatItIsNow(t *testing.T) {
	var s errorSpread
	require.InDelta(t, 0.02, s.add(0.01, 60), 1e-9)
	for range 100 {
		s.add(-0.01, 60)
	}
	require.InDelta(t, 0.02, s.add(0.01, 60), 1e-6)
	require.InDelta(t, 0.01, s.add(0.005, 240), 1e-6, "a window that is four times as long is off by half as much")
	require.InDelta(t, 0.2, s.add(0.2, 60), 0.05)
	require.Greater(t, s.add(0, 60), 0.05, "it is not forgotten at once")
}

// Replays and reality differ by chance, by 1 % under the policy in force and by so much under the other one, and
// perhaps by something that is no chance: the error covers what a forecast is off by in 19 of 20 cases, about.
func TestTheErrorOfAForecast(t *testing.T) {
	const windows, seconds = 4000, 240
	for name, c := range map[string]struct {
		rounds           int
		chance, wrong    float64 // of the other policy
		covers, mostSize float64
	}{
		"the other is steadier":              {3, 0.003, 0, 0.98, 0.015},
		"the other is as unsteady":           {3, 0.01, 0, 0.93, 0.027},
		"the other is more unsteady":         {3, 0.02, 0, 0.93, 0.05},
		"after two replays":                  {2, 0.01, 0, 0.93, 0.03},
		"both are a little wrong":            {2, 0.003, 0.01, 0.95, 0.025},
		"both are wrong by a bit more":       {2, 0.003, 0.015, 0.95, 0.035},
		"both are wrong by 2 %, four rounds": {4, 0.003, 0.02, 0.96, 0.045},
		"both are very wrong":                {3, 0.003, 0.04, 0.99, 0.09},
	} {
		t.Run(name, func(t *testing.T) {
			r := rand.New(rand.NewPCG(1, 2))
			at := func(chance, wrong float64) float64 { return 50 * (1 + wrong + chance*r.NormFloat64()) }
			a := account{variances: map[string]*ewma{}}
			within, size := 0., 0.
			for range windows {
				var own, other tally
				for range c.rounds {
					own.add(at(0.01, c.wrong))
					other.add(at(c.chance, c.wrong))
				}
				a.addVariance("own", &own, seconds)
				chance, known := a.deviation("own", seconds)
				require.True(t, known)
				a.bias.add(own.mean()/at(0.01, 0)-1, own.deviationOfMean(chance), seconds, seconds)
				a.addVariance("other", &other, seconds)
				chance, _ = a.deviation("other", seconds)
				e := a.bias.errorBound(other.deviationOfMean(chance))
				if math.Abs(other.mean()/at(c.chance, 0)-1) <= e {
					within += 1. / windows
				}
				size += e / windows
			}
			t.Logf("%.1f %% within %.2f %%", 100*within, 100*size)
			require.Greater(t, within, c.covers)
			require.Less(t, size, c.mostSize)
		})
	}
}

// What is more than chance counts: at once if it is much, and if it is less once it was so for long enough.
func TestWhenTheReplaysOfThePolicyInForceAreWrong(t *testing.T) {
	const chance, window, fresh = 0.01, 240, 15
	var w bias
	w.add(0.019, chance, window, window)
	require.Zero(t, max(w.lastError, w.hourError), "it is by chance")
	w.add(-0.03, chance, window, fresh)
	require.InDelta(t, 0.03, max(w.lastError, w.hourError), 1e-9, "too much for chance")
	w.add(0, chance, window, fresh)
	require.Zero(t, max(w.lastError, w.hourError))

	w = bias{}
	windows := 0
	for ; max(w.lastError, w.hourError) == 0 && windows < 1000; windows++ {
		w.add(0.01, chance, window, fresh)
	}
	require.InDelta(t, 4*window/fresh, windows, 1, "four windows that do not overlap halve what is by chance")
	require.InDelta(t, 0.01, w.hourError, 1e-9)
	for range 1000 {
		w.add(0, chance, window, fresh)
	}
	require.Zero(t, w.hourError, "it is over")
}

func TestTalliesOfFewReplays(t *testing.T) {
	var none, one tally
	require.Zero(t, none.mean())
	require.Zero(t, none.variance())
	one.add(50)
	require.Equal(t, 50., one.mean())
	require.Zero(t, one.variance(), "one tells nothing of chance")
	require.InDelta(t, 0.014, one.deviationOfMean(0.01), 1e-3)
	a := account{variances: map[string]*ewma{}}
	a.addVariance("p", &one, 60)
	_, known := a.deviation("p", 60)
	require.False(t, known, "there never were two")
	two := one
	two.add(51)
	a.addVariance("p", &two, 60)
	chance, known := a.deviation("p", 60)
	require.True(t, known)
	require.InDelta(t, 0.014, chance, 1e-3)
	a.addVariance("p", &one, 240)
	again, _ := a.deviation("p", 240)
	require.InDelta(t, chance/2, again, 1e-9, "one alone changes nothing, and a longer window is less by chance")
}

// What is claimed is more than what both errors allow, from so many and so long windows on.
func TestWhatIsClaimed(t *testing.T) {
	for name, c := range map[string]struct {
		v    Verdict
		n    float64
		want bool
	}{
		"more than both errors":                        {Verdict{Sure: true, Error: 0.02}, 2, true},
		"more than its own error only":                 {Verdict{Sure: true, Error: 0.06}, 2, false},
		"of too few windows":                           {Verdict{Error: 0.02}, 2, false},
		"nobody knows what is by chance":               {Verdict{Sure: true, Error: 0.02}, 1, false},
		"of a window in which replays have not parted": {Verdict{Sure: true, Error: 0.02, From: noon.Add(-90 * time.Second)}, 2, false},
	} {
		t.Run(name, func(t *testing.T) {
			if c.v.To, c.v.StepMs, c.v.TwinMs = noon, 50, 50; c.v.From.IsZero() {
				c.v.From = noon.Add(-240 * time.Second)
			}
			p := policyReplays{spec: "other", name: "other", stepMs: tally{n: c.n, sum: 52.5 * c.n, squares: 52.5 * 52.5 * c.n}}
			got := (&Twin{}).against(&p, &c.v, &account{variances: map[string]*ewma{}})
			require.Equal(t, c.want, got.Claimed)
			require.InDelta(t, 2.5, got.SavedMs, 1e-9)
			require.InDelta(t, 2*minBias, got.Error, 1e-9)
		})
	}
}
