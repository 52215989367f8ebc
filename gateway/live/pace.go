package live

import (
	"slices"
	"time"

	"evenkeel/stats"
)

// paces follow how fast ranks give tokens, and how long the steps of groups take beside what their law used to say. They are told of
// each document, in order.
type paces struct {
	last   time.Time
	ranks  map[int32]*pace
	groups map[groupName]*usual
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
	blanks    blanks
}

// stretch is the time between two documents.
type stretch struct {
	at      time.Time // of the later one
	streams float64   // ms, summed over the streams that ran
	tokens  int64
}

// usual is the law of a group's steps as it was in the last hour. A law that is learned on line follows steps that become longer, so
// the law of now would soon take them for usual.
type usual struct {
	laws []law
	next time.Time // when the next one is kept
	slow time.Time // since when steps have taken too long; zero: they do not
	fast time.Time // since when they have not, though they did before

	before float64       // ms; while steps are slow, what one at the present loads took before
	lasts  time.Duration // for how long they have been
}

type law struct{ c0, c1, each float64 } // ms; a KV token and a request of the fullest rank

const (
	lawEvery  = time.Minute
	lawsKept  = 60
	lawsLeast = 5
	slowLasts = 20 * time.Second // before steps are said to be slow, and before that is over
	slowTimes = 1.6              // as long as the law says, at least
	slowMs    = 5                // longer than that, at least
	slowEver  = 2 * time.Hour    // after that, what is slow is what is usual
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
				x.blanks.add(r, now)
				ranks[r.ID] = x
			}
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
	p.last, p.ranks, p.groups = now, ranks, groups
}

// onlyDecodes says that a group's steps can be compared with a law: where ranks prefill, a prompt makes a step longer, and that is no fault.
func (g *Group) onlyDecodes() bool { return g.Barrier && g.Rounds == nil }

// tell completes a document by what was taken in last.
func (p *paces) tell(d *Document) {
	for i := range d.Models {
		m := &d.Models[i]
		for j := range m.Groups {
			g := &m.Groups[j]
			for k := range g.Ranks {
				if x := p.ranks[g.Ranks[k].ID]; x != nil && g.Ranks[k].Steps {
					g.Ranks[k].TokenMs, g.Ranks[k].Lately = x.ms, x.blanks.lately
				}
			}
			g.TokenMs = middle(g.Ranks)
			if u := p.groups[groupName{m.Name, g.Name}]; u != nil && g.onlyDecodes() {
				if g.UsualMs, g.SlowS = u.before, u.lasts.Seconds(); g.SlowS > 0 {
					g.Differ = differing(g.Ranks)
				}
			}
		}
	}
}

// add takes in what the rank's answers got since the document before.
func (x *pace) add(r *Rank, since time.Duration, now time.Time) {
	if tokens := r.Output - x.output; x.output > 0 && tokens >= 0 && since < paceWindow {
		ms := float64(since.Milliseconds()) * float64(x.running+r.Running) / 2
		x.stretches = append(x.stretches, stretch{now, ms, tokens})
	} else {
		x.stretches = x.stretches[:0]
	}
	x.output, x.running = r.Output, r.Running
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

// add compares the steps of now with the law as it was, at the loads of now.
func (u *usual) add(g *Group, now time.Time) {
	u.before, u.lasts = 0, 0
	known := g.StepMs > 0 && g.ModelMs > 0
	if len(u.laws) >= lawsLeast && g.StepMs > 0 {
		before, steps := u.at(g)
		slow := steps && g.StepMs > slowTimes*before && g.StepMs-before > slowMs
		said := !u.slow.IsZero() && now.Sub(u.slow) >= slowLasts
		switch {
		case slow && u.slow.IsZero():
			u.slow = now
		case slow:
			u.fast = time.Time{}
		case said && u.fast.IsZero():
			u.fast = now
		case !said, now.Sub(u.fast) >= slowLasts:
			u.slow, u.fast = time.Time{}, time.Time{}
		}
		if lasts := now.Sub(u.slow); !u.slow.IsZero() && lasts >= slowLasts {
			u.before, u.lasts = before, lasts
			if lasts > slowEver {
				*u = usual{}
			}
		}
	}
	if known && u.slow.IsZero() && !now.Before(u.next) {
		if u.next = now.Add(lawEvery); len(u.laws) == lawsKept {
			u.laws = slices.Delete(u.laws, 0, 1)
		}
		u.laws = append(u.laws, g.law)
	}
}

// at is what a step takes at the loads of now by the middle one of the laws; false: nothing runs, so no step ends.
func (u *usual) at(g *Group) (ms float64, steps bool) {
	running := 0
	for i := range g.Ranks {
		running = max(running, g.Ranks[i].Running)
	}
	all := make([]float64, len(u.laws))
	for i, l := range u.laws {
		all[i] = l.c0 + l.c1*float64(g.MostTokens) + l.each*float64(running)
	}
	slices.Sort(all)
	return stats.Median(all), running > 0
}
