package pool

import (
	"cmp"
	"slices"
	"time"
)

// Pool keeps its entries in the order of Arrival. Aggregated entries come before them, in the order in which they were added. It reads no
// clock: the caller passes the time.
type Pool struct {
	ttl     time.Duration
	entries []*Entry // in the order of sortTime and, for equal times, of seq
	seq     uint64   // number of entries added since New, from which each entry gets its own seq
	// No entry expires before nextExpiry; zero: no entry ever expires. Remove leaves it as it is, even if the entry that expires first is
	// removed: Expire may then look at all entries once in vain.
	nextExpiry time.Time
}

// New returns an empty pool. An entry may wait for ttl, or until its deadline if that is earlier. With ttl 0, only the deadline counts.
func New(ttl time.Duration) *Pool { return &Pool{ttl: ttl} }

// SetTTL changes how long an entry may wait. It does not affect entries that are in the pool already.
func (p *Pool) SetTTL(ttl time.Duration) { p.ttl = ttl }

// Add adds an entry. It sets Entered and Arrival if the caller has left them zero.
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

// advanceNextExpiry makes nextExpiry the time at which an entry expires, if that is earlier. An entry that never expires changes nothing.
func (p *Pool) advanceNextExpiry(e *Entry) {
	isFirst := p.nextExpiry.IsZero() || e.expires.Before(p.nextExpiry) // zero: no entry that expires is known yet
	if !e.expires.IsZero() && isFirst {
		p.nextExpiry = e.expires
	}
}

// Remove takes an entry out of the pool; false: it is not there.
func (p *Pool) Remove(e *Entry) bool {
	at, found := p.find(e)
	if !found || p.entries[at] != e { // an entry of another pool may have the same sort keys
		return false
	}
	p.entries = slices.Delete(p.entries, at, at+1)
	return true
}

// find returns the index of an entry. If the entry is not there, it returns the index at which it would be inserted, and false.
func (p *Pool) find(e *Entry) (index int, found bool) {
	return slices.BinarySearchFunc(p.entries, e, func(a, b *Entry) int {
		return cmp.Or(a.sortTime().Compare(b.sortTime()), cmp.Compare(a.seq, b.seq))
	})
}

// sortTime returns the first sort key of an entry: its arrival. An aggregated entry has the zero time and so comes before all others,
// because the queue for a prefill has put such entries in order already. The second sort key is the order in which entries were added.
func (e *Entry) sortTime() time.Time {
	if e.Aggregated {
		return time.Time{}
	}
	return e.Arrival
}

// Len returns the number of entries that wait, including discarded hand-offs.
func (p *Pool) Len() int { return len(p.entries) }

// Entries returns the entries in the pool's order. The slice belongs to the pool, and is valid until the next Add, Remove or Expire.
func (p *Pool) Entries() []*Entry { return p.entries }

// Oldest returns the longest time that any entry has been in the pool; 0: the pool is empty.
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

// Expire removes the entries that may wait no longer, and appends them to dst. Entry.Expiry has the reason. Expire also finds out when
// the first of the other entries expires (nextExpiry).
func (p *Pool) Expire(now time.Time, dst []*Entry) []*Entry {
	if p.nextExpiry.IsZero() || now.Before(p.nextExpiry) { // no entry has expired, so none need be looked at
		return dst
	}
	p.nextExpiry = time.Time{} // the loop below finds the next one among the entries that stay
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
