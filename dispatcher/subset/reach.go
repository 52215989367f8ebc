package subset

import "github.com/bits-and-blooms/bitset"

// maxBits is the largest sum a table counts token by token (algorithm 4.4).
const maxBits = 65_536

// reach knows which sums exactly j of the first i sizes can have, for every i
// and j: a bitset each, kept after every item so that a sum can be traced back
// to the items that make it.
type reach struct {
	n, c  int
	bound int64
	rows  []row    // (i, j) at i*(c+1)+j
	arena []uint64 // words of all rows; reused
	used  int
}

// row is the set of sums of one (i, j): its words in use and the largest sum
// it can hold. Rows with j > i have none.
type row struct {
	words []uint64
	top   int64
}

// fill builds the table for sums up to bound.
func (r *reach) fill(sizes []int64, c int, bound int64) {
	r.n, r.c, r.bound, r.used = len(sizes), c, bound, 0
	if need := (r.n + 1) * (c + 1); cap(r.rows) < need {
		r.rows = make([]row, need)
	} else {
		r.rows = r.rows[:need]
		clear(r.rows)
	}
	r.reserve(sizes)
	zero := r.take(0)
	zero.words[0] = 1 // the empty sum
	r.rows[0] = zero
	for i, size := range sizes {
		before, after := r.rows[i*(c+1):][:c+1], r.rows[(i+1)*(c+1):][:c+1]
		after[0] = zero
		for j := 1; j <= min(i+1, c); j++ {
			without, fewer := before[j], before[j-1]
			if size > bound || fewer.words == nil {
				after[j] = without // rows never change once built: share it
				continue
			}
			next := r.take(max(without.top, min(bound, fewer.top+size)))
			shiftOr(next.words, without.words, fewer.words, uint(size))
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
		for j := 1; j <= min(i+1, r.c); j++ {
			need += wordsFor(min(r.bound, largest*int64(j)))
		}
	}
	if len(r.arena) < need {
		r.arena = make([]uint64, need)
	}
}

// take returns a row from the arena; its words are what was there before.
func (r *reach) take(top int64) row {
	n := wordsFor(top)
	words := r.arena[r.used : r.used+n : r.used+n]
	r.used += n
	return row{words: words, top: top}
}

func wordsFor(top int64) int { return int(top>>6) + 1 }

// trim drops the bits above bound from the last word.
func (w row) trim(bound int64) {
	if last := len(w.words) - 1; int64(last) == bound>>6 {
		w.words[last] &= ^uint64(0) >> (63 - uint(bound)&63)
	}
}

// set shows the row to the bitset library without copying it.
func (w row) set() (b bitset.BitSet) {
	b.SetBitsetFrom(w.words)
	return b
}

// has reports whether sum is in the row.
func (w row) has(sum int64) bool {
	return sum>>6 < int64(len(w.words)) && w.words[sum>>6]>>(uint(sum)&63)&1 == 1
}

// shiftOr sets dst = a | b << shift. Bits shifted past dst are lost; dst is at
// least as long as a and may hold anything before.
func shiftOr(dst, a, b []uint64, shift uint) {
	skip, bit := int(shift>>6), shift&63
	n := copy(dst, a)
	clear(dst[n:])
	if skip >= len(dst) {
		return
	}
	dst = dst[skip:]
	if bit == 0 {
		for k := range min(len(b), len(dst)) {
			dst[k] |= b[k]
		}
		return
	}
	var carry uint64
	m := min(len(b), len(dst))
	to, from := dst[:m], b[:m]
	for k, w := range from {
		to[k] |= w<<bit | carry
		carry = w >> (64 - bit)
	}
	if m < len(dst) {
		dst[m] |= carry
	}
}

// last returns the largest sum of at least one item up to w, and the largest
// number of items that makes it.
func (r *reach) last(w int64) (sum int64, count int, ok bool) {
	for j := 1; j <= r.c; j++ {
		row := r.rows[r.n*(r.c+1)+j]
		if row.words == nil {
			continue
		}
		b := row.set()
		if at, found := b.PreviousSet(uint(min(w, int64(len(row.words))<<6-1))); found && (!ok || int64(at) >= sum) {
			sum, count, ok = int64(at), j, true
		}
	}
	return sum, count, ok
}

// first returns the smallest sum of at least one item from w on, and the
// largest number of items that makes it.
func (r *reach) first(w int64) (sum int64, count int, ok bool) {
	for j := 1; j <= r.c; j++ {
		row := r.rows[r.n*(r.c+1)+j]
		b := row.set()
		if at, found := b.NextSet(uint(w)); found && (!ok || int64(at) <= sum) {
			sum, count, ok = int64(at), j, true
		}
	}
	return sum, count, ok
}

// trace returns the items of a reachable (sum, count): from the last item to
// the first each is left out where the rest can be had without it, which gives
// the smallest mask.
func (r *reach) trace(sizes []int64, sum int64, count int) (mask uint64) {
	for i := r.n; i > 0 && count > 0; i-- {
		if r.rows[(i-1)*(r.c+1)+count].has(sum) {
			continue
		}
		mask |= 1 << (i - 1)
		sum -= sizes[i-1]
		count--
	}
	return mask
}
