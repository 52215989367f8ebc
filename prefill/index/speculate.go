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

// Confirm says that the probe's engine has computed the blocks, those too that
// had no room meanwhile.
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

// Drop says that it has not: the probe failed or was cancelled.
func (x *Index) Drop(p *Speculation) {
	x.end(p, Failed)
	*p = Speculation{}
}

// linger is how long blocks stay of a probe whose outcome nobody knows. An engine's events tell it sooner, and without them a
// session's next request comes later than this.
const linger = 2 * time.Second

// Linger says that nobody knows, or that the engine's events will tell: the
// blocks count until the TTL is over, and then those that were not inserted go.
// It vouches no more for what was, from the prompt's start: that can be removed.
func (x *Index) Linger(p *Speculation, now time.Time) {
	if x.Vouches(p) {
		x.settle(p)
		if len(p.keys) > 0 {
			x.lingering = append(x.lingering, lingering{*p, now.Add(linger)})
		}
	}
	*p = Speculation{}
}

// settleLingering ends what lingers of a slot and was confirmed meanwhile.
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
	clear(x.lingering[len(kept):]) // their keys may go
	x.lingering = kept
}

// settle ends p's part in the first blocks, as many as are confirmed.
func (x *Index) settle(p *Speculation) {
	for len(p.keys) > 0 {
		c := &x.claims[x.lookUp(p.slot.N, p.keys[0])]
		if c.spec&confirmed == 0 { // claim 0 is nobody's
			return
		}
		if p.owns(c) {
			c.spec--
		}
		p.keys = p.keys[1:]
	}
}

// Sweep ends what has lingered long enough. The owner calls it before it
// matches; it costs nothing when nothing is due.
func (x *Index) Sweep(now time.Time) {
	for len(x.lingering) > 0 && !now.Before(x.lingering[0].until) {
		x.end(&x.lingering[0].Speculation, TTL)
		x.lingering[0] = lingering{} // its keys may go
		x.lingering = x.lingering[1:]
	}
}

// Vouches reports whether what p claimed may still be there.
func (x *Index) Vouches(p *Speculation) bool {
	return len(p.keys) > 0 && x.current(p.slot) && x.slots[p.slot.N].epoch == p.epoch
}

// end takes p's part in its claims back and drops those that nobody vouches for
// any more.
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

// owns reports whether p has a part in c. A claim born later is another's: p's
// own was dropped meanwhile.
func (p *Speculation) owns(c *claim) bool {
	return int32(c.born-p.began) <= 0 && c.spec&mostSpec > 0
}
