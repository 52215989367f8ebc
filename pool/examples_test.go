package pool_test

import (
	"fmt"
	"time"

	"evenkeel/pool"
)

// Of two entries the one whose hand-off dies first is given up first, and its
// error says what to do.
func ExamplePool() {
	now := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	p := pool.New(6 * time.Minute)
	p.Add(&pool.Entry{ID: 1}, now)
	p.Add(&pool.Entry{ID: 2, Deadline: now.Add(15 * time.Second)}, now)

	fmt.Println("look again at", p.NextDeadline().Format(time.TimeOnly))
	for _, e := range p.Expire(now.Add(15*time.Second), nil) {
		_, why := e.Expiry()
		fmt.Println(e.ID, why)
	}
	// Output:
	// look again at 12:00:15
	// 2 pool: the hand-off passed its deadline while it waited for a decode rank; prefill again
}
