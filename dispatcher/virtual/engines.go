package virtual

import (
	"slices"
	"time"

	"evenkeel/dispatcher/board"
)

// Engines are the ranks of one model in virtual time. The simulator or the twin provides the requests.
type Engines struct {
	*Driver
	Groups []*Group
	Stale  int // how many steps late the boards see the tokens of a request

	Length    func(g *Group) (ms float64)              // returns how long the step that begins takes
	Prefill   func(prompt int32) (ready, took float64) // starts the prefill of a request that has KV room now, see Leg; nil: its KV is there
	Token     func(l *Leg)                             // called when a request got a token
	Seated    func(l *Leg)                             // called when a request got its slot
	Finished  func(g *Group, l Leg)                    // called when a request got its last token, and has left
	Preempted func(r *Rank, l Leg)                     // called when a request has left because KV room is short
	Stepped   func(g *Group, tokens int)               // called when a step is over

	release board.Release // used again and again
}

// Turn runs one instant at which something happens: steps end, deliver gives the boards the requests, ranks
// and other events of this instant, and the boards decide.
func (e *Engines) Turn(deliver func()) {
	for _, g := range e.Groups {
		if g.Ends <= e.Now {
			e.finishStep(g)
		}
	}
	deliver()
	e.Look(e.Now)
}

// Begin begins a step in each group without one, and says whether a request was preempted for that.
func (e *Engines) Begin() (preempted bool) {
	for _, g := range e.Groups {
		if g.Ends == Never {
			preempted = e.startStep(g) || preempted
		}
	}
	return preempted
}

// Due returns when the engines or the boards have something to do again, and whether a step is in progress.
func (e *Engines) Due() (next float64, busy bool) {
	next = e.Driver.Next()
	for _, g := range e.Groups {
		next = min(next, g.Ends)
		if busy = busy || g.Ends < Never; g.Ends == Never {
			next = min(next, e.keptExpires(g))
		}
	}
	return next, busy
}

// keptExpires returns when a rank of a group without a step next gives up kept KV, if a request on that rank waits for KV room; Never:
// no rank does. While steps run, ranks look at that with each step.
func (e *Engines) keptExpires(g *Group) float64 {
	next := Never
	for _, r := range g.Ranks {
		if at := r.Kept.Next(); !at.IsZero() && slices.ContainsFunc(r.Legs, func(l Leg) bool { return !l.Reserved }) {
			next = min(next, float64(at.Sub(e.Began))/float64(time.Millisecond))
		}
	}
	return next
}

// Place gives a request to the engine that the boards bound it to.
func (e *Engines) Place(r *Rank, l Leg) {
	l.Begin, l.BoundStep = NotBegun, r.Group.nextStep()
	r.Legs = append(r.Legs, l)
	if r.Runs == 0 { // else KV is pulled only when a step begins
		r.Kept.Expire(e.Instant(e.Now))
		e.pull(r, l.BoundStep)
		e.seat(r)
	}
}

// Put puts a request on a rank that was there from the start, with the tokens that it has got already.
func (e *Engines) Put(r *Rank, l Leg) {
	e.Driver.resetCounts(l.Slot)
	if l.Reserved {
		r.KV += int64(l.Prompt) + int64(l.Gen)
	}
	if l.Joined != 0 {
		e.setCounts(l.Slot, l.Gen, l.Joined)
	}
	r.Legs = append(r.Legs, l)
}

// seat gives the free slots of a rank to the requests that wait in the engine and are prefilled, in order. On a rank with Runs, it makes
// all of them active: limitRunning then says which take part in a step.
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

// pull reserves KV room for the waiting requests that have none, in order. It stops at the first that does not fit, or that came too late
// for this step. If requests are bound before their prefill (Prefill is set), the reservation also starts the prefill; else the KV is
// ready at once. A request whose KV is ready gets its Begin.
func (e *Engines) pull(r *Rank, step int64) {
	for i := range r.Legs {
		l := &r.Legs[i]
		if !l.Reserved {
			late := r.Runs > 0 && l.BoundStep > step // a rank that runs takes in only what came before this step
			if late || !r.fits(int64(l.Prompt)) {
				return
			}
			l.Reserved, l.Ready = true, e.Now
			r.KV += int64(l.Prompt)
			if e.Prefill != nil {
				l.Ready, l.Prefill = e.Prefill(l.Prompt)
			}
		}
		if l.Begin == NotBegun && l.Ready <= e.Now {
			l.Begin = step + l.StepsToBegin
		}
	}
}

// startStep begins a step of a group, if any request is active. Before that, each rank takes in KV of waiting requests, gives them
// slots, and preempts requests while its KV is more than its capacity. preempted says whether there were such requests.
func (e *Engines) startStep(g *Group) (preempted bool) {
	active := false
	g.begun = false
	for _, r := range g.Ranks {
		r.Kept.Expire(e.Instant(e.Now))
		// A rank with Runs takes in KV only while it runs fewer requests.
		if r.Runs == 0 || r.limitRunning(g.Step) < r.Runs {
			e.pull(r, g.Step)
			e.seat(r)
			r.limitRunning(g.Step)
		}
		for i, found := r.victim(); found; i, found = r.victim() {
			e.Preempt(r, i)
			e.Apply(board.Preempted{Worker: r.ID}, e.Now)
			preempted = true
		}
		active = active || r.Active > 0
	}
	if active {
		g.Ends = e.Now + e.Length(g)
	}
	return preempted
}

// Preempt takes the i-th request off a rank and gives its slot back as failed.
func (e *Engines) Preempt(r *Rank, i int) {
	l := r.Legs[i]
	r.Remove(i)
	e.Release(r.Group, &l, board.Failed)
	e.Preempted(r, l)
}

// finishStep gives every running request its token, reports the step to the boards as streams would, and
// releases the requests that have all their tokens.
func (e *Engines) finishStep(g *Group) {
	tokens, reported, step := 0, false, g.Step
	g.begun = g.goesOn()
	g.Step, g.Ends = step+1, Never
	for _, r := range g.Ranks {
		for i := range r.Active {
			l := &r.Legs[i]
			if l.Begin > step {
				continue
			}
			reports := l.Joined != 0 && !reported // the first stream that gets a further token reports the step
			if reports {
				g.Number++
			}
			l.Gen++
			l.Left--
			if l.Joined == 0 {
				l.Joined = g.Number
			}
			e.setCounts(l.Slot, max(0, l.Gen-int32(e.Stale)), l.Joined)
			e.Token(l)
			r.KV++
			tokens++
			if reports {
				reported = true
				e.reportStep(&g.StepCounter, e.Now)
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
	e.release = board.Release{
		Model: e.Model, Slot: l.Slot, Outcome: board.Outcome{Kind: kind, Generated: int(l.Gen), Kept: kind == board.Finished}, Generated: l.Gen,
		Started: l.Gen > 0, First: l.Joined,
	}
	if l.Joined != 0 {
		e.release.Last = g.Number
	}
	e.Apply(&e.release, e.Now)
}
