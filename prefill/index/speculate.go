package index

import "time"

// Speculate counts a prompt's blocks, as many as the slot can hold, as held by the slot while the
// prompt's probe is in flight. The caller must not change keys before the speculation ends.
func (x *Index) Speculate(s Slot, keys []Key) Speculation {
	if !x.isCurrent(s) {
		return Speculation{}
	}
	at := &x.slots[s.N]
	keys = at.fitting(keys)
	for i := len(keys) - 1; i >= 0; i-- { // from the last block, whose claim is then the least recent one, and so evicted first
		n := x.ensureClaim(s.N, keys[i])
		x.claims[n].addSpeculation()
	}
	// Claims may be dropped before the speculation ends: clearCount shows that all of the slot were,
	// and began that one was dropped and made again.
	p := Speculation{keys: keys, slot: s, clearCount: at.clearCount, began: x.clock}
	x.clock++ // later claims are newer than the speculation
	return p
}

// Confirm ends the speculation, because the engine has computed the blocks. Blocks that the index
// has dropped meanwhile are added again, unless the slot was cleared or removed: its engine may
// have lost them since.
func (x *Index) Confirm(p *Speculation) {
	if x.StillValid(p) {
		for i := len(p.keys) - 1; i >= 0; i-- { // as in Speculate
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

// Drop notes that the engine has not computed the blocks, because the probe failed or was
// cancelled.
func (x *Index) Drop(p *Speculation) {
	x.endSpeculation(p, Failed)
	*p = Speculation{}
}

// lingerTime is how long the blocks of a probe with an unknown outcome stay in the index. KV events
// name stored blocks sooner. Without events, longer would not help: the next request of a session
// comes later.
const lingerTime = 2 * time.Second

// ExpireSoon ends a speculation whose probe has an unknown outcome, or one that KV events will
// show. The blocks still count as held for lingerTime; those that are not confirmed by then are
// dropped. The confirmed blocks at the prompt's start leave the speculation at once, so that an
// event can remove them.
func (x *Index) ExpireSoon(p *Speculation, now time.Time) {
	if x.StillValid(p) {
		x.releaseConfirmed(p)
		if len(p.keys) > 0 {
			x.lingering = append(x.lingering, lingering{*p, now.Add(lingerTime)})
		}
	}
	*p = Speculation{}
}

// releaseConfirmedLingering does releaseConfirmed for the slot's lingering speculations. One
// without further blocks leaves the list. One that has no effect any more stays until Sweep removes
// it.
func (x *Index) releaseConfirmedLingering(s Slot) {
	remaining := x.lingering[:0] // reuses the memory
	for i := range x.lingering {
		l := &x.lingering[i]
		if l.slot == s && x.StillValid(&l.Speculation) {
			x.releaseConfirmed(&l.Speculation)
		}
		if len(l.keys) > 0 {
			remaining = append(remaining, *l)
		}
	}
	clear(x.lingering[len(remaining):]) // lets the garbage collector free their keys
	x.lingering = remaining
}

// releaseConfirmed removes the confirmed blocks at the start of p from it.
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

// Sweep drops the unconfirmed blocks of speculations that have lingered for their time. The owner
// calls it before Match.
func (x *Index) Sweep(now time.Time) {
	for len(x.lingering) > 0 && !now.Before(x.lingering[0].until) {
		x.endSpeculation(&x.lingering[0].Speculation, TTL)
		x.lingering[0] = lingering{} // lets the garbage collector free its keys
		x.lingering = x.lingering[1:]
	}
}

// StillValid reports whether p still has an effect.
func (x *Index) StillValid(p *Speculation) bool {
	return len(p.keys) > 0 && x.isCurrent(p.slot) && x.slots[p.slot.N].clearCount == p.clearCount
}

// endSpeculation ends p without a confirmation, and drops the claims that nothing else needs.
func (x *Index) endSpeculation(p *Speculation, why Reason) {
	if !x.StillValid(p) {
		return
	}
	for i := len(p.keys) - 1; i >= 0; i-- { // in the order in which Speculate made the claims: lookUp first tries a neighbour's number
		n := x.lookUp(p.slot.N, p.keys[i]) // 0: dropped meanwhile
		if c := &x.claims[n]; n != 0 && p.isCountedBy(c) {
			c.removeSpeculation()
			if !c.isNeeded() {
				x.dropClaim(n, why)
			}
		}
	}
}

// isCountedBy is false if c was born after p began: then p's own claim was dropped meanwhile.
func (p *Speculation) isCountedBy(c *claim) bool {
	return int32(c.born-p.began) <= 0 && c.speculations() > 0 // born <= began, although the clock wraps around
}
