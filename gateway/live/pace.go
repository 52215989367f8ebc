package live

import (
	"slices"
	"time"

	"evenkeel/internal/stats"
)

// paces follow how fast ranks give tokens, and how long the steps of groups take beside what their law used to say. They are told of
// each document, in order.
type paces struct {
	last   time.Time
	ranks  map[int32]*pace
	groups map[groupName]*usual
	busy   spell // prompts come faster than prefill engines compute them
}

type groupName struct{ model, group string }

const (
	paceWindow = 20 * time.Second // of which a rank's pace is told
	paceTokens = 50               // that came in it, at least
)

// pace is what the streams of a rank got in the last seconds.
type pace struct {
	running   int
	output    int64
	stretches []stretch
	ms        float64 // of a token; 0: too few came to tell
	empties   empties
}

// stretch is the time between two documents.
type stretch struct {
	at      time.Time // of the later one
	streams float64   // ms, summed over the streams that ran
	tokens  int64
}

// usual is what a group's steps were in the last hour. A law that is learned on line follows steps that become longer, so
// the law of now would soon take them for usual.
type usual struct {
	laws  []law
	gives []gives
	next  time.Time // when the next ones are kept
	slow  spell     // steps take too long
	few   spell     // steps give too few tokens

	before float64 // ms; while steps are slow, what one at the present loads took before
	gave   float64 // tokens; while steps give too few, what one gave to an answer before
}

// law is what a step takes: ms; a KV token and a request of the fullest rank. Where none could be learned, because steps hardly
// follow the load, it is what a step took at a load.
type law struct {
	c0, c1, each float64
	tokens       int64 // of the fullest rank at the time, where there was no law; 0: there was one
	running      int   // likewise
}

// ms is what a step takes by the law, and at most. A step that was timed once takes longer where the load is larger, but no more so
// than the load is.
func (l law) ms(tokens int64, running int) (ms, most float64) {
	ms = l.c0 + l.c1*float64(tokens) + l.each*float64(running)
	if l.tokens == 0 {
		return ms, ms
	}
	return ms, ms * max(1, float64(tokens)/float64(l.tokens), float64(running)/float64(max(1, l.running)))
}

// gives is what a step gives to an answer.
type gives struct{ tokens, tokenMs float64 }

// spell is for how long something has been amiss. It begins and ends only after a while.
type spell struct {
	since time.Time // zero: it is not
	over  time.Time // since when it is not, though it was before
}

// look takes in how it is now, and says for how long it has been amiss; 0: it is not.
func (s *spell) look(amiss bool, now time.Time) (lasts time.Duration) {
	said := !s.since.IsZero() && (!s.over.IsZero() || s.lasts(now) > 0)
	switch {
	case amiss && s.since.IsZero():
		s.since = now
	case amiss:
		s.over = time.Time{}
	case said && s.over.IsZero():
		s.over = now
	case !said, now.Sub(s.over) >= slowLasts:
		*s = spell{}
	}
	return s.lasts(now)
}

// lasts says for how long it has been amiss, if it is so now.
func (s *spell) lasts(now time.Time) time.Duration {
	if !s.over.IsZero() {
		return 0
	}
	if lasts := now.Sub(s.since); !s.since.IsZero() && lasts >= slowLasts {
		return lasts
	}
	return 0
}

// lateSeconds is how long a request may wait where it may wait forever, before that is a finding.
const lateSeconds = 10.0

const (
	lawEvery  = time.Minute
	lawsKept  = 60
	lawsLeast = 5
	slowLasts = 20 * time.Second // before steps are said to be slow, and before that is over
	slowTimes = 1.6              // as long as the law says, at least
	slowMs    = 5                // longer than that, at least
	slowEver  = 2 * time.Hour    // after that, what is slow is what is usual
	fewShare  = 0.6              // of the tokens that a step gave, at most
	fewTimes  = 1.3              // as long as a token took, at least: else only the engine's chunks changed
)

// add takes in a document.
func (p *paces) add(d *Document, now time.Time) {
	if p.ranks == nil {
		p.ranks, p.groups = map[int32]*pace{}, map[groupName]*usual{}
	}
	ranks, groups := map[int32]*pace{}, map[groupName]*usual{}
	for i := range d.Models {
		m := &d.Models[i]
		for j := range m.Groups {
			g := &m.Groups[j]
			for k := range g.Ranks {
				r := &g.Ranks[k]
				x := p.ranks[r.ID]
				if x == nil {
					x = &pace{}
				}
				x.add(r, now.Sub(p.last), now)
				x.empties.add(r, now)
				ranks[r.ID] = x
			}
			g.pace(ranks)
			if g.onlyDecodes() {
				name := groupName{m.Name, g.Name}
				u := p.groups[name]
				if u == nil {
					u = &usual{}
				}
				u.add(g, now)
				groups[name] = u
			}
		}
	}
	p.busy.look(d.Prefill.Waiting > 0 && d.Prefill.BacklogS > lateSeconds, now)
	p.last, p.ranks, p.groups = now, ranks, groups
}

// onlyDecodes says that a group's steps can be compared with a law: where ranks prefill, a prompt makes a step longer, and that is no fault.
func (g *Group) onlyDecodes() bool { return g.Barrier && g.Rounds == nil }

// tell completes a document by what was taken in last.
func (p *paces) tell(d *Document) {
	d.Prefill.BusyS = p.busy.lasts(p.last).Seconds()
	for i := range d.Models {
		m := &d.Models[i]
		for j := range m.Groups {
			g := &m.Groups[j]
			g.pace(p.ranks)
			if u := p.groups[groupName{m.Name, g.Name}]; u != nil && g.onlyDecodes() {
				g.StepTokens = g.perStep()
				if g.UsualMs = u.before; u.before > 0 {
					g.SlowS, g.Differ = u.slow.lasts(p.last).Seconds(), differing(g.Ranks)
				}
				if g.UsualTokens = u.gave; u.gave > 0 {
					g.FewS = u.few.lasts(p.last).Seconds()
				}
			}
		}
	}
}

// pace fills in what is known of a group's ranks.
func (g *Group) pace(ranks map[int32]*pace) {
	for k := range g.Ranks {
		if x := ranks[g.Ranks[k].ID]; x != nil && g.Ranks[k].Steps {
			g.Ranks[k].TokenMs, g.Ranks[k].Lately = x.ms, x.empties.lately
		}
	}
	g.TokenMs = middle(g.Ranks)
}

// add takes in what the rank's answers got since the document before.
func (x *pace) add(r *Rank, since time.Duration, now time.Time) {
	output := r.Output - int64(r.Answers) // the first token of an answer is not waited for in a stream
	if tokens := output - x.output; x.output > 0 && tokens >= 0 && since < paceWindow {
		ms := float64(since.Milliseconds()) * float64(x.running+r.Running) / 2
		x.stretches = append(x.stretches, stretch{now, ms, tokens})
	} else {
		x.stretches = x.stretches[:0]
	}
	x.output, x.running = output, r.Running
	x.stretches = slices.DeleteFunc(x.stretches, func(s stretch) bool { return now.Sub(s.at) > paceWindow })
	streams, tokens := 0.0, int64(0)
	for _, s := range x.stretches {
		streams, tokens = streams+s.streams, tokens+s.tokens
	}
	if x.ms = 0; tokens >= paceTokens {
		x.ms = streams / float64(tokens)
	}
}

// middle is the median of the ranks' paces; 0: none has one.
func middle(ranks []Rank) float64 {
	var all []float64
	for i := range ranks {
		if ms := ranks[i].TokenMs; ms > 0 {
			all = append(all, ms)
		}
	}
	if len(all) == 0 {
		return 0
	}
	slices.Sort(all)
	return stats.Median(all)
}

// perStep is how many tokens a step gives to an answer; 0: unknown.
func (g *Group) perStep() float64 {
	if g.StepMs <= 0 || g.TokenMs <= 0 {
		return 0
	}
	return g.StepMs / g.TokenMs
}

// add compares the steps of now with those of the last hour, at the loads of now.
func (u *usual) add(g *Group, now time.Time) {
	u.before, u.gave = 0, 0
	usually, most, known := u.at(g)
	if u.slow.lasts(now) > 0 {
		most = usually // what is longer because of the load began with slow steps: the same requests stay for longer
	}
	lasts := u.slow.look(known && g.StepMs > slowTimes*most && g.StepMs-most > slowMs, now)
	if known && lasts > 0 {
		u.before = usually
	}
	tokens, before := g.perStep(), u.typical()
	few := u.few.look(tokens > 0 && tokens < fewShare*before.tokens && g.TokenMs > fewTimes*before.tokenMs, now)
	if tokens > 0 && few > 0 {
		u.gave = before.tokens
	}
	switch {
	case lasts > slowEver, few > slowEver:
		*u = usual{}
	case u.slow.since.IsZero() && u.few.since.IsZero() && g.StepMs > 0 && !now.Before(u.next):
		u.keep(g)
		u.next = now.Add(lawEvery)
	}
}

// keep notes how steps are now.
func (u *usual) keep(g *Group) {
	l := g.law
	if g.ModelMs <= 0 {
		l = law{c0: g.StepMs, tokens: max(1, g.MostTokens), running: g.mostRunning()}
	}
	if u.laws = append(u.laws, l); len(u.laws) > lawsKept {
		u.laws = slices.Delete(u.laws, 0, 1)
	}
	if tokens := g.perStep(); tokens > 0 {
		if u.gives = append(u.gives, gives{tokens, g.TokenMs}); len(u.gives) > lawsKept {
			u.gives = slices.Delete(u.gives, 0, 1)
		}
	}
}

// at is what a step takes at the loads of now by the middle one of the laws, and at most; false: there are too few, or nothing runs,
// so no step ends.
func (u *usual) at(g *Group) (ms, most float64, known bool) {
	running := g.mostRunning()
	if len(u.laws) < lawsLeast || running == 0 || g.StepMs <= 0 {
		return 0, 0, false
	}
	all, mosts := make([]float64, len(u.laws)), make([]float64, len(u.laws))
	for i, l := range u.laws {
		all[i], mosts[i] = l.ms(g.MostTokens, running)
	}
	slices.Sort(all)
	slices.Sort(mosts)
	return stats.Median(all), stats.Median(mosts), true
}

// mostRunning is how many requests the rank runs that runs the most.
func (g *Group) mostRunning() (most int) {
	for i := range g.Ranks {
		most = max(most, g.Ranks[i].Running)
	}
	return most
}

// typical is the middle of what steps gave; zero: too few are known.
func (u *usual) typical() (m gives) {
	if len(u.gives) < lawsLeast {
		return m
	}
	var tokens, ms []float64
	for _, x := range u.gives {
		tokens, ms = append(tokens, x.tokens), append(ms, x.tokenMs)
	}
	slices.Sort(tokens)
	slices.Sort(ms)
	return gives{stats.Median(tokens), stats.Median(ms)}
}
