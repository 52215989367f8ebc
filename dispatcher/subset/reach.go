package subset

import "github.com/bits-and-blooms/bitset"

// maxBits is the largest number of bits in a set of sums. If sums can be larger than this, the solver counts blocks of several tokens
// instead of single tokens.
const maxBits = 65_536

// sumTable is a table of sets: for every i and j, the sums that exactly j of the first i sizes can have. Each set is a bitset. The table
// keeps all sets, so that the items that make a sum can be found again (see trace).
type sumTable struct {
	items, maxItems int      // number of sizes, and the largest number of them in a sum (the largest j)
	bound           int64    // largest sum in the table; larger sums are left out
	rows            []row    // the set of (i, j) is at index i*(maxItems+1)+j
	arena           []uint64 // memory for the words of all rows, which the next table reuses
	used            int      // number of words of the arena that rows use
}

// row is the set of sums of one (i, j), as a bitset. It stores only the words between the smallest and the largest possible sum. A row with
// j > i is empty, and has no words.
type row struct {
	words   []uint64
	lowWord int   // the first bit of words stands for the sum 64*lowWord
	top     int64 // the largest sum in the set is at most this
}

// fill builds the table for sums of at most maxItems sizes; union leaves out sums above bound. The set of (i, j) has the sums that exactly
// j of the first i sizes can have. fill takes one size after another. The set of (i+1, j) has two kinds of sums: those without the size at
// index i, which are the set of (i, j), and those with this size, which are the sums of (i, j-1) plus the size.
func (t *sumTable) fill(sizes []int64, maxItems int, bound int64) {
	t.items, t.maxItems, t.bound, t.used = len(sizes), maxItems, bound, 0 // used 0: the arena's memory is used anew
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
		// The sets of (i, j) and of (i+1, j) for all j.
		before, after := t.rows[i*(maxItems+1):][:maxItems+1], t.rows[(i+1)*(maxItems+1):][:maxItems+1]
		after[0] = zero
		for j := 1; j <= min(i+1, maxItems); j++ {
			after[j] = t.union(before[j], before[j-1], size)
		}
	}
}

// sumsOf returns the set of (i, j): the sums that exactly j of the first i sizes can have.
func (t *sumTable) sumsOf(i, j int) row { return t.rows[i*(t.maxItems+1)+j] }

// union makes one row of the table (see fill): the sums of exactly j items out of the first i+1, of which the last item has this size. Each
// such sum either lacks the last item, and then it is one of withoutItem, the sums of j of the first i items. Or it has the last item, and
// then it is the size plus one of oneFewer, the sums of j-1 of the first i items. Sums above bound are left out. If no sum with the last
// item is left, union returns withoutItem itself.
//
// A row is a set of bits, one for each sum, in words of 64. It has only the words from lowWord on: the word k has the sums from 64*k to
// 64*k+63.
func (t *sumTable) union(withoutItem, oneFewer row, size int64) row {
	lowWord := oneFewer.lowWord + int(size>>6)                // the first word that may have a sum with the item
	if oneFewer.words == nil || int64(lowWord) > t.bound>>6 { // no sum with the item exists, or all are above bound
		return withoutItem // both sets can share one row, because a row does not change after it is built
	}
	if withoutItem.words != nil {
		lowWord = min(lowWord, withoutItem.lowWord)
	}
	largest := max(withoutItem.top, min(t.bound, oneFewer.top+size))
	next := t.newRow(lowWord, largest)
	next.copyFrom(withoutItem)
	// The sum x of oneFewer is bit x-64*oneFewer.lowWord there, and x+size is bit x+size-64*lowWord here.
	shiftBits := size + 64*int64(oneFewer.lowWord-lowWord) // never below 0, because next begins at or below the first sum with the item
	orShifted(next.words, oneFewer.words, uint(shiftBits)) // adds to next each sum of oneFewer plus size
	next.trim(t.bound)                                     // sums with the item may be above bound
	return next
}

// copyFrom sets the bits of w to those of other, so that both are the same set. w must have all words of other, and may have more before
// and after them, which become 0.
func (w row) copyFrom(other row) {
	first := max(0, other.lowWord-w.lowWord) // index in w of the first word of other; 0 if other is empty
	clear(w.words[:first])
	end := first + copy(w.words[first:], other.words)
	clear(w.words[end:])
}

// reserveWords makes the arena large enough for the words of all rows. It is called before any row is built, because the words of a row
// must not move. The row of (i, j) has the sums that exactly j of the first i sizes can have. It needs one bit for each number up to the
// largest of these sums, which is at most j times the largest of the first i sizes. Sums above bound are left out, so they need no bits.
func (t *sumTable) reserveWords(sizes []int64) {
	words := 1 // for the row with only the sum 0
	var largest int64
	for k, size := range sizes {
		i := k + 1
		largest = max(largest, min(size, t.bound)) // a size above bound is in no sum; j times such a size could overflow
		for j := 1; j <= min(i, t.maxItems); j++ {
			words += wordsFor(min(t.bound, largest*int64(j)))
		}
	}
	if len(t.arena) < words {
		t.arena = make([]uint64, words)
	}
}

// newRow returns a row for the sums from 64*lowWord to top, one bit for each, with memory from the arena. The words still have the bits of
// an earlier table.
func (t *sumTable) newRow(lowWord int, top int64) row {
	n := wordsFor(top) - lowWord // the words before lowWord would be empty, so they are left out
	words := t.arena[t.used : t.used+n : t.used+n]
	t.used += n
	return row{words: words, lowWord: lowWord, top: top}
}

// wordsFor returns how many 64-bit words a bitset of the sums from 0 to top has.
func wordsFor(top int64) int { return int(top>>6) + 1 }

// trim clears the bits for sums above bound in the last word of the row. The sum x is bit x&63 of the word x>>6.
func (w row) trim(bound int64) {
	if last := len(w.words) - 1; int64(w.lowWord+last) == bound>>6 { // otherwise all bits of the last word are below bound
		w.words[last] &= ^uint64(0) >> (63 - uint(bound)&63)
	}
}

// has says whether a sum is in the row: whether bit sum&63 of the word sum>>6 is 1.
func (w row) has(sum int64) bool {
	k := sum>>6 - int64(w.lowWord)
	return k >= 0 && k < int64(len(w.words)) && w.words[k]>>(uint(sum)&63)&1 == 1
}

// largestAtMost returns the largest sum in the row that is at most x; ok is false if the row has no such sum.
func (w row) largestAtMost(x int64) (sum int64, ok bool) {
	from := int64(w.lowWord) << 6 // sum that the first bit of the row stands for
	if len(w.words) == 0 || x < from {
		return 0, false
	}
	var b bitset.BitSet
	b.SetBitsetFrom(w.words)
	lastBit := int64(len(w.words))<<6 - 1
	at, ok := b.PreviousSet(uint(min(x-from, lastBit)))
	return from + int64(at), ok
}

// smallestAtLeast returns the smallest sum in the row that is at least x; ok is false if the row has no such sum.
func (w row) smallestAtLeast(x int64) (sum int64, ok bool) {
	var b bitset.BitSet
	b.SetBitsetFrom(w.words)
	from := int64(w.lowWord) << 6 // sum that the first bit of the row stands for
	at, ok := b.NextSet(uint(max(0, x-from)))
	return from + int64(at), ok
}

// orShifted sets dst |= src << shift, where dst and src are bitsets of several words. Bits that are shifted beyond the end of dst are lost.
func orShifted(dst, src []uint64, shift uint) {
	dst = dst[min(int(shift>>6), len(dst)):]
	up := shift & 63
	// w >> 1 >> down gives the bits of w that move into the next word, and 0 if up is 0.
	down := 63 - up
	src = src[:min(len(src), len(dst))]
	to := dst[:len(src)]
	var below uint64 // previous word of src, whose high bits move into the present word
	for k, w := range src {
		to[k] |= w<<(up&63) | below>>1>>(down&63) // the masks &63 save the compiler a test for shifts of 64 or more
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

// trace returns the smallest mask of count items whose sizes have the given sum. The table must have this sum. trace goes from the last
// item to the first, and leaves an item out if count items before it can make the sum.
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
