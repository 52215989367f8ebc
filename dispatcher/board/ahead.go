package board

// Sending ahead. A bound request gets its first token only after its KV has been copied to the
// rank. If each copy began only when a slot is free, the slot would be idle during the copy.
// Therefore a rank may get as many more requests as will probably end during a copy. They then find
// free slots, or wait for a short time in the engine's queue. With answers of 13 tokens and copies
// of 3 steps, about one request for five slots is sent ahead.

// maxNewRequests is one for each free slot, and some more if the policy sends ahead. On an early
// rank, requests need no slot until the prefill ends: as many are sent ahead as usually wait for
// their first token, or BindAhead.
func (r *rank) maxNewRequests(policy *policyInUse) int {
	free := r.freeSlots()
	if !policy.sendsAhead || r.needsFreeSlots() {
		return free
	}
	configured := policy.shared.cfg.BindAhead
	switch {
	case !r.Early:
		// r.slots also has requests in the engine's queue, which do not run.
		running := min(len(r.slots), r.Slots)
		return free + r.group.handoffDelay.extraSlots(running)
	case configured == AheadAuto:
		return free + r.group.prefillDelay.extraSlots(r.Slots)
	}
	return free + configured
}

func (r *rank) needsFreeSlots() bool {
	switch {
	case r.Limit > 0: // the engine has just started, or may run requests of other proxies
		return true
	case r.Mixed:
		// The rank might begin at once with a prompt that was sent ahead. But the policy wants all ranks
		// to compute prompts in the same steps.
		return true
	}
	return r.group == nil // not grouped yet, so no delays are known
}

func (g *group) admitsAny() bool {
	policy := g.policyInForce()
	for _, r := range g.steppingRanks {
		if r.takesRequests() && (policy.Immediate() || r.maxNewRequests(policy) > 0) {
			return true
		}
	}
	return false
}
