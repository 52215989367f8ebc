// Package effort steers how hard a policy may search, so that a tick takes a millisecond at most.
package effort

import "time"

// Bounds of the evaluations that a policy may spend on a tick, and when their number changes.
const (
	budgetMost  = 4000
	budgetLeast = 250
	tickSlow    = time.Millisecond       // after a longer tick, the budget becomes a quarter smaller
	tickQuick   = 500 * time.Microsecond // after ticksQuick shorter ticks in a row, it becomes a sixteenth larger
	ticksQuick  = 64
)

// Budget is how many evaluations the policy of a group may spend on a tick.
type Budget struct {
	now   int32 // 0 reads as budgetMost
	quick int   // ticks shorter than tickQuick in a row
}

// Evaluations returns the budget of the next tick.
func (b *Budget) Evaluations() int32 {
	if b.now == 0 {
		return budgetMost
	}
	return b.now
}

// Spent adapts the budget to how long a tick took.
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
