package virtual

import (
	"slices"
	"time"

	"evenkeel/dispatcher/board"
)

// Engines simulates the ranks of one model that only decode.
type Engines struct {
	*Driver
	Groups           []*Group
	ReportDelaySteps int // by how many steps the token counts that the boards see lag behind

	Length func(g *Group) (ms float64) // returns how long the step takes that the group begins now
	// Prefill starts the prefill of a request whose KV room was just reserved. Its results become
	// Request.Ready and Request.Prefill. nil: requests come with their prefill finished.
	Prefill   func(prompt int32) (ready, took float64)
	Token     func(q *Request)           // called for each token that a request gets
	Seated    func(q *Request)           // called when a request got a slot in the engine
	Finished  func(g *Group, q Request)  // called when a request has got its last token and has left its rank
	Preempted func(r *Rank, q Request)   // called when a request was taken off its rank because KV room is short
	Stepped   func(g *Group, tokens int) // called when a step has ended, with the number of its tokens

	release board.Release // reused, so that releases allocate nothing
}

// Turn does all that happens at the present time. deliver gives the boards the requests and other
// events that are due.
func (e *Engines) Turn(deliver func()) {
	for _, g := range e.Groups {
		if g.Ends <= e.Now {
			e.finishStep(g)
		}
	}
	deliver()
	e.Tick(e.Now)
}

// Begin begins a step in each group that has none. If it preempted a request, the boards must then
// find a rank for it.
func (e *Engines) Begin() (preempted bool) {
	for _, g := range e.Groups {
		if g.Ends == Never {
			preempted = e.startStep(g) || preempted
		}
	}
	return preempted
}

// Due returns when the engines or the boards next have something to do, in ms since Began (the
// caller then calls Turn and Begin), and whether a step is in progress (busy).
func (e *Engines) Due() (next float64, busy bool) {
	next = e.Driver.Next()
	for _, g := range e.Groups {
		if g.Ends < Never {
			busy = true
			next = min(next, g.Ends)
		} else { // a step frees KV of ended answers when it begins; without steps, the caller must act at that time
			next = min(next, e.nextRoomFromEndedKV(g))
		}
	}
	return next, busy
}

// nextRoomFromEndedKV returns when a rank on which a request waits for KV room next frees KV of
// ended answers, in ms; Never: there is none.
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

// Place gives a request to the rank to which the boards have bound it. A rank with MaxRunning pulls
// KV only when a step begins.
func (e *Engines) Place(r *Rank, q Request) {
	q.DecodesFrom, q.EarliestStep = KVNotReady, r.Group.earliestStep()
	r.Requests = append(r.Requests, q)
	if r.MaxRunning == 0 {
		r.EndedKV.Expire(e.Instant(e.Now))
		e.reserveKV(r, q.EarliestStep)
		e.assignSlots(r)
	}
}

// assignSlots gives slots to the waiting requests whose KV is ready, in order of arrival. With
// MaxRunning, all of them become active, and limitRunning decides which take part in a step.
func (e *Engines) assignSlots(r *Rank) {
	for i := r.Active; i < len(r.Requests) && (r.Active < r.Slots || r.MaxRunning > 0); i++ {
		q := r.Requests[i]
		if q.DecodesFrom == KVNotReady {
			continue
		}
		copy(r.Requests[r.Active+1:i+1], r.Requests[r.Active:i]) // moves earlier requests whose KV is not ready behind q
		r.Requests[r.Active] = q
		e.Seated(&r.Requests[r.Active])
		r.Active++
	}
}

// reserveKV reserves KV room for waiting requests in order of arrival, up to the first that does
// not fit, or that came too late for this step.
func (e *Engines) reserveKV(r *Rank, step int64) {
	for i := range r.Requests {
		q := &r.Requests[i]
		if !q.Reserved {
			// A rank with MaxRunning pulls KV only for requests that had come when the step begins.
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

func (e *Engines) startStep(g *Group) (preempted bool) {
	anyActive := false
	// finishStep sets nextStepBegun, because real engines begin the next step before the proxy reads
	// the tokens of the last one. From now on, Ends says whether a step is in progress.
	g.nextStepBegun = false
	for _, r := range g.Ranks {
		preempted = e.prepareRank(r, g.Step) || preempted
		anyActive = anyActive || r.Active > 0
	}
	if anyActive { // otherwise the group is idle until a request gets a slot
		g.Ends = e.Now + e.Length(g)
	}
	return preempted
}

func (e *Engines) prepareRank(r *Rank, step int64) (preempted bool) {
	r.EndedKV.Expire(e.Instant(e.Now))
	running := r.limitRunning(step) // 0 without MaxRunning
	isFull := r.MaxRunning != 0 && running >= r.MaxRunning
	if !isFull {
		e.reserveKV(r, step)
		e.assignSlots(r)
		r.limitRunning(step) // again, because with the new slots too many may be active
	}
	for i, tooMuch := r.toPreempt(); tooMuch; i, tooMuch = r.toPreempt() {
		e.Preempt(r, i)
		e.Apply(board.Preempted{Worker: r.ID}, e.Now)
		preempted = true
	}
	return preempted
}

// Preempt releases the slot with the outcome Failed, so the request must get another rank.
func (e *Engines) Preempt(r *Rank, i int) {
	q := r.Requests[i]
	r.remove(i)
	e.releaseSlot(r.Group, &q, board.Failed)
	e.Preempted(r, q)
}

// finishStep ends the step in progress. Step counts the steps of the engines. Number counts those
// that the proxy can see in the token streams: there, the time between two tokens of a stream shows
// a step, and the first token shows none, because a stream may begin at any time.
func (e *Engines) finishStep(g *Group) {
	step := g.Step
	tokens, stepReported := 0, false
	g.nextStepBegun = g.hasWorkAfterStep()
	g.Step, g.Ends = step+1, Never
	for _, r := range g.Ranks {
		for i := range r.Active {
			q := &r.Requests[i]
			if q.DecodesFrom > step {
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
			if showsStep { // the boards get the token counts together with the step
				stepReported = true
				e.reportStep(&g.StepCounter, e.Now)
			}
		}
	}
	e.Stepped(g, tokens)
	e.releaseFinished(g)
}

func (e *Engines) giveToken(g *Group, q *Request) {
	q.Gen++
	q.Left--
	if q.FirstStep == 0 {
		q.FirstStep = g.Number
	}
	e.setCounts(q.Slot, max(0, q.Gen-int32(e.ReportDelaySteps)), q.FirstStep)
	e.Token(q)
}

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

// releaseSlot leaves the request on its rank; the caller must remove it. Only a finished request
// may leave KV that the engine keeps.
func (e *Engines) releaseSlot(g *Group, q *Request, kind board.Kind) {
	e.release = board.Release{
		Model: e.Model, Slot: q.Slot, Outcome: board.Outcome{Kind: kind, Generated: int(q.Gen), Kept: kind == board.Finished}, Generated: q.Gen,
		Started: q.Gen > 0, FirstStep: q.FirstStep,
	}
	if q.FirstStep != 0 {
		e.release.LastStep = g.Number
	}
	e.Apply(&e.release, e.Now)
}
