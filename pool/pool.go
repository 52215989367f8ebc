package pool

import (
	"cmp"
	"slices"
	"time"
)

// Pool keeps entries in order of Arrival, and before them Mixed entries in the order in which they were added. It reads no clock:
// now is an argument.
type Pool struct {
	ttl     time.Duration
	entries []*Entry // ascending (turn, seq)
	seq     uint64
	// No entry expires before next; zero: none expires. next may be too early if the entry
	// that set it was removed. That costs one scan in Expire, and keeps Remove cheap.
	next time.Time
}

// New returns an empty pool. An entry may wait for ttl, or until its
// deadline if that is earlier; ttl 0 leaves only the deadline.
func New(ttl time.Duration) *Pool { return &Pool{ttl: ttl} }

// Clone copies the pool with its entries.
func (p *Pool) Clone() *Pool {
	c := *p
	c.entries = make([]*Entry, len(p.entries))
	for i, e := range p.entries {
		entry := *e
		c.entries[i] = &entry
	}
	return &c
}

// SetTTL changes how long entries may wait that are added from now on.
func (p *Pool) SetTTL(ttl time.Duration) { p.ttl = ttl }

// Add takes e in. Times the caller left zero become now.
func (p *Pool) Add(e *Entry, now time.Time) {
	if e.Entered.IsZero() {
		e.Entered = now
	}
	if e.Arrival.IsZero() {
		e.Arrival = e.Entered
	}
	p.seq++
	e.seq = p.seq
	e.arm(p.ttl)
	at, _ := p.find(e)
	p.entries = slices.Insert(p.entries, at, e)
	if !e.expires.IsZero() && (p.next.IsZero() || e.expires.Before(p.next)) {
		p.next = e.expires
	}
}

// Remove takes e out; false when it is not in the pool.
func (p *Pool) Remove(e *Entry) bool {
	at, ok := p.find(e)
	if !ok || p.entries[at] != e {
		return false
	}
	p.entries = slices.Delete(p.entries, at, at+1)
	return true
}

// find returns where an entry is in the pool's order, or where it would be inserted; the second result is false if it is not there.
func (p *Pool) find(e *Entry) (int, bool) {
	return slices.BinarySearchFunc(p.entries, e, func(a, b *Entry) int {
		return cmp.Or(a.turn().Compare(b.turn()), cmp.Compare(a.seq, b.seq))
	})
}

// turn is the first sort key of an entry; the order in which entries were added is the second.
func (e *Entry) turn() time.Time {
	if e.Mixed {
		return time.Time{}
	}
	return e.Arrival
}

// Len is the number of entries that wait.
func (p *Pool) Len() int { return len(p.entries) }

// Entries are the entries that wait, in the pool's order. The slice belongs to the
// pool and is good until the next Add, Remove or Expire.
func (p *Pool) Entries() []*Entry { return p.entries }

// Oldest is the longest time any entry has been in the pool.
func (p *Pool) Oldest(now time.Time) time.Duration {
	var oldest time.Duration
	for _, e := range p.entries {
		oldest = max(oldest, e.Wait(now))
	}
	return oldest
}

// NextDeadline is when Expire has to be called again at the latest; zero if
// no entry can expire.
func (p *Pool) NextDeadline() time.Time {
	if len(p.entries) == 0 {
		return time.Time{}
	}
	return p.next
}

// Expire removes the entries that may wait no longer and appends them to dst;
// their Expiry says why.
func (p *Pool) Expire(now time.Time, dst []*Entry) []*Entry {
	if p.next.IsZero() || now.Before(p.next) {
		return dst
	}
	p.next = time.Time{}
	p.entries = slices.DeleteFunc(p.entries, func(e *Entry) bool {
		if e.expired(now) {
			dst = append(dst, e)
			return true
		}
		if !e.expires.IsZero() && (p.next.IsZero() || e.expires.Before(p.next)) {
			p.next = e.expires
		}
		return false
	})
	return dst
}
