package policy

import "slices"

// line has the entries that wait in this round, in the order in which they are served. A position is an index in this order, and does not
// change when entries are removed.
type line struct {
	entry   []int32  // by position: the entry's index in the pool
	pos     []int32  // by index in the pool: the entry's position
	next    []int32  // by position: position of the next entry; position n, the sentinel, comes before the first and after the last
	prev    []int32  // by position: position of the entry before it
	waiting int      // number of entries still in line
	keys    []uint64 // reused for sorting, so that build allocates nothing

	// Entries by prompt length, after sortByLength was called. A place is an index in this order: 0 is the shortest prompt.
	sorted     []uint64 // by place: prompt tokens<<32 | position, ascending
	placeOf    []int32  // by position: the entry's place
	firstEqual []int32  // by place: lowest place with a prompt of the same length
	// skipUp and skipDown lead a search by length past the entries that have left the line. The value of a place is the place itself
	// while its entry is in line, else a place above or below it where the search goes on.
	skipUp   []int32 // by place; n at the end
	skipDown []int32 // by place+1; a value is a place plus 1, and 0 at the end
	indexed  bool    // true if sortByLength was called in this round
}

// build puts all entries of the pool in line: in order of arrival or, if longestFirst, the longest prompts first.
func (l *line) build(pool []Entry, longestFirst bool) {
	n := len(pool)
	l.entry, l.pos = sized(l.entry, n), sized(l.pos, n)
	l.next, l.prev = sized(l.next, n+1), sized(l.prev, n+1)
	l.waiting, l.indexed = n, false
	if longestFirst {
		l.keys = sized(l.keys, n)
		for i := range pool {
			// The length is inverted, because the longest prompt must have the smallest key. The index in the low bits keeps prompts of the same
			// length in order of arrival.
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
	if n == 0 { // an empty line: the sentinel is its own neighbour
		l.next[0], l.prev[0] = 0, 0
		return
	}
	l.prev[0] = int32(n) // the sentinel, at position n, closes the list to a ring
	l.next[n], l.prev[n] = 0, int32(n)-1
}

// sentinel returns the position before the first entry, which no entry has. A walk along next begins and ends there.
func (l *line) sentinel() int32 { return int32(len(l.entry)) }

// remove takes the entry at position p out of the line; all other positions stay the same. If the entries are also sorted by length, a
// search that comes to the entry's place goes on at the next place above (skipUp) or below it (skipDown). skipDown has places plus 1, both
// as its index and as its values, so that 0 stands for no place.
func (l *line) remove(p int32) {
	l.next[l.prev[p]], l.prev[l.next[p]] = l.next[p], l.prev[p]
	l.waiting--
	if l.indexed {
		place := l.placeOf[p]
		l.skipUp[place] = place + 1
		l.skipDown[place+1] = place
	}
}

// sortByLength sorts the entries that are still in line by the length of their prompts, so that bestSingle can look them up by length.
// Entries of the same length stay in the order of their positions. skipUp and skipDown then lead searches past the places of entries that
// leave the line. Each has an end beside the n places: index n of skipUp, and index 0 of skipDown, whose other indices are a place plus 1.
func (l *line) sortByLength(pool []Entry) {
	l.sorted = l.sorted[:0]
	for p := l.next[l.sentinel()]; p != l.sentinel(); p = l.next[p] {
		l.sorted = append(l.sorted, uint64(uint32(pool[l.entry[p]].Prompt))<<32|uint64(p))
	}
	slices.Sort(l.sorted)
	n := len(l.sorted)
	l.placeOf, l.firstEqual = sized(l.placeOf, len(l.entry)), sized(l.firstEqual, n)
	l.skipUp, l.skipDown = sized(l.skipUp, n+1), sized(l.skipDown, n+1)
	for place := range n {
		l.placeOf[l.position(place)] = int32(place)
		l.skipUp[place], l.skipDown[place] = int32(place), int32(place) // all entries are in line, so each search ends where it begins
		l.firstEqual[place] = int32(place)
		if place > 0 && l.prompt(place) == l.prompt(place-1) {
			l.firstEqual[place] = l.firstEqual[place-1]
		}
	}
	l.skipUp[n], l.skipDown[n] = int32(n), int32(n)
	l.indexed = true
}

// prompt returns how many prompt tokens the entry at this place has.
func (l *line) prompt(place int) int64 { return int64(l.sorted[place] >> 32) }

// position returns the position in line of the entry at this place.
func (l *line) position(place int) int32 { return int32(uint32(l.sorted[place])) }

// atOrAfter returns the first place, from the given one on, whose entry is still in line; len(sorted): there is none. It follows the values
// of skipUp until a place points to itself. It also halves the paths in skipUp that it walks, so that later calls are faster.
func (l *line) atOrAfter(from int) int {
	place := int32(from)
	for l.skipUp[place] != place {
		l.skipUp[place] = l.skipUp[l.skipUp[place]]
		place = l.skipUp[place]
	}
	return int(place)
}

// atOrBefore returns the last place, up to the given one, whose entry is still in line; -1: there is none. It walks skipDown as
// atOrAfter walks skipUp.
func (l *line) atOrBefore(from int) int {
	next := int32(from) + 1 // place plus 1, the form of the values in skipDown
	for l.skipDown[next] != next {
		l.skipDown[next] = l.skipDown[l.skipDown[next]]
		next = l.skipDown[next]
	}
	return int(next) - 1
}
