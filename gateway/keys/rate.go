package keys

import (
	"sync"
	"time"
)

// bucket holds how much of a limit a key may use now. It fills evenly, from empty to full in a
// minute. It may go into debt, because the tokens of an answer are known only at its end.
type bucket struct {
	mu   sync.Mutex
	debt float64 // requests or tokens that are missing to a full bucket
	at   time.Time
}

// take takes n out of a bucket of size perMinute. If the bucket holds too little, take takes
// nothing, ok is false, and wait is the time until it holds enough. More than the whole bucket can
// be taken only when it is full.
func (b *bucket) take(now time.Time, perMinute, n int) (wait time.Duration, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.refill(now, perMinute)
	// A bucket holds perMinute less its debt. What is missing to n, or to a full bucket for a larger
	// n, comes at perMinute per minute.
	if missing := b.debt + float64(min(n, perMinute)) - float64(perMinute); missing > rounding {
		return time.Duration(min(missing/float64(perMinute)*float64(time.Minute), float64(longestWait))), false
	}
	b.debt += float64(n)
	return 0, true
}

// longestWait bounds the wait that take returns, because a large debt could overflow a Duration.
const longestWait = 24 * time.Hour

// rounding is the error that many refills may add up to, in requests or tokens.
const rounding = 1e-6

// adjust takes n more out of the bucket even if it holds less. If n is below 0, adjust puts -n
// back.
func (b *bucket) adjust(now time.Time, perMinute, n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.refill(now, perMinute)
	b.debt = max(0, b.debt+float64(n))
}

// refill lowers the debt at perMinute per minute, for the time since the last refill. A bucket
// without debt is full.
func (b *bucket) refill(now time.Time, perMinute int) {
	if passed := now.Sub(b.at); passed > 0 {
		b.debt = max(0, b.debt-passed.Minutes()*float64(perMinute))
		b.at = now
	}
}
