package board

// Slots ahead. A request that is bound when a slot comes free has no token before its KV is on
// the rank, and its slot makes none meanwhile. So a rank may be sent as many requests beyond its
// slots as will end while their KV is on the way: they find free slots there, or wait a moment in
// the engine's queue. With answers of 13 tokens and 3 steps on the way that is every fifth slot.

// admits is how many requests more a policy may send to the rank: as many as slots are free, and
// those ahead, if the policy sends any. A rank that is limited, or of whose slots others have
// some, gets none, and so does one whose early entries must begin at once, or one that is mixed: what is sent
// beyond its slots would be computed in any step.
func (r *rank) admits(p *decider) int {
	free := r.free()
	switch {
	case !p.ahead || r.Limit > 0 || r.group == nil || r.Mixed:
	case !r.Early:
		free += r.group.lag.Slots(min(len(r.slots), r.Slots))
	case r.AtOnce:
	case p.rules.cfg.BindAhead == AheadAuto:
		free += r.group.lead.Slots(r.Slots)
	default:
		free += p.rules.cfg.BindAhead
	}
	return free
}

// open says whether the policy in force may admit anything to the group now.
func (g *group) open() bool {
	p := g.inForce()
	for _, r := range g.ranks {
		if r.takes() && (p.Immediate() || r.admits(p) > 0) {
			return true
		}
	}
	return false
}
