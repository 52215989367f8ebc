package board

import (
	"cmp"
	"time"
)

const (
	mostEvaluations   = 4000                   // largest budget of a round, in evaluations; a new group begins with this budget
	leastEvaluations  = 250                    // smallest budget of a round, in evaluations
	slowRound         = time.Millisecond       // after a round that took longer, the budget becomes a quarter smaller
	quickRound        = 500 * time.Microsecond // after quickRoundsNeeded rounds in a row that took less, the budget becomes a sixteenth larger
	quickRoundsNeeded = 64                     // quick rounds in a row that make the budget larger
)

// searchBudget is how many evaluations a policy may spend on a round: how many changes of its assignments it may try. It limits how long
// the policy searches, so that a round takes about a millisecond at most.
type searchBudget struct {
	nextEvaluations int32 // budget of the next round; 0 means mostEvaluations
	quickRounds     int   // rounds in a row that were shorter than quickRound
}

// evaluations returns the budget of the next round, in evaluations.
func (b *searchBudget) evaluations() int32 {
	return cmp.Or(b.nextEvaluations, mostEvaluations)
}

// adapt changes the budget by the duration of the last round. A single slow round makes it smaller, but only many quick rounds in a row
// make it larger.
func (b *searchBudget) adapt(took time.Duration) {
	before := b.evaluations()
	switch {
	case took > slowRound:
		b.quickRounds = 0
		b.nextEvaluations = max(leastEvaluations, before-before/4)
	case took < quickRound:
		if b.quickRounds++; b.quickRounds < quickRoundsNeeded {
			return
		}
		b.quickRounds = 0
		b.nextEvaluations = min(mostEvaluations, before+before/16)
	default: // the round was neither slow nor quick, so the budget is right
		b.quickRounds = 0
	}
}
