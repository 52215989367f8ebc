package keys

import (
	"sync"
	"time"
)

// bucket holds how much a key may use now. It fills evenly over a minute. It may be in debt, because only at the end of
// an answer is it known how much the answer took.
type bucket struct {
	mu   sync.Mutex
	debt float64 // what is missing to full
	at   time.Time
}

// take takes n out of a bucket that holds perMinute. If there is not enough in it, ok is false and wait is how long
// until there is. More than the whole bucket may be taken only when it is full.
func (b *bucket) take(now time.Time, perMinute, n int) (wait time.Duration, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.refill(now, perMinute)
	if over := b.debt + float64(min(n, perMinute)) - float64(perMinute); over > rounding {
		return time.Duration(min(over/float64(perMinute)*float64(time.Minute), float64(longestWait))), false
	}
	b.debt += float64(n)
	return 0, true
}

// longestWait is the longest that is told; a debt may be larger than a Duration.
const longestWait = 24 * time.Hour

// rounding is what a sum of many refills may be off, in requests or tokens.
const rounding = 1e-6

// settle takes n more, however much is left; below 0 it puts back.
func (b *bucket) settle(now time.Time, perMinute, n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.refill(now, perMinute)
	b.debt = max(0, b.debt+float64(n))
}

// refill pays back what the time since the last call has earned.
func (b *bucket) refill(now time.Time, perMinute int) {
	if passed := now.Sub(b.at); passed > 0 {
		b.debt = max(0, b.debt-passed.Minutes()*float64(perMinute))
		b.at = now
	}
}
