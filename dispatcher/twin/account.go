package twin

import (
	"math"
	"time"
)

// account is what the twin knows about a model from verdict to verdict, above all how large the errors of its replays may be.
type account struct {
	judgedUntil  time.Time // steps before this time are part of a verdict already
	windowsJudged int       // number of windows that were judged
	stepError   errorSpread
	variances map[string]*ewma // by policy: the variance of the mean step over one second, as share of the squared step
	bias  bias
	hoursUntil  time.Time        // traffic before this time is in hours already
	hours  map[string]*hour // by the name of the other policy
	checkpoints  []*Checkpoint         // states with which the next window's replays under other policies may begin
	stepsToFirstToken    int32            // steps from the binding of a request to its first token, in the last window; 0: not known
}

// ewma is an exponentially weighted moving average: older values count less and less.
type ewma struct {
	mean float64
	n    float64 // number of values
}

// ewmaWeight is the share of its difference from the mean by which each value moves the mean, from the eighth value on.
const ewmaWeight = 1. / 8

// add adds a value. The first eight values have equal weights.
func (f *ewma) add(x float64) {
	f.n++
	f.mean += max(ewmaWeight, 1/f.n) * (x - f.mean)
}

// scatter is the mean square of the error of a value that is measured over a window of one second. In longer windows the error is smaller.
type errorSpread struct{ square ewma }

// add adds the error of a value over a window of so many seconds. miss is the error as a share of the value. It returns a bound that the
// error exceeds in one of twenty cases: twice the standard deviation, and at least the present error.
func (s *errorSpread) add(miss, seconds float64) float64 {
	s.square.add(miss * miss * seconds)
	return max(math.Abs(miss), 2*math.Sqrt(s.square.mean/seconds))
}

// leastJudged is how many windows must be judged before the twin claims a difference, because a single window may be right by chance.
const minWindowsJudged = 4

// LeastClaimed is the length that a window must have before the twin claims a difference. In a shorter window, many requests on the ranks
// were placed by the policy in force before the window began, so replays under other policies hardly differ from the real steps yet.
const MinClaimWindow = Span / 3

// leastOff is the share of a step by which the result for another policy may be wrong in addition to chance. The replay under the policy in
// force does not show this error, because it begins with the requests that are really on the ranks. In the simulator, results for a quarter
// of an hour are wrong by up to 0.3 %, on average over four to twelve runs of a load.
const minBias = 0.004

// knows says whether it is known by how much the replays of a policy differ by chance.
func (a *account) knowsVariance(policy string) bool { return a.variances[policy] != nil }

// chanceOf adds how much the results of a policy's replays over a window of so many seconds differ by chance. It returns the standard
// deviation of one replay over so many seconds, as share of the step; known is false if no window has had two replays yet.
func (a *account) chanceOf(policy string, t *tally, seconds float64) (chance float64, known bool) {
	if t.n > 1 { // a single result does not show how much results differ
		if !a.knowsVariance(policy) {
			a.variances[policy] = &ewma{}
		}
		a.variances[policy].add(t.variance() * seconds)
	}
	if !a.knowsVariance(policy) {
		return 0, false
	}
	return math.Sqrt(a.variances[policy].mean / seconds), true
}

// wrong measures the error of the replays under the policy in force, as share of a step, as far as chance does not explain it. Chance
// explains an error that it exceeds in at least one of twenty cases.
type bias struct {
	meanError float64 // mean error with its sign, over about the last hour
	seconds   float64 // seconds of traffic in the mean, an hour at most
	hourError float64 // absolute value of the mean error; 0: chance explains it
	lastError float64 // absolute value of the last window's error; 0: chance explains it, or its difference from the mean error
}

// add adds the mean error of the replays over a window (miss, as share of a step). The window has so many seconds, of which fresh seconds
// were in no earlier window. chance is the standard deviation of the error by chance.
func (w *bias) add(miss, chance, seconds, fresh float64) {
	w.lastError, w.hourError = 0, 0
	if math.Abs(miss) > 2*chance && math.Abs(miss-w.meanError) > 2*chance { // otherwise the mean error is the better estimate
		w.lastError = math.Abs(miss)
	}
	w.seconds = min(w.seconds+fresh, time.Hour.Seconds())
	w.meanError += min(1, fresh/w.seconds) * (miss - w.meanError)
	if windows := max(1, w.seconds/seconds); math.Abs(w.meanError) > 2*chance/math.Sqrt(windows) {
		w.hourError = math.Abs(w.meanError)
	}
}

// forecast returns the largest error, as share of a step, that the result for another policy has in nineteen of twenty cases. chance is its
// standard deviation by chance.
func (w *bias) errorBound(chance float64) float64 {
	return 2 * math.Hypot(chance, max(minBias, w.hourError, w.lastError))
}

// steps are a number of steps and their total length in ms.
type steps struct{ n, ms float64 }

func (s *steps) add(ms float64) { s.n, s.ms = s.n+1, s.ms+ms }

func (s *steps) mean() float64 { return s.ms / max(1, s.n) }

// fade multiplies the steps by keep, and then adds others, multiplied by share.
func (s *steps) fade(keep float64, others *steps, share float64) {
	s.n, s.ms = keep*s.n+share*others.n, keep*s.ms+share*others.ms
}

// tally adds up the results of several replays of one window, each with other random numbers.
type tally struct{ n, sum, squares float64 }

func (t *tally) add(x float64) { t.n, t.sum, t.squares = t.n+1, t.sum+x, t.squares+x*x }

func (t *tally) mean() float64 { return t.sum / max(1, t.n) }

// variance returns the estimated variance of one replay's result, as share of the squared mean.
func (t *tally) variance() float64 {
	mean := t.mean()
	if t.n < 2 || mean == 0 {
		return 0
	}
	return max(0, t.squares-t.n*mean*mean) / (t.n - 1) / (mean * mean)
}

// ofMean returns the standard deviation by which the mean of the replays differs by chance from the real steps. chance is the standard
// deviation of one replay, and the real steps have the same.
func (t *tally) deviationOfMean(chance float64) float64 { return chance * math.Sqrt(1+1/max(1, t.n)) }

// hour adds up the replays under a policy that is not in force, over about an hour, because chance matters less in many windows than in
// one. Of each window it counts the fresh part. It begins anew if the policy in force or the settings change.
type hour struct {
	seconds  float64 // seconds of traffic in it, an hour at most: beyond that, older traffic counts less and less
	steps    steps   // steps of the replays under the other policy
	inForce  steps   // steps of the replays under the policy in force
	variance float64 // variance of the mean step by chance, as share of the squared mean
}

// addToHour adds the replays of a window under another policy and under the policy in force to the hour of the other policy, and returns
// the result of the hour. seconds is how many seconds of the window are fresh, and chance is the standard deviation of a replay of one
// second.
func (a *account) addToHour(other, inForce *policyReplays, seconds, chance float64) Hour {
	if other.failed != nil {
		return Hour{}
	}
	h := a.hours[other.name]
	if h == nil {
		h = &hour{}
		a.hours[other.name] = h
	}
	h.add(other, inForce, seconds, chance)
	found := h.result(&a.bias)
	found.To = a.hoursUntil
	return found
}

// add adds the fresh part of a window's replays, so that each second counts once. Of several replays under a policy, it adds the mean. It
// adds nothing if no part is fresh, or if a policy has no steps in it.
func (h *hour) add(other, inForce *policyReplays, seconds, chance float64) {
	if seconds <= 0 || inForce.newSteps.n == 0 || other.newSteps.n == 0 {
		return
	}
	const most = float64(time.Hour / time.Second)
	keep := min(1, (most-seconds)/max(1, h.seconds)) // lowers the weight of older traffic, so that all together is an hour at most
	h.seconds = keep*h.seconds + seconds
	h.inForce.fade(keep, &inForce.newSteps, 1/inForce.stepMs.n)
	h.steps.fade(keep, &other.newSteps, 1/other.stepMs.n)
	share := other.newSteps.ms / other.stepMs.n / h.steps.ms // how much of the hour's time under the other policy is fresh
	byChance := other.stepMs.deviationOfMean(chance) / math.Sqrt(seconds)
	h.variance = (1-share)*(1-share)*h.variance + share*share*byChance*byChance
}

// Hour says how long steps would have taken under another policy, as a mean over about an hour.
type Hour struct {
	Seconds float64   // seconds of traffic that were replayed; 0: too little is known
	To      time.Time // end of this traffic
	StepMs  float64   // mean length of a step
	SavedMs float64   // how many ms shorter steps are under the policy in force
	Error   float64   // share of a step by which StepMs may be wrong
}

// result returns the result of the hour; the zero Hour if too little is known.
func (h *hour) result(w *bias) Hour {
	if h.seconds < MinClaimWindow.Seconds() || h.variance == 0 {
		return Hour{}
	}
	return Hour{Seconds: h.seconds, StepMs: h.steps.mean(), SavedMs: h.steps.mean() - h.inForce.mean(),
		Error: 2 * math.Hypot(math.Sqrt(h.variance), max(minBias, w.hourError))}
}

// tried is a policy that is replayed, with the results of its replays of the current window.
type policyReplays struct {
	spec      string // empty: the policy in force
	name    string // canonical name; empty: not known before the first replay
	failed    error  // why it cannot be replayed; nil: it can
	duplicate bool   // it has the same name as an earlier policy of the list, so it is not replayed again

	stepMs  tally // mean steps of the replays, in ms
	newSteps steps // steps of all replays in the part of the window that no earlier verdict has counted
}
