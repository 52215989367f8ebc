package detect

import (
	"slices"
	"time"

	"evenkeel/internal/stats"
)

// usual compares the steps of a group with those of the last hour. A law that is learned online follows steps that
// become longer, so the present law would soon take them for usual.
type usual struct {
	from      time.Time // earlier steps are not compared with
	slow, few spell     // steps take too long, and give too few tokens

	list []GroupAt // the usual steps of the hour before something was wrong

	usualMs     float64 // ms; while steps are slow, what a step at the present loads took before
	usualTokens float64 // tokens; while steps give too few, what a step gave to an answer before
}

const (
	usualLeast = 5             // minutes of usual steps that are needed to compare others with
	slowTimes  = 1.6           // times as long as by the law, at least
	slowMs     = 5             // ms longer than that, at least
	slowEver   = 2 * time.Hour // after that, the slow steps are the usual ones
	fewShare   = 0.6           // of the tokens that a step gave before, at most
	fewTimes   = 1.3           // times as long as a token took before, at least: else only the engine's chunks have changed
)

// OnlyDecodes says whether a group's steps can be compared with a law: its ranks step together, and do not prefill. If ranks prefill, a
// prompt makes a step longer, which is no fault.
func (g *Group) OnlyDecodes() bool { return g.Barrier && g.Rounds == nil }

// isUsual says whether the group's present steps may count as usual: nothing is wrong with them, also not for a short time.
func (u *usual) isUsual() bool { return u.slow.state == spellWell && u.few.state == spellWell }

func (s *Sample) group(name GroupName) *GroupAt {
	return &s.Groups[s.at[name]]
}

// usually returns the usual steps of a group in the last hour, but not from before the time from: one for each minute that has such.
func (r *Ring) usually(name GroupName, from time.Time) (list []GroupAt) {
	for i := range r.minutes.list {
		s := &r.minutes.list[i]
		if k, ok := s.at[name]; ok && s.Groups[k].Usual && !s.At.Before(from) {
			list = append(list, s.Groups[k])
		}
	}
	return list
}

// compare compares the present steps with usual ones, at the present loads. If steps have been slow or have given few tokens for longer
// than slowEver, all that is known is forgotten, so that these steps become the usual ones.
func (u *usual) compare(g *Group, now time.Time) {
	u.usualMs, u.usualTokens = 0, 0
	usually, most, known := usualStep(g, u.list)
	if u.slow.lasts(now) > 0 {
		most = usually // the larger loads are a result of the slow steps, because requests stay for longer, so they explain nothing
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

// fillIn fills what compare has found into the group.
func (u *usual) fillIn(g *Group, now time.Time) {
	g.StepTokens = g.perStep()
	if g.UsualMs = u.usualMs; u.usualMs > 0 {
		g.SlowS, g.Differ = u.slow.lasts(now).Seconds(), differing(g)
	}
	if g.UsualTokens = u.usualTokens; u.usualTokens > 0 {
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

// lawNow is the law of the present steps. Without a step model it is how long a step takes at the present load.
func (g *Group) lawNow() Law {
	if g.ModelMs <= 0 {
		return Law{C0: g.StepMs, Tokens: max(1, g.MostTokens), Running: g.mostRunning()}
	}
	return g.Law
}

// usualStep is how long a step usually takes at the present loads, and how long at most, in ms, by the median of the laws of the usual
// steps. known is false if there are too few of them, or if nothing runs, so that no step ends.
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

// mostRunning is how many requests the rank with the most runs.
func (g *Group) mostRunning() (most int) {
	for i := range g.Ranks {
		most = max(most, g.Ranks[i].Running)
	}
	return most
}

// typical is the median of what the usual steps gave to an answer, in tokens and in ms for a token; zero: too few are known.
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
