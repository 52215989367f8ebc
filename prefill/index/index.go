package index

import (
	"math/bits"
)

// Match returns, for every slot number, how many of the prompt's blocks the slot holds from the first one on. It
// overwrites dst and may return a larger slice.
func (x *Index) Match(dst []int32, keys []Key) []int32 {
	dst = dst[:0]
	for range x.slots {
		dst = append(dst, 0)
	}
	for w := range x.words {
		x.matchWord(dst[64*w:], keys, w)
	}
	return dst
}

// matchWord walks over the keys for the 64 slots of one word of the holders. A slot leaves the walk at the first block
// that it does not hold.
func (x *Index) matchWord(dst []int32, keys []Key, word int) {
	alive := x.inUse(word)
	for depth := range keys {
		if alive == 0 {
			return
		}
		n := int(x.table.find(keys[depth], x.keys)) // number 0 has no holder
		next := alive & x.holders[n*x.words+word]
		for gone := alive &^ next; gone != 0; gone &= gone - 1 {
			dst[bits.TrailingZeros64(gone)] = int32(depth)
		}
		alive = next
	}
	for ; alive != 0; alive &= alive - 1 {
		dst[bits.TrailingZeros64(alive)] = int32(len(keys))
	}
}

// inUse has a bit for each slot of word w that has a candidate.
func (x *Index) inUse(w int) (word uint64) {
	for i := 64 * w; i < min(64*w+64, len(x.slots)); i++ {
		if x.slots[i].inUse {
			word |= 1 << (i % 64)
		}
	}
	return word
}

// Insert says that the slot's engine holds the blocks.
func (x *Index) Insert(s Slot, keys []Key) {
	if !x.current(s) {
		return
	}
	keys = x.slots[s.N].fitting(keys)
	for i := len(keys) - 1; i >= 0; i-- { // the deepest first, so that it is evicted before the blocks that it needs
		c := x.claim(s.N, keys[i])
		x.claims[c].spec |= confirmed
	}
	x.settleLingering(s)
}

// Remove says that the slot's engine no longer holds one block. The blocks behind it cannot be used without it, but
// they stay, because the block may come back.
func (x *Index) Remove(s Slot, k Key) {
	if !x.current(s) {
		return
	}
	if c := x.lookUp(s.N, k); c != 0 {
		if x.claims[c].spec &= mostSpec; x.claims[c].spec == 0 {
			x.drop(c, Removed)
		}
	}
}

// Correct takes how many of a probe's blocks the engine had in its cache. The slot's claims beyond these are dropped;
// dropped is how many. Confirm of the same probe then says what the engine has computed.
func (x *Index) Correct(s Slot, keys []Key, cached int) (dropped int) {
	if !x.current(s) {
		return 0
	}
	for i := len(keys) - 1; i >= max(cached, 0); i-- {
		if c := x.lookUp(s.N, keys[i]); c != 0 {
			x.drop(c, Removed)
			dropped++
		}
	}
	return dropped
}
