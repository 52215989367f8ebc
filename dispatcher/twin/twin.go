package twin

import (
	"maps"
	"math"
	"slices"
	"time"

	"evenkeel/dispatcher/board"
)

// Stale is how long after the end of its window a verdict may still be shown. An older verdict is no longer shown.
const Stale = 3 * Span

// maxRequests bounds how many arrivals and departures of requests the twin keeps over all its segments. It limits memory and replay time.
const maxRequests = 200_000

// MinSegmentLength returns the least length of a segment if the boards hold so many requests. The boards are copied for each segment, and a
// copy takes longer with more requests, so the length grows with their number.
func MinSegmentLength(requests int) time.Duration {
	return min(Span/3, 15*time.Second*time.Duration(1+requests/1500))
}

// Twin finds out, by replays of the traffic of the last minutes, how long steps would have taken under other policies.
type Twin struct {
	specs    []string
	segments []*Segment    // the latest segments, each beginning where the one before ended; the oldest first
	end      *board.Boards // the boards at the end of the last segment

	judging  *judging            // progress of the verdict on the current window; nil: no verdict is in progress
	models   map[string]*account // by model name
	upToDate bool                // no segment was added since work on the latest window began, so there is nothing new to judge
}

// Verdict compares, for one group, the real steps of a window with replays under the policy in force and under other policies. The groups
// of a model are judged together, because a policy also decides which group gets a request.
type Verdict struct {
	Group    board.GroupKey
	From, To time.Time
	Policy   string  // canonical name of the policy in force
	NewSteps uint64  // steps of the group that no earlier verdict has counted
	Ranks    int     // number of ranks of the group
	StepMs   float64 // mean length in ms of the real steps over all groups of the model; steps that were reported together do not count
	TwinMs   float64 // mean length in ms of the steps in replays under the policy in force
	Error    float64 // error of TwinMs, as share of a step, that only one of twenty results exceeds
	Sure     bool    // enough windows were judged to know the errors of replays; false: no difference is claimed yet
	Replays  int     // number of replays of each policy; step lengths are means over them

	Against []Against // one result for each policy that is not in force
}

// Against is the result for all groups of a model under another policy.
type Against struct {
	Policy  string  // canonical name; the spec as configured if the policy cannot be replayed
	StepMs  float64 // mean length of a step in the replays, in ms
	SavedMs float64 // how many ms shorter steps are under the policy in force; below 0: longer
	Error   float64 // error of StepMs, as share of a step, that only one of twenty results exceeds
	Claimed bool    // the difference exceeds Error and the replay error of the policy in force, so it may be reported
	Hour    Hour    // result over about the last hour; the zero Hour: too little is known
	Failed  error   // why the policy cannot be replayed; nil: it can
}

// A verdict comes from at most maxRounds rounds of replays; each round replays every policy once, with other random numbers. If the next
// window is ready earlier, one round is enough. Each varianceEvery-th verdict needs two rounds, because their difference shows how large
// random errors are.
const (
	maxRounds     = 4
	varianceEvery = 4
)

// judging is the state of the verdict on one window. Its replays are made one after the other.
type judging struct {
	latest      *Window         // all segments that the twin had when work on this verdict began
	window      *Window         // part of latest that is replayed: the model had all its groups in it
	models      []string        // models without a verdict on this window yet; the first is in progress
	policies    []policyReplays // policies to replay for the first of models; policies[0] is the policy in force
	current     int             // index in policies of the policy in progress
	round       uint64          // number of the present round of replays, from 0; also the seed of its random numbers
	replay      *Replay         // the replay in progress; nil: none
	checkpoints []*Checkpoint   // states saved by the replays, from which replays of later windows can begin
}

// New returns a twin that compares the listed policies with the policy in force. A policy that is listed twice is replayed only once.
func New(specs []string) *Twin {
	t := &Twin{models: map[string]*account{}}
	for _, spec := range specs {
		if !slices.Contains(t.specs, spec) {
			t.specs = append(t.specs, spec)
		}
	}
	return t
}

// AddSegment adds a segment that has ended, and the boards at its end. It drops the oldest segments if the segments are together longer
// than Span or have more than maxRequests arrivals and departures, but always keeps the newest. After a gap in the recording, it drops all
// earlier segments, the verdict in progress, and the results of the last hour, because a replay cannot run across the gap.
func (t *Twin) AddSegment(s *Segment, end *board.Boards) {
	if s.AfterGap {
		t.segments, t.judging = nil, nil
		for _, a := range t.models {
			clear(a.hours)
		}
	}
	// The tape has allocated more memory than the segment needs. The copies take only what they need.
	s.arrivals, s.departures = slices.Clip(slices.Clone(s.arrivals)), slices.Clip(slices.Clone(s.departures))
	t.segments, t.end, t.upToDate = append(t.segments, s), end, false
	requests := 0
	for i := len(t.segments) - 1; i >= 0; i-- {
		requests += len(t.segments[i].arrivals) + len(t.segments[i].departures)
		tooMuch := s.To.Sub(t.segments[i].From) > Span || requests > maxRequests
		if newest := i == len(t.segments)-1; tooMuch && !newest {
			t.segments = slices.Clone(t.segments[i+1:])
			break
		}
	}
}

// Work continues the replays for at most so many turns. After the last replay of a model, it returns the new verdicts on the model. more
// says whether Work should be called again. A call that begins a window or a replay replays nothing, so that each call takes a short time.
func (t *Twin) Work(turns int) (verdicts []Verdict, more bool) {
	j := t.judging
	if j == nil {
		if t.upToDate || len(t.segments) == 0 { // no segment was added since the last verdicts
			return nil, false
		}
		latest := &Window{Segments: slices.Clone(t.segments), End: t.end}
		t.judging, t.upToDate = &judging{latest: latest, models: t.end.Models()}, true
		return nil, true
	}
	if len(j.models) == 0 { // each model has its verdicts on this window
		t.judging = nil
		return nil, !t.upToDate // a newer window may be ready
	}
	if j.replay == nil {
		if begun := t.beginReplay(j); begun {
			return nil, true
		}
		return t.finishModel(j), true // every replay of this model is done
	}
	if over, err := j.replay.Run(turns); over || err != nil {
		j.finishReplay(err)
	}
	return nil, true
}

// finishReplay adds the result of the replay that has ended to the results of its policy, and goes on to the next policy. err is why the
// replay failed; nil: it did not fail. If an earlier replay of the policy had a result, an error is ignored and that result counts.
//
// Two specs may stand for the same policy. This shows only in a replay, by the policy's canonical name. The later one of the two is a
// duplicate then: its result is not used, and it is not replayed again.
func (j *judging) finishReplay(err error) {
	policy := &j.policies[j.current]
	switch {
	case err == nil:
		policy.name = j.replay.Boards.Policy()
		policy.duplicate = slices.ContainsFunc(j.policies[:j.current], func(earlier policyReplays) bool { return earlier.name == policy.name })
		policy.stepMs.add(j.replay.StepMs())
		policy.newSteps.addAll(&j.replay.newSteps)
		j.checkpoints = append(j.checkpoints, j.replay.Checkpoints...)
	case policy.stepMs.n == 0:
		policy.failed = err
	}
	j.replay = nil
	j.current++
}

// beginModel prepares the window and the policies for the next model. Only the part of the window can be replayed in which the model had
// all its present groups, because a replay simulates only the groups with which it begins. beginModel returns false if there is no such
// part.
func (t *Twin) beginModel(j *judging) bool {
	if j.window = j.latest.partWithAllGroups(j.model()); j.window == nil {
		return false
	}
	// If earlier windows of the model were judged, the new window gets the number of steps to a first token that they have shown, the
	// time until which the sums over the last hour have counted their traffic, and the states that their replays have saved.
	if a := t.models[j.model()]; a != nil {
		j.window.StepsToFirstToken, j.window.HoursUntil = a.stepsToFirstToken, a.hoursCountedUntil
		j.window.Checkpoints = a.checkpoints
	}
	j.policies = make([]policyReplays, 1, 1+len(t.specs)) // the first, without a spec, is the policy in force
	for _, spec := range t.specs {
		j.policies = append(j.policies, policyReplays{spec: spec})
	}
	return true
}

// model returns the model in progress, which must exist.
func (j *judging) model() string { return j.models[0] }

// inForce returns the policy in force with its replays. The model in progress must have begun (beginModel).
func (j *judging) inForce() *policyReplays { return &j.policies[0] }

// beginReplay begins the next replay of the model: with the next policy of the round, or with the first policy of the next round.
// finishReplay moves j.current to the next policy when the replay has ended. beginReplay returns false if no replay is left: enough rounds
// were made, or the window or the policy in force cannot be replayed.
func (t *Twin) beginReplay(j *judging) bool {
	if j.policies == nil && !t.beginModel(j) {
		return false
	}
	for j.inForce().failed == nil { // a failure of the policy in force ends the work on the model
		if j.current == len(j.policies) { // the round is over
			j.current, j.round = 0, j.round+1
		}
		if j.current == 0 && t.enoughRounds(j) {
			return false
		}
		policy := &j.policies[j.current]
		if policy.failed == nil && !policy.duplicate {
			if j.replay, policy.failed = NewReplay(j.window, j.model(), policy.spec, j.round); policy.failed == nil {
				return true
			}
		}
		j.current++ // this policy cannot be replayed or is a duplicate, so go on with the next
	}
	return false
}

// enoughRounds says whether the rounds so far are enough for a verdict. maxRounds rounds are enough; if a newer window is ready, one round
// is. But it takes two rounds to measure the variance of a policy: how much its replays differ by chance. It must be measured if it is not
// known for a policy with results, and again in every varianceEvery-th window.
func (t *Twin) enoughRounds(j *judging) bool {
	newerIsReady := !t.upToDate
	if j.round == 0 || j.round < maxRounds && !newerIsReady {
		return false
	}
	if j.round > 1 {
		return true
	}
	// One round was made, and a newer window is ready.
	a := t.models[j.model()]
	if varianceDue := a == nil || a.windowsJudged%varianceEvery == 0; varianceDue {
		return false
	}
	return !slices.ContainsFunc(j.policies, func(p policyReplays) bool { return p.hasResults() && !a.knowsVariance(p.name) })
}

// finishModel returns the verdicts on the present model, and goes on to the next model.
func (t *Twin) finishModel(j *judging) (verdicts []Verdict) {
	// Without replays of the policy in force, other policies have nothing to be compared with.
	if len(j.policies) > 0 && j.inForce().failed == nil {
		verdicts = t.judge(j)
	}
	j.models = j.models[1:]
	j.policies, j.checkpoints, j.replay = nil, nil, nil
	j.current, j.round = 0, 0
	return verdicts
}

// realSteps returns the total length in ms, and the number, of a group's real steps between two views of the group. It counts only the
// steps that the step model learned from; steps that were reported together, for example, have no known length.
func realSteps(from, to *board.GroupView) (took, n float64) {
	return to.Line.Learned.Ms - from.Line.Learned.Ms, to.Line.Learned.Steps - from.Line.Learned.Steps
}

// meanRealStep returns the mean length of a model's real steps in the measured part of the window, in ms; 0: no step has a known length.
// atEnd has the model's groups at the end of the window.
func (w *Window) meanRealStep(model string, atEnd []board.GroupView) float64 {
	atBegin, _ := w.Measured().Boards.Groups(model)
	ms, steps := 0.0, 0.0
	for _, to := range atEnd {
		if from := viewOf(atBegin, to.Key); from != nil {
			took, n := realSteps(from, &to)
			ms, steps = ms+took, steps+n
		}
	}
	if steps == 0 {
		return 0
	}
	return ms / steps
}

// measuredSeconds returns how many seconds the measured part of a window lasts; at least 1, so that callers can divide by the result.
func measuredSeconds(v *Verdict) float64 { return max(1, v.To.Sub(v.From).Seconds()) }

// judge compares the replays under the policy in force with the real steps, and with the replays under the other policies. It returns a
// verdict for each group, or nil if the window has no real or no replayed steps. It also drops the accounts of models that are gone. In the
// account of this model, it counts the window, adds the errors of the replays, and keeps the checkpoints with which replays of the next
// window may begin.
func (t *Twin) judge(j *judging) []Verdict {
	w, model, inForce := j.window, j.model(), j.inForce()
	t.dropModels() // those that are gone
	atEnd, _ := w.End.Groups(model)
	realStepMs := w.meanRealStep(model, atEnd)
	if realStepMs == 0 || inForce.stepMs.mean() == 0 {
		return nil
	}
	a := t.account(model)
	a.dropVariances(j.policies) // of policies that were not replayed
	a.windowsJudged++
	a.stepsToFirstToken = w.history(model).stepsToFirstToken // assumed in the next window if that shows no number
	v := Verdict{
		From: w.Measured().From, To: w.To(), Policy: inForce.name, StepMs: realStepMs, TwinMs: inForce.stepMs.mean(),
		Sure:    a.windowsJudged >= minWindowsJudged,
		Replays: int(inForce.stepMs.n),
	}
	a.addErrors(&v, &inForce.stepMs)
	t.compare(j, &v, a)
	a.keepCheckpoints(j)
	// Windows overlap, so a group's new steps begin after the last verdict (judgedUntil). Steps before v.From are not measured.
	beforeNewSteps := w.groupsSince(a.judgedUntil, v.From, model)
	a.judgedUntil = w.To()
	return v.forEachGroup(beforeNewSteps, atEnd)
}

// addErrors compares the mean step in the replays under the policy in force (v.TwinMs) with the real one (v.StepMs), and sets v.Error, a
// bound on this error. stepMs has the results of the replays. The account keeps three things for later verdicts: the mean square of such
// errors (stepError), how much replays differ by chance (variances), and the part of the errors that chance does not explain (bias). Only
// an error whose variance is known shows a bias.
//
// Windows overlap, and in the mean error of the bias each second of traffic counts once. So the error of a window weighs there as much as
// the window's seconds that no earlier verdict has counted.
func (a *account) addErrors(v *Verdict, stepMs *tally) {
	windowError, seconds := v.TwinMs/v.StepMs-1, measuredSeconds(v) // windowError is a share of a step
	v.Error = a.stepError.add(windowError, seconds)
	a.addVariance(v.Policy, stepMs, seconds)
	if ofOneReplay, known := a.deviation(v.Policy, seconds); known { // the random standard deviation of a replay's mean step
		uncountedSeconds := min(seconds, v.To.Sub(a.judgedUntil).Seconds())
		ofWindowError := stepMs.deviationOfMean(ofOneReplay) // the error is that of the mean of all replays of the window
		a.bias.add(windowError, ofWindowError, seconds, uncountedSeconds)
	}
}

// forEachGroup returns a copy of the verdict for each group at the end of the window, with the group's ranks and new steps. The new steps
// are those that no earlier verdict has counted. beforeNewSteps has the groups as they were just before these steps; a group that is not
// there has no new steps.
func (v *Verdict) forEachGroup(beforeNewSteps, atEnd []board.GroupView) (verdicts []Verdict) {
	for _, to := range atEnd {
		ofGroup := *v
		ofGroup.Group, ofGroup.Ranks = to.Key, len(to.Workers)
		if from := viewOf(beforeNewSteps, to.Key); from != nil {
			ofGroup.NewSteps = to.Steps - from.Steps
		}
		verdicts = append(verdicts, ofGroup)
	}
	return verdicts
}

// dropModels drops the accounts of models that the boards no longer have.
func (t *Twin) dropModels() {
	maps.DeleteFunc(t.models, func(name string, _ *account) bool { return !slices.Contains(t.end.Models(), name) })
}

// dropVariances drops the variances of policies that this window does not replay.
func (a *account) dropVariances(replayed []policyReplays) {
	maps.DeleteFunc(a.variances, func(policy string, _ *ewma) bool {
		return !slices.ContainsFunc(replayed, func(p policyReplays) bool { return p.name == policy })
	})
}

// keepCheckpoints keeps the checkpoints from which replays of the next window may begin: those that the replays of this window have saved,
// and older ones from the begin of this window, because the next window may begin at the same time.
func (a *account) keepCheckpoints(j *judging) {
	a.checkpoints = j.checkpoints
	for _, c := range j.window.Checkpoints {
		if c.at.Equal(j.window.From()) {
			a.checkpoints = append(a.checkpoints, c)
		}
	}
}

// compare adds to the verdict how each other policy does against the policy in force, in this window and over about the last hour. The
// account a has sums over this hour for each other policy. Windows overlap, so compare adds only the part of the window that is not in
// these sums yet (newPart), and records in hoursCountedUntil that no later verdict may add it again.
func (t *Twin) compare(j *judging, v *Verdict, a *account) {
	from, to := j.window.newPart()
	newSeconds := to.Sub(from).Seconds()
	if newSeconds > 0 { // otherwise the window has no new part
		a.hoursCountedUntil = to
	}
	for i := range j.policies[1:] { // all but the policy in force
		other := &j.policies[1+i]
		if other.duplicate { // an earlier policy of the list is the same
			continue
		}
		against := t.against(other, v, a)
		const oneSecond = 1
		deviationOfSecond, _ := a.deviation(other.name, oneSecond) // random error of a replay of one second; 0: not known yet
		hour := a.addToHour(other, j.inForce(), newSeconds, deviationOfSecond)
		if v.Sure { // otherwise too few windows were judged to know how wrong the result may be
			against.Hour = hour
		}
		v.Against = append(v.Against, against)
	}
}

// account returns what the twin knows about a model; a new account if it knows nothing yet.
func (t *Twin) account(model string) *account {
	a := t.models[model]
	if a == nil {
		a = &account{variances: map[string]*ewma{}, hours: map[string]*hour{}}
		t.models[model] = a
	}
	return a
}

// against compares the replays under another policy with those under the policy in force. The account a has what the twin knows about the
// model. against adds to it how much the other policy's replays of this window differ by chance (variance). The error of the result is a
// share of a step. It comes from chance and from the bias: the error of replays under the policy in force that chance does not explain,
// which is assumed for other policies, too. No difference is claimed until the variance of the other policy has been measured.
func (t *Twin) against(other *policyReplays, v *Verdict, a *account) Against {
	if other.failed != nil {
		return Against{Policy: other.spec, Failed: other.failed}
	}
	result := Against{Policy: other.name, StepMs: other.stepMs.mean(), SavedMs: other.stepMs.mean() - v.TwinMs}
	a.addVariance(other.name, &other.stepMs, measuredSeconds(v))
	ofOneReplay, varianceKnown := a.deviation(other.name, measuredSeconds(v)) // the random standard deviation of a replay's mean step
	ofResult := other.stepMs.deviationOfMean(ofOneReplay)                     // and that of the error of the mean of all replays
	result.Error = a.bias.errorBound(ofResult)
	result.Claimed = varianceKnown && v.supportsClaim(&result)
	return result
}

// supportsClaim says whether the verdict shows a difference between another policy and the policy in force that may be reported. Enough
// windows were judged (Sure), this one is long enough, and the difference is larger than the errors.
func (v *Verdict) supportsClaim(result *Against) bool {
	longEnough := measuredSeconds(v) >= MinClaimWindow.Seconds()
	hasSteps := result.StepMs > 0
	errorMs := max(result.Error, v.Error) * v.StepMs // the errors are shares of a step
	return v.Sure && longEnough && hasSteps && math.Abs(result.SavedMs) > errorMs
}
