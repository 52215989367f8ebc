package prefill

import "evenkeel/prefill/ledger"

// Share is what one dispatcher has on a candidate that several dispatchers use.
type Share = ledger.Share

// Shares are ours, by candidate; those that have nothing of us are left out.
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

// SetShares takes what the other dispatchers said last that they have there, each
// by candidate. It counts at once, where a scrape tells of it later, or not at
// all while the engine's gauges stand still.
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
