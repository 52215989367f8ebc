package policy

import "slices"

// line has the entries that wait in this round, in the order in which they are served. A position is an index in this order, and does not
// change when entries are removed.
type line struct {
	entry   []int32  // by position: the entry's index in the pool
	pos     []int32  // by index in the pool: the entry's position
	next    []int32  // by position: position of the next entry; position n, the head, comes before the first and after the last entry
	prev    []int32  // by position: position of the entry before it
	waiting int      // number of entries still in line
	keys    []uint64 // reused for sorting, so that build allocates nothing

	// Entries by prompt length, after sortByLength was called. A place is an index in this order: 0 is the shortest prompt.
	sorted     []uint64 // by place: prompt tokens<<32 | position, ascending
	placeOf    []int32  // by position: the entry's place
	firstEqual []int32  // by place: lowest place with a prompt of the same length
	after      []int32  // by place: the place itself while its entry is in line, else a higher place where to look on; n at the end
	before     []int32  // by place+1: like after, but towards lower places; values are a place plus 1, and 0 at the end
	indexed    bool     // true if sortByLength was called in this round
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
	if n == 0 { // an empty line: the head is its own neighbour
		l.next[0], l.prev[0] = 0, 0
		return
	}
	l.prev[0] = int32(n) // the head, at position n, closes the list to a ring
	l.next[n], l.prev[n] = 0, int32(n)-1
}

// head returns the position before the first entry, where a walk along next begins and ends.
func (l *line) head() int32 { return int32(len(l.entry)) }

// remove takes the entry at position p out of the line; all other positions stay the same.
func (l *line) remove(p int32) {
	l.next[l.prev[p]], l.prev[l.next[p]] = l.next[p], l.prev[p]
	l.waiting--
	if l.indexed { // atOrAfter and atOrBefore must skip the entry's place from now on
		place := l.placeOf[p]
		l.after[place] = place + 1
		l.before[place+1] = place
	}
}

// sortByLength sorts the entries that are still in line by the length of their prompts, so that bestSingle can look them up by length.
// Entries of the same length stay in the order of their positions.
func (l *line) sortByLength(pool []Entry) {
	l.sorted = l.sorted[:0]
	for p := l.next[l.head()]; p != l.head(); p = l.next[p] {
		l.sorted = append(l.sorted, uint64(uint32(pool[l.entry[p]].Prompt))<<32|uint64(p))
	}
	slices.Sort(l.sorted)
	n := len(l.sorted)
	l.placeOf, l.firstEqual = sized(l.placeOf, len(l.entry)), sized(l.firstEqual, n)
	l.after, l.before = sized(l.after, n+1), sized(l.before, n+1)
	for place := range n {
		l.placeOf[l.position(place)] = int32(place)
		l.after[place], l.before[place] = int32(place), int32(place) // the entry is in line, so a search ends at its place
		l.firstEqual[place] = int32(place)
		if place > 0 && l.prompt(place) == l.prompt(place-1) {
			l.firstEqual[place] = l.firstEqual[place-1]
		}
	}
	l.after[n], l.before[n] = int32(n), int32(n)
	l.indexed = true
}

// prompt returns how many prompt tokens the entry at this place has.
func (l *line) prompt(place int) int64 { return int64(l.sorted[place] >> 32) }

// position returns the position in line of the entry at this place.
func (l *line) position(place int) int32 { return int32(uint32(l.sorted[place])) }

// atOrAfter returns the first place, from the given one on, whose entry is still in line; len(sorted): there is none. It follows the values
// of after until a place points to itself. It also halves the paths in after that it walks, so that later calls are faster.
func (l *line) atOrAfter(from int) int {
	place := int32(from)
	for l.after[place] != place {
		l.after[place] = l.after[l.after[place]]
		place = l.after[place]
	}
	return int(place)
}

// atOrBefore returns the last place, up to the given one, whose entry is still in line; -1: there is none. It walks before as atOrAfter
// walks after.
func (l *line) atOrBefore(from int) int {
	next := int32(from) + 1 // place plus 1, the form of the values in before
	for l.before[next] != next {
		l.before[next] = l.before[l.before[next]]
		next = l.before[next]
	}
	return int(next) - 1
}
