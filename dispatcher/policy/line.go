package policy

import "slices"

// line has the entries that wait in this round, in the order in which they are served. A position
// is an index in this order, and does not change when entries are removed.
type line struct {
	entryAt    []int32  // by position: the entry's index in the pool
	positionOf []int32  // by index in the pool: the entry's position
	next       []int32  // by position: position of the next entry; position n, the sentinel, comes before the first and after the last
	prev       []int32  // by position
	waiting    int      // entries still in line
	keys       []uint64 // reused for sorting, so that build allocates nothing

	// Entries by prompt length, after sortByLength. A place is an index in this order: 0 is the
	// shortest prompt.
	sorted     []uint64 // by place: prompt tokens<<32 | position, ascending
	placeOf    []int32  // by position
	firstEqual []int32  // by place: lowest place with a prompt of the same length
	// skipUp and skipDown lead a search past the places whose entries have left the line, to longer
	// and to shorter prompts. With n places, the elements of skipUp are the places and, as its end, n;
	// those of skipDown are the places plus 1 and, as its end, 0.
	skipUp, skipDown chain
	sortedByLength   bool // sortByLength was called in this round
}

// chain finds the next element that was not removed (a union-find structure). The value of an
// element is the element itself while it is present, else one nearer to the end of the chain, which
// is never removed.
type chain []int32

// find halves the path that it walks, so that later searches are faster.
func (c chain) find(i int32) int32 {
	for c[i] != i {
		c[i] = c[c[i]]
		i = c[i]
	}
	return i
}

// build puts all entries in line: in order of arrival or, if longestFirst, the longest prompts
// first. The positions are linked in a ring.
func (l *line) build(pool []Entry, longestFirst bool) {
	n := len(pool)
	l.entryAt, l.positionOf = sized(l.entryAt, n), sized(l.positionOf, n)
	l.next, l.prev = sized(l.next, n+1), sized(l.prev, n+1)
	l.waiting, l.sortedByLength = n, false
	if longestFirst {
		l.putLongestFirst(pool)
	} else {
		for i := range l.entryAt { // the pool is in order of arrival
			l.entryAt[i] = int32(i)
		}
	}
	for position, entry := range l.entryAt {
		l.positionOf[entry] = int32(position)
		l.next[position], l.prev[position] = int32(position)+1, int32(position)-1
	}
	if n == 0 { // the sentinel is its own neighbour
		l.next[0], l.prev[0] = 0, 0
		return
	}
	l.prev[0] = int32(n) // the sentinel, at position n, closes the list to a ring
	l.next[n], l.prev[n] = 0, int32(n)-1
}

// Prompts of the same length stay in order of arrival.
func (l *line) putLongestFirst(pool []Entry) {
	l.keys = sized(l.keys, len(pool))
	for i := range pool {
		// The length is inverted, because the longest prompt must have the smallest key.
		l.keys[i] = uint64(^uint32(pool[i].Prompt))<<32 | uint64(i)
	}
	slices.Sort(l.keys)
	for position, key := range l.keys {
		l.entryAt[position] = int32(uint32(key))
	}
}

// sentinel is the position where a walk along next begins and ends.
func (l *line) sentinel() int32 { return int32(len(l.entryAt)) }

func (l *line) remove(p int32) {
	l.next[l.prev[p]], l.prev[l.next[p]] = l.next[p], l.prev[p]
	l.waiting--
	if l.sortedByLength {
		place := l.placeOf[p]
		l.skipUp[place] = place + 1 // from this place to the one above it
		l.skipDown[place+1] = place // from the element of this place to that of the place below it
	}
}

// sortByLength sorts the entries that are still in line. Entries of the same length stay in order.
// Entries that leave the line later keep their places.
func (l *line) sortByLength(pool []Entry) {
	l.sorted = l.sorted[:0]
	for p := l.next[l.sentinel()]; p != l.sentinel(); p = l.next[p] {
		l.sorted = append(l.sorted, uint64(uint32(pool[l.entryAt[p]].Prompt))<<32|uint64(p))
	}
	slices.Sort(l.sorted)
	n := len(l.sorted)
	l.placeOf, l.firstEqual = sized(l.placeOf, len(l.entryAt)), sized(l.firstEqual, n)
	l.skipUp, l.skipDown = sized(l.skipUp, n+1), sized(l.skipDown, n+1)
	for place := range n {
		l.placeOf[l.position(place)] = int32(place)
		l.firstEqual[place] = int32(place)
		if place > 0 && l.prompt(place) == l.prompt(place-1) {
			l.firstEqual[place] = l.firstEqual[place-1]
		}
	}
	for element := range l.skipUp { // all entries are in line, so each search ends where it begins
		l.skipUp[element], l.skipDown[element] = int32(element), int32(element)
	}
	l.sortedByLength = true
}

func (l *line) prompt(place int) int64 { return int64(l.sorted[place] >> 32) }

func (l *line) position(place int) int32 { return int32(uint32(l.sorted[place])) }

// atOrAfter returns the first place, from the given one on, whose entry is still in line;
// len(sorted): none.
func (l *line) atOrAfter(place int) int { return int(l.skipUp.find(int32(place))) }

// atOrBefore returns the last place, up to the given one, whose entry is still in line; -1: none.
func (l *line) atOrBefore(place int) int { return int(l.skipDown.find(int32(place)+1)) - 1 }
