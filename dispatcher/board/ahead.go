package board

// Sending ahead. A bound request gets its first token only after its KV has been copied to the rank. If each copy began only when a slot is
// free, the slot would be idle during the copy. Therefore a rank may get more requests than it has slots: as many more as running requests
// will probably end during a copy. When the copies end, the new requests find free slots, or wait for a short time in the engine's queue.
// With answers of 13 tokens and copies of 3 steps, about one request for five slots is sent ahead.

// maxNewRequests returns how many more requests a policy may send to the rank now: one for each free slot and, if the policy sends requests
// ahead, some more; 0 or below: none.
//
// A request of an early rank (Early) is bound before its prefill, and needs no slot until the prefill ends.
func (r *rank) maxNewRequests(policy *policyInUse) int {
	free := r.freeSlots()
	if !policy.sendsAhead || r.needsFreeSlots() {
		return free
	}
	configured := policy.shared.cfg.BindAhead // number of requests to send ahead to an early rank; AheadAuto: the learned number
	switch {
	case !r.Early: // the KV of a new request is copied first, and some of the requests that have slots end during the copy
		// Requests in the queue of the engine are in r.slots, too, but they use no slot of the engine.
		withSlot := min(len(r.slots), r.Slots)
		return free + r.group.handoffDelay.extraSlots(withSlot)
	case configured == AheadAuto: // as many as usually wait for their first token, because these need no slot yet
		return free + r.group.prefillDelay.extraSlots(r.Slots)
	}
	return free + configured
}

// needsFreeSlots says whether the rank may get only as many requests as it has free slots, even if the policy sends requests ahead.
func (r *rank) needsFreeSlots() bool {
	switch {
	case r.Limit > 0: // the engine has just started, or may run requests of other proxies
		return true
	case r.Early && r.AtOnce: // the prefill engine keeps the KV only for a short time, so a slot must be free when the prefill ends
		return true
	case r.Mixed: // the engine might compute a prompt at once, but the policy wants all ranks to compute prompts in the same steps
		return true
	}
	return r.group == nil // each group learns how many requests can be sent ahead, so nothing is known without a group
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
