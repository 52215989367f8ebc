package board

// Sending ahead. A bound request gets its first token only after its KV cache has been copied to the rank. If every request waited
// for a free slot before its copy began, the slot would be idle during the copy. Therefore a rank may get more requests than it has
// slots: as many more as running requests will probably end during a copy. When the copies end, the new requests find free slots, or
// wait a moment in the engine's queue. With answers of 13 tokens and copies of 3 steps, these are about one request for five slots.

// admits returns how many more requests a policy may send to the rank: one for each free slot and, if the policy sends requests ahead,
// some more. No request is sent ahead to a rank whose slots are limited (Limit), because its engine has just started or may run requests of
// other proxies, or to a rank whose requests must have a slot when their prefill ends (AtOnce). Nor is one sent ahead to a mixed rank: its
// engine could compute the prompt in any step, although the policy wants all ranks to compute their prompts in the same steps.
func (r *rank) admits(policy *policyInUse) int {
	free := r.free()
	nothingLearned := r.group == nil
	needsFreeSlot := r.Limit > 0 || r.Early && r.AtOnce || r.Mixed || nothingLearned
	if needsFreeSlot || !policy.ahead {
		return free
	}
	configured := policy.all.cfg.BindAhead // only for early ranks
	switch {
	case !r.Early:
		return free + r.group.lag.slots(min(len(r.slots), r.Slots)) // only requests that have a slot free one when they end
	case configured == AheadAuto:
		return free + r.group.lead.slots(r.Slots)
	}
	return free + configured
}

// admitsAny says whether the policy in force may admit any request to the group now.
func (g *group) admitsAny() bool {
	policy := g.inForce()
	for _, r := range g.ranks {
		if r.takes() && (policy.Immediate() || r.admits(policy) > 0) {
			return true
		}
	}
	return false
}
