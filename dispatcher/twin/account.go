package twin

import (
	"math"
	"time"
)

// account is what the twin keeps about a model from one verdict to the next, above all how large the errors of its replays may be.
type account struct {
	judgedUntil       time.Time // steps before this time are in a verdict already
	windowsJudged     int       // number of windows that were judged
	stepError         errorSpread
	variances         map[string]*ewma // by policy: the variance by chance of the mean step over one second, as share of the squared step
	bias              bias
	hoursUntil        time.Time        // traffic before this time is in hours already
	hours             map[string]*hour // by the name of the other policy: its replays of about the last hour
	checkpoints       []*Checkpoint    // with which the next window's replays under other policies may begin
	stepsToFirstToken int32            // from the binding of a request, in the last window; 0: not known
}

// ewma is an exponentially weighted moving average: older values count less and less. Before the first value, the mean is 0.
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

// errorSpread is the mean square of the error of a value that is measured over a window of one second. The mean square is assumed to
// be inversely proportional to the length of the window.
type errorSpread struct{ square ewma }

// add adds the error of a value over a window of so many seconds, as a share of the value. It returns a bound that such an error exceeds in
// one of twenty cases: twice the standard deviation, and at least the present error.
func (s *errorSpread) add(relativeError, seconds float64) float64 {
	s.square.add(relativeError * relativeError * seconds)
	return max(math.Abs(relativeError), 2*math.Sqrt(s.square.mean/seconds))
}

// minWindowsJudged is how many windows must be judged before the twin claims a difference: until then, the errors of its replays are not
// known well enough.
const minWindowsJudged = 4

// MinClaimWindow is the length that a window must have before the twin claims a difference. In a shorter window, many requests on the ranks
// were placed by the policy in force before the window began, so replays under other policies hardly differ from the real steps yet.
const MinClaimWindow = Span / 3

// minBias is the share of a step by which the result for another policy may be wrong in addition to chance. The replay under the policy in
// force does not show this error, because it begins with the requests that are really on the ranks. In the simulator, results for a quarter
// of an hour are wrong by up to 0.3 %, on average over four to twelve runs of a load.
const minBias = 0.004

// knowsVariance says whether it is known by how much the replays of a policy differ by chance. It becomes known with the first window that
// was replayed twice under the policy.
func (a *account) knowsVariance(policy string) bool { return a.variances[policy] != nil }

// addVariance adds how much the results of a policy's replays of a window differ by chance. The window has so many seconds.
func (a *account) addVariance(policy string, results *tally, seconds float64) {
	if results.n <= 1 { // a single result does not show how much results differ
		return
	}
	if !a.knowsVariance(policy) {
		a.variances[policy] = &ewma{}
	}
	a.variances[policy].add(results.variance() * seconds)
}

// deviation returns the standard deviation of one replay of so many seconds by chance, as share of the step; known is false if no window
// has had two replays under the policy yet.
func (a *account) deviation(policy string, seconds float64) (deviation float64, known bool) {
	if !a.knowsVariance(policy) {
		return 0, false
	}
	return math.Sqrt(a.variances[policy].mean / seconds), true
}

// bias is the error of the replays under the policy in force, as share of a step, as far as chance does not explain it. Chance explains an
// error that is at most twice its standard deviation, because it causes larger ones in only one of twenty cases.
type bias struct {
	meanError float64 // mean error with its sign, over about the last hour
	seconds   float64 // seconds of traffic in the mean, an hour at most
	hourError float64 // absolute value of the mean error; 0: chance explains it
	lastError float64 // absolute value of the last window's error; 0: chance explains it, or its difference from the mean error
}

// add adds the mean error of the replays over a window, as share of a step. The window has so many seconds, of which newSeconds were in no
// earlier window. deviation is the standard deviation of the error by chance.
func (b *bias) add(windowError, deviation, seconds, newSeconds float64) {
	b.lastError, b.hourError = 0, 0
	isError, isUnusual := math.Abs(windowError) > 2*deviation, math.Abs(windowError-b.meanError) > 2*deviation
	if isError && isUnusual { // otherwise the mean error is the better estimate
		b.lastError = math.Abs(windowError)
	}
	b.seconds = min(b.seconds+newSeconds, time.Hour.Seconds())
	b.meanError += min(1, newSeconds/b.seconds) * (windowError - b.meanError)
	windows := max(1, b.seconds/seconds) // in a mean over so many windows, chance has a smaller part
	if math.Abs(b.meanError) > 2*deviation/math.Sqrt(windows) {
		b.hourError = math.Abs(b.meanError)
	}
}

// errorBound returns the largest error, as share of a step, that the result for another policy has in nineteen of twenty cases. deviation
// is the standard deviation of this result by chance.
func (b *bias) errorBound(deviation float64) float64 {
	return 2 * math.Hypot(deviation, max(minBias, b.hourError, b.lastError))
}

// steps are a number of steps and their total length in ms.
type steps struct{ n, ms float64 }

// add adds a step that took ms.
func (s *steps) add(ms float64) { s.n, s.ms = s.n+1, s.ms+ms }

// mean returns the mean length of the steps in ms; 0: there are none.
func (s *steps) mean() float64 { return s.ms / max(1, s.n) }

// fade multiplies the number and the length of the steps by keep, and then adds those of others, multiplied by share.
func (s *steps) fade(keep float64, others *steps, share float64) {
	s.n, s.ms = keep*s.n+share*others.n, keep*s.ms+share*others.ms
}

// tally adds up the results of several replays of one window, each with other random numbers.
type tally struct {
	n       float64 // number of results
	sum     float64
	squares float64 // sum of the squared results
}

// add adds the result of a replay.
func (t *tally) add(x float64) { t.n, t.sum, t.squares = t.n+1, t.sum+x, t.squares+x*x }

// mean returns the mean of the results; 0: there are none.
func (t *tally) mean() float64 { return t.sum / max(1, t.n) }

// variance returns the estimated variance of one replay's result, as share of the squared mean; 0: fewer than two results do not show it.
func (t *tally) variance() float64 {
	mean := t.mean()
	if t.n < 2 || mean == 0 {
		return 0
	}
	return max(0, t.squares-t.n*mean*mean) / (t.n - 1) / (mean * mean)
}

// deviationOfMean returns the standard deviation by which the mean of the replays differs by chance from the real steps. ofOneReplay is the
// standard deviation of one replay, and the real steps have the same.
func (t *tally) deviationOfMean(ofOneReplay float64) float64 {
	return ofOneReplay * math.Sqrt(1+1/max(1, t.n))
}

// hour adds up the replays under a policy that is not in force, over about an hour, because chance matters less in many windows than in
// one. Of each window it counts the part that no earlier window has (newPart). It begins anew if the policy in force or the settings
// change.
type hour struct {
	seconds  float64 // seconds of traffic in it, an hour at most: beyond that, older traffic counts less and less
	steps    steps   // steps of the replays under the other policy
	inForce  steps   // steps of the replays under the policy in force
	variance float64 // variance of the mean step by chance, as share of the squared mean
}

// addToHour adds the replays of a window under another policy and under the policy in force to the hour of the other policy, and returns
// the result of the hour; the zero Hour if the other policy cannot be replayed. newSeconds is how long the new part of the window is, and
// deviation is the standard deviation of a replay of one second.
func (a *account) addToHour(other, inForce *policyReplays, newSeconds, deviation float64) Hour {
	if other.failed != nil {
		return Hour{}
	}
	h := a.hours[other.name]
	if h == nil {
		h = &hour{}
		a.hours[other.name] = h
	}
	h.add(other, inForce, newSeconds, deviation)
	found := h.result(&a.bias)
	found.To = a.hoursUntil
	return found
}

// add adds the new part of a window's replays, so that each second counts once. Of several replays under a policy, it adds the mean. It
// adds nothing if no part is new, or if a policy has no steps in it.
func (h *hour) add(other, inForce *policyReplays, newSeconds, deviation float64) {
	if newSeconds <= 0 || inForce.newSteps.n == 0 || other.newSteps.n == 0 {
		return
	}
	const maxSeconds = float64(time.Hour / time.Second)
	keep := min(1, (maxSeconds-newSeconds)/max(1, h.seconds)) // lowers the weight of older traffic, so that all together is an hour at most
	h.seconds = keep*h.seconds + newSeconds
	h.inForce.fade(keep, &inForce.newSteps, 1/inForce.stepMs.n)
	h.steps.fade(keep, &other.newSteps, 1/other.stepMs.n)
	newShare := other.newSteps.ms / other.stepMs.n / h.steps.ms // how much of the hour's time under the other policy is new
	newDeviation := other.stepMs.deviationOfMean(deviation) / math.Sqrt(newSeconds)
	h.variance = (1-newShare)*(1-newShare)*h.variance + newShare*newShare*newDeviation*newDeviation // the variance of a weighted mean
}

// Hour says how long steps would have taken under another policy, as a mean over about an hour.
type Hour struct {
	Seconds float64   // seconds of traffic that were replayed; 0: too little is known
	To      time.Time // end of this traffic
	StepMs  float64   // mean length of a step
	SavedMs float64   // how many ms shorter steps are under the policy in force
	Error   float64   // share of a step by which StepMs may be wrong
}

// result returns the result of the hour; the zero Hour if too little is known. b is the error of the replays under the policy in force.
func (h *hour) result(b *bias) Hour {
	if h.seconds < MinClaimWindow.Seconds() || h.variance == 0 {
		return Hour{}
	}
	return Hour{Seconds: h.seconds, StepMs: h.steps.mean(), SavedMs: h.steps.mean() - h.inForce.mean(),
		Error: 2 * math.Hypot(math.Sqrt(h.variance), max(minBias, b.hourError))}
}

// policyReplays is a policy that is replayed, with the results of its replays of the current window.
type policyReplays struct {
	spec      string // empty: the policy in force
	name      string // canonical name; empty: not known before the first replay
	failed    error  // why it cannot be replayed; nil: it can
	duplicate bool   // it has the same name as an earlier policy of the list, so it is not replayed again

	stepMs   tally // mean steps of the replays, in ms
	newSteps steps // steps of all replays in the part of the window that no earlier verdict has counted
}
