package board

// Sending ahead. A bound request gets its first token only after its KV has been copied to the rank. If each copy began only when a slot is
// free, the slot would be idle during the copy. Therefore a rank may get more requests than it has slots: as many more as running requests
// will probably end during a copy. When the copies end, the new requests find free slots, or wait for a short time in the engine's queue.
// With answers of 13 tokens and copies of 3 steps, about one request for five slots is sent ahead.

// maxNewRequests returns how many more requests a policy may send to the rank now; 0 or below: none. It is one for each free slot and, if
// the policy sends requests ahead, some more, except on ranks for which needsFreeSlots is true. On most ranks, a new request needs its slot
// only after its KV has been copied. There, as many requests are sent ahead as will probably end during a copy. On an early rank (Early),
// requests are bound before their prefill, and need no slot until the prefill ends. There, as many are sent ahead as usually wait for their
// first token, or a number from the config (BindAhead).
func (r *rank) maxNewRequests(policy *policyInUse) int {
	free := r.freeSlots()
	if !policy.sendsAhead || r.needsFreeSlots() {
		return free
	}
	configured := policy.shared.cfg.BindAhead // number of requests to send ahead to an early rank; AheadAuto: the learned number
	switch {
	case !r.Early:
		// Only running requests can end during the copy. Those in the queue of the engine are in r.slots, too, but do not run.
		running := min(len(r.slots), r.Slots)
		return free + r.group.handoffDelay.extraSlots(running)
	case configured == AheadAuto:
		return free + r.group.prefillDelay.extraSlots(r.Slots)
	}
	return free + configured
}

// needsFreeSlots says whether the rank may get only as many requests as it has free slots, even if the policy sends requests ahead.
func (r *rank) needsFreeSlots() bool {
	switch {
	case r.Limit > 0: // while the engine has just started, or may run requests of other proxies, only so many slots may be used
		return true
	case r.Mixed:
		// The rank computes prompts itself, and might begin at once with a prompt that was sent ahead. But the policy wants all
		// ranks to compute prompts in the same steps.
		return true
	}
	return r.group == nil // nil: the rank has left the fleet, and without a group it is not known how many requests can be sent ahead
}

// admitsAny says whether the policy in force may send any request to the group now. A policy that sends entries at once may, whenever a
// rank takes requests.
func (g *group) admitsAny() bool {
	policy := g.policyInForce()
	for _, r := range g.steppingRanks {
		if r.takesRequests() && (policy.Immediate() || r.maxNewRequests(policy) > 0) {
			return true
		}
	}
	return false
}
