package subset

import "github.com/bits-and-blooms/bitset"

// maxBits is the largest number of bits in a set of sums. For larger sums, the solver counts blocks
// of several tokens.
const maxBits = 65_536

// sumTable has a set for every i and j: the sums that exactly j of the first i sizes can have. It
// keeps all sets, so that trace can find the items that make a sum.
type sumTable struct {
	items, maxItems int      // number of sizes, and the most of them in a sum (the largest j)
	bound           int64    // larger sums are left out
	rows            []row    // the set of (i, j) is at index i*(maxItems+1)+j
	arena           []uint64 // memory for the words of all rows, reused for the next table
	used            int      // words of the arena that rows use
}

// row is the set of one (i, j), as a bitset. It stores only the words between the smallest and the
// largest possible sum; with j > i it has none.
type row struct {
	words   []uint64
	lowWord int   // the first bit of words stands for the sum 64*lowWord
	top     int64 // no sum in the set is larger
}

// fill builds the table for sums of at most maxItems sizes. The set of (i+1, j) has the sums of (i,
// j), and those of (i, j-1) plus the size at index i.
func (t *sumTable) fill(sizes []int64, maxItems int, bound int64) {
	t.items, t.maxItems, t.bound, t.used = len(sizes), maxItems, bound, 0
	if rows := (t.items + 1) * (maxItems + 1); cap(t.rows) < rows {
		t.rows = make([]row, rows)
	} else {
		t.rows = t.rows[:rows]
		clear(t.rows)
	}
	t.reserveWords(sizes)
	const firstWord, largestSum = 0, 0
	zero := t.newRow(firstWord, largestSum) // the set of (i, 0) for each i
	zero.words[0] = 1                       // bit 0: the sum of no items is 0
	t.rows[0] = zero
	for i, size := range sizes {
		before, after := t.rows[i*(maxItems+1):][:maxItems+1], t.rows[(i+1)*(maxItems+1):][:maxItems+1]
		after[0] = zero
		for j := 1; j <= min(i+1, maxItems); j++ {
			after[j] = t.union(before[j], before[j-1], size)
		}
	}
}

func (t *sumTable) sumsOf(i, j int) row { return t.rows[i*(t.maxItems+1)+j] }

// union returns the set of withoutItem and of each sum of oneFewer plus size. Sums above bound are
// left out.
func (t *sumTable) union(withoutItem, oneFewer row, size int64) row {
	lowWord := oneFewer.lowWord + int(size>>6)                // the first word that may have a sum with the item
	if oneFewer.words == nil || int64(lowWord) > t.bound>>6 { // no sum with the item is left
		return withoutItem // both sets can share a row, because it does not change after it is built
	}
	if withoutItem.words != nil {
		lowWord = min(lowWord, withoutItem.lowWord)
	}
	largest := max(withoutItem.top, min(t.bound, oneFewer.top+size))
	next := t.newRow(lowWord, largest)
	next.copyFrom(withoutItem)
	// The sum x of oneFewer is bit x-64*oneFewer.lowWord there, and x+size is bit x+size-64*lowWord
	// here.
	shiftBits := size + 64*int64(oneFewer.lowWord-lowWord) // never below 0: next begins at or below the first sum with the item
	orShifted(next.words, oneFewer.words, uint(shiftBits))
	next.trim(t.bound)
	return next
}

// copyFrom needs all words of other in w; the words before and after them become 0.
func (w row) copyFrom(other row) {
	first := max(0, other.lowWord-w.lowWord) // 0 if other is empty
	clear(w.words[:first])
	end := first + copy(w.words[first:], other.words)
	clear(w.words[end:])
}

// reserveWords is called before any row is built, because the words of a row must not move.
func (t *sumTable) reserveWords(sizes []int64) {
	words := 1 // for the row with only the sum 0
	var largest int64
	for k, size := range sizes {
		i := k + 1
		largest = max(largest, min(size, t.bound)) // a size above bound is in no sum, and j times such a size could overflow
		for j := 1; j <= min(i, t.maxItems); j++ {
			words += wordsFor(min(t.bound, largest*int64(j)))
		}
	}
	if len(t.arena) < words {
		t.arena = make([]uint64, words)
	}
}

// newRow returns a row for the sums from 64*lowWord to top, whose words still have the bits of an
// earlier table.
func (t *sumTable) newRow(lowWord int, top int64) row {
	n := wordsFor(top) - lowWord
	words := t.arena[t.used : t.used+n : t.used+n]
	t.used += n
	return row{words: words, lowWord: lowWord, top: top}
}

func wordsFor(top int64) int { return int(top>>6) + 1 }

// trim clears the bits for sums above bound in the last word.
func (w row) trim(bound int64) {
	if last := len(w.words) - 1; int64(w.lowWord+last) == bound>>6 { // otherwise all its bits are below bound
		w.words[last] &= ^uint64(0) >> (63 - uint(bound)&63)
	}
}

func (w row) has(sum int64) bool {
	k := sum>>6 - int64(w.lowWord)
	return k >= 0 && k < int64(len(w.words)) && w.words[k]>>(uint(sum)&63)&1 == 1
}

func (w row) largestAtMost(x int64) (sum int64, ok bool) {
	from := int64(w.lowWord) << 6 // sum of the first bit
	if len(w.words) == 0 || x < from {
		return 0, false
	}
	var b bitset.BitSet
	b.SetBitsetFrom(w.words)
	lastBit := int64(len(w.words))<<6 - 1
	at, ok := b.PreviousSet(uint(min(x-from, lastBit)))
	return from + int64(at), ok
}

func (w row) smallestAtLeast(x int64) (sum int64, ok bool) {
	var b bitset.BitSet
	b.SetBitsetFrom(w.words)
	from := int64(w.lowWord) << 6 // sum of the first bit
	at, ok := b.NextSet(uint(max(0, x-from)))
	return from + int64(at), ok
}

// orShifted sets dst |= src << shift for bitsets of several words. Bits beyond the end of dst are
// lost.
func orShifted(dst, src []uint64, shift uint) {
	dst = dst[min(int(shift>>6), len(dst)):]
	up := shift & 63
	// w >> 1 >> down has the bits of w that move into the next word; 0 if up is 0.
	down := 63 - up
	src = src[:min(len(src), len(dst))]
	to := dst[:len(src)]
	var below uint64 // previous word of src, whose high bits move into this one
	for k, w := range src {
		to[k] |= w<<(up&63) | below>>1>>(down&63) // the masks save a test for shifts of 64 or more
		below = w
	}
	if len(src) < len(dst) {
		dst[len(src)] |= below >> 1 >> (down & 63)
	}
}

// largestUpTo returns the largest sum that is at most x, and the most items with this sum.
func (t *sumTable) largestUpTo(x int64) (sum int64, count int, ok bool) {
	for j := 1; j <= t.maxItems; j++ {
		if s, found := t.sumsOf(t.items, j).largestAtMost(x); found && (!ok || s >= sum) {
			sum, count, ok = s, j, true
		}
	}
	return sum, count, ok
}

// smallestFrom returns the smallest sum that is at least x, and the most items with this sum.
func (t *sumTable) smallestFrom(x int64) (sum int64, count int, ok bool) {
	for j := 1; j <= t.maxItems; j++ {
		if s, found := t.sumsOf(t.items, j).smallestAtLeast(x); found && (!ok || s <= sum) {
			sum, count, ok = s, j, true
		}
	}
	return sum, count, ok
}

// trace returns the smallest mask of count items with the given sum, which the table must have.
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
