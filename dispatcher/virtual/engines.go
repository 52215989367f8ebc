package virtual

import (
	"slices"
	"time"

	"evenkeel/dispatcher/board"
)

// Engines are the simulated ranks of one model. The simulator or the twin provides the requests.
type Engines struct {
	*Driver
	Groups []*Group
	ReportDelaySteps  int // number of steps by which the boards see the tokens of a request too late

	Length func(g *Group) (ms float64) // returns how long the step takes that begins now
	// Prefill starts the prefill of a request that has KV room on its rank now. The results are Leg.Ready and Leg.Prefill. nil: requests
	// are prefilled before they are bound.
	Prefill   func(prompt int32) (ready, took float64)
	Token     func(l *Request)               // called when a request got a token
	Seated    func(l *Request)               // called when a request got its slot in the engine
	Finished  func(g *Group, l Request)      // called when a request got its last token, and has left
	Preempted func(r *Rank, l Request)       // called when a request has left because KV room is short
	Stepped   func(g *Group, tokens int) // called when a step has ended

	release board.Release // reused, so that releases allocate nothing
}

// Turn does all that happens at the present time: steps end, deliver gives the boards the requests, ranks and other events that are due,
// and the boards decide.
func (e *Engines) Turn(deliver func()) {
	for _, g := range e.Groups {
		if g.Ends <= e.Now {
			e.finishStep(g)
		}
	}
	deliver()
	e.Tick(e.Now)
}

// Begin begins a step in each group without one, and says whether it preempted a request before.
func (e *Engines) Begin() (preempted bool) {
	for _, g := range e.Groups {
		if g.Ends == Never {
			preempted = e.startStep(g) || preempted
		}
	}
	return preempted
}

// Due returns the time at which the engines or the boards next have something to do, and whether a step is in progress.
func (e *Engines) Due() (next float64, busy bool) {
	next = e.Driver.Next()
	for _, g := range e.Groups {
		if g.Ends < Never {
			busy = true
			next = min(next, g.Ends)
		} else {
			next = min(next, e.nextEndedKVExpiry(g))
		}
	}
	return next, busy
}

// keptExpires returns the time at which a rank of a group without a step in progress next frees KV that it keeps of ended answers, if a
// request on this rank waits for KV room; Never: there is no such rank. While steps run, ranks free such KV at each step.
func (e *Engines) nextEndedKVExpiry(g *Group) float64 {
	next := Never
	for _, r := range g.Ranks {
		if at := r.EndedKV.Next(); !at.IsZero() && slices.ContainsFunc(r.Requests, func(l Request) bool { return !l.Reserved }) {
			next = min(next, float64(at.Sub(e.Began))/float64(time.Millisecond))
		}
	}
	return next
}

// Place gives a request to the rank to which the boards have bound it.
func (e *Engines) Place(r *Rank, l Request) {
	l.DecodesFrom, l.EarliestStep = KVNotReady, r.Group.earliestStep()
	r.Requests = append(r.Requests, l)
	if r.MaxRunning == 0 { // otherwise the rank pulls KV only when a step begins
		r.EndedKV.Expire(e.Instant(e.Now))
		e.reserveKV(r, l.EarliestStep)
		e.assignSlots(r)
	}
}

// Put puts a request on a rank that is there when the simulation begins, with the tokens that it has got already.
func (e *Engines) Put(r *Rank, l Request) {
	e.Driver.resetCounts(l.Slot)
	if l.Reserved {
		r.KV += int64(l.Prompt) + int64(l.Gen)
	}
	if l.FirstStep != 0 {
		e.setCounts(l.Slot, l.Gen, l.FirstStep)
	}
	r.Requests = append(r.Requests, l)
}

// seat gives the free slots of a rank to the requests that wait in the engine and whose KV is ready, in order. On a rank with Runs, it
// makes all such requests active, and limitRunning then decides which of them take part in a step.
func (e *Engines) assignSlots(r *Rank) {
	for i := r.Active; i < len(r.Requests) && (r.Active < r.Slots || r.MaxRunning > 0); i++ {
		l := r.Requests[i]
		if l.DecodesFrom == KVNotReady {
			continue
		}
		copy(r.Requests[r.Active+1:i+1], r.Requests[r.Active:i])
		r.Requests[r.Active] = l
		e.Seated(&r.Requests[r.Active])
		r.Active++
	}
}

// pull reserves KV room for the waiting requests that have none, in order. It stops at the first request that does not fit, or that came
// too late for this step. If requests are bound before their prefill (Prefill is set), the reservation also starts the prefill. Otherwise
// the KV is ready at once. A request whose KV is ready gets its Begin.
func (e *Engines) reserveKV(r *Rank, step int64) {
	for i := range r.Requests {
		l := &r.Requests[i]
		if !l.Reserved {
			late := r.MaxRunning > 0 && l.EarliestStep > step // a rank with Runs takes only requests that came before this step
			if late || !r.hasRoomFor(int64(l.Prompt)) {
				return
			}
			l.Reserved, l.Ready = true, e.Now
			r.KV += int64(l.Prompt)
			if e.Prefill != nil {
				l.Ready, l.Prefill = e.Prefill(l.Prompt)
			}
		}
		if l.DecodesFrom == KVNotReady && l.Ready <= e.Now {
			l.DecodesFrom = step + l.StepsToFirstToken
		}
	}
}

// startStep begins a step of a group if any request is active. Before, each rank pulls KV of waiting requests, gives them slots, and
// preempts requests while its KV exceeds its capacity. preempted says whether a request was preempted.
func (e *Engines) startStep(g *Group) (preempted bool) {
	active := false
	g.nextStepBegun = false
	for _, r := range g.Ranks {
		r.EndedKV.Expire(e.Instant(e.Now))
		// A rank with Runs pulls KV only while it runs fewer requests than Runs.
		if r.MaxRunning == 0 || r.limitRunning(g.Step) < r.MaxRunning {
			e.reserveKV(r, g.Step)
			e.assignSlots(r)
			r.limitRunning(g.Step)
		}
		for i, found := r.toPreempt(); found; i, found = r.toPreempt() {
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

// Preempt takes the i-th request off a rank, and gives its slot back with the outcome Failed.
func (e *Engines) Preempt(r *Rank, i int) {
	l := r.Requests[i]
	r.Remove(i)
	e.Release(r.Group, &l, board.Failed)
	e.Preempted(r, l)
}

// finishStep ends the step in progress: it gives every running request its token, reports the step to the boards as streams would, and
// releases the requests that have all their tokens.
func (e *Engines) finishStep(g *Group) {
	step := g.Step
	tokens, reported := 0, false
	g.nextStepBegun = g.hasWorkAfterStep() // the engines begin their next step before anybody reads the tokens of this one
	g.Step, g.Ends = step+1, Never
	for _, r := range g.Ranks {
		for i := range r.Active {
			l := &r.Requests[i]
			if l.DecodesFrom > step { // its first token comes in a later step
				continue
			}
			reports := l.FirstStep != 0 && !reported // the first stream that gets a further token reports the step
			if reports {
				g.Number++
			}
			l.Gen++
			l.Left--
			if l.FirstStep == 0 { // its first token
				l.FirstStep = g.Number
			}
			e.setCounts(l.Slot, max(0, l.Gen-int32(e.ReportDelaySteps)), l.FirstStep) // with Stale, the boards see the tokens of an earlier step
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
	e.releaseFinished(g)
}

// releaseFinished releases the requests of a group that have all their tokens.
func (e *Engines) releaseFinished(g *Group) {
	for _, r := range g.Ranks {
		for i := 0; i < len(r.Requests); {
			if r.Requests[i].Left > 0 {
				i++
				continue
			}
			l := r.Requests[i]
			r.Remove(i)
			if r.KeepsKVFor > 0 {
				r.EndedKV.Add(int64(l.Prompt)+int64(l.Gen), e.Instant(e.Now), r.KeepsKVFor)
			}
			e.Release(g, &l, board.Finished)
			e.Finished(g, l)
		}
	}
}

// Release gives the slot of a request back to the boards.
func (e *Engines) Release(g *Group, l *Request, kind board.Kind) {
	e.release = board.Release{
		Model: e.Model, Slot: l.Slot, Outcome: board.Outcome{Kind: kind, Generated: int(l.Gen), Kept: kind == board.Finished}, Generated: l.Gen,
		Started: l.Gen > 0, First: l.FirstStep,
	}
	if l.FirstStep != 0 {
		e.release.Last = g.Number
	}
	e.Apply(&e.release, e.Now)
}
