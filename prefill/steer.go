package prefill

import (
	"math"
	"reflect"
	"slices"

	"evenkeel/prefill/policy"
)

// What overrules the policy, or only watches it.

// Outcomes of session affinity, as metrics name them.
const (
	affinityKept       = "kept"
	affinityOverloaded = "overloaded"
	affinityGone       = "gone"
	affinityNew        = "new"
)

// steerBy makes what overrules the policy as the config has it. What a config
// leaves as it was keeps what it has seen.
func (t *Tier) steerBy(c Config) {
	switch {
	case !c.Hotspot.Enabled:
		t.hotspots = nil
	case t.hotspots == nil || !reflect.DeepEqual(t.hotspots.cfg, c.Hotspot):
		t.hotspots = newHotspots(c.Hotspot)
	}
	switch a := c.Affinity; {
	case !a.Enabled:
		t.affinity = nil
	case t.affinity == nil || t.affinity.ttl != a.TTL || t.affinity.most != a.MaxKeys:
		t.affinity = newAffinity(a.TTL, a.MaxKeys)
	}
	t.cfg.Hotspot, t.cfg.Affinity = c.Hotspot, c.Affinity
}

// tracked is the least share of a prompt that somebody must hold for its class
// to be watched: only classes that hit much can gather at their holders.
const tracked = 0.5

// filterHot tells the detector of a request and keeps its class off the
// candidates that hold it while the detector says so. It returns the candidates
// that are left, t.view beside them, and the state of the class.
func (t *Tier) filterHot(p *policy.Policy, q *policy.Query, r *Request, m *model, eligible []*candidate) ([]*candidate, HotspotState) {
	if t.hotspots == nil {
		return eligible, HotspotOK
	}
	unit, depth := r.Prompt.unit(), r.Prompt.classDepth(t.cfg.Hotspot.ClassTokens)
	class, holders, others := t.classOf(r, m, unit, depth)
	if !r.seen.counted && !r.Reserved && len(r.Exclude) == 0 {
		r.seen.counted = true
		t.hotspots.arrive(t.now, class)
	}
	if class == 0 {
		return eligible, HotspotOK
	}
	state := t.hotspots.look(t.now, class, holders, others)
	if state == HotspotAlarm && !r.seen.weighed {
		r.seen.weighed = true
		p.Choose(q, t.view)
		best, rest := math.Inf(1), math.Inf(1)
		for i, c := range eligible {
			s := p.ScoreOf(i)
			switch holds := c.blocksOn(t.found, unit) >= depth; {
			case holds && s < best:
				best = s
			case !holds && s < rest:
				rest = s
			}
		}
		state = t.hotspots.weigh(t.now, class, best, rest)
	}
	if state != HotspotFilter {
		return eligible, state
	}
	holds := func(c *candidate) bool { return c.blocksOn(t.found, unit) >= depth }
	if !slices.ContainsFunc(eligible, func(c *candidate) bool { return !holds(c) }) {
		t.metrics.filterSkipped.WithLabelValues(filterHotspot).Inc()
		return eligible, HotspotAlarm
	}
	kept := 0
	for i, c := range eligible {
		if !holds(c) {
			eligible[kept], t.view[kept] = c, t.view[i]
			kept++
		}
	}
	t.view = t.view[:kept]
	policy.Aggregate(t.view)
	return eligible[:kept], state
}

// classOf is the class of a request, 0 where none is watched, and how many live
// candidates hold its prefix and do not.
func (t *Tier) classOf(r *Request, m *model, unit, depth int) (class uint64, holders, others int) {
	if depth == 0 {
		return 0, 0, 0
	}
	longest := 0
	for _, c := range m.servers {
		if !c.Live {
			continue
		}
		blocks := c.blocksOn(t.found, unit)
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

// keep finds where the request's session was last, if it may stay there.
func (t *Tier) keep(r *Request, eligible []*candidate) (choice policy.Choice, outcome string) {
	if t.affinity == nil || r.Session == 0 {
		return choice, ""
	}
	last := t.affinity.last(r.Session, t.now)
	if last == "" {
		return choice, affinityNew
	}
	at := slices.IndexFunc(eligible, func(c *candidate) bool { return c.ID == last })
	if at < 0 {
		return choice, affinityGone
	}
	sum := 0.0
	for i := range t.view {
		sum += t.view[i].BS
	}
	if !withinLoad(t.view[at].BS, sum, len(t.view), t.cfg.Affinity.LoadFactor) {
		return choice, affinityOverloaded
	}
	return policy.Choice{Index: at}, affinityKept
}

// remember notes where a session is now.
func (t *Tier) remember(r *Request, c *candidate, outcome string) {
	if outcome != "" {
		t.affinity.note(r.Session, c.ID, t.now)
	}
}

// shadow asks the other policies about the same candidates, without effect.
func (t *Tier) shadow(q *policy.Query, done policy.Choice) {
	for _, p := range t.shadows {
		theirs := p.Choose(q, t.view)
		name := p.Name()
		if theirs.Index != done.Index {
			t.metrics.shadowDisagreements.WithLabelValues(name).Inc()
		}
		regret := p.ScoreOf(done.Index) - theirs.Score
		if scale := math.Abs(theirs.Score); scale > 0 && !math.IsNaN(regret) {
			t.metrics.shadowRegret.WithLabelValues(name).Observe(regret / scale)
		}
	}
}
