package board

// Slots ahead. A request that is bound when a slot comes free gets no token before its KV is on
// the rank, and until then its slot produces nothing. So a rank may get some requests beyond its
// slots: as many as requests on it will end while the KV of the new ones is on the way. The new
// requests then find free slots, or wait a moment in the engine's queue. With answers of 13 tokens
// and 3 steps on the way, about one request for every five slots is sent ahead.

// admits returns how many more requests a policy may send to the rank: the free slots and, if the
// policy sends requests ahead, those. No request is sent ahead to a rank with a Limit, to a rank whose early
// entries must have a slot when their prefill ends (AtOnce), or to a mixed rank, whose engine could compute the
// prompt of such a request in any step, and not with its round.
func (r *rank) admits(policy *decider) int {
	free := r.free()
	switch {
	case !policy.ahead || r.Limit > 0 || r.group == nil || r.Mixed:
	case !r.Early:
		free += r.group.lag.Slots(min(len(r.slots), r.Slots))
	case r.AtOnce:
	case policy.rules.cfg.BindAhead == AheadAuto:
		free += r.group.lead.Slots(r.Slots)
	default:
		free += policy.rules.cfg.BindAhead
	}
	return free
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
