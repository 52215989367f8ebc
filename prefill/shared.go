package prefill

// Share is what one dispatcher has on a candidate that several dispatchers use.
type Share struct {
	Unanswered int   `json:"n"`             // probes
	NewTokens  int64 `json:"new,omitempty"` // of their prompts, that are not cached
	KVTokens   int64 `json:"kv,omitempty"`  // that the engine holds for them and for all that was prefilled and not fetched
}

func (s Share) plus(o Share) Share {
	return Share{s.Unanswered + o.Unanswered, s.NewTokens + o.NewTokens, s.KVTokens + o.KVTokens}
}

// Shares are ours, by candidate; those that have nothing of us are left out.
func (t *Tier) Shares() map[string]Share {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := map[string]Share{}
	for id, c := range t.candidates {
		if s := (Share{c.account.leases[probing], c.account.newTokens, c.account.kvTokens()}); s != (Share{}) {
			all[id] = s
		}
	}
	return all
}

// SetShares takes what the other dispatchers said last that they have there, each
// by candidate. It counts at once, where a scrape tells of it later, or not at
// all while the engine's gauges stand still.
func (t *Tier) SetShares(of ...map[string]Share) {
	t.lock()
	defer t.unlock()
	for id, c := range t.candidates {
		var sum Share
		for _, one := range of {
			sum = sum.plus(one[id])
		}
		if c.shared != sum {
			c.shared = sum
			t.updateGate(c)
		}
	}
}
