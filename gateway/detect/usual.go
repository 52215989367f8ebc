package detect

import (
	"slices"
	"time"

	"evenkeel/internal/stats"
)

// usual compares the steps of a group with those of the last hour. The present step model cannot serve for that: it is learned online, so
// it soon takes slow steps for usual.
type usual struct {
	from      time.Time // steps before this time are not used
	slow, few spell     // steps take too long; steps give too few tokens

	list []GroupAt // usual steps of the hour before the trouble began

	usualMs     float64 // while steps are slow: usual time of a step at the present loads, in ms
	usualTokens float64 // while steps give too few tokens: usual tokens per step and answer
}

const (
	usualLeast = 5             // minutes with usual steps that a comparison needs
	slowTimes  = 1.6           // a slow step takes this many times its usual time
	slowMs     = 5             // and this many ms more
	slowEver   = 2 * time.Hour // after this time, the slow steps count as usual
	fewShare   = 0.6           // a step gives too few tokens below this share of the usual number
	fewTimes   = 1.3           // if a token also takes this many times as long; otherwise only the size of the engine's chunks has changed
)

// OnlyDecodes says whether a group's steps can be compared with earlier ones: its ranks step together and do not prefill. With prefill, a
// prompt makes a step longer, which is no fault.
func (g *Group) OnlyDecodes() bool { return g.Barrier && g.Rounds == nil }

// isUsual says whether the group's present steps may count as usual: nothing has been wrong with them, not even for a short time.
func (u *usual) isUsual() bool { return u.slow.state == spellWell && u.few.state == spellWell }

func (s *Sample) group(name GroupName) *GroupAt {
	return &s.Groups[s.at[name]]
}

// usually returns the usual steps of a group in the last hour, one per minute, but none before from.
func (r *Ring) usually(name GroupName, from time.Time) (list []GroupAt) {
	for i := range r.minutes.list {
		s := &r.minutes.list[i]
		if k, ok := s.at[name]; ok && s.Groups[k].Usual && !s.At.Before(from) {
			list = append(list, s.Groups[k])
		}
	}
	return list
}

// compare compares the present steps with usual ones at the present loads. If they have been slow, or have given few tokens, for longer
// than slowEver, it forgets the old steps, so that the present ones become the usual ones.
func (u *usual) compare(g *Group, now time.Time) {
	u.usualMs, u.usualTokens = 0, 0
	usually, most, known := usualStep(g, u.list)
	if u.slow.lasts(now) > 0 {
		most = usually // slow steps keep requests for longer, and so cause the larger loads themselves: these loads are no excuse
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

// perStep returns how many tokens a step gives to an answer; 0: unknown.
func (g *Group) perStep() float64 {
	if g.StepMs <= 0 || g.TokenMs <= 0 {
		return 0
	}
	return g.StepMs / g.TokenMs
}

// lawNow returns the law of the present steps. Without a step model, it has the measured time at the present load.
func (g *Group) lawNow() Law {
	if g.ModelMs <= 0 {
		return Law{C0: g.StepMs, Tokens: max(1, g.MostTokens), Running: g.mostRunning()}
	}
	return g.Law
}

// usualStep returns the usual time of a step at the present loads, and its upper bound, in ms: medians over the laws of the usual steps.
// known is false if there are too few of them, or if nothing runs, so that no step ends.
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

// mostRunning returns the most requests that run on one rank.
func (g *Group) mostRunning() (most int) {
	for i := range g.Ranks {
		most = max(most, g.Ranks[i].Running)
	}
	return most
}

// typical returns the medians of tokens per step and of ms per token over the usual steps; zero: too few are known.
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
