package index

import "time"

// Speculate begins a speculation: a prompt's blocks count as held by the slot while the prompt's probe is in flight, because the engine
// will probably store them. Of a prompt with more blocks than the slot's capacity, it counts only the first ones. Each block has a claim,
// which counts the speculations that need it. The caller must not change keys before the speculation ends.
func (x *Index) Speculate(s Slot, keys []Key) Speculation {
	if !x.isCurrent(s) { // the candidate was removed: nothing is counted
		return Speculation{}
	}
	at := &x.slots[s.N]
	keys = at.fitting(keys)
	for i := len(keys) - 1; i >= 0; i-- { // from the last block, whose claim is then the least recent one, and so evicted first
		n := x.ensureClaim(s.N, keys[i])
		x.claims[n].addSpeculation()
	}
	// Claims may be dropped before the speculation ends. By clearCount, StillValid then sees that all claims of the slot were dropped.
	// By began, isCountedBy sees that one claim was dropped and made again: the new claim does not count this speculation.
	p := Speculation{keys: keys, slot: s, clearCount: at.clearCount, began: x.clock}
	x.clock++ // claims that are made from now on have a later time than the speculation
	return p
}

// Confirm ends the speculation, because the probe's engine has computed the blocks. The claim of each block no longer counts the
// speculation, and is confirmed instead: the engine is known to hold the block. Blocks that the index has dropped meanwhile are added
// again. But if the slot was cleared or removed, its engine may have lost the blocks since, and Confirm adds none.
func (x *Index) Confirm(p *Speculation) {
	if x.StillValid(p) {
		for i := len(p.keys) - 1; i >= 0; i-- { // from the last block, so that a block is evicted before the blocks in front of it
			n := x.ensureClaim(p.slot.N, p.keys[i])
			c := &x.claims[n]
			if p.isCountedBy(c) { // false for a claim that was just made
				c.removeSpeculation()
			}
			c.confirm()
		}
	}
	*p = Speculation{}
}

// Drop notes that the engine has not computed the blocks, because the probe failed or was cancelled.
func (x *Index) Drop(p *Speculation) {
	x.endSpeculation(p, Failed)
	*p = Speculation{}
}

// lingerTime is how long the blocks of a probe with an unknown outcome stay in the index. KV events name stored blocks sooner
// than this. Without events, longer would not help: the next request of a session comes later than this.
const lingerTime = 2 * time.Second

// ExpireSoon ends a speculation, the guess that a probe makes the engine store its blocks, if the probe's outcome is unknown or will be
// shown by the engine's KV events. The blocks still count as held for lingerTime. Those that the engine is not known to hold by then
// (Insert) are dropped. The confirmed blocks at the prompt's start leave the speculation at once, so that an event can remove them. A
// further call does nothing, because p is then empty.
func (x *Index) ExpireSoon(p *Speculation, now time.Time) {
	if x.StillValid(p) { // otherwise p is empty, or the slot was cleared or deleted, so that the blocks are gone already
		x.releaseConfirmed(p)
		if len(p.keys) > 0 { // some blocks are not confirmed yet
			x.lingering = append(x.lingering, lingering{*p, now.Add(lingerTime)})
		}
	}
	*p = Speculation{}
}

// releaseConfirmedLingering removes the confirmed blocks at the prompt's start from the slot's lingering speculations, whose probes have
// ended with an unknown outcome. A block is confirmed once an event or an answer of the engine shows it. A speculation without further
// blocks leaves the list. One that has no effect any more, because the slot was cleared or deleted, stays until Sweep removes it.
func (x *Index) releaseConfirmedLingering(s Slot) {
	remaining := x.lingering[:0] // reuses the memory of the list
	for i := range x.lingering {
		l := &x.lingering[i]
		if l.slot == s && x.StillValid(&l.Speculation) {
			x.releaseConfirmed(&l.Speculation)
		}
		if len(l.keys) > 0 { // 0: all of its blocks are confirmed
			remaining = append(remaining, *l)
		}
	}
	clear(x.lingering[len(remaining):]) // lets the garbage collector free their keys
	x.lingering = remaining
}

// releaseConfirmed removes the first blocks from p, up to the first block that the engine is not known to hold (that is not confirmed). A
// confirmed block stays in the index without p, so its claim stops counting p as one of the speculations that need it.
func (x *Index) releaseConfirmed(p *Speculation) {
	for len(p.keys) > 0 {
		c := &x.claims[x.lookUp(p.slot.N, p.keys[0])]
		if !c.isConfirmed() { // lookUp returns claim 0, which is never confirmed, for a block that the slot does not hold
			return
		}
		if p.isCountedBy(c) { // false if the claim was made after p began
			c.removeSpeculation()
		}
		p.keys = p.keys[1:]
	}
}

// Sweep drops the unconfirmed blocks of speculations that have lingered for their time. The owner calls it before Match.
func (x *Index) Sweep(now time.Time) {
	for len(x.lingering) > 0 && !now.Before(x.lingering[0].until) {
		x.endSpeculation(&x.lingering[0].Speculation, TTL)
		x.lingering[0] = lingering{} // lets the garbage collector free its keys
		x.lingering = x.lingering[1:]
	}
}

// StillValid reports whether p still has an effect: it has blocks, and its slot is in use and was not cleared since p began.
func (x *Index) StillValid(p *Speculation) bool {
	return len(p.keys) > 0 && x.isCurrent(p.slot) && x.slots[p.slot.N].clearCount == p.clearCount
}

// endSpeculation ends p without a confirmation. Each claim has the number of speculations that need it, and endSpeculation subtracts p from
// those that count it. It then drops each of them that is no longer needed: no other speculation needs it, and the engine is not known to
// hold the block.
func (x *Index) endSpeculation(p *Speculation, why Reason) {
	if !x.StillValid(p) { // p is empty, or the slot was cleared or deleted, so that its claims are gone already
		return
	}
	for i := len(p.keys) - 1; i >= 0; i-- { // in the order in which Speculate made the claims: lookUp first tries a neighbour's number
		n := x.lookUp(p.slot.N, p.keys[i]) // 0: the claim was dropped meanwhile
		if c := &x.claims[n]; n != 0 && p.isCountedBy(c) {
			c.removeSpeculation()
			if !c.isNeeded() {
				x.dropClaim(n, why)
			}
		}
	}
}

// isCountedBy reports whether p is one of the speculations that c counts. It is not if c was born after p began: then p's own claim
// was dropped meanwhile, and another speculation made c.
func (p *Speculation) isCountedBy(c *claim) bool {
	return int32(c.born-p.began) <= 0 && c.speculations() > 0 // born <= began, although the clock wraps around
}
