package dispatcher

import (
	"slices"
	"time"

	"evenkeel/dispatcher/policy"
	"evenkeel/predictor"
)

// round is a copy of one decision, for those who look at it after the tick:
// the decision log and the shadows. Its room is used again and again.
type round struct {
	tick     uint64
	at       time.Time
	group    string // as metrics name it
	policy   string
	snapshot policy.Snapshot
	assign   []policy.Assignment
	guardMs  float32             // six mean waits, what the starvation guard is at least
	survival *predictor.Survival // the table policies saw; nil: none

	running []policy.Request // of all workers, one after the other
}

// take copies a snapshot and what was decided on it.
func (r *round) take(s *policy.Snapshot, assign []policy.Assignment) {
	n := 0
	for i := range s.Workers {
		n += len(s.Workers[i].Running)
	}
	r.running = slices.Grow(r.running[:0], n)
	workers, pool := r.snapshot.Workers[:0], r.snapshot.Pool[:0]
	r.snapshot = *s
	for _, w := range s.Workers {
		from := len(r.running)
		r.running = append(r.running, w.Running...)
		w.Running = r.running[from:len(r.running):len(r.running)]
		workers = append(workers, w)
	}
	pool = append(pool, s.Pool...)
	r.snapshot.Workers, r.snapshot.Pool = workers, pool
	r.assign = append(r.assign[:0], assign...)
}
