package twin

import (
	"math"
	"time"
)

// account is what is kept of a model from verdict to verdict, to know how far its replays may be off.
type account struct {
	until  time.Time // steps before are accounted for
	judged int       // windows
	step   scatter
	chance map[string]*ewma // by policy: the variance of the mean step over a second, as share of the step
	wrong  wrong
	heard  time.Time        // the hours have what was before
	hours  map[string]*hour // by another policy
	begun  []*Begun         // where the next window's replays under other policies begin
	lag    int32            // steps from a bind to the first token, as it was seen last; 0: never
}

// fading is a mean in which the past fades.
type ewma struct {
	mean float64
	n    float64
}

// fadingWeight is by how much of the difference each window moves that mean, once there were more than a few.
const ewmaWeight = 1. / 8

func (f *ewma) add(x float64) {
	f.n++
	f.mean += max(ewmaWeight, 1/f.n) * (x - f.mean)
}

// scatter is how far something is off: the mean of its square over windows of a second. Over longer ones it is off by
// less.
type scatter struct{ square ewma }

// add takes in how far it is off over a window of so many seconds. It says how far it is off at most in nineteen of
// twenty cases: twice the deviation, and at least what it is now.
func (s *scatter) add(off, seconds float64) float64 {
	s.square.add(off * off * seconds)
	return max(math.Abs(off), 2*math.Sqrt(s.square.mean/seconds))
}

// leastJudged is after how many windows the twin is believed: one alone may be right by chance.
const leastJudged = 4

// LeastClaimed is how long a window is at least of which anything is claimed. In a shorter one the ranks still hold much
// of what the policy in force gave them, and replays have not parted yet.
const LeastClaimed = Span / 3

// leastOff is by what share of a step a forecast may be off where nothing is by chance. The replay of the policy in
// force does not show it, because it begins with what is really on the ranks. In the simulator, forecasts for a quarter of
// an hour are off by up to 0.3 % in the mean over four to twelve runs of a load.
const leastOff = 0.004

// knows says whether it is known how much the replays of a policy differ by chance.
func (a *account) knows(policy string) bool { return a.chance[policy] != nil }

// chanceOf takes in how much the replays of a policy differ by chance over a window of so many seconds. It says how
// much one of them does; known is false where there never were two.
func (a *account) chanceOf(policy string, t *tally, seconds float64) (chance float64, known bool) {
	if t.n > 1 {
		if !a.knows(policy) {
			a.chance[policy] = &ewma{}
		}
		a.chance[policy].add(t.variance() * seconds)
	}
	if !a.knows(policy) {
		return 0, false
	}
	return math.Sqrt(a.chance[policy].mean / seconds), true
}

// wrong is by what share of a step the replays of the policy in force are off where that is not by chance.
type wrong struct {
	mean float64
	seen float64 // seconds it is of, an hour at most
	hour float64 // in the mean over an hour, if chance explains that in less than one of twenty cases
	now  float64 // in the last window, if chance explains neither that nor how far it is from that mean
}

// add takes in by how much they are off in the mean over a window of so many seconds, fresh of which were in no window
// before, and by how much they would be by chance.
func (w *wrong) add(off, chance, seconds, fresh float64) {
	w.now, w.hour = 0, 0
	if math.Abs(off) > 2*chance && math.Abs(off-w.mean) > 2*chance { // else the mean tells it better
		w.now = math.Abs(off)
	}
	w.seen = min(w.seen+fresh, time.Hour.Seconds())
	w.mean += min(1, fresh/w.seen) * (off - w.mean)
	if windows := max(1, w.seen/seconds); math.Abs(w.mean) > 2*chance/math.Sqrt(windows) {
		w.hour = math.Abs(w.mean)
	}
}

// forecast is by what share of a step a forecast is wrong at most in nineteen of twenty cases. chance is by how much
// it would be by chance.
func (w *wrong) forecast(chance float64) float64 {
	return 2 * math.Hypot(chance, max(leastOff, w.hour, w.now))
}

// steps are how many there were and how long they took.
type steps struct{ n, ms float64 }

func (s *steps) add(ms float64) { s.n, s.ms = s.n+1, s.ms+ms }

func (s *steps) mean() float64 { return s.ms / max(1, s.n) }

// fade keeps a share of them, and adds a share of others.
func (s *steps) fade(keep float64, others *steps, share float64) {
	s.n, s.ms = keep*s.n+share*others.n, keep*s.ms+share*others.ms
}

// tally is what several replays of a window come to, each with other draws.
type tally struct{ n, sum, squares float64 }

func (t *tally) add(x float64) { t.n, t.sum, t.squares = t.n+1, t.sum+x, t.squares+x*x }

func (t *tally) mean() float64 { return t.sum / max(1, t.n) }

// variance is that of one replay, as share of the mean.
func (t *tally) variance() float64 {
	mean := t.mean()
	if t.n < 2 || mean == 0 {
		return 0
	}
	return max(0, t.squares-t.n*mean*mean) / (t.n - 1) / (mean * mean)
}

// beside is how far the mean of the replays is from what really happens, where each of them is off by so much by
// chance and so is that.
func (t *tally) beside(chance float64) float64 { return chance * math.Sqrt(1+1/max(1, t.n)) }

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
	return Hour{Seconds: h.seconds, StepMs: h.steps.mean(), SavedMs: h.steps.mean() - h.own.mean(),
		Error: 2 * math.Hypot(math.Sqrt(h.variance), max(leastOff, w.hour))}
}

// tried is a policy of which replays are made.
type tried struct {
	spec   string // empty: in force
	policy string // its name; empty: not known yet
	failed error
	again  bool // it is another of them under another spec

	step  tally // of replays: the mean step, in ms
	fresh steps // of all replays, where the window is fresh
}
