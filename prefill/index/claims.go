package index

import (
	"time"
)

// Index records which slots hold which blocks.
type Index struct {
	cfg Config

	// An entry is a block that at least one slot holds. Its number is an index into the following slices; number 0 is not used.
	table          table
	keys           []Key
	holders        []uint64 // bit sets of the slots that hold an entry: wordsPerEntry elements per entry
	wordsPerEntry  int      // length of an entry's bit set, in words of 64 bits, each for 64 slots
	firstClaim     []uint32 // by entry: its first claim; for an unused entry: the next unused entry
	useLinks       []link
	useOrder       order  // the entries by their last use, over all slots
	firstFreeEntry uint32 // first number in the list of free entries; 0: none is free
	entries        int

	// A claim says that one slot holds one entry.
	claims         []claim // by claim number; number 0 is not used
	recency        []link  // by claim: its neighbours in the slot's order of use
	firstFreeClaim uint32  // first number in the list of free claims; 0: none is free
	lastClaim      uint32  // claim that was looked up last; claimOf tries its neighbours first
	claimCount     int

	slots     []slot
	clock     uint32 // counts speculations, to tell claims that are older than a speculation from newer ones
	lingering []lingering
	evictions [reasons]uint64 // claims dropped since the start, by reason
}

// Eviction says which block is evicted first when the index is full.
type Eviction uint8

// Slot stands for a candidate in the index. It is stale once the candidate is removed. Calls with a stale Slot do
// nothing, even if a new candidate has the same number.
type Slot struct {
	N          int    // index into the result of Match
	generation uint32 // generation of the index's slot when the candidate was added; a later one there means that s is stale
}

// Config describes an index.
type Config struct {
	MaxBytes int64    // bytes of memory, default 256 MiB; at least 64 KiB
	Evict    Eviction // which block a full index evicts first; default LeastRecent
}

// The orders in which blocks are evicted from a full index.
const (
	LeastRecent Eviction = iota // the least recently used block, as engines' own caches do
	Oldest                      // the block that was inserted first; used for prompts that were sent to a peer region
)

type claim struct {
	entry   uint32
	sibling uint32 // the next claim on the same entry; in an unused claim: the next unused claim
	born    uint32 // the index's clock when the claim was made
	slot    uint16
	// support is the number of speculations that need the claim. Its top bit (confirmed) is set while the engine is known to hold the
	// block. A claim with support 0 is dropped.
	support uint16
}

const (
	confirmed       = 1 << 15
	speculationMask = confirmed - 1 // mask, and largest value, of the number of speculations in claim.support
)

// isNeeded reports whether the engine is known to hold the block, or a speculation needs the claim. Otherwise it must be dropped.
func (c *claim) isNeeded() bool { return c.support != 0 }

// isConfirmed reports whether the engine is known to hold the block.
func (c *claim) isConfirmed() bool { return c.support&confirmed != 0 }

// confirm notes that the engine holds the block.
func (c *claim) confirm() { c.support |= confirmed }

// unconfirm notes that the engine does not hold the block any more.
func (c *claim) unconfirm() { c.support &^= confirmed }

// speculations is the number of speculations that need the claim.
func (c *claim) speculations() uint16 { return c.support & speculationMask }

// addSpeculation counts one more speculation that needs the claim, unless the number is at its largest value.
func (c *claim) addSpeculation() {
	if c.speculations() < speculationMask {
		c.support++
	}
}

// removeSpeculation counts one speculation less. The number must not be 0 before.
func (c *claim) removeSpeculation() { c.support-- }

type slot struct {
	id         string
	inUse      bool
	generation uint32 // how many candidates have used this slot so far, so that a stale Slot is recognised
	clearCount uint32 // how often all claims of the slot were dropped at once
	capacity   int    // blocks that the candidate's engine can hold; 0: unknown, no bound
	held       int    // number of claims of the slot
	recent     order  // claims of the slot, by their last use
}

// New returns an empty index. A MaxBytes of 0 means 256 MiB, and a smaller one than 64 KiB is raised to 64 KiB.
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

// fitting returns the first blocks of a prompt, as many as the slot can hold at once.
func (s *slot) fitting(keys []Key) []Key {
	if s.capacity > 0 && len(keys) > s.capacity {
		return keys[:s.capacity]
	}
	return keys
}

// lookUp returns the claim of slot n on a key; 0: the slot does not hold the key.
func (x *Index) lookUp(n int, k Key) uint32 {
	entry := x.table.find(k, x.keys)
	if word, bit := x.holderBit(entry, n); *word&bit == 0 { // entry 0 is held by no slot
		return 0
	}
	return x.claimOf(entry, n)
}

// holderBit returns where slot n has its bit among the holders of an entry, the slots that hold it: the word and the bit in it. Entry 0
// stands for a key without an entry, and no slot holds it.
func (x *Index) holderBit(entry uint32, n int) (word *uint64, bit uint64) {
	return &x.holders[int(entry)*x.wordsPerEntry+n/64], 1 << (n % 64)
}

// claimOf returns the claim of slot n on an entry that the slot holds. It first tries the neighbours of the claim that was
// looked up last, because the claims of a prompt mostly have consecutive numbers.
func (x *Index) claimOf(entry uint32, n int) uint32 {
	for _, c := range [...]uint32{x.lastClaim - 1, x.lastClaim + 1} { // 0 - 1 wraps around to a number that no claim has
		if int(c) < len(x.claims) && x.claims[c].entry == entry && int(x.claims[c].slot) == n {
			x.lastClaim = c
			return c
		}
	}
	c := x.firstClaim[entry]
	for int(x.claims[c].slot) != n { // walks over the entry's claims, one of which is the slot's
		c = x.claims[c].sibling
	}
	x.lastClaim = c
	return c
}

// ensureClaim returns the claim of slot n on a key, and makes it if there is none. For a new claim it drops other claims if the slot or the
// index is full. A new claim is the slot's most recent one. An existing one becomes so, too, unless the index evicts the oldest blocks
// first.
func (x *Index) ensureClaim(n int, k Key) uint32 {
	entry := x.table.find(k, x.keys)                        // 0: the key has no entry
	if word, bit := x.holderBit(entry, n); *word&bit != 0 { // the slot has this claim already; never so for entry 0
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

// makeRoom drops claims until slot n and the index have room for a claim of the slot on key k. entry is the key's entry; 0: it has none.
// The result is the key's entry afterwards: 0 also if makeRoom had to evict it.
func (x *Index) makeRoom(n int, k Key, entry uint32) (entryLeft uint32) {
	s := &x.slots[n]
	if s.capacity > 0 && s.held >= s.capacity {
		x.dropClaim(s.recent.oldest, Capacity) // never drops the entry of k: the slot has no claim on it
	}
	if entry != 0 && x.cfg.Evict == LeastRecent {
		x.useOrder.touch(x.useLinks, entry) // marks the entry as used, so that the loop below does not evict it first
	}
	for x.bytes()+x.costOn(entry) > x.cfg.MaxBytes { // one more claim does not fit into the index
		x.evictEntry(x.useOrder.oldest)
		entry = x.table.find(k, x.keys) // 0 if k's own entry was evicted
	}
	return entry
}

// addClaim makes the claim of slot n on an entry, which the slot does not hold yet, and returns it.
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

// newEntry makes the entry of a key, which no slot holds yet.
func (x *Index) newEntry(k Key) uint32 {
	entry := x.takeFreeEntry()
	if entry == 0 { // no number is free: the slices grow by one entry
		entry = uint32(len(x.keys))
		x.keys, x.firstClaim, x.useLinks = append(x.keys, Key{}), append(x.firstClaim, 0), append(x.useLinks, link{})
		for range x.wordsPerEntry { // an empty bit set of holders
			x.holders = append(x.holders, 0)
		}
	}
	x.keys[entry], x.firstClaim[entry] = k, 0
	x.table.add(k, entry)
	x.useOrder.push(x.useLinks, entry)
	x.entries++
	return entry
}

// takeFreeEntry takes the first number off the list of free entries; 0: the list is empty. An entry in this list has no claims, so
// firstClaim has the next free entry in their place.
func (x *Index) takeFreeEntry() uint32 {
	entry := x.firstFreeEntry
	if entry != 0 {
		x.firstFreeEntry = x.firstClaim[entry]
	}
	return entry
}

// freeEntry removes an entry that no slot holds any more, and puts its number in front of the list of free entries.
func (x *Index) freeEntry(entry uint32) {
	x.table.remove(x.keys[entry], entry)
	x.useOrder.remove(x.useLinks, entry)
	x.keys[entry] = Key{}
	x.firstClaim[entry] = x.firstFreeEntry // a free entry has no claims: the field links the list of free entries
	x.firstFreeEntry = entry
	x.entries--
}

// newClaim returns an unused claim number.
func (x *Index) newClaim() uint32 {
	x.claimCount++
	if c := x.firstFreeClaim; c != 0 { // takes the first number off the list of free ones
		x.firstFreeClaim = x.claims[c].sibling
		return c
	}
	x.claims, x.recency = append(x.claims, claim{}), append(x.recency, link{})
	return uint32(len(x.claims) - 1)
}

// dropClaim removes a claim, which says that a slot (an engine) holds an entry (a block of a prompt). It also removes the entry if no other
// slot holds it.
func (x *Index) dropClaim(c uint32, why Reason) {
	entry, n := x.claims[c].entry, int(x.claims[c].slot)
	s := &x.slots[n]
	s.recent.remove(x.recency, c)
	s.held--
	x.evictions[why]++
	word, bit := x.holderBit(entry, n)
	*word &^= bit
	x.freeClaim(c)
	if x.firstClaim[entry] == 0 { // no slot holds the entry any more
		x.freeEntry(entry)
	}
}

// freeClaim takes a claim out of its entry's list of claims, and puts its number in front of the list of free claims. Both lists are linked
// by the field sibling.
func (x *Index) freeClaim(c uint32) {
	toClaim := &x.firstClaim[x.claims[c].entry] // becomes the link in the entry's list of claims that points to c
	for *toClaim != c {
		toClaim = &x.claims[*toClaim].sibling
	}
	*toClaim = x.claims[c].sibling
	x.claims[c] = claim{sibling: x.firstFreeClaim}
	x.firstFreeClaim = c
	x.claimCount--
}

// evictEntry drops all claims on an entry, and so the entry itself, to free memory.
func (x *Index) evictEntry(entry uint32) {
	for c := x.firstClaim[entry]; c != 0; {
		next := x.claims[c].sibling // read first, because dropClaim overwrites it
		x.dropClaim(c, ForBytes)
		c = next
	}
}

// costOn is the memory, in bytes, of one more claim on an entry; entry 0 stands for a new entry.
func (x *Index) costOn(entry uint32) int64 {
	if entry != 0 {
		return claimCost
	}
	return x.entryCost()
}

// entryCost is the memory, in bytes, of an entry with its first claim.
func (x *Index) entryCost() int64 { return int64(entryCost + wordCost*x.wordsPerEntry) }

// The memory of the index is estimated from these sizes. They are upper bounds, with the growth of slices and of the
// table included.
const (
	entryCost = 96 // bytes per entry with its first claim
	wordCost  = 16 // bytes per entry for every 64 slots
	claimCost = 32 // bytes per further claim on an entry
)

// bytes is the memory of the index, as estimated from its entries and claims.
func (x *Index) bytes() int64 {
	return int64(x.entries)*x.entryCost() + int64(x.claimCount-x.entries)*claimCost
}

// Reset drops all blocks and frees their memory. The slots stay valid. Each slice then has room for number 0 alone, which stands
// for no entry and for no claim. Speculations, which count blocks as held while a probe is in flight or its outcome is unknown, have no
// effect any more.
func (x *Index) Reset() {
	x.wordsPerEntry = (max(len(x.slots), 1) + 63) / 64 // words of 64 bits, one bit for each slot, rounded up
	x.table = table{}
	x.keys, x.holders = make([]Key, 1), make([]uint64, x.wordsPerEntry)
	x.firstClaim, x.useLinks, x.useOrder = make([]uint32, 1), make([]link, 1), order{}
	x.claims, x.recency = make([]claim, 1), make([]link, 1)
	x.firstFreeEntry, x.firstFreeClaim, x.entries = 0, 0, 0
	x.evictions[Removed] += uint64(x.claimCount)
	x.claimCount = 0
	for i := range x.slots {
		s := &x.slots[i]
		s.clearCount++ // speculations that began before have another count, by which StillValid sees that they have no effect
		s.held, s.recent = 0, order{}
	}
	x.lingering = nil // the speculations whose probes have ended with an unknown outcome
}

// Speculation counts the blocks of a prompt as held by a slot while the prompt's probe is in flight. Confirm, Drop or
// ExpireSoon ends it; further calls do nothing.
type Speculation struct {
	keys       []Key
	slot       Slot
	clearCount uint32 // the slot's clearCount when the speculation began
	began      uint32 // the index's clock when the speculation began
}

// lingering is a speculation whose probe has ended, but whose blocks are not yet known to be stored.
type lingering struct {
	Speculation
	until time.Time // when the blocks that are still unconfirmed are dropped
}

// Reason is why a claim was dropped, as metrics name it.
type Reason uint8

func (r Reason) String() string { return reasonNames[r] }

var reasonNames = [reasons]string{"bytes", "capacity", "ttl", "removed", "cold", "failed"}

// The reasons, in the order of reasonNames.
const (
	ForBytes Reason = iota // the index was full
	Capacity               // the index had as many blocks of the candidate as its engine can hold
	TTL                    // a lingering speculation ended without a confirmation
	Removed                // the engine reported the removal, restarted, or left the configuration
	Cold                   // the engine's events had a gap
	Failed                 // the probe failed
	reasons
)

// widenHolders enlarges each entry's bit set of holders so that it has a bit for every slot.
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
