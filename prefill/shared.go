package prefill

import "evenkeel/prefill/ledger"

// Share is the load that one dispatcher has put on a candidate that several dispatchers use.
type Share = ledger.Share

// Shares returns the load that this dispatcher has put on each candidate, if any.
func (s *Scheduler) Shares() map[string]Share {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := map[string]Share{}
	for id, c := range s.candidates {
		if share := c.load.Share(); share != (Share{}) {
			all[id] = share
		}
	}
	return all
}

// SetShares sets the last reports of all other dispatchers, each by candidate ID. A scrape would
// show the load later, or not at all while the engine does not update its gauges.
func (s *Scheduler) SetShares(reports ...map[string]Share) {
	s.lock()
	defer s.unlock()
	for id, c := range s.candidates {
		var sum Share
		for _, report := range reports {
			sum = sum.Plus(report[id])
		}
		c.load.SetReportedByOthers(sum, s.now)
	}
}
