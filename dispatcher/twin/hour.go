package twin

import (
	"math"
	"time"
)

// hour is what the verdicts of an hour come to for a policy that is not in force, each with the last part of its
// window: there its replay has run for so long that little is left of what the policy in force gave the ranks. What
// is by chance in one window is so to a lesser extent in many.
type hour struct {
	seconds  float64 // that it is of, an hour at most
	steps    steps   // of the replays
	own      steps   // of the replays under the policy in force
	variance float64 // of the mean step by chance, as share of it
	drift    float64 // by what share steps are longer in the last part than in the mean of the measured part, beside those under the policy in force
	chance   fading  // the variance of a replay's mean step over a second, as share of the step
}

// over takes in the replays of a window under another policy and under the policy in force, and says what they and those
// before come to.
func (a *account) over(p, own *tried, seconds, fresh float64) Hour {
	if a.policy != own.policy {
		a.policy, a.hours = own.policy, map[string]*hour{}
	}
	if p.failed != nil {
		return Hour{}
	}
	h := a.hours[p.policy]
	if h == nil {
		h = &hour{}
		a.hours[p.policy] = h
	}
	h.add(p, own, seconds, fresh)
	return h.tells(&a.wrong)
}

// add takes in the replays of a window, the last part of which has so many seconds; fresh of them were in no window
// before.
func (h *hour) add(other, own *tried, seconds, fresh float64) {
	if other.late.n > 1 {
		h.chance.add(other.late.variance() * seconds)
	}
	if fresh <= 0 || own.last.n == 0 || other.last.n == 0 {
		return
	}
	const whole = float64(time.Hour / time.Second)
	keep := min(1, (whole-fresh)/max(1, h.seconds))
	h.seconds = keep*h.seconds + fresh
	h.own.fade(keep, &own.last, fresh/(seconds*own.step.n))
	h.steps.fade(keep, &other.last, fresh/(seconds*other.step.n))
	share := fresh / (seconds * other.step.n) * other.last.ms / h.steps.ms
	byChance := h.chance.mean * (1/fresh + 1/(other.late.n*seconds)) // of what really happens, and of the replays
	h.variance += share*share*byChance - share*(2-share)*h.variance
	h.drift += share * (apart(other.last.mean()/own.last.mean(), other.step.mean()/own.step.mean()) - h.drift)
}

// Hour is what another policy would have had in the mean over an hour.
type Hour struct {
	Seconds float64 // of traffic that it is of; 0: nothing is known
	StepMs  float64
	SavedMs float64 // of every step, by the policy in force
	Error   float64 // by what share of a step StepMs may be wrong
}

// tells says what is known.
func (h *hour) tells(w *wrong) Hour {
	if h.seconds < LeastClaimed.Seconds() || h.chance.n == 0 {
		return Hour{}
	}
	settled := 2 * math.Hypot(math.Sqrt(h.variance), max(leastOff, w.hour))
	return Hour{h.seconds, h.steps.mean(), h.steps.mean() - h.own.mean(), math.Hypot(settled, h.drift)}
}
