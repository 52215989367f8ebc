package virtual

import (
	"slices"
	"time"

	"evenkeel/dispatcher/board"
)

// Engines are the ranks of one model in virtual time. Who drives them says what they serve.
type Engines struct {
	*Driver
	Groups []*Group
	Stale  int // boards see the progress of a request so many steps late

	Length    func(g *Group) (ms float64)              // of the step that begins
	Prefill   func(prompt int32) (ready, took float64) // of one whose KV has room now; nil: its KV is there
	Token     func(l *Leg)                             // it got one
	Seated    func(l *Leg)                             // it got its slot
	Finished  func(g *Group, l Leg)                    // it got its last token, and has left
	Preempted func(r *Rank, l Leg)                     // it has left for want of KV room
	Stepped   func(g *Group, tokens int)               // a step is over

	given board.Release // used again and again
}

// Turn is one instant at which something happens: a step ends, come tells the boards of requests, ranks
// and whatever else there is now, and the boards look.
func (e *Engines) Turn(come func()) {
	for _, g := range e.Groups {
		if g.Ends <= e.Now {
			e.finishStep(g)
		}
	}
	come()
	e.Look(e.Now)
}

// Begin begins the steps of groups that rest, and says whether a request was preempted for that.
func (e *Engines) Begin() (preempted bool) {
	for _, g := range e.Groups {
		if g.Ends == Never {
			preempted = e.startStep(g) || preempted
		}
	}
	return preempted
}

// Due is when the engines or the boards have something to do again, and whether a step is in progress.
func (e *Engines) Due() (next float64, busy bool) {
	next = e.Driver.Next()
	for _, g := range e.Groups {
		next = min(next, g.Ends)
		if busy = busy || g.Ends < Never; g.Ends == Never {
			next = min(next, e.roomComes(g))
		}
	}
	return next, busy
}

// roomComes is when a rank of a group that rests gives up the first of what it keeps, and a request waits for that.
func (e *Engines) roomComes(g *Group) float64 {
	next := Never
	for _, r := range g.Ranks {
		if at := r.Kept.Next(); !at.IsZero() && slices.ContainsFunc(r.Legs, func(l Leg) bool { return !l.Pulled }) {
			next = min(next, float64(at.Sub(e.Began))/float64(time.Millisecond))
		}
	}
	return next
}

// Place gives a request to the engine that the boards bound it to.
func (e *Engines) Place(r *Rank, l Leg) {
	l.Begin, l.Since = NotBegun, r.Group.next()
	r.Legs = append(r.Legs, l)
	if r.Runs == 0 { // else a step has to begin first
		r.Kept.Expire(e.Instant(e.Now))
		e.pull(r, l.Since)
		e.seat(r)
	}
}

// Put has a request on a rank from the start, with the tokens that it has got already.
func (e *Engines) Put(r *Rank, l Leg) {
	e.Driver.seat(l.Slot)
	if l.Pulled {
		r.KV += int64(l.Prompt) + int64(l.Gen)
	}
	if l.Joined != 0 {
		e.progress(l.Slot, l.Gen, l.Joined)
	}
	r.Legs = append(r.Legs, l)
}

// seat gives free slots to those that wait in the engine, or have been prefilled.
func (e *Engines) seat(r *Rank) {
	for i := r.Active; i < len(r.Legs) && (r.Active < r.Slots || r.Runs > 0); i++ {
		l := r.Legs[i]
		if l.Begin == NotBegun {
			continue
		}
		copy(r.Legs[r.Active+1:i+1], r.Legs[r.Active:i])
		r.Legs[r.Active] = l
		e.Seated(&r.Legs[r.Active])
		r.Active++
	}
}

// pull gives those that wait without it their room for KV, in order, while there is any. Where ranks are
// bound before the prefill, that begins now.
func (e *Engines) pull(r *Rank, step int64) {
	for i := range r.Legs {
		l := &r.Legs[i]
		if !l.Pulled {
			if !r.fits(int64(l.Prompt)) || r.Runs > 0 && l.Since > step {
				return
			}
			l.Pulled, l.Ready = true, e.Now
			r.KV += int64(l.Prompt)
			if e.Prefill != nil {
				l.Ready, l.Prefill = e.Prefill(l.Prompt)
			}
		}
		if l.Begin == NotBegun && l.Ready <= e.Now {
			l.Begin = step + l.Lag
		}
	}
}

// startStep preempts where KV overflows, and says when the step ends. A group in which nothing decodes
// does not step.
func (e *Engines) startStep(g *Group) (preempted bool) {
	holds := false
	g.begun = false
	for _, r := range g.Ranks {
		r.Kept.Expire(e.Instant(e.Now))
		if r.Runs == 0 || r.run(g.Step) < r.Runs {
			e.pull(r, g.Step)
			e.seat(r)
			r.run(g.Step)
		}
		for i, over := r.victim(); over; i, over = r.victim() {
			e.Preempt(r, i)
			e.Apply(board.Preempted{Worker: r.ID}, e.Now)
			preempted = true
		}
		holds = holds || r.Active > 0
	}
	if holds {
		g.Ends = e.Now + e.Length(g)
	}
	return preempted
}

// Preempt sends the i-th request of a rank back.
func (e *Engines) Preempt(r *Rank, i int) {
	l := r.Legs[i]
	r.Remove(i)
	e.Release(r.Group, &l, board.Failed)
	e.Preempted(r, l)
}

// finishStep gives every running request its token, tells the boards of the step as the streams would, and
// releases those that have all.
func (e *Engines) finishStep(g *Group) {
	tokens, told, step := 0, false, g.Step
	g.begun = g.goesOn()
	g.Step, g.Ends = step+1, Never
	for _, r := range g.Ranks {
		for i := range r.Active {
			l := &r.Legs[i]
			if l.Begin > step {
				continue
			}
			again := l.Joined != 0 && !told // the first stream that speaks again tells of the step
			if again {
				g.Number++
			}
			l.Gen++
			l.Left--
			if l.Joined == 0 {
				l.Joined = g.Number
			}
			e.progress(l.Slot, max(0, l.Gen-int32(e.Stale)), l.Joined)
			e.Token(l)
			r.KV++
			tokens++
			if again {
				told = true
				e.heard(&g.StepCounter, e.Now)
			}
		}
	}
	e.Stepped(g, tokens)
	for _, r := range g.Ranks {
		for i := 0; i < len(r.Legs); {
			if r.Legs[i].Left > 0 {
				i++
				continue
			}
			l := r.Legs[i]
			r.Remove(i)
			if r.Keeps > 0 {
				r.Kept.Add(int64(l.Prompt)+int64(l.Gen), e.Instant(e.Now), r.Keeps)
			}
			e.Release(g, &l, board.Finished)
			e.Finished(g, l)
		}
	}
}

// Release gives the slot of a request back.
func (e *Engines) Release(g *Group, l *Leg, kind board.Kind) {
	e.given = board.Release{
		Model: e.Model, Slot: l.Slot, Outcome: board.Outcome{Kind: kind, Generated: int(l.Gen), Kept: kind == board.Finished}, Generated: l.Gen,
		Started: l.Gen > 0, First: l.Joined,
	}
	if l.Joined != 0 {
		e.given.Last = g.Number
	}
	e.Apply(&e.given, e.Now)
}
