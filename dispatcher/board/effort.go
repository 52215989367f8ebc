package board

import (
	"cmp"
	"time"
)

const (
	mostEvaluations   = 4000                   // evaluations; a new group begins with so many
	leastEvaluations  = 250                    // evaluations
	slowRound         = time.Millisecond       // after a longer round, the budget becomes a quarter smaller
	quickRound        = 500 * time.Microsecond // after quickRoundsNeeded shorter rounds in a row, the budget becomes a sixteenth larger
	quickRoundsNeeded = 64                     // rounds
)

// searchBudget is how many evaluations a policy may spend on a round: how many changes of its placements it may try. It limits how long the
// policy searches, so that a round takes about a millisecond at most.
type searchBudget struct {
	nextEvaluations int32 // evaluations of the next round; 0 means mostEvaluations
	quickRounds     int   // rounds in a row that were shorter than quickRound
}

// evaluations returns the budget of the next round.
func (b *searchBudget) evaluations() int32 {
	return cmp.Or(b.nextEvaluations, mostEvaluations)
}

// adapt adapts the budget to the duration of the last round. A slow round makes it smaller at once, and only many quick rounds in a row
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
