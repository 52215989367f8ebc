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

func (r *Request) class() int {
	if r.Batch {
		return queue.Batch
	}
	return r.Priority
}

func (s *Scheduler) Batch() BatchStatus {
	s.mu.Lock()
	defer s.mu.Unlock()
	status := s.batch
	status.Waiting = s.queue.ByPriority()[queue.Batch]
	return status
}

// hasCapacityForBatch reports whether a candidate may take a batch request: only batch requests
// wait for its models, none is ahead on its engine or waits for a rank of its board, and two decode
// slots are free, so that one is left for the next request that is not batch.
func (d *chooser) hasCapacityForBatch(r *Request, c *candidate) bool {
	for _, name := range c.Models { // a base model and its LoRA adapters use the same engine
		if m := d.models[name]; m != nil && m.queue.HasOnline() {
			return false
		}
	}
	if !c.Aggregated && c.load.RequestsAhead(d.now) > 0 { // ranks that decode run many requests, which their slots bound
		return false
	}
	withoutSlot, waitingForSlot := d.slotDemand(c.Board)
	if waitingForSlot > 0 {
		return false
	}
	if d.cfg.Free == nil { // no bound
		return true
	}
	free, _ := d.cfg.Free(c.Board, r.Model)
	return free-withoutSlot >= 2 // each request without a slot will take one
}

// slotDemand counts the requests on the candidates of a board that have no decode slot yet, and
// those of them that wait for one now. A request usually gets its slot after its prefill. On some
// candidates it gets it before its probe.
func (d *chooser) slotDemand(board string) (withoutSlot, waitingForSlot int) {
	for _, c := range d.candidates {
		if c.Board != board {
			continue
		}
		computing, waiting := c.load.Leases[ledger.Probing], c.load.Leases[ledger.Pooled]
		if c.Aggregated || c.needsRankFirst() { // then a request that is being computed has its slot
			computing, waiting = 0, c.load.Unsent()
		}
		withoutSlot += computing + waiting
		waitingForSlot += waiting
	}
	return withoutSlot, waitingForSlot
}

// recordWait counts a batch request once, when capacity was first free for it, and any other with
// each attempt, because every one waits in the queue.
func (d *chooser) recordWait(r *Request, l *Lease) {
	switch {
	case !r.Batch:
		d.metrics.queueWait.Observe(l.Wait.Seconds())
	case !r.HasPlace:
		d.metrics.batchWait.Observe(l.Wait.Seconds())
		d.batch.Ran++
		d.batch.HeldS += l.Wait.Seconds()
	}
}
