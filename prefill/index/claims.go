package index

import (
	"time"
)

// Index is the table of blocks and who holds them.
type Index struct {
	cfg Config

	// An entry is a block that some slot holds. Its number is an index into these slices; number 0 is not used.
	table      table
	keys       []Key
	holders    []uint64 // bits, one for each slot, in words for each entry
	words      int
	firstClaim []uint32 // the entry's first claim; for a free number, the next free one
	useLinks   []link
	useOrder   order
	free       uint32 // the first free number
	entries    int

	// A claim says that one slot holds one entry.
	claims     []claim // number 0 is not used
	recency    []link  // by claim, in the slot's order of use
	freeClaim  uint32
	lastClaim  uint32 // the claim that was looked up last
	claimCount int

	slots     []slot
	clock     uint32 // counts speculations: a claim that was born after a speculation is not the speculation's
	lingering []lingering
	evictions [reasons]uint64
}

// Eviction says which block goes first when there is no more room.
type Eviction uint8

// Slot is a candidate's place in the index. It is stale once the candidate is removed: calls with a stale Slot do
// nothing, although another candidate may have its number.
type Slot struct {
	N    int // its place in what Match returns
	life uint32
}

// Config describes an index.
type Config struct {
	MaxBytes int64    // bytes of memory, default 256 MiB; at least 64 KiB
	Evict    Eviction // default LeastRecent
}

// The evictions.
const (
	LeastRecent Eviction = iota // like engines' own caches: for the index of our own engines
	Oldest                      // the block that was inserted first: for what was sent to a peer
)

type claim struct {
	entry   uint32
	sibling uint32 // the next claim on the entry; for a free claim, the next free one
	born    uint32 // clock at its creation
	slot    uint16
	spec    uint16 // how many probes in flight vouch for it; the top bit is set once the engine is known to have the block
}

const (
	confirmed = 1 << 15
	mostSpec  = confirmed - 1
)

type slot struct {
	id       string
	inUse    bool
	life     uint32 // how many candidates have used this slot so far; it tells the claims of earlier candidates apart
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

// fitting returns the blocks of a prompt that the slot can hold at once: the first ones.
func (s *slot) fitting(keys []Key) []Key {
	if s.capacity > 0 && len(keys) > s.capacity {
		return keys[:s.capacity]
	}
	return keys
}

// lookUp returns the claim of slot n on a key, 0 if it has none.
func (x *Index) lookUp(n int, k Key) uint32 {
	entry := x.table.find(k, x.keys)
	if x.holders[int(entry)*x.words+n/64]&(1<<(n%64)) == 0 {
		return 0
	}
	return x.claimOf(entry, n)
}

// claimOf returns the claim of slot n on an entry that it holds. A prompt's claims were made one after the other, so the
// next one is mostly a neighbour of the last; else it looks through all claims on the entry.
func (x *Index) claimOf(entry uint32, n int) uint32 {
	for _, c := range [...]uint32{x.lastClaim - 1, x.lastClaim + 1} {
		if int(c) < len(x.claims) && x.claims[c].entry == entry && int(x.claims[c].slot) == n {
			x.lastClaim = c
			return c
		}
	}
	c := x.firstClaim[entry]
	for int(x.claims[c].slot) != n {
		c = x.claims[c].sibling
	}
	x.lastClaim = c
	return c
}

// claim returns the claim of slot n on a key, and makes it if there is none. It is the most recent one of the slot from
// then on. Claims for which there is no more room are dropped.
func (x *Index) claim(n int, k Key) uint32 {
	s, word, bit := &x.slots[n], n/64, uint64(1)<<(n%64)
	entry := x.table.find(k, x.keys)
	if x.holders[int(entry)*x.words+word]&bit != 0 {
		c := x.claimOf(entry, n)
		if x.cfg.Evict == LeastRecent {
			x.useOrder.touch(x.useLinks, entry)
			s.recent.touch(x.recency, c)
		}
		return c
	}
	if s.capacity > 0 && s.held >= s.capacity {
		x.drop(s.recent.oldest, Capacity) // it is not a claim on e, because the slot does not hold e
	}
	if entry != 0 && x.cfg.Evict == LeastRecent {
		x.useOrder.touch(x.useLinks, entry) // before room is made: else the entry itself might be evicted
	}
	for x.bytes()+x.costOn(entry) > x.cfg.MaxBytes {
		x.evict(x.useOrder.oldest)
		entry = x.table.find(k, x.keys)
	}
	if entry == 0 {
		entry = x.newEntry(k)
	}
	x.holders[int(entry)*x.words+word] |= bit
	c := x.newClaim()
	x.claims[c] = claim{entry: entry, sibling: x.firstClaim[entry], born: x.clock, slot: uint16(n)}
	x.firstClaim[entry] = c
	s.recent.push(x.recency, c)
	s.held++
	return c
}

// newEntry makes the entry of a key, which no slot holds yet.
func (x *Index) newEntry(k Key) uint32 {
	entry := x.free
	if entry != 0 {
		x.free = x.firstClaim[entry]
	} else {
		entry = uint32(len(x.keys))
		x.keys, x.firstClaim, x.useLinks = append(x.keys, Key{}), append(x.firstClaim, 0), append(x.useLinks, link{})
		for range x.words {
			x.holders = append(x.holders, 0)
		}
	}
	x.keys[entry], x.firstClaim[entry] = k, 0
	x.table.add(k, entry)
	x.useOrder.push(x.useLinks, entry)
	x.entries++
	return entry
}

// newClaim returns the number of a claim that is not used.
func (x *Index) newClaim() uint32 {
	x.claimCount++
	if c := x.freeClaim; c != 0 {
		x.freeClaim = x.claims[c].sibling
		return c
	}
	x.claims, x.recency = append(x.claims, claim{}), append(x.recency, link{})
	return uint32(len(x.claims) - 1)
}

// drop takes one claim away, and the entry with its last claim.
func (x *Index) drop(c uint32, why Reason) {
	entry, n := x.claims[c].entry, int(x.claims[c].slot)
	s := &x.slots[n]
	s.recent.remove(x.recency, c)
	s.held--
	x.claimCount--
	x.evictions[why]++
	x.holders[int(entry)*x.words+n/64] &^= 1 << (n % 64)
	next := &x.firstClaim[entry] // the link that leads to the claim
	for *next != c {
		next = &x.claims[*next].sibling
	}
	*next = x.claims[c].sibling
	x.claims[c] = claim{sibling: x.freeClaim}
	x.freeClaim = c
	if x.firstClaim[entry] == 0 {
		x.table.remove(x.keys[entry], entry)
		x.useOrder.remove(x.useLinks, entry)
		x.keys[entry], x.firstClaim[entry] = Key{}, x.free
		x.free = entry
		x.entries--
	}
}

// evict drops all claims on an entry.
func (x *Index) evict(entry uint32) {
	for c := x.firstClaim[entry]; c != 0; {
		next := x.claims[c].sibling
		x.drop(c, ForBytes)
		c = next
	}
}

// costOn is what one more claim on an entry costs in bytes; 0 stands for a new entry.
func (x *Index) costOn(entry uint32) int64 {
	if entry != 0 {
		return claimCost
	}
	return x.entryCost()
}

func (x *Index) entryCost() int64 { return int64(entryCost + wordCost*x.words) }

// Memory is counted by a formula that bounds what is really used, growth of
// the table included.
const (
	entryCost = 96 // bytes of an entry with its first claim
	wordCost  = 16 // bytes for every 64 slots
	claimCost = 32 // bytes of each further claim
)

func (x *Index) bytes() int64 {
	return int64(x.entries)*x.entryCost() + int64(x.claimCount-x.entries)*claimCost
}

// Reset drops all blocks and gives their memory back. Slots stay.
func (x *Index) Reset() {
	x.words = (max(len(x.slots), 1) + 63) / 64
	x.table = table{}
	x.keys, x.holders = make([]Key, 1), make([]uint64, x.words)
	x.firstClaim, x.useLinks, x.useOrder = make([]uint32, 1), make([]link, 1), order{}
	x.claims, x.recency = make([]claim, 1), make([]link, 1)
	x.free, x.freeClaim, x.entries = 0, 0, 0
	x.evictions[Removed] += uint64(x.claimCount)
	x.claimCount = 0
	for i := range x.slots {
		s := &x.slots[i]
		s.epoch++
		s.held, s.recent = 0, order{}
	}
	x.lingering = nil
}

// Speculation is the claim of a probe in flight on its prompt's blocks. Confirm, Drop or Linger ends it once; a
// second end does nothing.
type Speculation struct {
	keys  []Key
	slot  Slot
	epoch uint32
	began uint32
}

// lingering is a speculation whose probe ended without a known outcome.
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
	Capacity               // the candidate's engine was full, by our count
	TTL                    // the outcome of the probe stayed unknown
	Removed                // the engine said so, or is gone
	Cold                   // the engine's events had a gap
	Failed                 // the probe failed
	reasons
)

// widen makes the holders of each entry wide enough for all slots.
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
		x.evict(x.useOrder.oldest)
	}
}
