package detect

import (
	"slices"
	"time"

	"evenkeel/internal/stats"
)

// usual compares the steps of a group with those of the last hour. It does not compare them with the step model's present law: the model
// learns while it runs, so it would soon predict the longer steps.
type usual struct {
	from      time.Time // steps before this time are ignored
	slow, few spell     // slow: steps take too long; few: steps give too few tokens

	list []GroupAt // usual steps: one per minute of the hour before something went wrong

	usualMs     float64 // while steps are slow: length in ms of a usual step at the present loads; else 0
	usualTokens float64 // while steps give few tokens: tokens per usual step and answer; else 0
}

const (
	usualLeast = 5             // fewer minutes of usual steps prove nothing
	slowTimes  = 1.6           // a step is slow if it takes this many times as long as usual
	slowMs     = 5             // and this many ms longer than usual
	slowEver   = 2 * time.Hour // after that, the slow steps are the usual ones
	fewShare   = 0.6           // a step gives few tokens if they are less than this share of the usual number
	fewTimes   = 1.3           // and if a token takes this many times as long: otherwise only the size of stream chunks has changed
)

// OnlyDecodes says whether a group's steps can be compared with a law: its ranks step together, and do not prefill. If ranks prefill, a
// prompt makes a step longer, which is no fault.
func (g *Group) StepsAreComparable() bool { return g.Barrier && g.Rounds == nil }

// isUsual says whether the group's present steps may count as usual: nothing is wrong with them, not even since a moment ago.
func (u *usual) isUsual() bool { return u.slow.state == spellWell && u.few.state == spellWell }

func (s *Sample) group(name GroupName) *GroupAt {
	return &s.Groups[s.at[name]]
}

// usually returns the usual steps of a group in the last hour, from the time from on: at most one per minute.
func (r *Ring) usually(name GroupName, from time.Time) (list []GroupAt) {
	for i := range r.minutes.list {
		s := &r.minutes.list[i]
		if k, ok := s.at[name]; ok && s.Groups[k].Usual && !s.At.Before(from) {
			list = append(list, s.Groups[k])
		}
	}
	return list
}

// compare compares the group's present steps with usual steps at the same loads. Once steps have been slow or have given few tokens for
// longer than slowEver, it forgets the earlier steps, so that the present ones become usual.
func (u *usual) compare(g *Group, now time.Time) {
	u.usualMs, u.usualTokens = 0, 0
	usually, most, known := usualStep(g, u.list)
	if u.slow.lasts(now) > 0 {
		most = usually // slow steps keep requests for longer and so raise the load: the higher load is no excuse for them
	}
	lasts := u.slow.observe(known && g.StepMs > slowTimes*most && g.StepMs-most > slowMs, now)
	if known && lasts > 0 {
		u.usualMs = usually
	}
	tokens, before := g.perStep(), typical(u.list)
	few := u.few.observe(tokens > 0 && tokens < fewShare*before.tokens && g.TokenMs > fewTimes*before.tokenMs, now)
	if tokens > 0 && few > 0 {
		u.usualTokens = before.tokens
	}
	if lasts > slowEver || few > slowEver {
		*u = usual{from: now}
	}
}

// fillIn copies the results of compare into the group.
func (u *usual) fillIn(g *Group, now time.Time) {
	g.StepTokens = g.perStep()
	g.UsualMs, g.UsualTokens = u.usualMs, u.usualTokens
	if u.usualMs > 0 {
		g.SlowS, g.Differ = u.slow.lasts(now).Seconds(), differing(g)
	}
	if u.usualTokens > 0 {
		g.FewS = u.few.lasts(now).Seconds()
	}
}

// perStep is how many tokens a step gives to an answer; 0: unknown.
func (g *Group) perStep() float64 {
	if g.StepMs <= 0 || g.TokenMs <= 0 {
		return 0
	}
	return g.StepMs / g.TokenMs
}

// lawNow is the law of the present steps. Without a step model it is the measured length of a step at the present load.
func (g *Group) lawNow() StepModel {
	if g.ModelMs <= 0 {
		return StepModel{BaseMs: g.StepMs, MeasuredTokens: max(1, g.MostTokens), MeasuredRunning: g.mostRunning()}
	}
	return g.StepModel
}

// usualStep returns how long a step at the present loads usually takes, and how long at most (see Law.ms), in ms: medians over the laws of
// the usual steps. known is false if there are too few usual steps, or if no request runs, so that there is no step.
func usualStep(g *Group, list []GroupAt) (ms, most float64, known bool) {
	running := g.mostRunning()
	if len(list) < usualLeast || running == 0 || g.StepMs <= 0 {
		return 0, 0, false
	}
	all, mosts := make([]float64, len(list)), make([]float64, len(list))
	for i := range list {
		all[i], mosts[i] = list[i].Law.ms(g.MostTokens, running)
	}
	slices.Sort(all)
	slices.Sort(mosts)
	return stats.Median(all), stats.Median(mosts), true
}

// mostRunning is the largest number of running requests on a rank of the group.
func (g *Group) mostRunning() (most int) {
	for i := range g.Ranks {
		most = max(most, g.Ranks[i].Running)
	}
	return most
}

// typical returns medians over the usual steps: tokens per step and answer, and ms per token; zero: too few steps are known.
func typical(list []GroupAt) (m gives) {
	var tokens, ms []float64
	for _, g := range list {
		if g.gives.tokens > 0 {
			tokens, ms = append(tokens, g.gives.tokens), append(ms, g.gives.tokenMs)
		}
	}
	if len(tokens) < usualLeast {
		return m
	}
	slices.Sort(tokens)
	slices.Sort(ms)
	return gives{stats.Median(tokens), stats.Median(ms)}
}
