package prefill

import (
	"slices"

	"evenkeel/prefill/ledger"
)

// SetSlots says how many decode slots of a model are free in each region whose
// engines are ours, "" being our own; nil: all is decoded in one region, and
// where a prompt is prefilled makes no difference.
func (t *Tier) SetSlots(model string, free map[string]int) {
	t.lock()
	defer t.unlock()
	if m := t.models[model]; m != nil {
		m.slots = free
	}
}

// countOnTheWay counts the prompts of each region that are prefilled or wait for
// a decode slot there.
func (d *chooser) countOnTheWay(m *model) {
	clear(d.onTheWay)
	for _, c := range m.servers {
		if c.Mixed { // its prompts need no slot anywhere else
			continue
		}
		d.onTheWay[c.Region] += c.account.Leases[ledger.Probing] + c.account.Leases[ledger.Pooled]
	}
}

// crowded says whether a prompt that the candidate prefills would wait for a decode slot in its region: KV does not
// cross regions. countOnTheWay must be called before.
func (d *chooser) crowded(m *model, c *candidate) bool {
	return m.slots != nil && !c.Mixed && d.onTheWay[c.Region] >= m.slots[c.Region]
}

// filterCrowded drops, in place, the candidates in regions whose decode side is full, unless no other candidate could
// start the request.
func (d *chooser) filterCrowded(m *model, r *Request, candidates []*candidate) []*candidate {
	if m.slots == nil {
		return candidates
	}
	d.countOnTheWay(m)
	if !slices.ContainsFunc(candidates, func(c *candidate) bool { return !d.crowded(m, c) && d.canStart(r, c) }) {
		return candidates
	}
	return slices.DeleteFunc(candidates, func(c *candidate) bool { return d.crowded(m, c) })
}

// closeCrowded marks the prefillers in such regions as not open, for the choice of a region. It marks none if no
// other prefiller is open.
func (d *chooser) closeCrowded(m *model, all []Prefiller) {
	if m.slots == nil {
		return
	}
	d.countOnTheWay(m)
	if slices.ContainsFunc(m.servers, func(c *candidate) bool { return c.Live && !c.account.Closed(d.now) && !d.crowded(m, c) }) {
		for i, c := range m.servers {
			full := d.crowded(m, c)
			all[i].Open, all[i].Filled = all[i].Open && !full, all[i].Filled && !full
		}
	}
}

// decodeFull reports whether the candidate is crowded for any of its models.
func (d *chooser) decodeFull(c *candidate) bool {
	for _, name := range c.Models {
		if m := d.models[name]; m != nil && m.slots != nil {
			if d.countOnTheWay(m); d.crowded(m, c) {
				return true
			}
		}
	}
	return false
}

// hopeless says whether a hand-off that the candidate begins now would get no decode slot before its engine drops it,
// because too many are on their way already. A request that waits for this reason is looked at again when
// Config.Decode has grown, see Wake.
func (d *chooser) hopeless(c *candidate, model string) bool {
	if d.cfg.Decode == nil || c.Board == "" || c.Profile == nil || c.Profile.Early() { // early: the rank comes first, and no hand-off waits
		return false
	}
	hold, err := c.Profile.HoldBudget()
	if err != nil {
		return false
	}
	places, own := d.cfg.Decode(c.Board, model, hold)
	ahead := 0
	for _, other := range d.candidates {
		if other.Board == c.Board {
			probing, _ := other.chargesAhead(model, own)
			ahead += probing
		}
	}
	return ahead >= places
}
