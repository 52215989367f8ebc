package prefill

import "slices"

// CandidateStatus is what the admin API shows of a candidate.
type CandidateStatus struct {
	ID              string   `json:"id"`
	Instance        string   `json:"instance"`
	Models          []string `json:"models"`
	State           string   `json:"state"` // open, closed (KV gate), out (circuit), unknown (its models), down, removed
	GateOpen        bool     `json:"gate_open"`
	Inflight        int      `json:"inflight_requests"`
	QueuedNewTokens int64    `json:"queued_new_tokens"`
	KVTokens        int64    `json:"kv_tokens"`
	CapacityTokens  int64    `json:"capacity_tokens"` // 0: unknown
	Pooled          int      `json:"pooled"`
	Dispatched      int      `json:"dispatched"`
	Orphans         int      `json:"orphans"`
	OwnUsage        float64  `json:"kv_usage_own"`
	ScrapedUsage    *float64 `json:"kv_usage_scraped"` // null: not known
	Foreign         float64  `json:"foreign_requests"`
	ScrapeMisses    int      `json:"scrape_misses"`
	Failures        int      `json:"failures"` // in a row

	account account
}

// audit compares what was charged and released with what the accounts hold.
type audit struct {
	drift            int64
	misuses, expired uint64
}

// Status returns the candidates in configured order, removed ones last.
func (t *Tier) Status() []CandidateStatus {
	s, _ := t.status()
	return s
}

func (t *Tier) status() ([]CandidateStatus, audit) {
	t.lock()
	defer t.unlock()
	ordered := make([]*candidate, 0, len(t.candidates))
	for _, c := range t.candidates {
		ordered = append(ordered, c)
	}
	slices.SortFunc(ordered, func(a, b *candidate) int {
		switch {
		case a.configured != b.configured && a.configured:
			return -1
		case a.configured != b.configured:
			return 1
		default:
			return a.order - b.order
		}
	})
	a := audit{drift: int64(t.charged - t.released), misuses: t.misuses, expired: t.expired}
	all := make([]CandidateStatus, 0, len(ordered))
	for _, c := range ordered {
		a.drift -= int64(c.account.held())
		all = append(all, t.describeCandidate(c))
	}
	return all, a
}

func (t *Tier) describeCandidate(c *candidate) CandidateStatus {
	return CandidateStatus{
		ID:              c.ID,
		Instance:        c.Instance,
		Models:          c.Models,
		State:           c.state(t.now),
		GateOpen:        !c.gate.closed,
		Inflight:        c.account.leases[probing],
		QueuedNewTokens: c.account.newTokens,
		KVTokens:        c.account.kvTokens(),
		CapacityTokens:  c.capacityTokens(),
		Pooled:          c.account.leases[pooled],
		Dispatched:      c.account.leases[dispatched],
		Orphans:         c.account.leases[orphaned],
		OwnUsage:        c.own(),
		ScrapedUsage:    finite(c.usage),
		Foreign:         c.foreign,
		ScrapeMisses:    c.misses,
		Failures:        c.circuit.Failures(),
		account:         c.account,
	}
}
