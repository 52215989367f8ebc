package index

// Add returns the slot of a candidate, a new one if it has none. capacity is how many of the index's blocks its
// engine can hold (for blocks of bytes: Ratio.Blocks); 0: it is not known and there is no bound.
func (x *Index) Add(id string, capacity int) Slot {
	vacant := -1
	for i := range x.slots {
		switch s := &x.slots[i]; {
		case s.inUse && s.id == id:
			at := Slot{i, s.life}
			x.SetCapacity(at, capacity)
			return at
		case !s.inUse && vacant < 0:
			vacant = i
		}
	}
	if vacant < 0 {
		vacant = len(x.slots)
		x.slots = append(x.slots, slot{})
		x.widen()
	}
	s := &x.slots[vacant]
	s.id, s.inUse, s.capacity = id, true, max(capacity, 0)
	s.life++
	return Slot{vacant, s.life}
}

// SetCapacity says how many blocks the candidate's engine can hold. The least recent blocks beyond it are dropped, so
// that the index promises no more than the engine holds.
func (x *Index) SetCapacity(s Slot, blocks int) {
	if !x.current(s) {
		return
	}
	at := &x.slots[s.N]
	at.capacity = max(blocks, 0)
	for at.capacity > 0 && at.held > at.capacity {
		x.drop(at.recent.oldest, Capacity)
	}
}

// Clear drops all blocks of a slot: its engine started anew, or lost or emptied its cache. Speculations of probes in
// flight are void from then on.
func (x *Index) Clear(s Slot, why Reason) {
	if !x.current(s) {
		return
	}
	at := &x.slots[s.N]
	at.epoch++
	for at.held > 0 {
		x.drop(at.recent.oldest, why)
	}
}

// Delete drops all blocks of a slot and the slot itself.
func (x *Index) Delete(s Slot) {
	if x.current(s) {
		x.Clear(s, Removed)
		at := &x.slots[s.N]
		at.id, at.inUse, at.capacity = "", false, 0
	}
}

// Held is how many blocks the slot is said to hold.
func (x *Index) Held(s Slot) int {
	if !x.current(s) {
		return 0
	}
	return x.slots[s.N].held
}

func (x *Index) current(s Slot) bool {
	return s.N >= 0 && s.N < len(x.slots) && x.slots[s.N].inUse && x.slots[s.N].life == s.life
}

// Stats is what an index holds and has dropped.
type Stats struct {
	Bytes     int64
	Entries   int // blocks
	Claims    int // of candidates on blocks
	Evictions [reasons]uint64
}

// Stats is cheap, because nothing is counted anew.
func (x *Index) Stats() Stats {
	return Stats{Bytes: x.bytes(), Entries: x.entries, Claims: x.claimCount, Evictions: x.evictions}
}
