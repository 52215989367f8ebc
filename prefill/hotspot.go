package prefill

import (
	"math"
	"slices"

	"evenkeel/prefill/policy"
	"evenkeel/prefill/steer"
)

// tracked is the least share of a prompt's blocks that one candidate must hold for the prompt's class to be watched:
// requests gather at the engines that hold their prefix only if they hit much of it.
const tracked = 0.5

// filterHot reports the request to the hotspot detector. While the detector says that the request's class is kept off
// the candidates that hold the prefix of the class, it drops these candidates. It returns the candidates that are left,
// with their indicators in d.view, and the state of the class.
func (d *chooser) filterHot(p *policy.Policy, q *policy.Query, r *Request, m *model, eligible []*candidate) ([]*candidate, steer.State) {
	if d.steer.Hotspots == nil {
		return eligible, steer.OK
	}
	depth := r.Prompt.ClassDepth(steer.ClassTokens)
	class, holders, others := d.classOf(r, m, depth)
	if !r.seen.counted && !r.Reserved && len(r.Exclude) == 0 {
		r.seen.counted = true
		d.steer.Hotspots.Arrive(d.now, class)
	}
	if class == 0 {
		return eligible, steer.OK
	}
	state := d.steer.Hotspots.Look(d.now, class, holders, others)
	if state == steer.Alarm && !r.seen.weighed {
		r.seen.weighed = true
		p.Choose(q, d.view)
		bestHolder, bestOther := math.Inf(1), math.Inf(1)
		for i, c := range eligible {
			score := p.ScoreOf(i)
			switch holds := c.cache.Blocks(d.found, &r.Prompt) >= depth; {
			case holds && score < bestHolder:
				bestHolder = score
			case !holds && score < bestOther:
				bestOther = score
			}
		}
		state = d.steer.Hotspots.Weigh(d.now, class, bestHolder, bestOther)
	}
	if state != steer.Filter {
		return eligible, state
	}
	holds := func(c *candidate) bool { return c.cache.Blocks(d.found, &r.Prompt) >= depth }
	if !slices.ContainsFunc(eligible, func(c *candidate) bool { return !holds(c) }) {
		d.metrics.filterSkipped.WithLabelValues(filterHotspot).Inc()
		return eligible, steer.Alarm
	}
	kept := 0
	for i, c := range eligible {
		if !holds(c) {
			eligible[kept], d.view[kept] = c, d.view[i]
			kept++
		}
	}
	d.view = d.view[:kept]
	policy.Aggregate(d.view)
	return eligible[:kept], state
}

// classOf is the class of a request, 0 if it has none to be watched, and how many live candidates hold the prefix of
// the class (holders) and how many do not (others).
func (d *chooser) classOf(r *Request, m *model, depth int) (class uint64, holders, others int) {
	if depth == 0 {
		return 0, 0, 0
	}
	longest := 0
	for _, c := range m.servers {
		if !c.Live {
			continue
		}
		blocks := c.cache.Blocks(d.found, &r.Prompt)
		longest = max(longest, blocks)
		if blocks >= depth {
			holders++
		} else {
			others++
		}
	}
	if float64(longest) < tracked*float64(len(r.Prompt.Keys)) {
		return 0, holders, others
	}
	return r.Prompt.Keys[depth-1].Hash, holders, others
}
