package virtual

import (
	"slices"
	"time"

	"evenkeel/dispatcher/board"
)

// Engines simulates the ranks of one model that only decode, in groups.
type Engines struct {
	*Driver
	Groups           []*Group
	ReportDelaySteps int // number of steps by which the token counts that the boards see lag behind; 0: they are exact

	Length func(g *Group) (ms float64) // returns how long the step takes that the group begins now, in ms
	// Prefill starts the prefill of a request for which its rank has just reserved KV room. Its results become Request.Ready and
	// Request.Prefill. If Prefill is nil, requests come to the ranks with their prefill finished.
	Prefill   func(prompt int32) (ready, took float64)
	Token     func(q *Request)           // called for each token that a request gets
	Seated    func(q *Request)           // called when a request got a slot in the engine, so that it takes part in steps
	Finished  func(g *Group, q Request)  // called when a request has got its last token and has left its rank
	Preempted func(r *Rank, q Request)   // called when a request was taken off its rank because KV room is short
	Stepped   func(g *Group, tokens int) // called when a step has ended, with the number of tokens that it brought

	release board.Release // reused for each release, so that releases allocate nothing
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

// Begin begins a step in each group that has none in progress. It returns true if it preempted a request, because the boards must then find
// a rank for this request.
func (e *Engines) Begin() (preempted bool) {
	for _, g := range e.Groups {
		if g.Ends == Never {
			preempted = e.startStep(g) || preempted
		}
	}
	return preempted
}

// Due returns when the engines or the boards next have something to do, in ms since Began (the caller then calls Turn and Begin), and
// whether a step is in progress (busy). A rank may keep the KV of ended answers for a while. If its group is idle and a request waits for
// the room of this KV, the time at which the rank drops it counts, too.
func (e *Engines) Due() (next float64, busy bool) {
	next = e.Driver.Next()
	for _, g := range e.Groups {
		if g.Ends < Never {
			busy = true
			next = min(next, g.Ends)
		} else { // a step frees such KV when it begins; without steps, the caller must act at that time
			next = min(next, e.nextRoomFromEndedKV(g))
		}
	}
	return next, busy
}

// nextRoomFromEndedKV returns when a rank of the group next frees KV that it keeps of ended answers, in ms. Only ranks on which a request
// waits for KV room count; Never: there is no such rank. It is needed only while no step is in progress, because ranks otherwise free such
// KV at each step.
func (e *Engines) nextRoomFromEndedKV(g *Group) float64 {
	waitsForRoom := func(q Request) bool { return !q.Reserved }
	next := Never
	for _, r := range g.Ranks {
		if at := r.EndedKV.Next(); !at.IsZero() && slices.ContainsFunc(r.Requests, waitsForRoom) {
			next = min(next, float64(at.Sub(e.Began))/float64(time.Millisecond))
		}
	}
	return next
}

// Place gives a request to the rank to which the boards have bound it. The rank begins to pull its KV at once if there is room. A rank with
// MaxRunning pulls KV only when a step begins, so startStep does it.
func (e *Engines) Place(r *Rank, q Request) {
	q.DecodesFrom, q.EarliestStep = KVNotReady, r.Group.earliestStep()
	r.Requests = append(r.Requests, q)
	if r.MaxRunning == 0 {
		r.EndedKV.Expire(e.Instant(e.Now)) // the KV of ended answers that the rank no longer keeps makes room
		e.reserveKV(r, q.EarliestStep)
		e.assignSlots(r)
	}
}

// assignSlots gives the free slots of a rank to the requests that wait in the engine and whose KV is ready, in order of arrival. On a rank
// with MaxRunning, it makes all such requests active, and limitRunning then decides which of them take part in a step.
func (e *Engines) assignSlots(r *Rank) {
	for i := r.Active; i < len(r.Requests) && (r.Active < r.Slots || r.MaxRunning > 0); i++ {
		q := r.Requests[i]
		if q.DecodesFrom == KVNotReady {
			continue
		}
		copy(r.Requests[r.Active+1:i+1], r.Requests[r.Active:i]) // moves requests that came earlier, but whose KV is not ready, behind q
		r.Requests[r.Active] = q
		e.Seated(&r.Requests[r.Active])
		r.Active++
	}
}

// reserveKV reserves KV room for waiting requests, in order of arrival. It stops at the first request that does not fit, or that came too
// late for this step. If requests are bound before their prefill, the reservation also starts the prefill (the function Prefill), which
// returns when it will end and how long it takes. Otherwise the KV is ready at once. When the KV of a request is ready, reserveKV sets its
// DecodesFrom, the step of its first token.
func (e *Engines) reserveKV(r *Rank, step int64) {
	for i := range r.Requests {
		q := &r.Requests[i]
		if !q.Reserved {
			// A rank with MaxRunning pulls KV only when a step begins, and only for requests that had come by then
			// (EarliestStep).
			cameTooLate := r.MaxRunning > 0 && q.EarliestStep > step
			if cameTooLate || !r.hasRoomFor(int64(q.Prompt)) {
				return
			}
			q.Reserved, q.Ready = true, e.Now
			r.KV += int64(q.Prompt)
			if e.Prefill != nil {
				q.Ready, q.Prefill = e.Prefill(q.Prompt)
			}
		}
		if q.DecodesFrom == KVNotReady && q.Ready <= e.Now {
			q.DecodesFrom = step + q.StepsToFirstToken
		}
	}
}

// startStep begins a step of a group if any request is active. Before that, each rank prepares the step. preempted says whether a request
// was preempted.
func (e *Engines) startStep(g *Group) (preempted bool) {
	anyActive := false
	// finishStep sets nextStepBegun, because real engines begin the next step before the proxy reads the tokens of the last one. From
	// now on, Ends says whether a step is in progress. If no request is active, none is, whatever finishStep expected.
	g.nextStepBegun = false
	for _, r := range g.Ranks {
		preempted = e.prepareRank(r, g.Step) || preempted
		anyActive = anyActive || r.Active > 0
	}
	if anyActive { // otherwise Ends stays Never: the group is idle until a request gets a slot
		g.Ends = e.Now + e.Length(g)
	}
	return preempted
}

// prepareRank prepares a rank for a step: the rank frees the KV of ended answers that it no longer keeps, pulls KV of waiting requests,
// gives them slots, and preempts requests while its KV exceeds its capacity. With MaxRunning, limitRunning lets at most so many active
// requests take part in the step, and postpones the others to the next one. If so many run already, the rank pulls no KV in this step.
// preempted says whether any request was preempted.
func (e *Engines) prepareRank(r *Rank, step int64) (preempted bool) {
	r.EndedKV.Expire(e.Instant(e.Now))
	running := r.limitRunning(step) // 0 without MaxRunning
	isFull := r.MaxRunning != 0 && running >= r.MaxRunning
	if !isFull {
		e.reserveKV(r, step)
		e.assignSlots(r)
		r.limitRunning(step) // again, because with the requests that have just got slots, too many may be active
	}
	for i, tooMuch := r.toPreempt(); tooMuch; i, tooMuch = r.toPreempt() {
		e.Preempt(r, i)
		e.Apply(board.Preempted{Worker: r.ID}, e.Now)
		preempted = true
	}
	return preempted
}

// Preempt takes the i-th request off a rank. The boards get its slot back with the outcome Failed, so the request must get another rank.
func (e *Engines) Preempt(r *Rank, i int) {
	q := r.Requests[i]
	r.remove(i)
	e.releaseSlot(r.Group, &q, board.Failed)
	e.Preempted(r, q)
}

// finishStep ends the step in progress: each running request gets its token, and requests that have all their tokens are released. Step
// counts the steps of the engines. Number counts those that the proxy can see in the token streams: there, the time between two tokens of a
// stream shows a step. The first token of a stream shows none, because a stream may begin at any time. So in each step, the first token
// that is not the first of its request raises Number and reports the step to the boards.
func (e *Engines) finishStep(g *Group) {
	step := g.Step
	tokens, stepReported := 0, false
	g.nextStepBegun = g.hasWorkAfterStep() // the engines begin the next step before the proxy reads the tokens of this one
	g.Step, g.Ends = step+1, Never
	for _, r := range g.Ranks {
		for i := range r.Active {
			q := &r.Requests[i]
			if q.DecodesFrom > step { // the request's first token comes in a later step
				continue
			}
			isFirstToken := q.FirstStep == 0
			showsStep := !isFirstToken && !stepReported // one report per step is enough
			if showsStep {
				g.Number++
			}
			e.giveToken(g, q)
			r.KV++
			tokens++
			if showsStep { // after giveToken, because the boards get the token counts together with the step
				stepReported = true
				e.reportStep(&g.StepCounter, e.Now)
			}
		}
	}
	e.Stepped(g, tokens)
	e.releaseFinished(g)
}

// giveToken gives a request its next token, and shows the boards how many it has. With ReportDelaySteps, they see the number of an earlier
// step. The step of the first token is kept in FirstStep, as the proxy counts steps (Number).
func (e *Engines) giveToken(g *Group, q *Request) {
	q.Gen++
	q.Left--
	if q.FirstStep == 0 {
		q.FirstStep = g.Number
	}
	e.setCounts(q.Slot, max(0, q.Gen-int32(e.ReportDelaySteps)), q.FirstStep)
	e.Token(q)
}

// releaseFinished releases the requests of a group that have all their tokens.
func (e *Engines) releaseFinished(g *Group) {
	for _, r := range g.Ranks {
		for i := 0; i < len(r.Requests); {
			if r.Requests[i].Left > 0 {
				i++
				continue
			}
			q := r.Requests[i]
			r.remove(i) // the next request is now at index i
			if r.KeepsKVFor > 0 {
				r.EndedKV.Add(int64(q.Prompt)+int64(q.Gen), e.Instant(e.Now), r.KeepsKVFor)
			}
			e.releaseSlot(g, &q, board.Finished)
			e.Finished(g, q)
		}
	}
}

// releaseSlot gives the slot of a request back to the boards, with the outcome kind and the request's token count.
// Only a finished request may leave KV that the engine keeps. The request stays on its rank; the caller must remove it.
func (e *Engines) releaseSlot(g *Group, q *Request, kind board.Kind) {
	e.release = board.Release{
		Model: e.Model, Slot: q.Slot, Outcome: board.Outcome{Kind: kind, Generated: int(q.Gen), Kept: kind == board.Finished}, Generated: q.Gen,
		Started: q.Gen > 0, FirstStep: q.FirstStep,
	}
	if q.FirstStep != 0 { // a request without a token has no last step either
		e.release.LastStep = g.Number
	}
	e.Apply(&e.release, e.Now)
}
