package index

import "time"

// Speculate counts a prompt's blocks as the slot's while its probe is in flight.
// keys must not change before the speculation's end.
func (x *Index) Speculate(s Slot, keys []Key) Speculation {
	if !x.current(s) {
		return Speculation{}
	}
	at := &x.slots[s.N]
	keys = at.fitting(keys)
	for i := len(keys) - 1; i >= 0; i-- {
		n := x.claim(s.N, keys[i])
		if c := &x.claims[n]; c.spec&mostSpec < mostSpec {
			c.spec++
		}
	}
	p := Speculation{keys: keys, slot: s, epoch: at.epoch, began: x.clock}
	x.clock++
	return p
}

// Confirm says that the probe's engine has computed the blocks, also those that were dropped meanwhile for want of
// room.
func (x *Index) Confirm(p *Speculation) {
	if x.Vouches(p) {
		for i := len(p.keys) - 1; i >= 0; i-- {
			n := x.claim(p.slot.N, p.keys[i])
			c := &x.claims[n]
			if p.owns(c) {
				c.spec--
			}
			c.spec |= confirmed
		}
	}
	*p = Speculation{}
}

// Drop says that the engine has not computed the blocks: the probe failed or was cancelled.
func (x *Index) Drop(p *Speculation) {
	x.end(p, Failed)
	*p = Speculation{}
}

// linger is how long the blocks of a probe with an unknown outcome stay. An engine's events name the blocks sooner,
// and without events a session's next request comes later than this.
const linger = 2 * time.Second

// Linger says that the outcome of the probe is not known, or that the engine's events will show it. The blocks count
// until linger is over; those that were not inserted by then are dropped. The speculation no longer vouches for the
// confirmed blocks at the prompt's start, so that they can be removed.
func (x *Index) Linger(p *Speculation, now time.Time) {
	if x.Vouches(p) {
		x.settle(p)
		if len(p.keys) > 0 {
			x.lingering = append(x.lingering, lingering{*p, now.Add(linger)})
		}
	}
	*p = Speculation{}
}

// settleLingering takes the blocks that were confirmed meanwhile out of the slot's lingering speculations.
func (x *Index) settleLingering(s Slot) {
	kept := x.lingering[:0]
	for i := range x.lingering {
		l := &x.lingering[i]
		if l.slot == s && x.Vouches(&l.Speculation) {
			x.settle(&l.Speculation)
		}
		if len(l.keys) > 0 {
			kept = append(kept, *l)
		}
	}
	clear(x.lingering[len(kept):]) // so that their keys can be freed
	x.lingering = kept
}

// settle takes the first blocks out of p, as many as are confirmed.
func (x *Index) settle(p *Speculation) {
	for len(p.keys) > 0 {
		c := &x.claims[x.lookUp(p.slot.N, p.keys[0])]
		if c.spec&confirmed == 0 { // claim 0, which no slot has, is not confirmed
			return
		}
		if p.owns(c) {
			c.spec--
		}
		p.keys = p.keys[1:]
	}
}

// Sweep ends the speculations that have lingered long enough. The owner calls it before Match; it costs nothing if
// none is due.
func (x *Index) Sweep(now time.Time) {
	for len(x.lingering) > 0 && !now.Before(x.lingering[0].until) {
		x.end(&x.lingering[0].Speculation, TTL)
		x.lingering[0] = lingering{} // so that its keys can be freed
		x.lingering = x.lingering[1:]
	}
}

// Vouches reports whether blocks that p claimed may still be in the index: its slot is in use and was not cleared
// since.
func (x *Index) Vouches(p *Speculation) bool {
	return len(p.keys) > 0 && x.current(p.slot) && x.slots[p.slot.N].epoch == p.epoch
}

// end takes p's part in its claims back, and drops the claims that neither a probe nor the engine vouches for any
// more.
func (x *Index) end(p *Speculation, why Reason) {
	if !x.Vouches(p) {
		return
	}
	for i := len(p.keys) - 1; i >= 0; i-- {
		n := x.lookUp(p.slot.N, p.keys[i])
		if c := &x.claims[n]; n != 0 && p.owns(c) {
			if c.spec--; c.spec == 0 {
				x.drop(n, why)
			}
		}
	}
}

// owns reports whether p has a part in c. If c was born after p, p's own claim was dropped meanwhile and c belongs to
// others.
func (p *Speculation) owns(c *claim) bool {
	return int32(c.born-p.began) <= 0 && c.spec&mostSpec > 0
}
