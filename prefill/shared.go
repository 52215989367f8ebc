package prefill

import "evenkeel/prefill/ledger"

// Share is what one dispatcher has on a candidate that several dispatchers use.
type Share = ledger.Share

// Shares returns what this dispatcher has on each candidate; a candidate with nothing of ours is left out.
func (t *Tier) Shares() map[string]Share {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := map[string]Share{}
	for id, c := range t.candidates {
		if s := c.account.Share(); s != (Share{}) {
			all[id] = s
		}
	}
	return all
}

// SetShares takes the last report of each other dispatcher: what it has on each candidate. The reports count at once.
// A scrape shows these requests later, or not at all while the engine's gauges stand still.
func (t *Tier) SetShares(of ...map[string]Share) {
	t.lock()
	defer t.unlock()
	for id, c := range t.candidates {
		var sum Share
		for _, one := range of {
			sum = sum.Plus(one[id])
		}
		c.account.SetShared(sum, t.now)
	}
}
