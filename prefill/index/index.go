package index

import (
	"math/bits"
)

// Match returns, for every slot number, how many of the prompt's first blocks the slot holds
// without a gap. It overwrites dst.
func (x *Index) Match(dst []int32, keys []Key) []int32 {
	dst = dst[:0]
	for range x.slots {
		dst = append(dst, 0)
	}
	for w := range x.wordsPerEntry {
		x.matchWord(dst[64*w:], keys, w)
	}
	return dst
}

// matchWord is Match for the 64 slots of one word of the holders; dst begins with the first of
// them.
func (x *Index) matchWord(dst []int32, keys []Key, word int) {
	matching := x.inUse(word) // the slots that hold all blocks so far
	for depth := range keys {
		if matching == 0 {
			return
		}
		entry := int(x.table.find(keys[depth], x.keys)) // 0 if the key is unknown; entry 0 has no holders
		next := matching & x.holders[entry*x.wordsPerEntry+word]
		// The slots that held all earlier blocks but not this one. Each step clears the lowest bit.
		for gone := matching &^ next; gone != 0; gone &= gone - 1 {
			dst[bits.TrailingZeros64(gone)] = int32(depth)
		}
		matching = next
	}
	for ; matching != 0; matching &= matching - 1 { // these slots hold all blocks
		dst[bits.TrailingZeros64(matching)] = int32(len(keys))
	}
}

// inUse has a bit for each slot with a candidate, among the 64 slots of word w.
func (x *Index) inUse(w int) (word uint64) {
	for i := 64 * w; i < min(64*w+64, len(x.slots)); i++ {
		if x.slots[i].inUse {
			word |= 1 << (i % 64)
		}
	}
	return word
}

// Insert notes that the slot's engine is known to hold the blocks of a prompt, as many as the slot
// can hold.
func (x *Index) Insert(s Slot, keys []Key) {
	if !x.isCurrent(s) {
		return
	}
	keys = x.slots[s.N].fitting(keys)
	for i := len(keys) - 1; i >= 0; i-- { // from the last, so that a block is evicted before those in front of it
		c := x.ensureClaim(s.N, keys[i])
		x.claims[c].confirm()
	}
	x.releaseConfirmedLingering(s)
}

// Remove notes that the slot's engine no longer holds a block. The blocks behind it stay, because
// the engine may store it again.
func (x *Index) Remove(s Slot, k Key) {
	if !x.isCurrent(s) {
		return
	}
	c := x.lookUp(s.N, k)
	if c == 0 {
		return
	}
	x.claims[c].unconfirm()
	if !x.claims[c].isNeeded() { // else a probe in flight needs the claim
		x.dropClaim(c, Removed)
	}
}

// Correct drops the slot's claims on all but the first cached blocks of a prompt, because the
// engine found only these when it began the prefill. By now the prefill has computed them anew: a
// caller that learns only from answers adds them again next, by Confirm or Insert; otherwise the
// engine's events add them.
func (x *Index) Correct(s Slot, keys []Key, cached int) (dropped int) {
	if !x.isCurrent(s) {
		return 0
	}
	for i := len(keys) - 1; i >= max(cached, 0); i-- { // as the claims were made
		if c := x.lookUp(s.N, keys[i]); c != 0 {
			x.dropClaim(c, Removed)
			dropped++
		}
	}
	return dropped
}
