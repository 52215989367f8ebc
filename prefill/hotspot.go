package prefill

import (
	"math"
	"slices"

	"evenkeel/prefill/policy"
	"evenkeel/prefill/steer"
)

// trackedShare is the smallest share of a prompt's blocks that one candidate must hold for the
// prompt's class to be watched. With less, a policy has little reason to prefer the engines that
// hold the prefix.
const trackedShare = 0.5

// filterHot reports the request to the hotspot detector (steer.Hotspots). In the state Filter it
// removes the holders of the prefix from eligible and from d.view.
func (d *chooser) filterHot(p *policy.Policy, q *policy.Query, r *Request, m *model, eligible []*candidate) ([]*candidate, steer.State) {
	if d.steering.Hotspots == nil {
		return eligible, steer.OK
	}
	depth := r.Prompt.ClassDepth(steer.ClassTokens) // blocks that the prompts of a class share
	class, holders, others := d.classOf(r, m, depth)
	if r.isFirstAttempt() && !r.considered.counted { // a request that waits is considered many times, and counts once
		r.considered.counted = true
		d.steering.Hotspots.CountRequest(d.now, class) // also without a class, because a class is hot by its share of all requests
	}
	if class == 0 {
		return eligible, steer.OK
	}
	state := d.steering.Hotspots.UpdateState(d.now, class, holders, others)
	if state == steer.Alarm && !r.considered.scoresCompared { // once for each request that waits, too
		r.considered.scoresCompared = true
		p.Choose(q, d.view) // only for the scores that bestScores reads
		bestHolder, bestOther := d.bestScores(p, r, depth, eligible)
		state = d.steering.Hotspots.RecordScores(d.now, class, bestHolder, bestOther)
	}
	if state != steer.Filter {
		return eligible, state
	}
	isOther := func(c *candidate) bool { return !d.holdsPrefix(c, r, depth) }
	if !slices.ContainsFunc(eligible, isOther) {
		d.metrics.filterSkipped.WithLabelValues(hotspotFilter).Inc()
		return eligible, steer.Alarm // the class cannot be kept off them
	}
	return d.dropHolders(r, depth, eligible), state
}

// dropHolders works in place, also on d.view.
func (d *chooser) dropHolders(r *Request, depth int, eligible []*candidate) []*candidate {
	others := 0
	for i, c := range eligible {
		if !d.holdsPrefix(c, r, depth) {
			eligible[others], d.view[others] = c, d.view[i]
			others++
		}
	}
	d.view = d.view[:others]
	policy.Aggregate(d.view)
	return eligible[:others]
}

// bestScores returns the lowest scores of the policy's last choice among the holders and among the
// others; infinite if there are none. The policy has scored the candidates in the order of
// eligible.
func (d *chooser) bestScores(p *policy.Policy, r *Request, depth int, eligible []*candidate) (bestHolder, bestOther float64) {
	bestHolder, bestOther = math.Inf(1), math.Inf(1)
	for i, c := range eligible {
		score := p.ScoreOf(i)
		switch holds := d.holdsPrefix(c, r, depth); {
		case holds && score < bestHolder:
			bestHolder = score
		case !holds && score < bestOther:
			bestOther = score
		}
	}
	return bestHolder, bestOther
}

func (d *chooser) holdsPrefix(c *candidate, r *Request, depth int) bool {
	return c.cache.Blocks(d.heldBlocks, &r.Prompt) >= depth
}

// classOf is the hash of the prompt's first depth blocks, and how many live candidates hold these
// blocks, and do not. It is 0 if no candidate holds trackedShare of the prompt: then no policy has
// much reason to crowd the requests on few engines. fillView must have looked up the prompt.
func (d *chooser) classOf(r *Request, m *model, depth int) (class uint64, holders, others int) {
	if depth == 0 {
		return 0, 0, 0
	}
	longest := 0 // of one candidate, in blocks
	for _, c := range m.candidates {
		if !c.Live {
			continue
		}
		blocks := c.cache.Blocks(d.heldBlocks, &r.Prompt)
		longest = max(longest, blocks)
		if blocks >= depth {
			holders++
		} else {
			others++
		}
	}
	heldTooLittle := float64(longest) < trackedShare*float64(len(r.Prompt.Keys))
	if heldTooLittle {
		return 0, holders, others
	}
	return r.Prompt.Keys[depth-1].Hash, holders, others // a block's hash covers all blocks before it
}
