package pool

import (
	"cmp"
	"slices"
	"time"
)

// Pool keeps its entries in the order of Arrival. Aggregated entries come first, in the order in
// which they were added. It reads no clock.
type Pool struct {
	ttl     time.Duration
	entries []*Entry // by sortTime, then by seq
	seq     uint64   // number of entries added since New
	// No entry expires before nextExpiry; zero: none expires. Remove leaves it as it is, so Expire may
	// look at all entries once in vain.
	nextExpiry time.Time
}

// New returns an empty pool. With ttl 0, only the deadline of an entry counts.
func New(ttl time.Duration) *Pool { return &Pool{ttl: ttl} }

// SetTTL does not affect entries that are in the pool already.
func (p *Pool) SetTTL(ttl time.Duration) { p.ttl = ttl }

// Add sets Entered and Arrival if they are zero.
func (p *Pool) Add(e *Entry, now time.Time) {
	if e.Entered.IsZero() {
		e.Entered = now
	}
	if e.Arrival.IsZero() {
		e.Arrival = e.Entered
	}
	p.seq++
	e.seq = p.seq
	e.setExpiry(p.ttl)
	at, _ := p.find(e)
	p.entries = slices.Insert(p.entries, at, e)
	p.advanceNextExpiry(e)
}

func (p *Pool) advanceNextExpiry(e *Entry) {
	isFirst := p.nextExpiry.IsZero() || e.expires.Before(p.nextExpiry)
	if !e.expires.IsZero() && isFirst {
		p.nextExpiry = e.expires
	}
}

// Remove takes an entry out; false: it is not there.
func (p *Pool) Remove(e *Entry) bool {
	at, found := p.find(e)
	if !found || p.entries[at] != e { // an entry of another pool may have the same sort keys
		return false
	}
	p.entries = slices.Delete(p.entries, at, at+1)
	return true
}

// find returns the index at which the entry is, or would be inserted.
func (p *Pool) find(e *Entry) (index int, found bool) {
	return slices.BinarySearchFunc(p.entries, e, func(a, b *Entry) int {
		return cmp.Or(a.sortTime().Compare(b.sortTime()), cmp.Compare(a.seq, b.seq))
	})
}

// The zero time puts an aggregated entry before all others, because the queue for a prefill has put
// such entries in order already.
func (e *Entry) sortTime() time.Time {
	if e.Aggregated {
		return time.Time{}
	}
	return e.Arrival
}

// Len includes discarded hand-offs.
func (p *Pool) Len() int { return len(p.entries) }

// Entries returns the pool's own slice, which is valid until the next Add, Remove or Expire.
func (p *Pool) Entries() []*Entry { return p.entries }

// Oldest returns the longest wait of any entry.
func (p *Pool) Oldest(now time.Time) time.Duration {
	var oldest time.Duration
	for _, e := range p.entries {
		oldest = max(oldest, e.Wait(now))
	}
	return oldest
}

// NextDeadline returns the time by which Expire must be called again; zero: no entry can expire.
func (p *Pool) NextDeadline() time.Time {
	if len(p.entries) == 0 {
		return time.Time{}
	}
	return p.nextExpiry
}

// Expire removes the entries that may wait no longer, and appends them to dst. Entry.Expiry has the
// reason.
func (p *Pool) Expire(now time.Time, dst []*Entry) []*Entry {
	if p.nextExpiry.IsZero() || now.Before(p.nextExpiry) {
		return dst
	}
	p.nextExpiry = time.Time{}
	p.entries = slices.DeleteFunc(p.entries, func(e *Entry) bool {
		if e.expired(now) {
			dst = append(dst, e)
			return true
		}
		p.advanceNextExpiry(e)
		return false
	})
	return dst
}
