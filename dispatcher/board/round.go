package board

import (
	"slices"
	"time"

	"evenkeel/dispatcher/policy"
	"evenkeel/predictor"
)

// Round is one decision of a policy. The decision log copies it, because it is written after the
// tick, when the board may already use the memory for the next round.
type Round struct {
	Tick     uint64
	At       time.Time
	Group    string // label in metrics
	Policy   string
	Snapshot policy.Snapshot
	Assign   []policy.Assignment
	Survival *predictor.Survival // behind Snapshot.MeanOutput; nil: there is none

	running []policy.Request // in a copy: memory for all Running lists
}

// Copy makes r a copy that shares no memory with the board. It reuses the memory of r.
func (r *Round) Copy(from *Round) {
	// The assignment to *r below would lose the old memory.
	running, assign := r.running[:0], r.Assign[:0]
	workers, pool, waits := r.Snapshot.Workers[:0], r.Snapshot.Pool[:0], r.Snapshot.Waits[:0]
	*r = *from
	requests := 0
	for i := range from.Snapshot.Workers {
		requests += len(from.Snapshot.Workers[i].Running)
	}
	r.running = slices.Grow(running, requests) // must not move: the lists of the workers point into it
	for _, w := range from.Snapshot.Workers {
		first := len(r.running)
		r.running = append(r.running, w.Running...)
		w.Running = r.running[first:len(r.running):len(r.running)] // no capacity into the next list
		workers = append(workers, w)
	}
	pool = append(pool, from.Snapshot.Pool...)
	waits = append(waits, from.Snapshot.Waits...)
	assign = append(assign, from.Assign...)
	r.Snapshot.Workers, r.Snapshot.Pool, r.Snapshot.Waits, r.Assign = workers, pool, waits, assign
}
