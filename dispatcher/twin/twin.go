package twin

import (
	"maps"
	"math"
	"slices"
	"time"

	"evenkeel/dispatcher/board"
)

// Stale is the time after the end of its window when a verdict is too old to be shown.
const Stale = 3 * Span

// mostKept bounds the arrivals and departures of requests in all stretches that are kept.
const maxRequests = 200_000

// LeastStretch returns the least length of a stretch if the boards hold so many requests. It grows with their number, because the boards
// are copied for each stretch, which takes longer with more requests.
func MinSegmentLength(held int) time.Duration {
	return min(Span/3, 15*time.Second*time.Duration(1+held/1500))
}

// Twin judges policies by replays of the last minutes under them.
type Twin struct {
	specs []string
	segments  []*Segment    // the last stretches without a gap, the oldest first
	end   *board.Boards // the boards at the end of the last stretch

	judging *judging
	models  map[string]*account
	upToDate bool // no stretch was added since the judgement of the latest window began
}

// Verdict is the result for one group. The groups of a model are judged together, because a policy also decides which group gets a request.
type Verdict struct {
	Group    board.GroupKey
	From, To time.Time
	Policy   string  // policy in force
	NewSteps    uint64  // steps of the group that were in no earlier verdict
	Ranks    int     // number of ranks of the group
	StepMs   float64 // mean length of the real steps over all groups of the model, without steps that were reported together
	TwinMs   float64 // mean length of the steps as replayed under the policy in force
	Error    float64 // share of a step by which the replay of the policy in force may be wrong
	Sure     bool    // enough windows were judged to know the errors of the twin
	Replays  int     // number of replays of each policy; the results are their means

	Against []Against // one for each other policy
}

// Against is the result for the model under another policy.
type Against struct {
	Policy  string  // its name
	StepMs  float64 // mean length of the steps as replayed
	SavedMs float64 // how many ms shorter steps are under the policy in force; below 0: longer
	Error   float64 // share of a step by which StepMs may be wrong
	Claimed bool    // the difference is larger than Error, and larger than the error of the policy in force
	Hour    Hour    // the result over about an hour
	Failed  error   // why the policy cannot be replayed; nil: it can
}

// A verdict comes from at most mostRounds rounds of replays, each with other random numbers. If the next window is ready earlier, one round
// is enough. But for each chanceEvery-th verdict, two rounds are made: their difference shows how large errors by chance are.
const (
	maxRounds  = 4
	varianceEvery = 4
)

// judging is a window that is being judged, with the state of its replays. The replays are made one after the other.
type judging struct {
	latest  *Window
	window *Window  // the part of the window in which the model had all its groups
	models []string // models that are not judged yet; the first is being judged
	policies  []policyReplays  // policies for this model; the first is the policy in force
	current int      // index in tried of the policy that is being replayed
	round  uint64   // number of the round of replays, from 0
	replay *Replay  // the replay in progress; nil: none
	checkpoints []*Checkpoint // states that the replays have kept for later windows
}

// New returns a twin that compares these policies with the policy in force. It takes a policy that is listed twice only once.
func New(specs []string) *Twin {
	t := &Twin{models: map[string]*account{}}
	for _, spec := range specs {
		if !slices.Contains(t.specs, spec) {
			t.specs = append(t.specs, spec)
		}
	}
	return t
}

// AddStretch adds a stretch that has ended, and the boards at its end. It drops the oldest stretches if all together are longer than Span
// or have more than mostKept arrivals and departures, but always keeps the newest. If there is a gap before the stretch, it drops all
// earlier stretches, the window that is being judged, and the results of the last hour.
func (t *Twin) AddSegment(s *Segment, end *board.Boards) {
	if s.AfterGap {
		t.segments, t.judging = nil, nil
		for _, a := range t.models {
			clear(a.hours)
		}
	}
	s.arrivals, s.departures = slices.Clip(slices.Clone(s.arrivals)), slices.Clip(slices.Clone(s.departures)) // the tape allocates too much in advance
	t.segments, t.end, t.upToDate = append(t.segments, s), end, false
	sum := 0
	for i := len(t.segments) - 1; i >= 0; i-- {
		sum += len(t.segments[i].arrivals) + len(t.segments[i].departures)
		tooMuch := s.To.Sub(t.segments[i].From) > Span || sum > maxRequests
		if newest := i == len(t.segments)-1; tooMuch && !newest {
			t.segments = slices.Clone(t.segments[i+1:])
			break
		}
	}
}

// Work continues the replays for at most so many turns. After the last replay of a model, it makes the verdicts on the model and returns
// them (fresh). more says whether there is more to do. A call that begins a window or a replay replays nothing.
func (t *Twin) Work(turns int) (fresh []Verdict, more bool) {
	j := t.judging
	if j == nil {
		if t.upToDate || len(t.segments) == 0 {
			return nil, false
		}
		latest := &Window{Segments: slices.Clone(t.segments), End: t.end}
		t.judging, t.upToDate = &judging{latest: latest, models: t.end.Models()}, true
		return nil, true
	}
	if len(j.models) == 0 { // all are judged
		t.judging = nil
		return nil, !t.upToDate
	}
	if j.replay == nil {
		if t.beginReplay(j) {
			return nil, true
		}
		return t.finishModel(j), true // no replay of this model is left
	}
	if over, err := j.replay.Run(turns); over || err != nil {
		j.finishReplay(err)
	}
	return nil, true
}

// endReplay keeps the result of the replay that has ended, or the error with which it failed, and goes on to the next policy. If an earlier
// replay of the policy did not fail, the policy keeps the result of that one.
func (j *judging) finishReplay(err error) {
	policy := &j.policies[j.current]
	switch {
	case err == nil:
		policy.name = j.replay.Boards.Policy()
		policy.duplicate = slices.ContainsFunc(j.policies[:j.current], func(earlier policyReplays) bool { return earlier.name == policy.name })
		policy.stepMs.add(j.replay.StepMs())
		policy.newSteps.fade(1, &j.replay.newSteps, 1)
		j.checkpoints = append(j.checkpoints, j.replay.Checkpoints...)
	case policy.stepMs.n == 0:
		policy.failed = err
	}
	j.replay = nil
	j.current++
}

// beginModel prepares the window and the policies for the model that is judged next. It returns false if no part of the window is fit to be
// replayed.
func (t *Twin) beginModel(j *judging) bool {
	if j.window = j.latest.partWithAllGroups(j.models[0]); j.window == nil {
		return false
	}
	if a := t.models[j.models[0]]; a != nil {
		j.window.StepsToFirstToken, j.window.HoursUntil, j.window.Checkpoints = a.stepsToFirstToken, a.hoursUntil, a.checkpoints
	}
	j.policies = make([]policyReplays, 1, 1+len(t.specs)) // the first, without a spec, is the policy in force
	for _, spec := range t.specs {
		j.policies = append(j.policies, policyReplays{spec: spec})
	}
	return true
}

// beginReplay begins the next replay of the model: of the next policy of the round, or of the first policy of the next round. It returns
// false if no replay is left, because enough rounds were made, or because the window or the policy in force cannot be replayed.
func (t *Twin) beginReplay(j *judging) bool {
	if j.policies == nil && !t.beginModel(j) {
		return false
	}
	for j.policies[0].failed == nil {
		if j.current == len(j.policies) {
			j.current, j.round = 0, j.round+1
		}
		if j.current == 0 && t.enoughRounds(j) {
			return false
		}
		policy := &j.policies[j.current]
		if policy.failed == nil && !policy.duplicate {
			if j.replay, policy.failed = NewReplay(j.window, j.models[0], policy.spec, j.round); policy.failed == nil {
				return true
			}
		}
		j.current++
	}
	return false
}

// enough says whether the rounds so far are enough for a verdict: mostRounds rounds or, if a newer window is ready, one round. If the size
// of errors by chance is not known, or is due to be measured again, it takes two rounds at least.
func (t *Twin) enoughRounds(j *judging) bool {
	newerIsReady := !t.upToDate
	if j.round == 0 || j.round < maxRounds && !newerIsReady {
		return false
	}
	if j.round > 1 {
		return true
	}
	a := t.models[j.models[0]]
	if isDue := a == nil || a.windowsJudged%varianceEvery == 0; isDue {
		return false
	}
	return !slices.ContainsFunc(j.policies, func(p policyReplays) bool { return p.stepMs.n > 0 && !p.duplicate && !a.knowsVariance(p.name) })
}

// endModel ends the judgement of a model, and goes on to the next model. It returns the verdicts on the model.
func (t *Twin) finishModel(j *judging) (fresh []Verdict) {
	if len(j.policies) > 0 && j.policies[0].failed == nil {
		fresh = t.judge(j)
	}
	j.models = j.models[1:]
	j.policies, j.checkpoints, j.replay = nil, nil, nil
	j.current, j.round = 0, 0
	return fresh
}

// realSteps returns the total length in ms, and the number, of a group's real steps between two views of the group. It counts only the
// steps from which the step model learned.
func realSteps(from, to *board.GroupView) (took, n float64) {
	return to.Line.Learned.Ms - from.Line.Learned.Ms, to.Line.Learned.Steps - from.Line.Learned.Steps
}

// meanRealStep returns the mean length of a model's real steps in the measured part of the window, in ms; 0: there were none. ended has the
// groups at the end of the window.
func (w *Window) meanRealStep(model string, ended []board.GroupView) float64 {
	begun, _ := w.Measured().Boards.Groups(model)
	ms, steps := 0.0, 0.0
	for _, to := range ended {
		if from := viewOf(begun, to.Key); from != nil {
			took, n := realSteps(from, &to)
			ms, steps = ms+took, steps+n
		}
	}
	if steps == 0 {
		return 0
	}
	return ms / steps
}

// secondsOf returns how many seconds the measured part of a window lasts, at least 1.
func measuredSeconds(v *Verdict) float64 { return max(1, v.To.Sub(v.From).Seconds()) }

// judge compares the replays under the policy in force with the real steps, and with the replays under the other policies. It returns a
// verdict for each group, or nil if the window has no real or no replayed steps. In the model's account, it counts the window, adds the
// errors of the replays, and keeps the states with which replays of the next window may begin. It also drops what cannot be used any more:
// accounts of models that are gone, and errors by chance of policies that are not tried.
func (t *Twin) judge(j *judging) (found []Verdict) {
	w, model, inForce := j.window, j.models[0], &j.policies[0]
	maps.DeleteFunc(t.models, func(name string, _ *account) bool { return !slices.Contains(t.end.Models(), name) })
	ended, _ := w.End.Groups(model)
	realStepMs := w.meanRealStep(model, ended)
	if realStepMs == 0 || inForce.stepMs.mean() == 0 {
		return nil
	}
	a := t.account(model)
	maps.DeleteFunc(a.variances, func(policy string, _ *ewma) bool {
		return !slices.ContainsFunc(j.policies, func(p policyReplays) bool { return p.name == policy })
	})
	a.windowsJudged++
	a.stepsToFirstToken = w.history(model).stepsToFirstToken
	v := Verdict{
		From: w.Measured().From, To: w.To(), Policy: inForce.name, StepMs: realStepMs, TwinMs: inForce.stepMs.mean(),
		Sure:    a.windowsJudged >= minWindowsJudged,
		Replays: int(inForce.stepMs.n),
	}
	miss, seconds := v.TwinMs/v.StepMs-1, measuredSeconds(&v)
	v.Error = a.stepError.add(miss, seconds)
	if chance, known := a.chanceOf(inForce.name, &inForce.stepMs, seconds); known {
		fresh := min(seconds, v.To.Sub(a.judgedUntil).Seconds()) // the seconds that are in no earlier verdict
		a.bias.add(miss, inForce.stepMs.deviationOfMean(chance), seconds, fresh)
	}
	t.compare(j, &v, a)
	a.checkpoints = j.checkpoints
	for _, b := range w.Checkpoints {
		if b.at.Equal(w.From()) { // the next window may begin at the same time as this one
			a.checkpoints = append(a.checkpoints, b)
		}
	}
	freshFrom := w.groupsSince(a.judgedUntil, v.From, model) // the groups where the fresh steps begin
	for _, to := range ended {
		v.Group, v.Ranks, v.NewSteps = to.Key, len(to.Workers), 0
		if from := viewOf(freshFrom, to.Key); from != nil {
			v.NewSteps = to.Steps - from.Steps
		}
		found = append(found, v)
	}
	a.judgedUntil = w.To()
	return found
}

// compare adds to the verdict how each other policy does against the policy in force, in this window and in the hour. The fresh part of the
// window then counts in the hours (heard).
func (t *Twin) compare(j *judging, v *Verdict, a *account) {
	from, to := j.window.newPart()
	if to.After(from) {
		a.hoursUntil = to
	}
	for i := range j.policies[1:] {
		other := &j.policies[1+i]
		if other.duplicate {
			continue
		}
		against := t.against(other, v, a)
		chance, _ := a.chanceOf(other.name, &tally{}, 1) // of a replay of one second; the empty tally adds nothing
		if hour := a.addToHour(other, &j.policies[0], to.Sub(from).Seconds(), chance); v.Sure {
			against.Hour = hour
		}
		v.Against = append(v.Against, against)
	}
}

// account returns the account of a model, and creates it if it is missing.
func (t *Twin) account(model string) *account {
	a := t.models[model]
	if a == nil {
		a = &account{variances: map[string]*ewma{}, hours: map[string]*hour{}}
		t.models[model] = a
	}
	return a
}

// against compares the replays under another policy with those under the policy in force.
func (t *Twin) against(other *policyReplays, v *Verdict, a *account) Against {
	if other.failed != nil {
		return Against{Policy: other.spec, Failed: other.failed}
	}
	found := Against{Policy: other.name, StepMs: other.stepMs.mean(), SavedMs: other.stepMs.mean() - v.TwinMs}
	chance, known := a.chanceOf(other.name, &other.stepMs, measuredSeconds(v))
	found.Error = a.bias.errorBound(other.stepMs.deviationOfMean(chance))
	mayClaim := known && v.Sure && measuredSeconds(v) >= MinClaimWindow.Seconds() && found.StepMs > 0
	found.Claimed = mayClaim && math.Abs(found.SavedMs) > max(found.Error, v.Error)*v.StepMs
	return found
}
