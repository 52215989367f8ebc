package index

// Add returns the slot of a candidate, and makes one if there is none. capacity is the number of blocks that the candidate's engine can
// hold; 0: unknown, which means no bound. If blocks have a size in bytes of text, and not in tokens, Ratio.Blocks estimates this number.
func (x *Index) Add(id string, capacity int) Slot {
	vacant := -1
	for i := range x.slots {
		switch s := &x.slots[i]; {
		case s.inUse && s.id == id:
			present := Slot{i, s.generation}
			x.SetCapacity(present, capacity)
			return present
		case !s.inUse && vacant < 0:
			vacant = i
		}
	}
	if vacant < 0 { // all slots are in use: one more is made
		vacant = len(x.slots)
		x.slots = append(x.slots, slot{})
		x.widenHolders() // each entry needs a bit for the new slot
	}
	s := &x.slots[vacant]
	s.id, s.inUse, s.capacity = id, true, max(capacity, 0)
	s.generation++
	return Slot{vacant, s.generation}
}

// SetCapacity sets the number of blocks that the candidate's engine can hold; 0: no bound. If the slot has more blocks,
// the least recently used ones are dropped.
func (x *Index) SetCapacity(s Slot, blocks int) {
	if !x.isCurrent(s) { // the candidate was removed
		return
	}
	at := &x.slots[s.N]
	at.capacity = max(blocks, 0)
	for at.capacity > 0 && at.held > at.capacity {
		x.dropClaim(at.recent.oldest, Capacity)
	}
}

// Clear drops all blocks of a slot, because its engine restarted or emptied its cache, or because its KV events had a gap.
// Speculations of the slot's probes in flight have no effect any more.
func (x *Index) Clear(s Slot, why Reason) {
	if !x.isCurrent(s) { // the candidate was removed, or has no such slot
		return
	}
	at := &x.slots[s.N]
	at.clearCount++ // the slot's speculations see by it that their claims are gone
	for at.held > 0 {
		x.dropClaim(at.recent.oldest, why)
	}
}

// Delete drops all blocks of a slot and the slot itself, so that every copy of s is stale.
func (x *Index) Delete(s Slot) {
	if x.isCurrent(s) {
		x.Clear(s, Removed)
		at := &x.slots[s.N]
		at.id, at.inUse, at.capacity = "", false, 0
	}
}

// Held is the number of blocks that the slot's engine holds, as far as the index knows.
func (x *Index) Held(s Slot) int {
	if !x.isCurrent(s) { // the candidate was removed, or has no such slot
		return 0
	}
	return x.slots[s.N].held
}

// isCurrent reports whether s still stands for the candidate for which it was made. Otherwise that candidate was removed.
func (x *Index) isCurrent(s Slot) bool {
	if s.N < 0 || s.N >= len(x.slots) {
		return false
	}
	at := &x.slots[s.N]
	return at.inUse && at.generation == s.generation
}

// Stats counts the content of an index, and its evictions since the start.
type Stats struct {
	Bytes     int64
	Entries   int // blocks that at least one candidate holds
	Claims    int // pairs of a block and a candidate that holds it
	Evictions [reasons]uint64
}

// Stats is cheap: it only copies counters.
func (x *Index) Stats() Stats {
	return Stats{Bytes: x.bytes(), Entries: x.entries, Claims: x.claimCount, Evictions: x.evictions}
}
