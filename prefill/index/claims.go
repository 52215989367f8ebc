package index

import (
	"time"
)

// Index is the table of blocks and who holds them.
type Index struct {
	cfg Config

	// An entry is a block that somebody holds. Its number indexes these; number 0 is not used.
	table   table
	keys    []Key
	holders []uint64 // words for each entry, a bit for each slot
	words   int
	claimed []uint32 // its first claim; of a free number, the next free one
	uses    []link
	use     order
	free    uint32 // the first free number
	entries int

	// A claim says that one slot holds one entry.
	claims    []claim // number 0 is not used
	recency   []link  // in the order of the slot
	freeClaim uint32
	last      uint32 // the claim that was looked up last
	held      int

	slots     []slot
	clock     uint32 // counts speculations: a claim born after one is not its own
	lingering []lingering
	evictions [reasons]uint64
}

// Eviction is which block goes first when there is no more room.
type Eviction uint8

// Slot is a candidate's place in the index. After the candidate's removal it is
// stale: what is done with it does nothing, though another has its number.
type Slot struct {
	N    int // its place in what Match returns
	life uint32
}

// Config describes an index.
type Config struct {
	MaxBytes int64    // of memory, default 256 MiB; at least 64 KiB
	Evict    Eviction // default LeastRecent
}

// The evictions.
const (
	LeastRecent Eviction = iota // as engines' caches do: the local index
	Oldest                      // inserted first: what was sent to a peer
)

type claim struct {
	entry   uint32
	sibling uint32 // the next claim on the entry; of a free one, the next free one
	born    uint32 // clock at its creation
	slot    uint16
	spec    uint16 // probes in flight that vouch for it; the top bit: the engine has it, or said so
}

const (
	confirmed = 1 << 15
	mostSpec  = confirmed - 1
)

type slot struct {
	id       string
	inUse    bool
	life     uint32 // counts candidates that had the number
	epoch    uint32 // counts how often all its claims were dropped
	capacity int    // blocks the candidate's engine can hold, 0 unknown
	held     int
	recent   order
}

// New returns an empty index.
func New(cfg Config) *Index {
	if cfg.MaxBytes <= 0 {
		cfg.MaxBytes = defaultBytes
	}
	cfg.MaxBytes = max(cfg.MaxBytes, leastBytes)
	x := &Index{cfg: cfg}
	x.Reset()
	return x
}

const (
	defaultBytes = 256 << 20
	leastBytes   = 64 << 10
)

// fitting are the blocks of a prompt that the slot can hold at once.
func (s *slot) fitting(keys []Key) []Key {
	if s.capacity > 0 && len(keys) > s.capacity {
		return keys[:s.capacity]
	}
	return keys
}

// lookUp returns the slot's claim on a key, 0 if it has none.
func (x *Index) lookUp(n int, k Key) uint32 {
	e := x.table.find(k, x.keys)
	if x.holders[int(e)*x.words+n/64]&(1<<(n%64)) == 0 {
		return 0
	}
	return x.claimOf(e, n)
}

// claimOf returns the slot's claim on an entry that it holds. A prompt's claims
// were made one after the other, so that the next is mostly beside the last;
// else all that hold the entry are looked at.
func (x *Index) claimOf(e uint32, n int) uint32 {
	for _, c := range [...]uint32{x.last - 1, x.last + 1} {
		if int(c) < len(x.claims) && x.claims[c].entry == e && int(x.claims[c].slot) == n {
			x.last = c
			return c
		}
	}
	c := x.claimed[e]
	for int(x.claims[c].slot) != n {
		c = x.claims[c].sibling
	}
	x.last = c
	return c
}

// claim returns the slot's claim on a key, made if there is none, as the most
// recent one; what has no room any more goes.
func (x *Index) claim(n int, k Key) uint32 {
	s, word, bit := &x.slots[n], n/64, uint64(1)<<(n%64)
	e := x.table.find(k, x.keys)
	if x.holders[int(e)*x.words+word]&bit != 0 {
		c := x.claimOf(e, n)
		if x.cfg.Evict == LeastRecent {
			x.use.touch(x.uses, e)
			s.recent.touch(x.recency, c)
		}
		return c
	}
	if s.capacity > 0 && s.held >= s.capacity {
		x.drop(s.recent.oldest, Capacity) // not on e: the slot does not hold it
	}
	if e != 0 && x.cfg.Evict == LeastRecent {
		x.use.touch(x.uses, e) // before room is made, or it may be what goes
	}
	for x.bytes()+x.costOn(e) > x.cfg.MaxBytes {
		x.evict(x.use.oldest)
		e = x.table.find(k, x.keys)
	}
	if e == 0 {
		e = x.newEntry(k)
	}
	x.holders[int(e)*x.words+word] |= bit
	c := x.newClaim()
	x.claims[c] = claim{entry: e, sibling: x.claimed[e], born: x.clock, slot: uint16(n)}
	x.claimed[e] = c
	s.recent.push(x.recency, c)
	s.held++
	return c
}

func (x *Index) newEntry(k Key) uint32 {
	e := x.free
	if e != 0 {
		x.free = x.claimed[e]
	} else {
		e = uint32(len(x.keys))
		x.keys, x.claimed, x.uses = append(x.keys, Key{}), append(x.claimed, 0), append(x.uses, link{})
		for range x.words {
			x.holders = append(x.holders, 0)
		}
	}
	x.keys[e], x.claimed[e] = k, 0
	x.table.add(k, e)
	x.use.push(x.uses, e)
	x.entries++
	return e
}

func (x *Index) newClaim() uint32 {
	x.held++
	if c := x.freeClaim; c != 0 {
		x.freeClaim = x.claims[c].sibling
		return c
	}
	x.claims, x.recency = append(x.claims, claim{}), append(x.recency, link{})
	return uint32(len(x.claims) - 1)
}

// drop takes one claim away, and its entry with the last one.
func (x *Index) drop(c uint32, why Reason) {
	e, n := x.claims[c].entry, int(x.claims[c].slot)
	s := &x.slots[n]
	s.recent.remove(x.recency, c)
	s.held--
	x.held--
	x.evictions[why]++
	x.holders[int(e)*x.words+n/64] &^= 1 << (n % 64)
	at := &x.claimed[e]
	for *at != c {
		at = &x.claims[*at].sibling
	}
	*at = x.claims[c].sibling
	x.claims[c] = claim{sibling: x.freeClaim}
	x.freeClaim = c
	if x.claimed[e] == 0 {
		x.table.remove(x.keys[e], e)
		x.use.remove(x.uses, e)
		x.keys[e], x.claimed[e] = Key{}, x.free
		x.free = e
		x.entries--
	}
}

// evict drops all claims on an entry.
func (x *Index) evict(e uint32) {
	for c := x.claimed[e]; c != 0; {
		next := x.claims[c].sibling
		x.drop(c, ForBytes)
		c = next
	}
}

// costOn is what a further claim on entry e costs, or the first on a new one.
func (x *Index) costOn(e uint32) int64 {
	if e != 0 {
		return claimCost
	}
	return x.entryCost()
}

func (x *Index) entryCost() int64 { return int64(entryCost + wordCost*x.words) }

// Memory is counted by a formula that bounds what is really used, growth of
// the table included.
const (
	entryCost = 96 // with its first claim
	wordCost  = 16 // for every 64 slots
	claimCost = 32 // of each further claim
)

func (x *Index) bytes() int64 {
	return int64(x.entries)*x.entryCost() + int64(x.held-x.entries)*claimCost
}

// Reset drops all blocks and gives their memory back. Slots stay.
func (x *Index) Reset() {
	x.words = (max(len(x.slots), 1) + 63) / 64
	x.table = table{}
	x.keys, x.holders = make([]Key, 1), make([]uint64, x.words)
	x.claimed, x.uses, x.use = make([]uint32, 1), make([]link, 1), order{}
	x.claims, x.recency = make([]claim, 1), make([]link, 1)
	x.free, x.freeClaim, x.entries = 0, 0, 0
	x.evictions[Removed] += uint64(x.held)
	x.held = 0
	for i := range x.slots {
		s := &x.slots[i]
		s.epoch++
		s.held, s.recent = 0, order{}
	}
	x.lingering = nil
}

// Speculation is the claim of a probe in flight on its prompt's blocks. It is
// ended once, by Confirm, Drop or Linger; a second end does nothing.
type Speculation struct {
	keys  []Key
	slot  Slot
	epoch uint32
	began uint32
}

// lingering is a speculation whose probe ended without an answer we know.
type lingering struct {
	Speculation
	until time.Time
}

// Reason is why a claim was dropped, as metrics name it.
type Reason uint8

func (r Reason) String() string { return reasonNames[r] }

var reasonNames = [reasons]string{"bytes", "capacity", "ttl", "removed", "cold", "failed"}

// The reasons.
const (
	ForBytes Reason = iota // the index was full
	Capacity               // the candidate's engine was, by our count
	TTL                    // nobody told how the probe ended
	Removed                // the engine said so, or it is gone
	Cold                   // its events had a gap
	Failed                 // the probe did
	reasons
)

// widen makes the holders of an entry wide enough for all slots.
func (x *Index) widen() {
	words := (len(x.slots) + 63) / 64
	if words == x.words {
		return
	}
	wide := make([]uint64, len(x.keys)*words)
	for e := range x.keys {
		copy(wide[e*words:], x.holders[e*x.words:(e+1)*x.words])
	}
	x.holders, x.words = wide, words
	for x.bytes() > x.cfg.MaxBytes {
		x.evict(x.use.oldest)
	}
}
