package twin

import (
	"errors"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// replayed is one more replay, with steps of these means in the window and in the seconds of it that are fresh.
func (p *policyReplays) replayed(all, fresh, seconds float64) {
	p.stepMs.add(all)
	p.newSteps.fade(1, &steps{1000 * seconds / fresh, 1000 * seconds}, 1)
}

// An hour of windows covers what its forecast is off by in 19 of 20 cases, about.
func TestTheErrorOfAnHour(t *testing.T) {
	const hours, windows, seconds = 1000, 60, 60
	for name, c := range map[string]struct {
		replays       int
		chance        float64 // of a window of the other policy
		wrong         float64 // replays under both policies are off by so much
		covers, above float64
		mostSize      float64
	}{
		"two replays":           {2, 0.1, 0, 0.94, 0.975, 0.034},
		"one replay":            {1, 0.1, 0, 0.94, 0.975, 0.039},
		"the other is steadier": {2, 0.003, 0, 0.99, 1.01, 0.0085},
		"replays are wrong":     {2, 0.1, 0.01, 0.94, 0.99, 0.041},
	} {
		t.Run(name, func(t *testing.T) {
			r := rand.New(rand.NewPCG(3, 4))
			within, size := 0., 0.
			for range hours {
				var h hour
				took, n := 0., 0.
				for range windows {
					var own, other policyReplays
					for range c.replays {
						own.replayed(50, 50, seconds)
						other.replayed(48, 48*(1+c.wrong+c.chance*r.NormFloat64()), seconds)
					}
					h.add(&other, &own, seconds, c.chance*math.Sqrt(seconds))
					took, n = took+seconds*1000, n+seconds*1000/(48*(1+c.chance*r.NormFloat64()))
				}
				told := h.result(&bias{hourError: c.wrong})
				require.InDelta(t, windows*seconds, told.Seconds, 1e-6)
				require.InDelta(t, told.StepMs-50, told.SavedMs, 1e-9)
				if math.Abs(told.StepMs/(took/n)-1) <= told.Error {
					within += 1. / hours
				}
				size += told.Error / hours
			}
			t.Logf("%.1f %% within %.2f %%", 100*within, 100*size)
			require.GreaterOrEqual(t, within, c.covers)
			require.LessOrEqual(t, within, c.above)
			require.Less(t, size, c.mostSize)
		})
	}
}

// Little is known of few seconds, and nothing where nobody knows what is by chance. What was more than an hour ago
// fades, and what was in a window before counts once.
func TestWhatAnHourIsOf(t *testing.T) {
	var h hour
	add := func(step, seconds, chance float64) {
		var own, other policyReplays
		own.replayed(50, 50, max(1, seconds))
		other.replayed(step, step, max(1, seconds))
		h.add(&other, &own, seconds, chance)
	}
	add(45, 60, 0.01)
	require.Zero(t, h.result(&bias{}), "of a minute")
	add(45, 0, 0.01)
	require.InDelta(t, 60, h.seconds, 1e-9, "nothing of it is new")
	add(45, 60, 0.01)
	told := h.result(&bias{})
	require.InDeltaSlice(t, []float64{120, 45, -5, 2 * minBias}, []float64{told.Seconds, told.StepMs, told.SavedMs, told.Error}, 1e-3)
	require.InDelta(t, 0.04, h.result(&bias{hourError: 0.02, lastError: 0.3}).Error, 1e-3,
		"one window in which the replay of what was is wrong is one of many")
	for range 10 * 60 {
		add(55, 60, 0.01)
	}
	require.InDelta(t, time.Hour.Seconds(), h.seconds, 1e-9)
	require.InDelta(t, 55, h.result(&bias{}).StepMs, 0.01)

	h = hour{}
	for range 10 {
		add(20, 60, 0.01)
		add(60, 60, 0.01)
	}
	require.InDelta(t, 30, h.result(&bias{}).StepMs, 0.01, "each step counts once: of short ones there are more")
	require.InDelta(t, 50, h.result(&bias{}).StepMs-h.result(&bias{}).SavedMs, 0.01)

	h = hour{}
	add(45, 600, 0)
	require.Zero(t, h.result(&bias{}), "what is by chance is not known")
}

// Each of the other policies has an hour, and all begin anew where nothing that was before can be replayed.
func TestWhenAnHourBeginsAnew(t *testing.T) {
	replays := func(policy string, step float64) *policyReplays {
		p := &policyReplays{name: policy}
		p.replayed(step, step, 60)
		return p
	}
	a := &account{hours: map[string]*hour{}}
	for range 2 {
		a.addToHour(replays("a", 45), replays("own", 50), 60, 0.01)
	}
	require.InDelta(t, 180, a.addToHour(replays("a", 45), replays("own", 50), 60, 0.01).Seconds, 1e-9)
	require.Zero(t, a.addToHour(replays("b", 40), replays("own", 50), 60, 0.01))
	require.Zero(t, a.addToHour(&policyReplays{name: "a", failed: errors.New("it fails")}, replays("own", 50), 60, 0.01))
	require.InDelta(t, 240, a.addToHour(replays("a", 45), replays("own", 50), 60, 0.01).Seconds, 1e-9)
	judge := New(nil)
	judge.models["m"] = a
	judge.AddSegment(&Segment{}, nil)
	require.InDelta(t, 300, a.addToHour(replays("a", 45), replays("own", 50), 60, 0.01).Seconds, 1e-9)
	judge.AddSegment(&Segment{AfterGap: true}, nil)
	require.Zero(t, a.addToHour(replays("a", 45), replays("own", 50), 60, 0.01))
}
