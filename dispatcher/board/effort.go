package board

import (
	"cmp"
	"time"
)

const (
	budgetMost  = 4000                   // evaluations; a new group begins with so many
	budgetLeast = 250                    // evaluations
	tickSlow    = time.Millisecond       // after a longer round, the budget becomes a quarter smaller
	tickQuick   = 500 * time.Microsecond // after ticksQuick shorter rounds in a row, the budget becomes a sixteenth larger
	ticksQuick  = 64
)

// searchBudget is how many evaluations a policy may spend on a round: how many changes of its placements it may try. It limits how long the
// policy searches, so that a round takes about a millisecond at most.
type searchBudget struct {
	next  int32 // evaluations of the next round; 0 means budgetMost
	quick int   // rounds in a row that were shorter than tickQuick
}

// evaluations returns the budget of the next round.
func (b *searchBudget) evaluations() int32 {
	return cmp.Or(b.next, budgetMost)
}

// spent adapts the budget to the duration of the last round.
func (b *searchBudget) spent(took time.Duration) {
	before := b.evaluations()
	switch {
	case took > tickSlow:
		b.quick = 0
		b.next = max(budgetLeast, before-before/4)
	case took < tickQuick:
		if b.quick++; b.quick < ticksQuick {
			return
		}
		b.quick = 0
		b.next = min(budgetMost, before+before/16)
	default:
		b.quick = 0
	}
}
