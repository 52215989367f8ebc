package twin

import (
	"errors"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// replayed is one more replay, with steps of these means in the measured part and in the last part.
func (p *tried) replayed(all, late, seconds float64) {
	p.step.add(all)
	p.late.add(late)
	p.last.fade(1, &steps{1000 * seconds / late, 1000 * seconds}, 1)
}

// An hour of windows covers what its forecast is off by in 19 of 20 cases, about, with an error that is a fraction of
// that of a window.
func TestTheErrorOfAnHour(t *testing.T) {
	const hours, windows, seconds = 400, 40, 60
	for name, c := range map[string]struct {
		once             bool    // one replay of most windows
		chance           float64 // of a window of the other policy
		drift            float64
		covers, mostSize float64
	}{
		"by chance only":                  {false, 0.02, 0, 0.95, 0.0125},
		"of one replay a window":          {true, 0.02, 0, 0.95, 0.014},
		"the other is steadier":           {false, 0.003, 0, 0.99, 0.0085},
		"steps of the other grow, and on": {false, 0.02, 0.02, 0.9, 0.025},
	} {
		t.Run(name, func(t *testing.T) {
			r := rand.New(rand.NewPCG(3, 4))
			within, size := 0., 0.
			for range hours {
				var h hour
				really := 0.
				for w := range windows {
					var own, other tried
					replays := 2
					if c.once && w%chanceEvery > 0 {
						replays = 1
					}
					for range replays {
						own.replayed(50, 50, seconds)
						other.replayed(48, 48*(1+c.drift)*(1+c.chance*r.NormFloat64()), seconds)
					}
					h.add(&other, &own, seconds, seconds)
					really += 48 * (1 + 1.5*c.drift) * (1 + c.chance*r.NormFloat64()) / windows
				}
				told := h.tells(&wrong{})
				require.InDelta(t, windows*seconds, told.Seconds, 1e-9)
				require.InDelta(t, told.StepMs-50, told.SavedMs, 1e-9)
				if math.Abs(told.StepMs/really-1) <= told.Error {
					within += 1. / hours
				}
				size += told.Error / hours
			}
			t.Logf("%.1f %% within %.2f %%", 100*within, 100*size)
			require.GreaterOrEqual(t, within, c.covers)
			require.Less(t, size, c.mostSize)
		})
	}
}

// Little is known of few seconds, and nothing where no two replays tell what is by chance. What was more than an hour
// ago fades, and what was in a window before counts once.
func TestWhatAnHourIsOf(t *testing.T) {
	window := func(step float64, replays int) (own, other tried) {
		for range replays {
			own.replayed(50, 50, 60)
			other.replayed(step, step, 60)
		}
		return own, other
	}
	var h hour
	add := func(step float64, replays int, fresh float64) {
		own, other := window(step, replays)
		h.add(&other, &own, 60, fresh)
	}
	add(45, 2, 60)
	require.Zero(t, h.tells(&wrong{}), "of a minute")
	add(45, 2, 0)
	require.InDelta(t, 60, h.seconds, 1e-9, "nothing of it is new")
	add(45, 2, 60)
	require.Equal(t, Hour{120, 45, -5, 2 * leastOff}, h.tells(&wrong{}))
	require.InDelta(t, 0.04, h.tells(&wrong{hour: 0.02, now: 0.3}).Error, 1e-9, "one window in which the replay of what was is wrong is one of many")
	for range 10 * 60 {
		add(55, 1, 60)
	}
	require.InDelta(t, time.Hour.Seconds(), h.seconds, 1e-9)
	require.InDelta(t, 55, h.tells(&wrong{}).StepMs, 0.01)

	h = hour{}
	for range 10 {
		add(20, 2, 60)
		add(60, 2, 60)
	}
	require.InDelta(t, 30, h.tells(&wrong{}).StepMs, 0.01, "each step counts once: of short ones there are more")
	require.InDelta(t, 50, h.tells(&wrong{}).StepMs-h.tells(&wrong{}).SavedMs, 0.01)

	h = hour{}
	add(45, 1, 600)
	require.Zero(t, h.tells(&wrong{}), "one replay tells nothing of chance")
}

// Another policy in force begins another hour, and each of the others has one.
func TestAnHourEndsWithThePolicyInForce(t *testing.T) {
	replays := func(policy string, step float64) *tried {
		p := &tried{policy: policy}
		for range 2 {
			p.replayed(step, step, 60)
		}
		return p
	}
	a := &account{}
	for range 2 {
		a.over(replays("a", 45), replays("own", 50), 60, 60)
	}
	require.Equal(t, Hour{180, 45, -5, 2 * leastOff}, a.over(replays("a", 45), replays("own", 50), 60, 60))
	require.Zero(t, a.over(replays("b", 40), replays("own", 50), 60, 60))
	require.Zero(t, a.over(&tried{policy: "a", failed: errors.New("it fails")}, replays("own", 50), 60, 60))
	require.InDelta(t, 240, a.over(replays("a", 45), replays("own", 50), 60, 60).Seconds, 1e-9)
	require.Zero(t, a.over(replays("a", 45), replays("b", 50), 60, 60))
}
