package board

import (
	"slices"
	"time"

	"evenkeel/dispatcher/policy"
	"evenkeel/predictor"
)

// Round is one decision of a policy: what the policy saw, and what it assigned. The decision log is written after the tick, when the board
// may already use the memory of the round for the next one. So the log makes a copy.
type Round struct {
	Tick     uint64
	At       time.Time
	Group    string // label of the group in metrics
	Policy   string
	Snapshot policy.Snapshot
	Assign   []policy.Assignment
	Survival *predictor.Survival // past output lengths from which Snapshot.MeanOutput was computed; nil: the snapshot has no MeanOutput

	running []policy.Request // in a copy: memory for the Running lists of all workers, one after the other
}

// Copy makes r a copy of from that shares no memory with the board. It reuses the memory that r had before.
func (r *Round) Copy(from *Round) {
	// Keep the old memory of r, because the assignment to *r below would lose it.
	running, assign := r.running[:0], r.Assign[:0]
	workers, pool, waits := r.Snapshot.Workers[:0], r.Snapshot.Pool[:0], r.Snapshot.Waits[:0]
	*r = *from
	requests := 0
	for i := range from.Snapshot.Workers {
		requests += len(from.Snapshot.Workers[i].Running)
	}
	r.running = slices.Grow(running, requests) // all memory at once, because the lists of the workers point into it, so it must not move
	for _, w := range from.Snapshot.Workers {
		first := len(r.running)
		r.running = append(r.running, w.Running...)
		w.Running = r.running[first:len(r.running):len(r.running)] // no capacity beyond its end, where the list of the next worker begins
		workers = append(workers, w)
	}
	pool = append(pool, from.Snapshot.Pool...)
	waits = append(waits, from.Snapshot.Waits...)
	assign = append(assign, from.Assign...)
	r.Snapshot.Workers, r.Snapshot.Pool, r.Snapshot.Waits, r.Assign = workers, pool, waits, assign
}
