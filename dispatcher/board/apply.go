package board

import (
	"slices"
	"time"
)

func (e Enqueue) apply(l *Boards) { l.enqueue(waitingEntry{Enqueue: e}) }

func (e Withdraw) apply(l *Boards) { l.withdraw(e.Entry) }

// apply frees the slot. Some engines report the tokens of an answer only at its end (an unreported answer, see unreported.go). Until then,
// the board has counted estimated tokens in the loads of the group's steps. So rememberEnded, which serves the learning from these steps,
// gets the estimate. release gets the reported tokens all the same: it measures the error of the estimate by them, and lets other
// statistics learn from them.
func (e *Release) apply(l *Boards) {
	b := l.boards[e.Model]
	s := &b.slots.records[e.Slot]
	// Above 0: the answer is unreported, and release must know this (s.unreported). The record may not say so yet, because
	// countStreamTokens sets this only at measurements, and the engine may have begun the answer after the last one.
	s.estimate.maxTokens = e.MaxUnreported
	generated, firstStep, lastStep := e.Generated, e.FirstStep, e.LastStep
	hasEstimate := s.estimate.firstStep != 0 // by the estimate, the unreported answer has a token; other answers never have an estimate
	if hasEstimate && s.rank.group != nil {  // a rank without a group has left the fleet, so none of its steps is reported
		generated, firstStep, lastStep = s.estimatedEnd()
	}
	b.rememberEnded(e.Slot, generated, firstStep, lastStep)
	b.release(e.Slot, e.Outcome, e.Generated, e.Started, l.now)
}

// estimatedEnd returns, for an unreported answer that ends now, the estimated number of its tokens, and the numbers of the steps that
// brought its first and its last token by the estimate. The rank of the request must have a group.
func (s *slotRecord) estimatedEnd() (generated int32, firstStep, lastStep uint32) {
	firstStep, lastStep = s.estimate.firstStep, s.rank.group.lastStep.Number
	// If the first token came in the step under way, it came after the last reported step. The answer then began and ended in this
	// step.
	if isAfter(firstStep, lastStep) {
		lastStep = firstStep
	}
	return int32(s.estimate.tokens), firstStep, lastStep
}

func (e Recount) apply(l *Boards) { l.boards[e.Model].correctPrompt(e.Slot, clampTokens(e.Prompt)) }

func (e Rerouted) apply(l *Boards) { l.boards[e.Model].changePrefiller(e.Slot, e.Prefiller, l.now) }

func (e Excused) apply(l *Boards) {
	if b := l.boards[e.Model]; b != nil {
		b.pairs.Excuse(e.Link)
		b.updateFirstEventWatch()
	}
}

// apply records that the rank's engine took the request, so that it refuses requests no longer. If the request has a hand-off, it also
// records that the hand-off has arrived.
func (e FirstEvent) apply(l *Boards) {
	b := l.boards[e.Model]
	s := &b.slots.records[e.Slot]
	b.recordAccepted(s)
	if s.prefiller != "" {
		b.recordArrived(s, l.now)
	}
}

// apply records the steps of the group. It does nothing if the group has left the fleet.
func (e *Steps) apply(l *Boards) {
	if b, g := l.groupWithKey(e.Group); g != nil {
		b.recordSteps(g, e.List)
	}
}

// apply makes the group use the given step model and weights instead of learned ones.
func (e SetStepModel) apply(l *Boards) {
	if _, g := l.groupWithKey(e.Group); g != nil {
		g.steps.GivenModel, g.givenWeights = e.StepModel, &e.Weights
	}
}

func (e SetWorkers) apply(l *Boards) { l.setWorkers(e.Workers) }

func (e Preempted) apply(l *Boards) { l.recordPreemption(e.Worker) }

func (e TablesBuilt) apply(l *Boards) { l.predictors[e.Predictor].Tables = e.Tables }

func (e SetPolicy) apply(l *Boards) { l.reportRejected(l.setPolicy(e.Spec)) }

func (e SetFit) apply(l *Boards) { l.setFit(e.Fit) }

func (s Settings) apply(l *Boards) { l.reportRejected(l.applySettings(s)) }

// apply stores the Counts for the next event and the rounds that follow from it, and measures how fast the streams of the board's groups
// get tokens. It does nothing if the board has been removed.
func (e *Counts) apply(l *Boards) {
	if b := l.boards[e.Model]; b != nil {
		b.counts = e
		b.measureTokenRate(l.now)
	}
}

// apply ends the waits that are over, and prepares the rounds that are due (see advance). It removes the board if it has neither ranks nor
// entries left. It does nothing if the board has been removed before.
func (e *Tick) apply(l *Boards) {
	b := l.boards[e.Model]
	if b == nil {
		return
	}
	b.advance(l.now)
	if b.isEmpty() {
		l.remove(b)
		l.emit(Effect{Kind: EffectGone, Group: GroupKey{Model: e.Model}})
	}
}

// apply runs one round of decisions, on the first board that has one to run. The board stays in l.round until the event Decided, which the
// caller must send next. If no board has a round to run, nothing happens.
func (Decide) apply(l *Boards) {
	if l.round = l.nextToDecide(); l.round != nil {
		l.round.runRound(l.now)
	}
}

// apply finishes the round that the event Decide ran, with the duration of that round. It does nothing if Decide found no round to run.
func (e *Decided) apply(l *Boards) {
	if b := l.round; b != nil {
		l.round = nil
		b.finishRound(e, l.now)
	}
}

// apply answers all waiting entries with ErrDraining, and makes the boards answer all later ones in the same way.
func (Shutdown) apply(l *Boards) {
	l.draining = true
	l.refuseAll(ErrDraining)
}

// reportRejected emits EffectRejected if the settings of the current event cannot work. err says why; nil: they can, and nothing is
// emitted.
func (l *Boards) reportRejected(err error) {
	if err != nil {
		l.emit(Effect{Kind: EffectRejected, Err: err})
	}
}

// MayHoldEndedKV says whether the engine of a worker may still hold KV of ended requests, by the boards' own count: KV of orphans
// (orphans.go), or KV that the engine keeps of ended answers (kept.go).
func (l *Boards) MayHoldEndedKV(worker int32) bool {
	return slices.ContainsFunc(l.inOrder, func(b *board) bool {
		r := b.ranks[worker]
		return r != nil && (len(r.orphans) > 0 || r.keptKV.Tokens() > 0)
	})
}

// apply frees KV room that the board counts as taken although the engine's gauge shows that it is not in use. Two kinds of room are counted
// for requests that have ended. An orphan is the room of a request whose KV its prefill engine may never finish writing (orphans.go). Kept
// KV is what the engine keeps of an ended answer for the next turn of its chat (kept.go). apply ignores gauges that are older than
// gaugeLife.
func (e Gauged) apply(l *Boards) {
	if l.now.Sub(e.At) > gaugeLife {
		return
	}
	for _, b := range l.inOrder {
		// The gauge does not tell the two kinds apart, so kept KV is corrected only on a rank without orphans.
		if r := b.ranks[e.Worker]; r != nil && len(r.orphans) > 0 {
			b.correctOrphans(r, e)
		} else if r != nil && r.keptKV.Tokens() > 0 {
			b.correctKept(r, e)
		}
	}
}

// Apply changes the boards by one event and returns the effects that the caller must carry out now. They are valid until the next Apply.
// While Deciding returns true, the next two events must be Decide and then Decided. The event Counts brings the progress of the running
// requests, which is valid only for the event that follows it, and for the rounds of that event.
func (l *Boards) Apply(e Event, now time.Time) []Effect {
	clear(l.effects) // otherwise the old effects would keep their entries from being garbage collected
	l.effects, l.now = l.effects[:0], now
	e.apply(l)
	if _, isCounts := e.(*Counts); !isCounts { // after the event Counts itself, the boards keep the Counts for the event that follows
		l.forgetCounts()
	}
	return l.effects
}

// NeedsCounts says whether a Tick at the time now would read how many tokens the running requests of a model have. If so, the caller first
// applies Counts, which brings these numbers up to date. It is false for a model without a board.
func (l *Boards) NeedsCounts(model string, now time.Time) bool {
	b := l.boards[model]
	return b != nil && b.needsCounts(now)
}

// nextToDecide returns the first board with a round of decisions to run; nil: no board has one.
func (l *Boards) nextToDecide() *board {
	for _, b := range l.inOrder {
		if b.deciding() {
			return b
		}
	}
	return nil
}

// Deciding says whether any board has a round of decisions to run. The caller must then send Decide and Decided.
func (l *Boards) Deciding() bool { return l.nextToDecide() != nil }

// forgetCounts drops the Counts of all boards that have no round to run, because Counts are valid only for one event and the rounds that
// follow from it.
func (l *Boards) forgetCounts() {
	for _, b := range l.inOrder {
		if b != l.round && !b.deciding() { // otherwise a round of this board is under way or has yet to run
			b.counts = nil
		}
	}
}
