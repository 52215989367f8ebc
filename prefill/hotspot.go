package prefill

import (
	"math"
	"slices"

	"evenkeel/prefill/policy"
	"evenkeel/prefill/steer"
)

// trackedShare is the smallest share of a prompt's blocks that one candidate must hold for the prompt's class to be watched.
// With a smaller hit, a policy has little reason to prefer the engines that hold the prefix.
const trackedShare = 0.5

// filterHot reports the request to the hotspot detector. The detector knows classes of requests, whose prompts begin with the same blocks,
// and their holders, the candidates that have these blocks in their cache. A class that has too large a share of the requests for its few
// holders is in the state Alarm. If a holder then has the best score for one request after another, the state becomes Filter: the class is
// kept off its holders for a while, so that other candidates compute the blocks, and then have them, too. In the state Filter, filterHot
// removes the holders. It returns the remaining candidates, whose indicators are then in d.view, and the state of the class.
func (d *chooser) filterHot(p *policy.Policy, q *policy.Query, r *Request, m *model, eligible []*candidate) ([]*candidate, steer.State) {
	if d.steering.Hotspots == nil {
		return eligible, steer.OK
	}
	depth := r.Prompt.ClassDepth(steer.ClassTokens) // how many blocks at their start the prompts of a class share
	class, holders, others := d.classOf(r, m, depth)
	if r.isFirstAttempt() && !r.considered.counted { // a request that waits is considered many times, and counts once
		r.considered.counted = true
		d.steering.Hotspots.CountRequest(d.now, class) // also without a class, because a class is hot by its share of all requests
	}
	if class == 0 { // no candidate holds enough of the prompt for it to have a class
		return eligible, steer.OK
	}
	state := d.steering.Hotspots.UpdateState(d.now, class, holders, others)
	if state == steer.Alarm && !r.considered.scoresCompared { // the scores of a request that waits are compared only once, too
		r.considered.scoresCompared = true
		p.Choose(q, d.view) // computes the scores, which bestScores reads from the policy; this choice itself is not used
		bestHolder, bestOther := d.bestScores(p, r, depth, eligible)
		state = d.steering.Hotspots.RecordScores(d.now, class, bestHolder, bestOther)
	}
	if state != steer.Filter {
		return eligible, state
	}
	isOther := func(c *candidate) bool { return !d.holdsPrefix(c, r, depth) }
	if !slices.ContainsFunc(eligible, isOther) {
		d.metrics.filterSkipped.WithLabelValues(hotspotFilter).Inc()
		return eligible, steer.Alarm // all candidates hold the prefix, so that the class cannot be kept off them
	}
	return d.dropHolders(r, depth, eligible), state
}

// dropHolders removes, in place, the candidates that hold the first depth blocks of the prompt, together with their indicators in d.view.
// It returns the remaining candidates, and computes anew the indicators that compare all candidates.
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

// bestScores returns the best (lowest) scores of the policy's last choice among the holders and among the other candidates; infinite if
// there are none. A holder has the first depth blocks of the prompt in its cache. The policy has scored the candidates in the order of
// eligible, so that ScoreOf(i) is the score of eligible[i].
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

// holdsPrefix reports whether a candidate has the first depth blocks of the request's prompt in its prefix cache.
func (d *chooser) holdsPrefix(c *candidate, r *Request, depth int) bool {
	return c.cache.Blocks(d.heldBlocks, &r.Prompt) >= depth
}

// classOf is the class of a request, by which the hotspot detector counts the requests whose prompts begin alike: the hash of the prompt's
// first depth blocks. It is 0, which stands for no class, if no candidate holds the share trackedShare of the prompt: then no policy has
// much reason to crowd the requests on few engines. holders is the number of live candidates that hold these blocks, and others the number
// of live candidates that do not. Before, fillView must have looked up the prompt: d.heldBlocks has its result, from which Blocks reads how
// many of the prompt's first blocks a candidate holds.
func (d *chooser) classOf(r *Request, m *model, depth int) (class uint64, holders, others int) {
	if depth == 0 { // the prompt has no blocks to compare
		return 0, 0, 0
	}
	longest := 0 // the largest number of the prompt's blocks that one candidate holds
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
