package detect

import (
	"slices"
	"time"

	"evenkeel/internal/stats"
)

// stepWatch compares the steps of a group with those of the last hour. It does not compare them with the group's present step model: the
// model learns while it runs, so it would soon predict the longer steps.
type stepWatch struct {
	ignoreBefore         time.Time  // steps before this time are ignored
	slowSteps, fewTokens faultTimer // timers of the faults that steps take too long, and that they give too few tokens

	usualSteps []GroupAt // usual steps: one per minute of the hour before something went wrong

	usualStepMs     float64 // while steps are slow: length in ms of a usual step at the present loads; else 0
	usualStepTokens float64 // while steps give few tokens: tokens per usual step and answer; else 0
}

const (
	minUsualMinutes = 5             // fewer minutes of usual steps prove nothing
	slowTimes       = 1.6           // a step is slow if it takes this many times as long as usual
	slowMs          = 5             // a slow step also takes this many ms longer than usual
	acceptedAfter   = 2 * time.Hour // if steps are slow for longer than this, they become the usual ones
	fewShare        = 0.6           // a step gives few tokens if they are less than this share of the usual number
	fewTimes        = 1.3           // few tokens count only if a token takes this many times as long: else only the size of chunks has changed
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

// usualSteps returns the usual steps of a group in the last hour, from the time from on: at most one per minute.
func (r *Ring) usualSteps(name GroupName, from time.Time) (list []GroupAt) {
	for i := range r.minutes.list {
		s := &r.minutes.list[i]
		if k, ok := s.groupIndex[name]; ok && s.Groups[k].Usual && !s.At.Before(from) {
			list = append(list, s.Groups[k])
		}
	}
	return list
}

// compareWithUsual compares the group's present steps with usual steps at the same loads. Once steps have been slow or have given few
// tokens for longer than acceptedAfter, it forgets the earlier steps, so that the present ones become usual.
func (u *stepWatch) compareWithUsual(g *Group, now time.Time) {
	u.usualStepMs, u.usualStepTokens = 0, 0
	usualMs, longestUsualMs, known := usualStepMs(g, u.usualSteps)
	if u.slowSteps.duration(now) > 0 {
		longestUsualMs = usualMs // slow steps keep requests for longer and so raise the load: the higher load is no excuse for them
	}
	isSlow := known && g.StepMs > slowTimes*longestUsualMs && g.StepMs-longestUsualMs > slowMs
	slowFor := u.slowSteps.observe(isSlow, now)
	if known && slowFor > 0 {
		u.usualStepMs = usualMs
	}
	tokens, usual := g.tokensPerStep(), medianYield(u.usualSteps) // tokens is 0 if unknown
	givesFew := tokens > 0 && tokens < fewShare*usual.tokens && g.TokenMs > fewTimes*usual.tokenMs
	fewFor := u.fewTokens.observe(givesFew, now)
	if tokens > 0 && fewFor > 0 {
		u.usualStepTokens = usual.tokens
	}
	if slowFor > acceptedAfter || fewFor > acceptedAfter {
		*u = stepWatch{ignoreBefore: now}
	}
}

// fillInGroup copies the results of compareWithUsual into the group.
func (u *stepWatch) fillInGroup(g *Group, now time.Time) {
	g.StepTokens = g.tokensPerStep()
	g.UsualMs, g.UsualTokens = u.usualStepMs, u.usualStepTokens
	if u.usualStepMs > 0 {
		g.SlowStepsS, g.Differing = u.slowSteps.duration(now).Seconds(), differing(g)
	}
	if u.usualStepTokens > 0 {
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

// usualStepMs returns how long a step at the present loads usually takes, and how long at most (see StepModel.ms), in ms. Both are medians
// over the step models of the usual steps. known is false if there are too few usual steps, or if no request runs, so that there is no
// step.
func usualStepMs(g *Group, usualSteps []GroupAt) (ms, longestMs float64, known bool) {
	running := g.mostRunning()
	stepsNow := running > 0 && g.StepMs > 0
	if len(usualSteps) < minUsualMinutes || !stepsNow {
		return 0, 0, false
	}
	lengths, longest := make([]float64, len(usualSteps)), make([]float64, len(usualSteps))
	for i := range usualSteps {
		lengths[i], longest[i] = usualSteps[i].StepModel.ms(g.MostTokens, running)
	}
	slices.Sort(lengths)
	slices.Sort(longest)
	return stats.Median(lengths), stats.Median(longest), true
}

// mostRunning is the largest number of running requests on a rank of the group.
func (g *Group) mostRunning() (most int) {
	for i := range g.Ranks {
		most = max(most, g.Ranks[i].Running)
	}
	return most
}

// medianYield returns medians over the usual steps: tokens per step and answer, and ms per token; zero: too few steps are known.
func medianYield(list []GroupAt) (m stepYield) {
	var tokens, ms []float64
	for _, g := range list {
		if g.yield.tokens > 0 {
			tokens, ms = append(tokens, g.yield.tokens), append(ms, g.yield.tokenMs)
		}
	}
	if len(tokens) < minUsualMinutes {
		return m
	}
	slices.Sort(tokens)
	slices.Sort(ms)
	return stepYield{stats.Median(tokens), stats.Median(ms)}
}
