package subset

import "github.com/bits-and-blooms/bitset"

// maxBits bounds the bits of a set of sums. If the largest sum is larger, sums count blocks of several tokens instead of single tokens.
const maxBits = 65_536

// sumTable is a table of sets: for every i and j, the sums that exactly j of the first i sizes can have. Each set is a bitset. The table
// keeps all sets, so that the items of a sum can be found again (see trace).
type sumTable struct {
	items, maxItems int      // number of sizes, and the largest j
	bound           int64    // larger sums are left out
	rows            []row    // the set of (i, j) is at index i*(maxItems+1)+j
	arena           []uint64 // memory for the words of all rows, which the next table reuses
	used            int      // words of the arena that are in use
}

// row is the set of sums of one (i, j), as a bitset. It has only the words from the smallest possible sum to the largest. Rows with j > i
// have no words.
type row struct {
	words []uint64
	low   int   // words begins with the bit of the sum 64*low
	top   int64 // no sum of the set is larger
}

// fill builds the table. Each sum adds at most maxItems of the sizes, and sums above bound are left out. fill takes one size after another.
// The set of (i+1, j) has the sums without the size at index i, which are the set of (i, j), and the sums with it, which are the sums of
// (i, j-1) plus this size.
func (t *sumTable) fill(sizes []int64, maxItems int, bound int64) {
	t.items, t.maxItems, t.bound, t.used = len(sizes), maxItems, bound, 0
	if need := (t.items + 1) * (maxItems + 1); cap(t.rows) < need {
		t.rows = make([]row, need)
	} else {
		t.rows = t.rows[:need]
		clear(t.rows)
	}
	t.reserve(sizes)
	zero := t.newRow(0, 0)
	zero.words[0] = 1 // the empty sum
	t.rows[0] = zero
	for i, size := range sizes {
		before, after := t.rows[i*(maxItems+1):][:maxItems+1], t.rows[(i+1)*(maxItems+1):][:maxItems+1]
		after[0] = zero
		for j := 1; j <= min(i+1, maxItems); j++ {
			after[j] = t.union(before[j], before[j-1], size)
		}
	}
}

// sumsOf returns the set of (i, j).
func (t *sumTable) sumsOf(i, j int) row { return t.rows[i*(t.maxItems+1)+j] }

// union returns the set of the sums of without, and of the sums of fewer plus size, up to bound. without has the sums without an item, and
// fewer those of one item less. If no sum of fewer plus size is within bound, it returns without itself.
func (t *sumTable) union(without, fewer row, size int64) row {
	low := fewer.low + int(size>>6)
	if fewer.words == nil || int64(low) > t.bound>>6 { // there are no sums with the item, or all are above bound
		return without // both sets can share one row, because a row does not change after it is built
	}
	first := 0 // index in the new row of the first word of without
	if without.words != nil {
		first = max(0, without.low-low)
		low = min(low, without.low)
	}
	next := t.newRow(low, max(without.top, min(t.bound, fewer.top+size)))
	clear(next.words[:first])
	end := first + copy(next.words[first:], without.words)
	clear(next.words[end:])
	orShifted(next.words, fewer.words, uint(size)+uint(fewer.low-low)<<6)
	next.trim(t.bound)
	return next
}

// reserve makes the arena large enough for all rows, because the words of a row must not move.
func (t *sumTable) reserve(sizes []int64) {
	need := 1
	var largest int64
	for i, size := range sizes {
		largest = max(largest, min(size, t.bound))
		for j := 1; j <= min(i+1, t.maxItems); j++ {
			need += wordsFor(min(t.bound, largest*int64(j)))
		}
	}
	if len(t.arena) < need {
		t.arena = make([]uint64, need)
	}
}

// newRow returns a row with memory from the arena. The words are not cleared.
func (t *sumTable) newRow(low int, top int64) row {
	n := wordsFor(top) - low
	words := t.arena[t.used : t.used+n : t.used+n]
	t.used += n
	return row{words: words, low: low, top: top}
}

// wordsFor returns how many 64-bit words a bitset of the sums from 0 to top has.
func wordsFor(top int64) int { return int(top>>6) + 1 }

// trim drops the bits above bound from the last word. The sum x is bit x&63 of the word x>>6.
func (w row) trim(bound int64) {
	if last := len(w.words) - 1; int64(w.low+last) == bound>>6 { // otherwise all bits of the last word are below bound
		w.words[last] &= ^uint64(0) >> (63 - uint(bound)&63)
	}
}

// has reports whether sum is in the row.
func (w row) has(sum int64) bool {
	k := sum>>6 - int64(w.low)
	return k >= 0 && k < int64(len(w.words)) && w.words[k]>>(uint(sum)&63)&1 == 1
}

// largestAtMost returns the largest sum in the row that is at most x; false: there is none.
func (w row) largestAtMost(x int64) (int64, bool) {
	from := int64(w.low) << 6 // the sum of the first bit
	if len(w.words) == 0 || x < from {
		return 0, false
	}
	var b bitset.BitSet
	b.SetBitsetFrom(w.words)
	at, ok := b.PreviousSet(uint(min(x-from, int64(len(w.words))<<6-1)))
	return from + int64(at), ok
}

// smallestAtLeast returns the smallest sum in the row that is at least x; false: there is none.
func (w row) smallestAtLeast(x int64) (int64, bool) {
	var b bitset.BitSet
	b.SetBitsetFrom(w.words)
	from := int64(w.low) << 6 // the sum of the first bit
	at, ok := b.NextSet(uint(max(0, x-from)))
	return from + int64(at), ok
}

// orShifted sets dst |= src << shift, for bitsets of several words. Bits that are shifted beyond the end of dst are lost.
func orShifted(dst, src []uint64, shift uint) {
	dst = dst[min(int(shift>>6), len(dst)):]
	up := shift & 63
	down := 63 - up // a word shifted down by 1 and then by this gives the bits for the next word, and none if up is 0
	src = src[:min(len(src), len(dst))]
	to := dst[:len(src)]
	var below uint64 // the word before, whose high bits move into this word
	for k, w := range src {
		to[k] |= w<<(up&63) | below>>1>>(down&63) // with these masks, the compiler need not test for shifts of 64 or more
		below = w
	}
	if len(src) < len(dst) {
		dst[len(src)] |= below >> 1 >> (down & 63)
	}
}

// largestUpTo returns the largest sum of at least one item that is at most x, and the largest number of items with this sum.
func (t *sumTable) largestUpTo(x int64) (sum int64, count int, ok bool) {
	for j := 1; j <= t.maxItems; j++ {
		if s, found := t.sumsOf(t.items, j).largestAtMost(x); found && (!ok || s >= sum) {
			sum, count, ok = s, j, true
		}
	}
	return sum, count, ok
}

// smallestFrom returns the smallest sum of at least one item that is at least x, and the largest number of items with this sum.
func (t *sumTable) smallestFrom(x int64) (sum int64, count int, ok bool) {
	for j := 1; j <= t.maxItems; j++ {
		if s, found := t.sumsOf(t.items, j).smallestAtLeast(x); found && (!ok || s <= sum) {
			sum, count, ok = s, j, true
		}
	}
	return sum, count, ok
}

// trace returns the smallest mask of so many items with the given sum, which the table must have. From the last item to the first, it
// leaves an item out if as many items before it can make the sum.
func (t *sumTable) trace(sizes []int64, sum int64, count int) (mask uint64) {
	for i := t.items; i > 0 && count > 0; i-- {
		if t.sumsOf(i-1, count).has(sum) {
			continue
		}
		mask |= 1 << (i - 1)
		sum -= sizes[i-1]
		count--
	}
	return mask
}
