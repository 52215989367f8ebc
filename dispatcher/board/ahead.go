package board

// Sending ahead. A bound request gets its first token only after its KV cache has been copied to the rank. If every request waited
// for a free slot before its copy began, the slot would be idle during the copy. Therefore a rank may get more requests than it has
// slots: as many more as running requests will probably end during a copy. When the copies end, the new requests find free slots, or
// wait a moment in the engine's queue. With answers of 13 tokens and copies of 3 steps, these are about one request for five slots.

// maxNewRequests returns how many more requests a policy may send to the rank: one for each free slot and, if the policy sends requests
// ahead, some more; 0 or below: none. No request is sent ahead to a rank whose slots are limited (Limit), because its engine has just
// started or may run requests of other proxies, or to a rank whose requests must have a slot when their prefill ends (AtOnce). Nor is one
// sent ahead to a mixed rank: its engine could compute the prompt in any step, although the policy wants all ranks to compute their prompts
// in the same steps.
func (r *rank) maxNewRequests(policy *policyInUse) int {
	free := r.freeSlots()
	nothingLearned := r.group == nil
	needsFreeSlot := r.Limit > 0 || r.Early && r.AtOnce || r.Mixed || nothingLearned
	if needsFreeSlot || !policy.sendsAhead {
		return free
	}
	configured := policy.shared.cfg.BindAhead // only for early ranks
	switch {
	case !r.Early:
		withSlot := min(len(r.slots), r.Slots) // r.slots has also the requests in the engine's queue, which free no slot of the engine
		return free + r.group.handoffDelay.extraSlots(withSlot)
	case configured == AheadAuto:
		return free + r.group.prefillDelay.extraSlots(r.Slots)
	}
	return free + configured
}

// admitsAny says whether the policy in force may send any request to the group now. An immediate policy may whenever a rank takes requests.
func (g *group) admitsAny() bool {
	policy := g.policyInForce()
	for _, r := range g.steppingRanks {
		if r.takesRequests() && (policy.Immediate() || r.maxNewRequests(policy) > 0) {
			return true
		}
	}
	return false
}
