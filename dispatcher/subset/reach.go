package subset

import "github.com/bits-and-blooms/bitset"

// maxBits is the largest sum for which a table counts single tokens; for larger sums it counts blocks of tokens.
const maxBits = 65_536

// reach has the set of sums that exactly j of the first i sizes can have, for every i
// and j, as a bitset. All are kept, so that a sum can be traced back
// to its items.
type reach struct {
	n, most int
	bound   int64
	rows    []row    // (i, j) at i*(c+1)+j
	arena   []uint64 // words of all rows; reused
	used    int
}

// row is the set of sums of one (i, j). It has only the words from the smallest possible sum
// to the largest. Rows with j > i have no words.
type row struct {
	words []uint64
	low   int   // words begins with the bit of the sum 64*low
	top   int64 // no sum of the set is larger
}

// fill builds the table for sums up to bound of at most `most` of the sizes. A row takes over the sums of the row without the new size,
// and adds those of the row with one size fewer, shifted by the new size.
func (r *reach) fill(sizes []int64, most int, bound int64) {
	r.n, r.most, r.bound, r.used = len(sizes), most, bound, 0
	if need := (r.n + 1) * (most + 1); cap(r.rows) < need {
		r.rows = make([]row, need)
	} else {
		r.rows = r.rows[:need]
		clear(r.rows)
	}
	r.reserve(sizes)
	zero := r.newRow(0, 0)
	zero.words[0] = 1 // the empty sum
	r.rows[0] = zero
	for i, size := range sizes {
		before, after := r.rows[i*(most+1):][:most+1], r.rows[(i+1)*(most+1):][:most+1]
		after[0] = zero
		for j := 1; j <= min(i+1, most); j++ {
			without, fewer := before[j], before[j-1]
			low := fewer.low + int(size>>6)
			if fewer.words == nil || int64(low) > bound>>6 {
				after[j] = without // rows never change once built: share it
				continue
			}
			if without.words != nil {
				low = min(low, without.low)
			}
			next := r.newRow(low, max(without.top, min(bound, fewer.top+size)))
			at := 0
			if without.words != nil {
				at = without.low - low
			}
			clear(next.words[:at])
			clear(next.words[at+copy(next.words[at:], without.words):])
			orShifted(next.words, fewer.words, uint(size)+uint(fewer.low-low)<<6)
			next.trim(bound)
			after[j] = next
		}
	}
}

// reserve makes the arena large enough for every row, so that no row moves.
func (r *reach) reserve(sizes []int64) {
	need := 1
	var largest int64
	for i, size := range sizes {
		largest = max(largest, min(size, r.bound))
		for j := 1; j <= min(i+1, r.most); j++ {
			need += wordsFor(min(r.bound, largest*int64(j)))
		}
	}
	if len(r.arena) < need {
		r.arena = make([]uint64, need)
	}
}

// newRow returns a row with memory from the arena, which is not cleared.
func (r *reach) newRow(low int, top int64) row {
	n := wordsFor(top) - low
	words := r.arena[r.used : r.used+n : r.used+n]
	r.used += n
	return row{words: words, low: low, top: top}
}

func wordsFor(top int64) int { return int(top>>6) + 1 }

// trim drops the bits above bound from the last word.
func (w row) trim(bound int64) {
	if last := len(w.words) - 1; int64(w.low+last) == bound>>6 {
		w.words[last] &= ^uint64(0) >> (63 - uint(bound)&63)
	}
}

// has reports whether sum is in the row.
func (w row) has(sum int64) bool {
	k := sum>>6 - int64(w.low)
	return k >= 0 && k < int64(len(w.words)) && w.words[k]>>(uint(sum)&63)&1 == 1
}

// previous returns the largest sum of the row up to x.
func (w row) previous(x int64) (int64, bool) {
	from := int64(w.low) << 6
	if len(w.words) == 0 || x < from {
		return 0, false
	}
	var b bitset.BitSet
	b.SetBitsetFrom(w.words)
	at, ok := b.PreviousSet(uint(min(x-from, int64(len(w.words))<<6-1)))
	return from + int64(at), ok
}

// next returns the smallest sum of the row from x on.
func (w row) next(x int64) (int64, bool) {
	var b bitset.BitSet
	b.SetBitsetFrom(w.words)
	from := int64(w.low) << 6
	at, ok := b.NextSet(uint(max(0, x-from)))
	return from + int64(at), ok
}

// orShifted sets dst |= src << shift. Bits shifted past dst are lost.
func orShifted(dst, src []uint64, shift uint) {
	dst = dst[min(int(shift>>6), len(dst)):]
	up := shift & 63
	down := 63 - up // of the word below once it is down by one, so that up = 0 takes nothing of it
	src = src[:min(len(src), len(dst))]
	to := dst[:len(src)]
	var below uint64
	for k, w := range src {
		to[k] |= w<<(up&63) | below>>1>>(down&63) // the masks spare the test for shifts of 64
		below = w
	}
	if len(src) < len(dst) {
		dst[len(src)] |= below >> 1 >> (down & 63)
	}
}

// largestUpTo returns the largest sum of at least one item up to x, and the largest
// number of items that makes it.
func (r *reach) largestUpTo(x int64) (sum int64, count int, ok bool) {
	for j := 1; j <= r.most; j++ {
		if at, found := r.rows[r.n*(r.most+1)+j].previous(x); found && (!ok || at >= sum) {
			sum, count, ok = at, j, true
		}
	}
	return sum, count, ok
}

// smallestFrom returns the smallest sum of at least one item from x on, and the
// largest number of items that makes it.
func (r *reach) smallestFrom(x int64) (sum int64, count int, ok bool) {
	for j := 1; j <= r.most; j++ {
		if at, found := r.rows[r.n*(r.most+1)+j].next(x); found && (!ok || at <= sum) {
			sum, count, ok = at, j, true
		}
	}
	return sum, count, ok
}

// trace returns the mask of items of a reachable (sum, count). From the last item to
// the first, it leaves an item out if the sum can be had without it, which gives
// the smallest mask.
func (r *reach) trace(sizes []int64, sum int64, count int) (mask uint64) {
	for i := r.n; i > 0 && count > 0; i-- {
		if r.rows[(i-1)*(r.most+1)+count].has(sum) {
			continue
		}
		mask |= 1 << (i - 1)
		sum -= sizes[i-1]
		count--
	}
	return mask
}
