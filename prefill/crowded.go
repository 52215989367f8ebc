package prefill

import (
	"slices"

	"evenkeel/prefill/ledger"
)

// SetSlots sets the free decode slots of a model in each region; the empty name is the proxy's own.
// nil: all requests are decoded in one region, so that the region of the prefill does not matter.
func (s *Scheduler) SetSlots(model string, free map[string]int) {
	s.lock()
	defer s.unlock()
	if m := s.models[model]; m != nil {
		m.freeDecodeSlots = free
	}
}

// countSlotsNeeded counts, for each region, the prompts of the model that are being prefilled or
// wait for a decode slot.
func (d *chooser) countSlotsNeeded(m *model) {
	clear(d.slotsNeeded)
	for _, c := range m.candidates {
		if c.Aggregated { // the rank that prefills also decodes, in the same slot
			continue
		}
		d.slotsNeeded[c.Region] += c.load.Leases[ledger.Probing] + c.load.Leases[ledger.Pooled]
	}
}

// lacksDecodeSlot says that a further prompt would have to wait for a slot in the candidate's
// region, because KV is not sent to other regions. countSlotsNeeded must be called before.
func (d *chooser) lacksDecodeSlot(m *model, c *candidate) bool {
	return m.freeDecodeSlots != nil && !c.Aggregated && d.slotsNeeded[c.Region] >= m.freeDecodeSlots[c.Region]
}

// filterWithoutDecodeSlot works in place, and only if another candidate can start the request.
func (d *chooser) filterWithoutDecodeSlot(m *model, r *Request, candidates []*candidate) []*candidate {
	if m.freeDecodeSlots == nil {
		return candidates
	}
	d.countSlotsNeeded(m)
	usable := func(c *candidate) bool { return !d.lacksDecodeSlot(m, c) && d.canStart(r, c) }
	if !slices.ContainsFunc(candidates, usable) {
		return candidates
	}
	return slices.DeleteFunc(candidates, func(c *candidate) bool { return d.lacksDecodeSlot(m, c) })
}

// closeWithoutDecodeSlot marks candidates without a decode slot as not open, so that RemoteRegions
// send none to them, unless none would be left. all are the states of m.candidates, in the same
// order.
func (d *chooser) closeWithoutDecodeSlot(m *model, all []Prefiller) {
	if m.freeDecodeSlots == nil {
		return
	}
	d.countSlotsNeeded(m)
	openWithSlot := func(c *candidate) bool { return c.Live && !c.load.Closed(d.now) && !d.lacksDecodeSlot(m, c) }
	if !slices.ContainsFunc(m.candidates, openWithSlot) {
		return
	}
	for i, c := range m.candidates {
		if d.lacksDecodeSlot(m, c) {
			all[i].Open = false
			all[i].KVGateWillOpen = false // even with an open KV gate, the prompt would wait
		}
	}
}

func (d *chooser) lacksAnyDecodeSlot(c *candidate) bool {
	for _, name := range c.Models {
		m := d.models[name] // nil: the candidate was removed, and no request for the model waits
		if m == nil || m.freeDecodeSlots == nil {
			continue
		}
		d.countSlotsNeeded(m)
		if d.lacksDecodeSlot(m, c) {
			return true
		}
	}
	return false
}

// handoffWouldExpire reports whether a hand-off that begins now would get no decode slot before its
// engine drops the KV, because too many are on their way. It is false if this cannot be predicted.
// A request that waits for this reason is considered again when slots become free; see Wake.
func (d *chooser) handoffWouldExpire(c *candidate, model string) bool {
	if d.cfg.Decode == nil || c.Board == "" || c.Profile == nil {
		return false
	}
	if c.Profile.Early() { // no hand-off waits for a slot
		return false
	}
	hold, err := c.Profile.HoldBudget()
	if err != nil { // not known
		return false
	}
	slotsWithinHold, onlySomeRanks := d.cfg.Decode(c.Board, model, hold)
	handoffsAhead := 0 // unanswered probes, each of which will need a slot before this one
	for _, other := range d.candidates {
		if other.Board == c.Board {
			unanswered, _ := other.chargesAhead(model, onlySomeRanks)
			handoffsAhead += unanswered
		}
	}
	return handoffsAhead >= slotsWithinHold
}
