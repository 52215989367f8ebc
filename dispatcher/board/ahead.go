package board

// Sending ahead. A bound request gets its first token only after its KV has been copied to the rank. If each copy began only when a slot is
// free, the slot would be idle during the copy. Therefore a rank may get more requests than it has slots: as many more as running requests
// will probably end during a copy. When the copies end, the new requests find free slots, or wait for a short time in the engine's queue.
// With answers of 13 tokens and copies of 3 steps, about one request for five slots is sent ahead.

// maxNewRequests returns how many more requests a policy may send to the rank now: one for each free slot and, if the policy sends requests
// ahead, some more; 0 or below: none.
//
// Requests of an early rank (Early) are bound before their prefill. In four cases, each request needs a free slot. If Limit is set, the
// engine has just started or may run requests of other proxies. If AtOnce is set, the requests of an early rank must have a slot when their
// prefill ends. On a mixed rank, the engine could compute a prompt that was sent ahead in any step, but the policy wants all ranks to
// compute prompts in the same steps. For a rank without a group, no delay was learned from which the number could be computed.
func (r *rank) maxNewRequests(policy *policyInUse) int {
	free := r.freeSlots()
	nothingLearned := r.group == nil // each group learns for itself how long a new request has no token yet
	mustStartAtOnce := r.Early && r.AtOnce
	needsFreeSlot := r.Limit > 0 || mustStartAtOnce || r.Mixed || nothingLearned
	if needsFreeSlot || !policy.sendsAhead {
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
