package twin

import (
	"math"
	"time"
)

// account is what the twin keeps about one model from one verdict to the next, above all how large the errors of replays may be.
type account struct {
	judgedUntil   time.Time // steps before this time are already counted in a verdict
	windowsJudged int       // number of windows judged so far; with fewer than minWindowsJudged, the errors of replays are not known
	stepError     errorSpread
	// variances has, by policy, the random variance of the mean step over one second of traffic, as share of the squared step.
	variances         map[string]*ewma
	bias              bias
	hoursCountedUntil time.Time        // traffic before this time is already counted in the field hours
	hours             map[string]*hour // by the name of a policy that is not in force: its replays of about the last hour
	checkpoints       []*Checkpoint    // states of replays from which the next window's replays under other policies may begin
	stepsToFirstToken int32            // usual number of steps from binding a request to its first token; 0: not known
}

// ewma is an exponentially weighted moving average: older values count less and less. Before the first value, the mean is 0.
type ewma struct {
	mean float64
	n    float64 // number of values added so far
}

// ewmaWeight is the weight of each new value from the eighth on: the mean moves by this share of the value's distance from it.
const ewmaWeight = 1. / 8

// add adds a value. The first eight values have equal weights.
func (f *ewma) add(x float64) {
	f.n++
	f.mean += max(ewmaWeight, 1/f.n) * (x - f.mean)
}

// errorSpread is the mean square of the relative error of a value that is measured over a window of one second. For other windows, the mean
// square is assumed to be inversely proportional to the length of the window.
type errorSpread struct{ square ewma }

// add adds relativeError, the error of a value measured over a window of so many seconds. It returns a bound that only one of twenty such
// errors exceeds: twice the standard deviation, or the present error if it is larger. The square of an error is assumed to be inversely
// proportional to the length of its window, so it is kept for a window of one second.
func (s *errorSpread) add(relativeError, seconds float64) float64 {
	s.square.add(relativeError * relativeError * seconds)
	deviation := math.Sqrt(s.square.mean / seconds)
	return max(math.Abs(relativeError), 2*deviation)
}

// minWindowsJudged is how many windows must be judged before the twin claims that a policy is better or worse. With fewer windows, the
// errors of replays are not known well enough.
const minWindowsJudged = 4

// MinClaimWindow is the shortest window for which the twin claims that a policy is better or worse. In a shorter window, many requests were
// placed by the policy in force before the window began. Replays under other policies then hardly differ from the real steps.
const MinClaimWindow = Span / 3

// minBias is the error, as share of a step, that the result for another policy may have in addition to random error. The replay under the
// policy in force does not show this error, because it begins with the requests that are really on the ranks. In the simulator, results for
// a quarter of an hour are wrong by up to 0.3 %, on average over four to twelve runs of a load.
const minBias = 0.004

// knowsVariance says whether the random differences between replays of a policy have been measured. The first window that was replayed
// twice under the policy measures them.
func (a *account) knowsVariance(policy string) bool { return a.variances[policy] != nil }

// addVariance adds how much the results of several replays of one window under a policy differ by chance. seconds is the length of the
// window. The variance of a mean over a window is inversely proportional to the length of the window, so it is kept for one second.
func (a *account) addVariance(policy string, results *tally, seconds float64) {
	if results.n <= 1 { // a single result does not show how much results differ
		return
	}
	if !a.knowsVariance(policy) {
		a.variances[policy] = &ewma{}
	}
	a.variances[policy].add(results.variance() * seconds)
}

// deviation returns the random standard deviation of the mean step in one replay of so many seconds, as share of the step. known is false
// if no window has had two replays under the policy yet.
func (a *account) deviation(policy string, seconds float64) (deviation float64, known bool) {
	if !a.knowsVariance(policy) {
		return 0, false
	}
	return math.Sqrt(a.variances[policy].mean / seconds), true
}

// bias is the part of the error of the replays under the policy in force that chance does not explain, as share of a step. Chance explains
// an error of at most twice its standard deviation, because it causes larger errors in only one of twenty cases.
type bias struct {
	meanError float64 // mean of the signed error, over about the last hour
	seconds   float64 // seconds of traffic in meanError; at most an hour
	hourError float64 // absolute value of meanError; 0: chance explains it
	lastError float64 // absolute value of the last window's error; 0: chance explains the error, or its difference from meanError
}

// add adds windowError, the signed error of the mean step in the replays of a window, as share of a step. The window has so many seconds;
// newSeconds of them are in no earlier window. deviation is the random standard deviation of windowError. Chance explains an error of at
// most twice its standard deviation.
//
// add sets the two errors that chance does not explain, for the bounds on the errors of results. hourError is that of the mean over about
// the last hour. lastError is that of this window alone. It is set only if the window also differs from the earlier mean by more than
// chance explains: otherwise that mean is a better estimate than one window.
func (b *bias) add(windowError, deviation, seconds, newSeconds float64) {
	b.lastError, b.hourError = 0, 0
	beyondChance := math.Abs(windowError) > 2*deviation
	unlikeEarlier := math.Abs(windowError-b.meanError) > 2*deviation
	if beyondChance && unlikeEarlier {
		b.lastError = math.Abs(windowError)
	}
	b.seconds = min(b.seconds+newSeconds, time.Hour.Seconds())
	// The new seconds get their share of the hour, so older errors count less and less.
	newShare := min(1, newSeconds/b.seconds)
	b.meanError += newShare * (windowError - b.meanError)
	windows := max(1, b.seconds/seconds) // number of such windows in the hour
	deviationOfMean := deviation / math.Sqrt(windows)
	if math.Abs(b.meanError) > 2*deviationOfMean {
		b.hourError = math.Abs(b.meanError)
	}
}

// errorBound returns a bound on the error of the result for another policy, as share of a step: only one result in twenty is wrong by more.
// deviation is the random standard deviation of this result.
func (b *bias) errorBound(deviation float64) float64 {
	return 2 * math.Hypot(deviation, max(minBias, b.hourError, b.lastError))
}

// steps counts steps and adds up their lengths in ms.
type steps struct{ n, ms float64 }

func (s *steps) add(ms float64) { s.n, s.ms = s.n+1, s.ms+ms }

// mean returns the mean length of a step in ms; 0: there are no steps.
func (s *steps) mean() float64 { return s.ms / max(1, s.n) }

// addAll adds the other steps.
func (s *steps) addAll(others *steps) { s.n, s.ms = s.n+others.n, s.ms+others.ms }

// fade lowers the weight of the steps counted so far to the share keep (1: unchanged), and then adds the other steps, multiplied by share.
func (s *steps) fade(keep float64, others *steps, share float64) {
	s.n, s.ms = keep*s.n+share*others.n, keep*s.ms+share*others.ms
}

// tally adds up the results of several replays of one window. The replays differ in their random numbers only.
type tally struct {
	n       float64 // number of replays added
	sum     float64
	squares float64
}

// add adds x, the mean step length of one more replay in ms.
func (t *tally) add(x float64) { t.n, t.sum, t.squares = t.n+1, t.sum+x, t.squares+x*x }

// mean returns the mean of the results; 0: there are no results.
func (t *tally) mean() float64 { return t.sum / max(1, t.n) }

// variance returns the estimated variance of one replay's result, as share of the squared mean; 0: unknown, because there are fewer than
// two results.
func (t *tally) variance() float64 {
	mean := t.mean()
	if t.n < 2 || mean == 0 {
		return 0
	}
	squaredDistances := max(0, t.squares-t.n*mean*mean) // of the results from their mean; rounding could make it negative
	return squaredDistances / (t.n - 1) / (mean * mean)
}

// deviationOfMean returns the random standard deviation of the difference between the mean of the n replays and the real steps. ofOneReplay
// is the standard deviation of one replay, and the real steps are assumed to have the same. The variances of both add up: 1/n and 1 times
// the variance of one replay.
func (t *tally) deviationOfMean(ofOneReplay float64) float64 {
	return ofOneReplay * math.Sqrt(1+1/max(1, t.n))
}

// hour adds up the replays under a policy that is not in force, over about an hour of traffic. Over many windows, random errors are smaller
// than in one. Windows overlap, so hour counts of each window only the part that is in no earlier window (newPart). It begins anew if the
// policy in force or the settings change.
type hour struct {
	seconds      float64 // seconds of traffic in this hour; at most 3600, because older traffic fades
	otherSteps   steps   // steps of the replays under the other policy
	inForceSteps steps   // steps of the replays under the policy in force
	variance     float64 // random variance of the mean of otherSteps, as share of the squared mean
}

// addToHour adds the replays of a window under one policy that is not in force (other), and those under the policy in force, to the sums
// over about the last hour that compare these two. It returns the result of the comparison; the zero Hour if other cannot be replayed.
// newSeconds is the length of the window's part that no earlier window has added. deviationOfSecond is the random error of a replay of one
// second under other: the standard deviation of its mean step, as share of the step. Longer replays have smaller ones.
//
// The result also needs the bias: the error of the replays under the policy in force, compared with the real steps, that chance does not
// explain. For other, there are no real steps to compare with, so its replays are assumed to have the same bias.
func (a *account) addToHour(other, inForce *policyReplays, newSeconds, deviationOfSecond float64) Hour {
	if other.failed != nil {
		return Hour{}
	}
	h := a.hours[other.name]
	if h == nil {
		h = &hour{}
		a.hours[other.name] = h
	}
	h.add(other, inForce, newSeconds, deviationOfSecond)
	found := h.result(&a.bias)
	found.To = a.hoursCountedUntil // the end of the traffic in the sums
	return found
}

// add adds the part of a window's replays that is in no earlier window, so that each second of traffic counts once. Of several replays
// under a policy, it adds the mean. Older traffic counts less if the sums would stand for more than an hour. add does nothing if the
// window has no new part, or if a policy has no steps in the new part. newSeconds is the length of the new part. deviationOfSecond is the
// random standard deviation of the mean step in one replay of one second under the other policy, as share of the step. add keeps the
// variance only for the other policy, because Hour.Error has the error of this mean alone.
func (h *hour) add(other, inForce *policyReplays, newSeconds, deviationOfSecond float64) {
	if newSeconds <= 0 || inForce.newSteps.n == 0 || other.newSteps.n == 0 {
		return
	}
	const maxSeconds = float64(time.Hour / time.Second)
	// The weight of older traffic is lowered to this share, so that old and new traffic together are at most an hour.
	keptShare := min(1, (maxSeconds-newSeconds)/max(1, h.seconds))
	h.seconds = keptShare*h.seconds + newSeconds
	// newSteps has the steps of all replays of the new part together, so divide by the number of replays.
	inForceReplays, otherReplays := inForce.stepMs.n, other.stepMs.n
	h.inForceSteps.fade(keptShare, &inForce.newSteps, 1/inForceReplays)
	h.otherSteps.fade(keptShare, &other.newSteps, 1/otherReplays)
	// newShare is the share of the other policy's step time in the hour that comes from this window.
	newShare := other.newSteps.ms / otherReplays / h.otherSteps.ms
	// The random error of a mean is inversely proportional to the square root of the time over which it is taken.
	newDeviation := other.stepMs.deviationOfMean(deviationOfSecond) / math.Sqrt(newSeconds)
	// The variance of a mean of two independent means with the weights 1-s and s is (1-s)^2 and s^2 times their variances, added up.
	h.variance = (1-newShare)*(1-newShare)*h.variance + newShare*newShare*newDeviation*newDeviation
}

// Hour says how long steps would have taken under another policy, as a mean over about an hour of traffic.
type Hour struct {
	Seconds float64   // seconds of traffic that were replayed; 0: too few for a result
	To      time.Time // end of the traffic that was replayed
	StepMs  float64   // mean length of a step under the other policy, in ms
	SavedMs float64   // how many ms shorter steps are under the policy in force; below 0: longer
	Error   float64   // error of StepMs, as share of a step, that only one of twenty results exceeds
}

// result returns how the other policy did over the hour; the zero Hour if too little traffic was replayed. SavedMs is by how much steps
// under the policy in force are shorter than under the other one. b is the error of the replays under the policy in force that chance does
// not explain. Error is twice the standard deviation of chance and this error together: only one result in twenty is wrong by more.
func (h *hour) result(b *bias) Hour {
	if h.seconds < MinClaimWindow.Seconds() || h.variance == 0 { // 0: the random error is not known
		return Hour{}
	}
	return Hour{Seconds: h.seconds, StepMs: h.otherSteps.mean(), SavedMs: h.otherSteps.mean() - h.inForceSteps.mean(),
		Error: 2 * math.Hypot(math.Sqrt(h.variance), max(minBias, b.hourError))}
}

// policyReplays is a policy that is replayed, and the results of its replays of the current window.
type policyReplays struct {
	spec      string // policy as configured; empty: the policy in force
	name      string // canonical name; empty: not known before the first replay
	failed    error  // why the policy cannot be replayed; nil: it can
	duplicate bool   // another spec in the list has the same canonical name and was replayed already, so this one is skipped

	stepMs   tally // mean step length of each replay, in ms
	newSteps steps // steps of all replays in the part of the window that no earlier verdict has counted
}

// hasResults says whether the policy has replays that count. Those of a duplicate do not: its first replay shows its canonical name, and so
// that it is a duplicate.
func (p *policyReplays) hasResults() bool { return p.stepMs.n > 0 && !p.duplicate }
