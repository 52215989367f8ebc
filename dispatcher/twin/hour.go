package twin

import (
	"math"
	"time"
)

// hour is what verdicts come to for a policy that is not in force, each with what is fresh of its window. What is by
// chance in one window is so to a lesser extent in many. It begins anew where the policy in force or the settings change.
type hour struct {
	seconds  float64 // that it is of, an hour at most: from then on, what is older counts less and less
	steps    steps   // of the replays
	own      steps   // of the replays under the policy in force
	variance float64 // of the mean step by chance, as share of it
}

// over takes in the replays of a window under another policy and under the policy in force, and says what they and those
// before come to. So many seconds of the window are fresh, and chance is by how much a replay of one second differs.
func (a *account) over(p, own *tried, seconds, chance float64) Hour {
	if p.failed != nil {
		return Hour{}
	}
	h := a.hours[p.policy]
	if h == nil {
		h = &hour{}
		a.hours[p.policy] = h
	}
	h.add(p, own, seconds, chance)
	found := h.tells(&a.wrong)
	found.To = a.heard
	return found
}

// add takes in the replays of a window, so many seconds of which are fresh: each counts once.
func (h *hour) add(other, own *tried, seconds, chance float64) {
	if seconds <= 0 || own.fresh.n == 0 || other.fresh.n == 0 {
		return
	}
	const whole = float64(time.Hour / time.Second)
	keep := min(1, (whole-seconds)/max(1, h.seconds))
	h.seconds = keep*h.seconds + seconds
	h.own.fade(keep, &own.fresh, 1/own.step.n)
	h.steps.fade(keep, &other.fresh, 1/other.step.n)
	share := other.fresh.ms / other.step.n / h.steps.ms
	byChance := other.step.beside(chance) / math.Sqrt(seconds)
	h.variance = (1-share)*(1-share)*h.variance + share*share*byChance*byChance
}

// Hour is what another policy would have had in the mean over an hour.
type Hour struct {
	Seconds float64   // of traffic that it is of; 0: too little is known
	To      time.Time // when that ended
	StepMs  float64
	SavedMs float64 // of every step, by the policy in force
	Error   float64 // by what share of a step StepMs may be wrong
}

// tells says what is known.
func (h *hour) tells(w *wrong) Hour {
	if h.seconds < LeastClaimed.Seconds() || h.variance == 0 {
		return Hour{}
	}
	return Hour{Seconds: h.seconds, StepMs: h.steps.mean(), SavedMs: h.steps.mean() - h.own.mean(), Error: 2 * math.Hypot(math.Sqrt(h.variance), max(leastOff, w.hour))}
}
