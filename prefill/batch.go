package prefill

import (
	"evenkeel/prefill/ledger"
	"evenkeel/prefill/queue"
)

// BatchStatus counts batch requests, which get only what other requests leave.
type BatchStatus struct {
	Waiting int     `json:"waiting_requests"`
	Ran     uint64  `json:"ran_requests"` // since the start
	HeldS   float64 `json:"held_s"`       // seconds that these waited, all of them together
}

// class is the priority of a request in its line.
func (r *Request) class() int {
	if r.Batch {
		return queue.Batch
	}
	return r.Priority
}

// Batch says how batch requests are served.
func (t *Tier) Batch() BatchStatus {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.batch
	s.Waiting = t.queue.ByPriority()[queue.Batch]
	return s
}

// leftForBatch says whether the candidate is left over for a batch request: no other request waits for what serves its
// models, neither here nor in the engine nor for a decode rank, and one slot more than the request will need is free, for
// the request that comes next.
func (d *chooser) leftForBatch(r *Request, c *candidate) bool {
	for _, name := range c.Models { // a model and its adapters have the same engines
		if m := d.models[name]; m != nil && m.line.Online() {
			return false
		}
	}
	if !c.Mixed && c.account.Ahead(d.now) > 0 {
		return false
	}
	underWay, waiting := 0, 0
	for _, other := range d.candidates {
		if other.Board != c.Board {
			continue
		}
		pooled := other.account.Leases[ledger.Pooled]
		if other.Mixed || other.Profile != nil && other.Profile.Early() { // its rank comes before its prefill
			pooled = other.account.Unsent()
			underWay -= other.account.Leases[ledger.Probing]
		}
		underWay += other.account.Leases[ledger.Probing] + pooled
		waiting += pooled
	}
	if waiting > 0 || d.cfg.Free == nil {
		return waiting == 0
	}
	free, _ := d.cfg.Free(c.Board, r.Model)
	return free-underWay > 1
}

// recordWait records how long a request that got a candidate was in the arrival queue. The wait of a batch request is
// recorded only for its first attempt.
func (d *chooser) recordWait(r *Request, l *Lease) {
	switch {
	case !r.Batch:
		d.metrics.queueWait.Observe(l.Wait.Seconds())
	case !r.Reserved:
		d.metrics.batchWait.Observe(l.Wait.Seconds())
		d.batch.Ran++
		d.batch.HeldS += l.Wait.Seconds()
	}
}
