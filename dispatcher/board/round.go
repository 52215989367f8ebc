package board

import (
	"slices"
	"time"

	"evenkeel/dispatcher/policy"
	"evenkeel/predictor"
)

// Round is one decision of a policy. The decision log copies the round, because it writes it after the tick, when the board may already use
// the memory of the original for the next round.
type Round struct {
	Tick     uint64
	At       time.Time
	Group    string // the group's label in metrics
	Policy   string
	Snapshot policy.Snapshot
	Assign   []policy.Assignment
	Survival *predictor.Survival // the past output lengths behind Snapshot.MeanOutput; nil: the snapshot has no MeanOutput

	running []policy.Request // memory of a copy: the running requests of all workers, one after the other
}

// Copy makes r a copy that shares nothing with the board. It reuses the memory of r's former contents.
func (r *Round) Copy(from *Round) {
	// The memory of r's former contents, which the assignment below would lose.
	running, assign := r.running[:0], r.Assign[:0]
	workers, pool, waits := r.Snapshot.Workers[:0], r.Snapshot.Pool[:0], r.Snapshot.Waits[:0]
	*r = *from
	requests := 0
	for i := range from.Snapshot.Workers {
		requests += len(from.Snapshot.Workers[i].Running)
	}
	r.running = slices.Grow(running, requests) // at once, because the workers' lists are parts of it, so it must not move any more
	for _, w := range from.Snapshot.Workers {
		first := len(r.running)
		r.running = append(r.running, w.Running...)
		w.Running = r.running[first:len(r.running):len(r.running)]
		workers = append(workers, w)
	}
	pool = append(pool, from.Snapshot.Pool...)
	waits = append(waits, from.Snapshot.Waits...)
	assign = append(assign, from.Assign...)
	r.Snapshot.Workers, r.Snapshot.Pool, r.Snapshot.Waits, r.Assign = workers, pool, waits, assign
}
