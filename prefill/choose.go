package prefill

import (
	"slices"
	"time"
)

// blocked is why a request cannot be served now.
type blocked uint8

const (
	noPlace blocked = iota + 1 // in the pool
	noGate                     // all gates closed
)

// tryServe chooses a candidate and charges the request to it, in one step: two
// requests at once never see the same state (prefill P3). The order of the
// filters is live, circuit, KV gate, tried before; all but liveness and the
// gate give way when they would leave nobody (P4). There must be a live one.
func (t *Tier) tryServe(m *model, p policy, r *Request, since time.Time) (*Lease, blocked) {
	start := time.Now()
	eligible, skipped := t.filterCircuit(m.servers)
	eligible = t.filterGate(eligible)
	if len(eligible) == 0 {
		return nil, noGate
	}
	if !r.Reserved && t.cfg.Places != nil && !t.cfg.Places.TryReserve() {
		return nil, noPlace
	}
	if skipped {
		t.metrics.filterSkipped.WithLabelValues("circuit").Inc()
	}
	if len(r.Exclude) > 0 {
		eligible = t.filterTried(eligible, r.Exclude)
	}

	var c *candidate
	if p == roundRobin {
		c = after(m.cursor, eligible)
		m.cursor = c.order
	} else {
		c = t.least(p, r.ID, eligible)
	}
	lease := t.reserve(c, p, r, since)

	reason := "policy"
	if lease.canary {
		reason = "canary"
	} else if len(eligible) == 1 {
		reason = "only"
	}
	t.metrics.decisions.WithLabelValues(lease.Policy, reason).Inc()
	t.metrics.decisionSeconds.Observe(time.Since(start).Seconds())
	t.metrics.queueWait.Observe(lease.Wait.Seconds())
	return lease, 0
}

// filterCircuit keeps the live candidates that are not out. If all are out,
// they are all tried: a request that may fail beats one that must.
func (t *Tier) filterCircuit(servers []*candidate) (kept []*candidate, skipped bool) {
	t.eligible = t.eligible[:0]
	for _, c := range servers {
		if c.Live && c.circuit.Allows(t.now) {
			t.eligible = append(t.eligible, c)
		}
	}
	if len(t.eligible) > 0 {
		return t.eligible, false
	}
	for _, c := range servers {
		if c.Live {
			t.eligible = append(t.eligible, c)
		}
	}
	return t.eligible, true
}

// filterGate keeps, in place, the candidates whose KV gate lets a probe pass.
func (t *Tier) filterGate(candidates []*candidate) []*candidate {
	open := candidates[:0]
	for _, c := range candidates {
		if ok, _ := c.gate.passes(t.now); ok {
			open = append(open, c)
		}
	}
	return open
}

// filterTried keeps the candidates on instances that were not tried, else
// those that were not tried themselves, else all (prefill P45).
func (t *Tier) filterTried(candidates []*candidate, exclude []string) []*candidate {
	elsewhere, others := 0, 0
	for _, c := range candidates {
		here, instance := t.tried(c, exclude)
		if !instance {
			elsewhere++
		}
		if !here {
			others++
		}
	}
	if elsewhere == 0 {
		t.metrics.filterSkipped.WithLabelValues("instance").Inc()
	}
	if others == 0 {
		t.metrics.filterSkipped.WithLabelValues("excluded").Inc()
		return candidates
	}
	t.untried = t.untried[:0]
	for _, c := range candidates {
		here, instance := t.tried(c, exclude)
		if elsewhere > 0 && !instance || elsewhere == 0 && !here {
			t.untried = append(t.untried, c)
		}
	}
	return t.untried
}

// tried says whether a request that names these candidates was there before,
// and whether it was on the same instance.
func (t *Tier) tried(c *candidate, exclude []string) (here, instance bool) {
	here = slices.Contains(exclude, c.ID)
	for _, id := range exclude {
		if o := t.candidates[id]; o != nil && o.Instance == c.Instance {
			return here, true
		}
	}
	return here, here
}

// reserve books the choice: charge, circuit and canary.
func (t *Tier) reserve(c *candidate, p policy, r *Request, since time.Time) *Lease {
	_, canary := c.gate.passes(t.now)
	bytes := r.PromptBytes
	if bytes <= 0 {
		bytes = 4 * r.PromptTokens
	}
	t.lastLease++
	l := &Lease{
		Candidate: c.Candidate,
		Policy:    p.String(),
		Wait:      t.now.Sub(since),
		Others:    c.account.leases[probing],
		tier:      t,
		c:         c,
		number:    t.lastLease,
		canary:    canary,
		tokens:    int64(max(1, r.PromptTokens)),
		work:      ascendWork(bytes),
	}
	if canary {
		c.gate.lastCanary = t.now
	}
	c.circuit.Send(l.number, t.now)
	t.charge(l)
	return l
}
