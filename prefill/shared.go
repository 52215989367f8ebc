package prefill

import "evenkeel/prefill/ledger"

// Share is the load that one dispatcher has put on a candidate that several dispatchers use.
type Share = ledger.Share

// Shares returns the load that this dispatcher has put on each candidate. Candidates without such load are absent.
func (t *Scheduler) Shares() map[string]Share {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := map[string]Share{}
	for id, c := range t.candidates {
		if s := c.load.Share(); s != (Share{}) {
			all[id] = s
		}
	}
	return all
}

// SetShares sets the last reports of all other dispatchers, each by candidate ID. The reported load counts at once. A scrape
// would show it later, or not at all while the engine does not update its gauges.
func (t *Scheduler) SetShares(reports ...map[string]Share) {
	t.lock()
	defer t.unlock()
	for id, c := range t.candidates {
		var sum Share
		for _, report := range reports {
			sum = sum.Plus(report[id])
		}
		c.load.SetShared(sum, t.now)
	}
}
