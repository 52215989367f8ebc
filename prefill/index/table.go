package index

// table is a hash table from keys to entry numbers, with open addressing and linear probing. A cell
// holds the number and 32 bits of the key's Check, which clients cannot choose; 0 is an empty cell.
type table struct {
	cells []uint64 // the length is a power of two; at most three quarters are in use
	used  int      // cells
}

const leastCells = 1 << 10

// cellOf packs the tag in the upper 32 bits, and the entry number in the lower 32.
func cellOf(tag, n uint32) uint64 { return uint64(tag)<<32 | uint64(n) }

func unpack(cell uint64) (tag, n uint32) { return uint32(cell >> 32), uint32(cell) }

// home is the first cell in which a key with this tag is looked for.
func (t *table) home(tag uint32) uint32 { return tag & uint32(len(t.cells)-1) }

// find returns 0 if k is not in the table.
func (t *table) find(k Key, keys []Key) uint32 {
	if len(t.cells) == 0 {
		return 0
	}
	tag, mask := uint32(k.Check), uint32(len(t.cells)-1)
	for i := tag & mask; ; i = (i + 1) & mask {
		cell := t.cells[i]
		if cell == 0 { // add would have put the key here
			return 0
		}
		if cellTag, n := unpack(cell); cellTag == tag && keys[n] == k {
			return n
		}
	}
}

// add adds a key that is not in the table.
func (t *table) add(k Key, n uint32) {
	if t.used++; t.used > len(t.cells)*3/4 {
		t.grow()
	}
	t.insertCell(cellOf(uint32(k.Check), n))
}

func (t *table) insertCell(cell uint64) {
	mask := uint32(len(t.cells) - 1)
	tag, _ := unpack(cell)
	i := t.home(tag)
	for t.cells[i] != 0 {
		i = (i + 1) & mask
	}
	t.cells[i] = cell
}

func (t *table) grow() {
	old := t.cells
	t.cells = make([]uint64, max(leastCells, 2*len(old)))
	for _, cell := range old {
		if cell != 0 {
			t.insertCell(cell)
		}
	}
}

// remove removes a key that is in the table. It moves later cells back into the hole, because find
// stops at an empty cell.
func (t *table) remove(k Key, n uint32) {
	mask := uint32(len(t.cells) - 1)
	hole := t.home(uint32(k.Check))
	for uint32(t.cells[hole]) != n { // the lower 32 bits are the number
		hole = (hole + 1) & mask
	}
	for i := (hole + 1) & mask; t.cells[i] != 0; i = (i + 1) & mask {
		tag, _ := unpack(t.cells[i])
		home := t.home(tag)
		// Then find would stop at the hole: i is at least as far behind home as behind the hole.
		holeIsOnItsWay := (i-home)&mask >= (i-hole)&mask
		if holeIsOnItsWay {
			t.cells[hole] = t.cells[i]
			hole = i // the moved cell leaves a hole of its own
		}
	}
	t.cells[hole] = 0
	t.used--
}
