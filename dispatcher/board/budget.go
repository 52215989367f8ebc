package board

import "time"

// Evaluations a policy may spend on a tick, and when they change.
const (
	budgetMost  = 4000
	budgetLeast = 250
	tickSlow    = time.Millisecond       // over it: a quarter less
	tickQuick   = 500 * time.Microsecond // so many below it in a row: a sixteenth more
	ticksQuick  = 64
)

// budget steers how hard the policy of a group may search, so that its ticks
// take a millisecond at most.
type budget struct {
	now   int32 // 0 reads as budgetMost
	quick int   // ticks in a row
}

// evaluations is the budget of the next tick.
func (b *budget) evaluations() int32 {
	if b.now == 0 {
		return budgetMost
	}
	return b.now
}

// spent takes in how long a tick took and says how the budget changed,
// nothing if it did not.
func (b *budget) spent(took time.Duration) (change string) {
	before := b.evaluations()
	switch {
	case took > tickSlow:
		b.quick = 0
		b.now = max(budgetLeast, before-before/4)
	case took < tickQuick:
		if b.quick++; b.quick < ticksQuick {
			return ""
		}
		b.quick = 0
		b.now = min(budgetMost, before+before/16)
	default:
		b.quick = 0
	}
	switch after := b.evaluations(); {
	case after < before:
		return BudgetDown
	case after > before:
		return BudgetUp
	}
	return ""
}
