package prefill

import (
	"evenkeel/prefill/ledger"
	"evenkeel/prefill/queue"
)

// BatchStatus counts batch requests, which only use capacity that no other request needs.
type BatchStatus struct {
	Waiting int     `json:"waiting_requests"`
	Ran     uint64  `json:"ran_requests"` // batch requests that got an engine, since the start
	HeldS   float64 `json:"held_s"`       // sum of the times that the ran_requests waited, in seconds
}

// class is the priority of a request in its model's queue. Batch requests have the lowest priority, whatever Priority says.
func (r *Request) class() int {
	if r.Batch {
		return queue.Batch
	}
	return r.Priority
}

// Batch returns the counts of batch requests.
func (s *Scheduler) Batch() BatchStatus {
	s.mu.Lock()
	defer s.mu.Unlock()
	status := s.batch
	status.Waiting = s.queue.ByPriority()[queue.Batch]
	return status
}

// hasCapacityForBatch reports whether a candidate may take a batch request. It may if only batch requests wait for its models, if
// its engine has no request that comes before this one, and if no request waits for a rank of its board. At least two decode slots
// must also be free, so that one is left for the next request that is not batch.
func (d *chooser) hasCapacityForBatch(r *Request, c *candidate) bool {
	for _, name := range c.Models { // a base model and its LoRA adapters use the same engine, so that all of their queues count
		if m := d.models[name]; m != nil && m.queue.HasOnline() {
			return false
		}
	}
	if !c.Aggregated && c.load.RequestsAhead(d.now) > 0 { // the ranks of an aggregated candidate run many requests, which its slots bound
		return false
	}
	withoutSlot, waitingForSlot := d.slotDemand(c.Board)
	if waitingForSlot > 0 {
		return false
	}
	if d.cfg.Free == nil { // the number of slots has no bound
		return true
	}
	free, _ := d.cfg.Free(c.Board, r.Model)
	return free-withoutSlot >= 2 // each request that has no slot yet will take one of the free slots
}

// slotDemand counts the requests on the candidates of a board that have no decode slot yet, and those of them that wait for one now. A
// request usually gets its slot after its prefill: while its prompt is computed (Probing), it will need one later, and after that (Pooled)
// it waits for one. On some candidates a request gets its slot before its probe, the call that computes the prompt. There, the requests
// whose probe was not sent yet wait, and all others have their slot already.
func (d *chooser) slotDemand(board string) (withoutSlot, waitingForSlot int) {
	for _, c := range d.candidates {
		if c.Board != board {
			continue
		}
		computing, waiting := c.load.Leases[ledger.Probing], c.load.Leases[ledger.Pooled]
		if c.Aggregated || c.needsRankFirst() { // a request that is being computed already has its slot
			computing, waiting = 0, c.load.Unsent()
		}
		withoutSlot += computing + waiting
		waitingForSlot += waiting
	}
	return withoutSlot, waitingForSlot
}

// recordWait records how long a request that now got its lease has waited in the arrival queue. For requests that are not batch, each
// attempt counts, because every one waits in the queue. A batch request counts only once, when capacity was first free for it: a retry,
// which has its place in the pool already (HasPlace), does not wait for free capacity again.
func (d *chooser) recordWait(r *Request, l *Lease) {
	switch {
	case !r.Batch:
		d.metrics.queueWait.Observe(l.Wait.Seconds())
	case !r.HasPlace:
		d.metrics.batchWait.Observe(l.Wait.Seconds())
		d.batch.Ran++
		d.batch.HeldS += l.Wait.Seconds() // of all batch requests that ran
	}
}
