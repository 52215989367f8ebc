package board

import (
	"slices"
	"time"
)

func (e Enqueue) apply(l *Boards) { l.enqueue(waitingEntry{Enqueue: e}) }

func (e Withdraw) apply(l *Boards) { l.withdraw(e.Entry) }

// apply gives rememberEnded the estimate for an unreported answer, because the loads of the steps
// from which it learns had it. release gets the reported tokens.
func (e *Release) apply(l *Boards) {
	b := l.boards[e.Model]
	s := &b.slots.records[e.Slot]
	// The record may not have this yet, because countStreamTokens sets it only at measurements.
	s.estimate.maxTokens = e.MaxUnreported
	generated, firstStep, lastStep := e.Generated, e.FirstStep, e.LastStep
	hasEstimate := s.estimate.firstStep != 0 // only unreported answers have one
	// Without a group, no step is reported.
	if hasEstimate && s.rank.group != nil {
		generated, firstStep, lastStep = s.estimatedEnd()
	}
	b.rememberEnded(e.Slot, generated, firstStep, lastStep)
	b.release(e.Slot, e.Outcome, e.Generated, e.Started, l.now)
}

// estimatedEnd needs a rank with a group.
func (s *slotRecord) estimatedEnd() (generated int32, firstStep, lastStep uint32) {
	firstStep, lastStep = s.estimate.firstStep, s.rank.group.lastStep.Number
	// The answer began and ended in the step under way.
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

// apply: the rank refuses requests no longer, and a hand-off has arrived.
func (e FirstEvent) apply(l *Boards) {
	b := l.boards[e.Model]
	s := &b.slots.records[e.Slot]
	b.recordAccepted(s)
	if s.prefiller != "" {
		b.recordArrived(s, l.now)
	}
}

func (e *Steps) apply(l *Boards) {
	if b, g := l.groupWithKey(e.Group); g != nil {
		b.recordSteps(g, e.List)
	}
}

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

func (e *Counts) apply(l *Boards) {
	if b := l.boards[e.Model]; b != nil {
		b.counts = e
		b.measureTokenRate(l.now)
	}
}

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

func (Decide) apply(l *Boards) {
	if l.round = l.nextToDecide(); l.round != nil {
		l.round.runRound(l.now)
	}
}

func (e *Decided) apply(l *Boards) {
	if b := l.round; b != nil {
		l.round = nil
		b.finishRound(e, l.now)
	}
}

func (Shutdown) apply(l *Boards) {
	l.draining = true
	l.refuseAll(ErrDraining)
}

func (l *Boards) reportRejected(err error) {
	if err != nil {
		l.emit(Effect{Kind: EffectRejected, Err: err})
	}
}

// MayHoldEndedKV says whether by the boards' count an engine may still hold KV of ended requests
// (orphans.go, kept.go).
func (l *Boards) MayHoldEndedKV(worker int32) bool {
	return slices.ContainsFunc(l.inOrder, func(b *board) bool {
		r := b.ranks[worker]
		return r != nil && (len(r.orphans) > 0 || r.keptKV.Tokens() > 0)
	})
}

// apply frees KV of ended requests that the gauge shows is not in use.
func (e Gauged) apply(l *Boards) {
	if l.now.Sub(e.At) > gaugeLife {
		return
	}
	for _, b := range l.inOrder {
		// The gauge does not tell the two apart, so kept KV is corrected only without orphans.
		if r := b.ranks[e.Worker]; r != nil && len(r.orphans) > 0 {
			b.correctOrphans(r, e)
		} else if r != nil && r.keptKV.Tokens() > 0 {
			b.correctKept(r, e)
		}
	}
}

// Apply changes the boards by one event and returns the effects that the caller must carry out now.
// They are valid until the next Apply. While Deciding returns true, the next two events must be
// Decide and Decided. Counts is valid only for the event that follows it, and for its rounds.
func (l *Boards) Apply(e Event, now time.Time) []Effect {
	clear(l.effects) // so that their entries can be garbage collected
	l.effects, l.now = l.effects[:0], now
	e.apply(l)
	if _, isCounts := e.(*Counts); !isCounts {
		l.forgetCounts()
	}
	return l.effects
}

// NeedsCounts says whether the caller must apply Counts before a Tick at the time now.
func (l *Boards) NeedsCounts(model string, now time.Time) bool {
	b := l.boards[model]
	return b != nil && b.needsCounts(now)
}

func (l *Boards) nextToDecide() *board {
	for _, b := range l.inOrder {
		if b.deciding() {
			return b
		}
	}
	return nil
}

// Deciding says whether the caller must send Decide and Decided.
func (l *Boards) Deciding() bool { return l.nextToDecide() != nil }

func (l *Boards) forgetCounts() {
	for _, b := range l.inOrder {
		if b != l.round && !b.deciding() { // otherwise a round is under way or has yet to run
			b.counts = nil
		}
	}
}
