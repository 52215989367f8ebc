package board

import (
	"cmp"
	"time"
)

const (
	mostEvaluations   = 4000 // largest budget, and that of a new group
	leastEvaluations  = 250
	slowRound         = time.Millisecond       // a longer round makes the budget a quarter smaller
	quickRound        = 500 * time.Microsecond // after 64 shorter rounds in a row, a sixteenth larger
	quickRoundsNeeded = 64
)

// searchBudget is how many changes of its assignments (evaluations) a policy may try in a round, so
// that the round takes about a millisecond at most.
type searchBudget struct {
	nextEvaluations int32 // 0 means mostEvaluations
	quickRounds     int   // shorter than quickRound, in a row
}

func (b *searchBudget) evaluations() int32 {
	return cmp.Or(b.nextEvaluations, mostEvaluations)
}

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
	default:
		b.quickRounds = 0
	}
}
