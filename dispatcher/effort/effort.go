// Package effort limits how long a policy may search, so that a round of decisions takes about a millisecond at most.
package effort

import "time"

const (
	budgetMost  = 4000                   // evaluations
	budgetLeast = 250                    // evaluations
	tickSlow    = time.Millisecond       // after a longer round, the budget becomes a quarter smaller
	tickQuick   = 500 * time.Microsecond // after ticksQuick shorter rounds in a row, the budget becomes a sixteenth larger
	ticksQuick  = 64
)

// Budget is how many evaluations a policy may spend on a round: how many changes of its placements it may try.
type Budget struct {
	now   int32 // evaluations; 0 means budgetMost
	quick int   // rounds in a row that were shorter than tickQuick
}

// Evaluations returns the budget of the next round.
func (b *Budget) Evaluations() int32 {
	if b.now == 0 {
		return budgetMost
	}
	return b.now
}

// Spent adapts the budget to the duration of the last round.
func (b *Budget) Spent(took time.Duration) {
	before := b.Evaluations()
	switch {
	case took > tickSlow:
		b.quick = 0
		b.now = max(budgetLeast, before-before/4)
	case took < tickQuick:
		if b.quick++; b.quick < ticksQuick {
			return
		}
		b.quick = 0
		b.now = min(budgetMost, before+before/16)
	default:
		b.quick = 0
	}
}
