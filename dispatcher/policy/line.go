package policy

import "slices"

// line is W: the entries that wait in this round, in window order. A position
// is a place in that order and stays valid while entries leave.
type line struct {
	entry []int32  // index in the pool, by position
	pos   []int32  // position, by index in the pool
	next  []int32  // list of those still here; position n stands before the first and after the last
	prev  []int32  //
	left  int      // how many are still here
	keys  []uint64 // scratch of sorting

	// By size, once index was called: rank 0 is the shortest prompt.
	sorted  []uint64 // prompt<<32 | position, ascending
	rankOf  []int32  // by position
	run     []int32  // by rank: the lowest rank with the same prompt
	after   []int32  // by rank: itself while here, else a step towards the next one here; n at the end
	before  []int32  // by rank+1: the same downwards; 0 at the end
	indexed bool
}

// build puts the whole pool in line, by arrival or longest prompt first.
func (l *line) build(pool []Entry, longestFirst bool) {
	n := len(pool)
	l.entry, l.pos = sized(l.entry, n), sized(l.pos, n)
	l.next, l.prev = sized(l.next, n+1), sized(l.prev, n+1)
	l.left, l.indexed = n, false
	if longestFirst {
		l.keys = sized(l.keys, n)
		for i := range pool {
			l.keys[i] = uint64(^uint32(pool[i].Prompt))<<32 | uint64(i)
		}
		slices.Sort(l.keys)
		for p, k := range l.keys {
			l.entry[p] = int32(uint32(k))
		}
	} else {
		for i := range l.entry {
			l.entry[i] = int32(i)
		}
	}
	for p, i := range l.entry {
		l.pos[i] = int32(p)
		l.next[p], l.prev[p] = int32(p)+1, int32(p)-1
	}
	if n == 0 {
		l.next[0], l.prev[0] = 0, 0
		return
	}
	l.prev[0] = int32(n)
	l.next[n], l.prev[n] = 0, int32(n)-1
}

// head is the position before the first entry: next of it is the first.
func (l *line) head() int32 { return int32(len(l.entry)) }

// remove takes the entry at a position out of the line.
func (l *line) remove(p int32) {
	l.next[l.prev[p]], l.prev[l.next[p]] = l.next[p], l.prev[p]
	l.left--
	if l.indexed {
		r := l.rankOf[p]
		l.after[r] = r + 1
		l.before[r+1] = r
	}
}

// index sorts those still here by prompt.
func (l *line) index(pool []Entry) {
	l.sorted = l.sorted[:0]
	for p := l.next[l.head()]; p != l.head(); p = l.next[p] {
		l.sorted = append(l.sorted, uint64(uint32(pool[l.entry[p]].Prompt))<<32|uint64(p))
	}
	slices.Sort(l.sorted)
	n := len(l.sorted)
	l.rankOf, l.run = sized(l.rankOf, len(l.entry)), sized(l.run, n)
	l.after, l.before = sized(l.after, n+1), sized(l.before, n+1)
	for r := range n {
		l.rankOf[uint32(l.sorted[r])] = int32(r)
		l.after[r], l.before[r] = int32(r), int32(r)
		l.run[r] = int32(r)
		if r > 0 && l.prompt(r) == l.prompt(r-1) {
			l.run[r] = l.run[r-1]
		}
	}
	l.after[n], l.before[n] = int32(n), int32(n)
	l.indexed = true
}

func (l *line) prompt(rank int) int64 { return int64(l.sorted[rank] >> 32) }

// position of the entry with this rank.
func (l *line) position(rank int) int32 { return int32(uint32(l.sorted[rank])) }

// atOrAfter returns the first rank from r on that is still here, len(sorted) if
// none is. Paths are halved on the way.
func (l *line) atOrAfter(r int) int {
	x := int32(r)
	for l.after[x] != x {
		l.after[x] = l.after[l.after[x]]
		x = l.after[x]
	}
	return int(x)
}

// atOrBefore returns the last rank up to r that is still here, -1 if none is.
func (l *line) atOrBefore(r int) int {
	x := int32(r) + 1
	for l.before[x] != x {
		l.before[x] = l.before[l.before[x]]
		x = l.before[x]
	}
	return int(x) - 1
}
