package prefill

import (
	"slices"

	"evenkeel/prefill/ledger"
)

// SetSlots sets the number of free decode slots of a model in each region; the empty name is the proxy's own region. nil:
// all requests are decoded in one region, so that the region of the prefill does not matter.
func (s *Scheduler) SetSlots(model string, free map[string]int) {
	s.lock()
	defer s.unlock()
	if m := s.models[model]; m != nil {
		m.freeDecodeSlots = free
	}
}

// countSlotsNeeded counts, for each region, the prompts of the model that are being prefilled or wait for a decode slot, in d.slotsNeeded.
// lacksDecodeSlot compares these counts with the free slots.
func (d *chooser) countSlotsNeeded(m *model) {
	clear(d.slotsNeeded)
	for _, c := range m.candidates {
		if c.Aggregated { // the rank that prefills the prompt also decodes it, in the same slot
			continue
		}
		d.slotsNeeded[c.Region] += c.load.Leases[ledger.Probing] + c.load.Leases[ledger.Pooled]
	}
}

// lacksDecodeSlot reports whether a prompt that the candidate prefills would have to wait for a decode slot in its region, because
// KV is not sent to other regions. countSlotsNeeded must be called before.
func (d *chooser) lacksDecodeSlot(m *model, c *candidate) bool {
	return m.freeDecodeSlots != nil && !c.Aggregated && d.slotsNeeded[c.Region] >= m.freeDecodeSlots[c.Region]
}

// filterWithoutDecodeSlot removes, in place, the candidates whose region has no free decode slot for one more prompt, if another candidate
// can start the request.
func (d *chooser) filterWithoutDecodeSlot(m *model, r *Request, candidates []*candidate) []*candidate {
	if m.freeDecodeSlots == nil { // all requests are decoded in one region, so that the region of the prefill does not matter
		return candidates
	}
	d.countSlotsNeeded(m) // for lacksDecodeSlot
	usable := func(c *candidate) bool { return !d.lacksDecodeSlot(m, c) && d.canStart(r, c) }
	if !slices.ContainsFunc(candidates, usable) {
		return candidates
	}
	return slices.DeleteFunc(candidates, func(c *candidate) bool { return d.lacksDecodeSlot(m, c) })
}

// closeWithoutDecodeSlot marks the candidates whose region has no free decode slot for one more prompt as not open. RemoteRegions, which
// choose the region of a request, then send none to them. all are the states of m.candidates, in the same order. It marks none if no
// candidate with a decode slot is open.
func (d *chooser) closeWithoutDecodeSlot(m *model, all []Prefiller) {
	if m.freeDecodeSlots == nil { // all requests are decoded in one region, so that the region of the prefill does not matter
		return
	}
	d.countSlotsNeeded(m) // for lacksDecodeSlot
	openWithSlot := func(c *candidate) bool { return c.Live && !c.load.Closed(d.now) && !d.lacksDecodeSlot(m, c) }
	if !slices.ContainsFunc(m.candidates, openWithSlot) { // to close the others would leave no candidate open
		return
	}
	for i, c := range m.candidates {
		if d.lacksDecodeSlot(m, c) {
			all[i].Open = false
			all[i].KVGateWillOpen = false // even with an open KV gate, the prompt would wait for a decode slot
		}
	}
}

// lacksAnyDecodeSlot reports whether, for one of the candidate's models, a prompt that it prefills would have to wait for a decode slot in
// its region.
func (d *chooser) lacksAnyDecodeSlot(c *candidate) bool {
	for _, name := range c.Models {
		m := d.models[name] // nil: the candidate was removed from the configuration, and no request for the model waits
		// freeDecodeSlots is nil if all requests of the model are decoded in one region.
		if m == nil || m.freeDecodeSlots == nil {
			continue
		}
		d.countSlotsNeeded(m) // lacksDecodeSlot compares these counts with the free slots
		if d.lacksDecodeSlot(m, c) {
			return true
		}
	}
	return false
}

// handoffWouldExpire reports whether a hand-off that the candidate begins now would get no decode slot before its engine drops the
// KV, because too many hand-offs are on their way already. It is false if this cannot be predicted. A request that waits for this
// reason is considered again when slots become free; see Wake.
func (d *chooser) handoffWouldExpire(c *candidate, model string) bool {
	if d.cfg.Decode == nil || c.Board == "" || c.Profile == nil { // the slots or the engine's hold timeout are not known
		return false
	}
	if c.Profile.Early() { // the decode rank is chosen before the prefill, so that no hand-off waits for a slot
		return false
	}
	hold, err := c.Profile.HoldBudget() // how long a hand-off may wait for its slot
	if err != nil {                     // the profile does not say it
		return false
	}
	// slotsWithinHold is how many hand-offs would get a slot within the hold, in addition to those that wait already. onlySomeRanks:
	// not all ranks of the board list the model. Only their slots count then, and only hand-offs of the model wait for these.
	slotsWithinHold, onlySomeRanks := d.cfg.Decode(c.Board, model, hold)
	handoffsAhead := 0 // those of the unanswered probes, each of which will need a slot before this one
	for _, other := range d.candidates {
		if other.Board == c.Board {
			unanswered, _ := other.chargesAhead(model, onlySomeRanks)
			handoffsAhead += unanswered
		}
	}
	return handoffsAhead >= slotsWithinHold
}
