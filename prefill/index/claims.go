package index

import (
	"time"
)

// Index records which slots hold which blocks.
type Index struct {
	cfg Config

	// An entry is a block that at least one slot holds. Its number is an index into these slices; 0 is
	// not used.
	table          table
	keys           []Key
	holders        []uint64 // bit sets of the slots that hold an entry: wordsPerEntry elements per entry
	wordsPerEntry  int      // words of 64 bits, each for 64 slots
	firstClaim     []uint32 // by entry; for an unused entry: the next unused entry
	useLinks       []link
	useOrder       order  // by their last use, over all slots
	firstFreeEntry uint32 // 0: none is free
	entries        int

	// A claim says that one slot holds one entry.
	claims         []claim // by claim number; 0 is not used
	recency        []link  // by claim: its neighbours in the slot's order of use
	firstFreeClaim uint32  // 0: none is free
	lastClaim      uint32  // looked up last; claimOf tries its neighbours first
	claimCount     int

	slots     []slot
	clock     uint32 // counts speculations, to tell claims that are older than a speculation from newer ones
	lingering []lingering
	evictions [reasons]uint64 // claims dropped since the start
}

type Eviction uint8

// Slot stands for a candidate in the index. It is stale once the candidate is removed. Calls with a
// stale Slot do nothing, even if a new candidate has the same number.
type Slot struct {
	N          int    // index into the result of Match
	generation uint32 // differs from the index's slot if this Slot is stale
}

type Config struct {
	MaxBytes int64    // of memory, default 256 MiB; at least 64 KiB
	Evict    Eviction // default LeastRecent
}

// The orders in which blocks are evicted from a full index.
const (
	LeastRecent Eviction = iota // as engines' own caches do
	Oldest                      // the block that was inserted first; used for prompts that were sent to a peer region
)

type claim struct {
	entry   uint32
	sibling uint32 // next claim on the same entry; in an unused claim: the next unused one
	born    uint32 // the index's clock then
	slot    uint16
	// support is the number of speculations that need the claim. Its top bit (confirmed) is set while
	// the engine is known to hold the block. A claim with support 0 is dropped.
	support uint16
}

const (
	confirmed       = 1 << 15
	speculationMask = confirmed - 1 // also the largest number of speculations
)

// isNeeded: a claim that is not needed must be dropped.
func (c *claim) isNeeded() bool { return c.support != 0 }

func (c *claim) isConfirmed() bool { return c.support&confirmed != 0 }

func (c *claim) confirm() { c.support |= confirmed }

func (c *claim) unconfirm() { c.support &^= confirmed }

func (c *claim) speculations() uint16 { return c.support & speculationMask }

func (c *claim) addSpeculation() {
	if c.speculations() < speculationMask {
		c.support++
	}
}

// removeSpeculation needs a number above 0.
func (c *claim) removeSpeculation() { c.support-- }

type slot struct {
	id         string
	inUse      bool
	generation uint32 // how many candidates have used this slot so far
	clearCount uint32 // how often all claims were dropped at once
	capacity   int    // blocks; 0: no bound
	held       int    // claims
	recent     order  // claims, by their last use
}

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

// fitting returns as many of a prompt's first blocks as the slot can hold at once.
func (s *slot) fitting(keys []Key) []Key {
	if s.capacity > 0 && len(keys) > s.capacity {
		return keys[:s.capacity]
	}
	return keys
}

// lookUp returns 0 if the slot does not hold the key.
func (x *Index) lookUp(n int, k Key) uint32 {
	entry := x.table.find(k, x.keys)
	if word, bit := x.holderBit(entry, n); *word&bit == 0 { // entry 0 is held by no slot
		return 0
	}
	return x.claimOf(entry, n)
}

// holderBit returns where slot n has its bit among the holders of an entry.
func (x *Index) holderBit(entry uint32, n int) (word *uint64, bit uint64) {
	return &x.holders[int(entry)*x.wordsPerEntry+n/64], 1 << (n % 64)
}

// claimOf needs an entry that the slot holds. It first tries the neighbours of the claim that was
// looked up last, because the claims of a prompt mostly have consecutive numbers.
func (x *Index) claimOf(entry uint32, n int) uint32 {
	for _, c := range [...]uint32{x.lastClaim - 1, x.lastClaim + 1} { // 0 - 1 wraps around to a number that no claim has
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

// ensureClaim returns the claim of slot n on a key, and makes it if there is none, for which it
// drops others if the slot or the index is full.
func (x *Index) ensureClaim(n int, k Key) uint32 {
	entry := x.table.find(k, x.keys)                        // 0: none
	if word, bit := x.holderBit(entry, n); *word&bit != 0 { // never so for entry 0
		c := x.claimOf(entry, n)
		if x.cfg.Evict == LeastRecent { // with Oldest, the order of insertion stays
			x.useOrder.touch(x.useLinks, entry)
			x.slots[n].recent.touch(x.recency, c)
		}
		return c
	}
	entry = x.makeRoom(n, k, entry)
	if entry == 0 {
		entry = x.newEntry(k)
	}
	return x.addClaim(n, entry)
}

// makeRoom drops claims until there is room for a claim of slot n on key k. It returns the key's
// entry afterwards, which it may have had to evict; 0: none.
func (x *Index) makeRoom(n int, k Key, entry uint32) (entryLeft uint32) {
	s := &x.slots[n]
	if s.capacity > 0 && s.held >= s.capacity {
		x.dropClaim(s.recent.oldest, Capacity) // not the entry of k: the slot has no claim on it
	}
	if entry != 0 && x.cfg.Evict == LeastRecent {
		x.useOrder.touch(x.useLinks, entry) // so that the loop below does not evict it first
	}
	for x.bytes()+x.costOn(entry) > x.cfg.MaxBytes {
		x.evictEntry(x.useOrder.oldest)
		entry = x.table.find(k, x.keys) // 0 if k's own entry was evicted
	}
	return entry
}

// addClaim needs an entry that the slot does not hold yet.
func (x *Index) addClaim(n int, entry uint32) uint32 {
	s := &x.slots[n]
	word, bit := x.holderBit(entry, n)
	*word |= bit
	c := x.newClaim()
	x.claims[c] = claim{entry: entry, sibling: x.firstClaim[entry], born: x.clock, slot: uint16(n)}
	x.firstClaim[entry] = c
	s.recent.push(x.recency, c)
	s.held++
	return c
}

func (x *Index) newEntry(k Key) uint32 {
	entry := x.takeFreeEntry()
	if entry == 0 {
		entry = uint32(len(x.keys))
		x.keys, x.firstClaim, x.useLinks = append(x.keys, Key{}), append(x.firstClaim, 0), append(x.useLinks, link{})
		for range x.wordsPerEntry {
			x.holders = append(x.holders, 0)
		}
	}
	x.keys[entry], x.firstClaim[entry] = k, 0
	x.table.add(k, entry)
	x.useOrder.push(x.useLinks, entry)
	x.entries++
	return entry
}

func (x *Index) takeFreeEntry() uint32 {
	entry := x.firstFreeEntry
	if entry != 0 {
		x.firstFreeEntry = x.firstClaim[entry]
	}
	return entry
}

func (x *Index) freeEntry(entry uint32) {
	x.table.remove(x.keys[entry], entry)
	x.useOrder.remove(x.useLinks, entry)
	x.keys[entry] = Key{}
	x.firstClaim[entry] = x.firstFreeEntry // a free entry has no claims: the field links the free list
	x.firstFreeEntry = entry
	x.entries--
}

func (x *Index) newClaim() uint32 {
	x.claimCount++
	if c := x.firstFreeClaim; c != 0 {
		x.firstFreeClaim = x.claims[c].sibling
		return c
	}
	x.claims, x.recency = append(x.claims, claim{}), append(x.recency, link{})
	return uint32(len(x.claims) - 1)
}

// dropClaim also removes the entry if no other slot holds it.
func (x *Index) dropClaim(c uint32, why Reason) {
	entry, n := x.claims[c].entry, int(x.claims[c].slot)
	s := &x.slots[n]
	s.recent.remove(x.recency, c)
	s.held--
	x.evictions[why]++
	word, bit := x.holderBit(entry, n)
	*word &^= bit
	x.freeClaim(c)
	if x.firstClaim[entry] == 0 {
		x.freeEntry(entry)
	}
}

func (x *Index) freeClaim(c uint32) {
	toClaim := &x.firstClaim[x.claims[c].entry] // becomes the link that points to c
	for *toClaim != c {
		toClaim = &x.claims[*toClaim].sibling
	}
	*toClaim = x.claims[c].sibling
	x.claims[c] = claim{sibling: x.firstFreeClaim}
	x.firstFreeClaim = c
	x.claimCount--
}

// evictEntry drops all claims on an entry, and so the entry itself.
func (x *Index) evictEntry(entry uint32) {
	for c := x.firstClaim[entry]; c != 0; {
		next := x.claims[c].sibling // read first, because dropClaim overwrites it
		x.dropClaim(c, ForBytes)
		c = next
	}
}

// costOn is the memory, in bytes, of one more claim on an entry; 0: a new entry.
func (x *Index) costOn(entry uint32) int64 {
	if entry != 0 {
		return claimCost
	}
	return x.entryCost()
}

func (x *Index) entryCost() int64 { return int64(entryCost + wordCost*x.wordsPerEntry) }

// The memory of the index is estimated from these sizes. They are upper bounds, with the growth of
// slices and of the table.
const (
	entryCost = 96 // per entry with its first claim
	wordCost  = 16 // per entry for every 64 slots
	claimCost = 32 // per further claim on an entry
)

func (x *Index) bytes() int64 {
	return int64(x.entries)*x.entryCost() + int64(x.claimCount-x.entries)*claimCost
}

// Reset drops all blocks and frees their memory. The slots stay valid; speculations have no effect
// any more. Number 0 of each slice stands for no entry and no claim.
func (x *Index) Reset() {
	x.wordsPerEntry = (max(len(x.slots), 1) + 63) / 64 // rounded up
	x.table = table{}
	x.keys, x.holders = make([]Key, 1), make([]uint64, x.wordsPerEntry)
	x.firstClaim, x.useLinks, x.useOrder = make([]uint32, 1), make([]link, 1), order{}
	x.claims, x.recency = make([]claim, 1), make([]link, 1)
	x.firstFreeEntry, x.firstFreeClaim, x.entries = 0, 0, 0
	x.evictions[Removed] += uint64(x.claimCount)
	x.claimCount = 0
	for i := range x.slots {
		s := &x.slots[i]
		s.clearCount++ // so that StillValid is false for earlier speculations
		s.held, s.recent = 0, order{}
	}
	x.lingering = nil
}

// Speculation counts the blocks of a prompt as held by a slot while the prompt's probe is in
// flight. Confirm, Drop or ExpireSoon ends it; further calls do nothing.
type Speculation struct {
	keys       []Key
	slot       Slot
	clearCount uint32 // of the slot, when the speculation began
	began      uint32 // the index's clock then
}

// lingering is a speculation whose probe has ended, but whose blocks are not yet known to be
// stored.
type lingering struct {
	Speculation
	until time.Time // when the blocks that are still unconfirmed are dropped
}

// Reason is why a claim was dropped, as metrics name it.
type Reason uint8

func (r Reason) String() string { return reasonNames[r] }

var reasonNames = [reasons]string{"bytes", "capacity", "ttl", "removed", "cold", "failed"}

// In the order of reasonNames.
const (
	ForBytes Reason = iota // the index was full
	Capacity               // it had as many blocks of the candidate as its engine can hold
	TTL                    // a lingering speculation ended without a confirmation
	Removed                // the engine reported the removal, restarted, or left the configuration
	Cold                   // the engine's events had a gap
	Failed                 // the probe failed
	reasons
)

// widenHolders enlarges each entry's bit set of holders to a bit for every slot.
func (x *Index) widenHolders() {
	words := (len(x.slots) + 63) / 64 // rounded up
	if words == x.wordsPerEntry {
		return
	}
	wide := make([]uint64, len(x.keys)*words)
	for entry := range x.keys {
		copy(wide[entry*words:], x.holders[entry*x.wordsPerEntry:(entry+1)*x.wordsPerEntry])
	}
	x.holders, x.wordsPerEntry = wide, words
	for x.bytes() > x.cfg.MaxBytes { // an entry now needs more memory
		x.evictEntry(x.useOrder.oldest)
	}
}
