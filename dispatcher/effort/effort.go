// Package effort steers how hard a policy may search, so that a tick takes a millisecond at most.
package effort

import "time"

// Evaluations a policy may spend on a tick, and when they change.
const (
	budgetMost  = 4000
	budgetLeast = 250
	tickSlow    = time.Millisecond       // over it: a quarter less
	tickQuick   = 500 * time.Microsecond // so many below it in a row: a sixteenth more
	ticksQuick  = 64
)

// Budget is what the policy of a group may spend.
type Budget struct {
	now   int32 // 0 reads as budgetMost
	quick int   // ticks in a row
}

// Evaluations is the budget of the next tick.
func (b *Budget) Evaluations() int32 {
	if b.now == 0 {
		return budgetMost
	}
	return b.now
}

// Spent takes in how long a tick took.
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
