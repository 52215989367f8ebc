package index

// Add returns the slot of a candidate, and makes one if there is none. capacity is in blocks; 0: no
// bound.
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
	if vacant < 0 {
		vacant = len(x.slots)
		x.slots = append(x.slots, slot{})
		x.widenHolders() // each entry needs a bit for the new slot
	}
	s := &x.slots[vacant]
	s.id, s.inUse, s.capacity = id, true, max(capacity, 0)
	s.generation++
	return Slot{vacant, s.generation}
}

// SetCapacity sets the capacity in blocks; 0: no bound. If the slot has more blocks, the least
// recently used ones are dropped.
func (x *Index) SetCapacity(s Slot, blocks int) {
	if !x.isCurrent(s) {
		return
	}
	at := &x.slots[s.N]
	at.capacity = max(blocks, 0)
	for at.capacity > 0 && at.held > at.capacity {
		x.dropClaim(at.recent.oldest, Capacity)
	}
}

// Clear drops all blocks of a slot. Speculations of its probes in flight have no effect any more.
func (x *Index) Clear(s Slot, why Reason) {
	if !x.isCurrent(s) {
		return
	}
	at := &x.slots[s.N]
	at.clearCount++ // the slot's speculations see by it that their claims are gone
	for at.held > 0 {
		x.dropClaim(at.recent.oldest, why)
	}
}

// Delete makes every copy of s stale.
func (x *Index) Delete(s Slot) {
	if x.isCurrent(s) {
		x.Clear(s, Removed)
		at := &x.slots[s.N]
		at.id, at.inUse, at.capacity = "", false, 0
	}
}

func (x *Index) Held(s Slot) int {
	if !x.isCurrent(s) {
		return 0
	}
	return x.slots[s.N].held
}

func (x *Index) isCurrent(s Slot) bool {
	if s.N < 0 || s.N >= len(x.slots) {
		return false
	}
	at := &x.slots[s.N]
	return at.inUse && at.generation == s.generation
}

type Stats struct {
	Bytes     int64
	Entries   int // that at least one candidate holds
	Claims    int // pairs of a block and a candidate that holds it
	Evictions [reasons]uint64
}

// Stats is cheap: it only copies counters.
func (x *Index) Stats() Stats {
	return Stats{Bytes: x.bytes(), Entries: x.entries, Claims: x.claimCount, Evictions: x.evictions}
}
