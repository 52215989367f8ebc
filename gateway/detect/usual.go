package detect

import (
	"slices"
	"time"

	"evenkeel/internal/stats"
)

// stepWatch compares the steps of a group with those of the last hour. It does not compare them with the group's present step model: the
// model learns while it runs, so it would soon predict the longer steps.
type stepWatch struct {
	usualFrom            time.Time  // only steps from this time on may count as usual
	slowSteps, fewTokens faultTimer // timers of the faults that steps take too long, and that they give too few tokens

	usualMinutes []GroupAt // the group's usual steps in the hour before something went wrong: one record per minute

	usualStepMs     float64 // while steps are slow: length in ms of a usual step at the present loads; else 0
	usualStepTokens float64 // while steps give few tokens: tokens per usual step and answer; else 0
}

const (
	minUsualMinutes = 5             // fewer minutes with usual steps prove nothing
	slowTimes       = 1.6           // a step is slow if it takes this many times as long as usual
	slowMs          = 5             // a slow step also takes this many ms longer than usual
	acceptedAfter   = 2 * time.Hour // if steps are slow for longer than this, they become the usual ones
	fewShare        = 0.6           // a step gives few tokens if they are less than this share of the usual number
	// few tokens per step count only if each token also takes this many times as long: else only the size of chunks has changed
	fewTimes = 1.3
)

// StepsAreComparable says whether a group's steps can be compared with a step model: its ranks step together, and do not prefill. If ranks
// prefill, a prompt makes a step longer, which is no fault.
func (g *Group) StepsAreComparable() bool { return g.Barrier && g.Rounds == nil }

// hasNoFault says whether the group's present steps may count as usual: they are neither slow nor low in tokens, not even for a time too
// short to be reported.
func (u *stepWatch) hasNoFault() bool {
	return u.slowSteps.state == noFault && u.fewTokens.state == noFault
}

// group returns the record of a group. The sample must have a record of it.
func (s *Sample) group(name GroupName) *GroupAt {
	return &s.Groups[s.groupIndex[name]]
}

// usualMinutes returns the usual steps of a group in the last hour, from the time from on: at most one record per minute. Steps are usual
// if they had no fault: they were neither slow nor low in tokens.
func (r *Ring) usualMinutes(name GroupName, from time.Time) (list []GroupAt) {
	for i := range r.minutes.list {
		s := &r.minutes.list[i]
		if k, ok := s.groupIndex[name]; ok && s.Groups[k].Usual && !s.At.Before(from) {
			list = append(list, s.Groups[k])
		}
	}
	return list
}

// compareWithUsual compares the group's present steps with usual steps at the same loads: how long they take, and how many tokens they
// give. Once steps have been slow or have given few tokens for longer than acceptedAfter, it forgets the earlier steps, so that the present
// ones become usual.
func (u *stepWatch) compareWithUsual(g *Group, now time.Time) {
	slowFor, fewFor := u.compareLength(g, now), u.compareTokens(g, now)
	if slowFor > acceptedAfter || fewFor > acceptedAfter {
		*u = stepWatch{usualFrom: now}
	}
}

// compareLength compares how long the group's steps take with how long steps at the present loads usually take: usualMs by the steps of the
// last hour. If those were measured only at smaller loads, a step may now take up to atMostMs. compareLength returns for how long steps
// have been slow; 0: they are not slow now, or not for long. While they are slow, it keeps the usual length in u.usualStepMs.
func (u *stepWatch) compareLength(g *Group, now time.Time) (slowFor time.Duration) {
	u.usualStepMs = 0
	usualMs, atMostMs, known := usualStepMs(g, u.usualMinutes)
	limitMs := atMostMs
	if u.slowSteps.duration(now) > 0 { // slow steps keep requests for longer and so raise the loads, which is no excuse for slow steps
		limitMs = usualMs
	}
	isSlow := known && g.StepMs > slowTimes*limitMs && g.StepMs-limitMs > slowMs
	slowFor = u.slowSteps.observe(isSlow, now)
	if slowFor > 0 {
		u.usualStepMs = usualMs
	}
	return slowFor
}

// compareTokens compares how many tokens a step gives to an answer with the usual number. This number may also fall because the engine
// sends smaller chunks of tokens more often, which look like shorter steps. No client loses by that, so steps count as low in tokens only
// if a token also takes longer than usual. compareTokens returns for how long steps have given few tokens; 0: they do not now, or not for
// long. While they give few, it keeps the usual number in u.usualStepTokens.
func (u *stepWatch) compareTokens(g *Group, now time.Time) (fewFor time.Duration) {
	u.usualStepTokens = 0
	tokens, usual := g.tokensPerStep(), medianYield(u.usualMinutes) // usual has medians over the usual minutes; 0: not known
	tokensAreFew := tokens > 0 && tokens < fewShare*usual.tokens    // tokens is 0 if unknown
	tokenTakesLonger := g.TokenMs > fewTimes*usual.tokenMs
	fewFor = u.fewTokens.observe(tokensAreFew && tokenTakesLonger, now)
	if fewFor > 0 {
		u.usualStepTokens = usual.tokens
	}
	return fewFor
}

// fillInGroup copies the results of compareWithUsual into the group. While steps are slow, it also looks for ranks that may be the reason:
// those with a gauge far above that of the other ranks (Differing).
func (u *stepWatch) fillInGroup(g *Group, now time.Time) {
	g.StepTokens = g.tokensPerStep()
	g.UsualMs, g.UsualTokens = u.usualStepMs, u.usualStepTokens
	if u.usualStepMs > 0 { // steps are slow
		g.SlowStepsS, g.Differing = u.slowSteps.duration(now).Seconds(), gaugesFarAboveOthers(g)
	}
	if u.usualStepTokens > 0 { // steps give few tokens
		g.FewTokensS = u.fewTokens.duration(now).Seconds()
	}
}

// tokensPerStep is how many tokens a step gives to an answer: the length of a step divided by the time between two tokens; 0: unknown.
func (g *Group) tokensPerStep() float64 {
	if g.StepMs <= 0 || g.TokenMs <= 0 {
		return 0
	}
	return g.StepMs / g.TokenMs
}

// presentStepModel is the model of the present steps. If none was learned, it is the measured length of a step at the present load.
func (g *Group) presentStepModel() StepModel {
	if g.ModelMs <= 0 {
		return StepModel{BaseMs: g.StepMs, MeasuredTokens: max(1, g.MostTokens), MeasuredRunning: g.mostRunning()}
	}
	return g.StepModel
}

// usualStepMs returns how long a step at the present loads usually takes (ms), in ms. Usual steps may have been measured only at smaller
// loads: then a step may now take up to atMostMs, and otherwise both are equal. Both are medians over the step models of the usual minutes.
// known is false if there are too few usual minutes, or if no request runs, so that there is no step.
func usualStepMs(g *Group, usualMinutes []GroupAt) (ms, atMostMs float64, known bool) {
	running := g.mostRunning()
	stepsNow := running > 0 && g.StepMs > 0
	if len(usualMinutes) < minUsualMinutes || !stepsNow {
		return 0, 0, false
	}
	lengths, longestLengths := make([]float64, len(usualMinutes)), make([]float64, len(usualMinutes))
	for i := range usualMinutes {
		lengths[i], longestLengths[i] = usualMinutes[i].StepModel.ms(g.MostTokens, running)
	}
	slices.Sort(lengths)
	slices.Sort(longestLengths)
	return stats.Median(lengths), stats.Median(longestLengths), true
}

// mostRunning is the largest number of running requests on a rank of the group.
func (g *Group) mostRunning() (most int) {
	for i := range g.Ranks {
		most = max(most, g.Ranks[i].Running)
	}
	return most
}

// medianYield returns what a step of a group usually yields: the median of the tokens that a step gives to an answer, and the median of the
// ms per token. An element of usualMinutes has both values of one minute. It returns zeros if they are known for too few minutes.
func medianYield(usualMinutes []GroupAt) stepYield {
	var tokens, ms []float64 // one value per minute
	for _, minute := range usualMinutes {
		if minute.yield.tokens > 0 { // 0: not known
			tokens, ms = append(tokens, minute.yield.tokens), append(ms, minute.yield.tokenMs)
		}
	}
	if len(tokens) < minUsualMinutes {
		return stepYield{}
	}
	slices.Sort(tokens)
	slices.Sort(ms)
	return stepYield{stats.Median(tokens), stats.Median(ms)}
}
