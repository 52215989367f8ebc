package detect

import (
	"slices"
	"time"

	"evenkeel/internal/stats"
)

// stepWatch compares the steps of a group with those of the last hour, not with its present step
// model, which would soon learn the longer steps.
type stepWatch struct {
	usualFrom            time.Time // only later steps count as usual
	slowSteps, fewTokens faultTimer

	usualMinutes []GroupAt // in the hour before something went wrong: one per minute

	usualStepMs     float64 // while steps are slow: a usual step at the present loads; else 0
	usualStepTokens float64 // while steps give few tokens: the usual number; else 0
}

const (
	minUsualMinutes = 5             // fewer prove nothing
	slowTimes       = 1.6           // as long as usual
	slowMs          = 5             // and so much longer
	acceptedAfter   = 2 * time.Hour // slow steps become the usual ones
	fewShare        = 0.6           // of the usual number of tokens
	// If tokens do not take longer, too, only the size of chunks has changed.
	fewTimes = 1.3
)

// StepsAreComparable says whether the ranks step together, and do not prefill: a prompt makes a
// step longer, which is no fault.
func (g *Group) StepsAreComparable() bool { return g.Barrier && g.Rounds == nil }

// hasNoFault: not even one too short to be reported.
func (u *stepWatch) hasNoFault() bool {
	return u.slowSteps.state == noFault && u.fewTokens.state == noFault
}

// group returns the record of a group. The sample must have a record of it.
func (s *Sample) group(name GroupName) *GroupAt {
	return &s.Groups[s.groupIndex[name]]
}

// usualMinutes returns the steps without a fault since from.
func (r *Ring) usualMinutes(name GroupName, from time.Time) (list []GroupAt) {
	for i := range r.minutes.list {
		s := &r.minutes.list[i]
		if k, ok := s.groupIndex[name]; ok && s.Groups[k].Usual && !s.At.Before(from) {
			list = append(list, s.Groups[k])
		}
	}
	return list
}

// compareWithUsual forgets the earlier steps once a fault has lasted for acceptedAfter, so that the
// present ones become usual.
func (u *stepWatch) compareWithUsual(g *Group, now time.Time) {
	slowFor, fewFor := u.compareLength(g, now), u.compareTokens(g, now)
	if slowFor > acceptedAfter || fewFor > acceptedAfter {
		*u = stepWatch{usualFrom: now}
	}
}

// compareLength returns for how long steps have been slow; 0: not now, or not for long.
func (u *stepWatch) compareLength(g *Group, now time.Time) (slowFor time.Duration) {
	u.usualStepMs = 0
	usualMs, atMostMs, known := usualStepMs(g, u.usualMinutes)
	limitMs := atMostMs
	// slow steps keep requests for longer and so raise the loads, which is no excuse
	if u.slowSteps.duration(now) > 0 {
		limitMs = usualMs
	}
	isSlow := known && g.StepMs > slowTimes*limitMs && g.StepMs-limitMs > slowMs
	slowFor = u.slowSteps.observe(isSlow, now)
	if slowFor > 0 {
		u.usualStepMs = usualMs
	}
	return slowFor
}

// compareTokens returns for how long steps have given few tokens. The number may also fall because
// the engine sends smaller chunks more often, which look like shorter steps. No client loses by
// that, so a token must also take longer.
func (u *stepWatch) compareTokens(g *Group, now time.Time) (fewFor time.Duration) {
	u.usualStepTokens = 0
	tokens, usual := g.tokensPerStep(), medianYield(u.usualMinutes) // medians; 0: not known
	tokensAreFew := tokens > 0 && tokens < fewShare*usual.tokens    // 0: unknown
	tokenTakesLonger := g.TokenMs > fewTimes*usual.tokenMs
	fewFor = u.fewTokens.observe(tokensAreFew && tokenTakesLonger, now)
	if fewFor > 0 {
		u.usualStepTokens = usual.tokens
	}
	return fewFor
}

func (u *stepWatch) fillInGroup(g *Group, now time.Time) {
	g.StepTokens = g.tokensPerStep()
	g.UsualMs, g.UsualTokens = u.usualStepMs, u.usualStepTokens
	if u.usualStepMs > 0 {
		g.SlowStepsS, g.Differing = u.slowSteps.duration(now).Seconds(), gaugesFarAboveOthers(g)
	}
	if u.usualStepTokens > 0 {
		g.FewTokensS = u.fewTokens.duration(now).Seconds()
	}
}

// tokensPerStep is per answer; 0: unknown.
func (g *Group) tokensPerStep() float64 {
	if g.StepMs <= 0 || g.TokenMs <= 0 {
		return 0
	}
	return g.StepMs / g.TokenMs
}

// presentStepModel is the measured step if no model was learned.
func (g *Group) presentStepModel() StepModel {
	if g.ModelMs <= 0 {
		return StepModel{BaseMs: g.StepMs, MeasuredTokens: max(1, g.MostTokens), MeasuredRunning: g.mostRunning()}
	}
	return g.StepModel
}

// usualStepMs returns medians of the usual minutes at the present loads. If those were measured at
// smaller loads, a step may now take up to atMostMs.
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

func (g *Group) mostRunning() (most int) {
	for i := range g.Ranks {
		most = max(most, g.Ranks[i].Running)
	}
	return most
}

// medianYield is zero for too few minutes.
func medianYield(usualMinutes []GroupAt) stepYield {
	var tokens, ms []float64
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
