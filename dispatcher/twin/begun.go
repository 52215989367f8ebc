package twin

import (
	"evenkeel/dispatcher/board"
)

// A policy in a replay may be so bad that requests pile up. If they become more than mostPiled times the requests that were really there,
// and more than mostPiled*fewPiled, the next replay begins with the real requests instead. This bounds the cost of replays.
const (
	maxPiledRatio = 2
	minPiledRequests  = 1000
)

// earlierState returns the state with which the replay of a model under a policy begins: that of an earlier replay of this policy; nil: the
// replay begins with the real boards.
func (w *Window) checkpointFor(model, spec string) *Checkpoint {
	requestsOf := func(b *board.Boards) int { return len(b.Charges(model)) + len(b.Waiting(model)) }
	for _, b := range w.Checkpoints {
		if b.spec != spec || !b.at.Equal(w.From()) {
			continue
		}
		if requestsOf(b.boards) <= maxPiledRatio*max(minPiledRequests, requestsOf(w.Segments[0].Boards)) {
			return b
		}
	}
	return nil
}

// marks returns the times at which later windows may begin, in ms since this window began. A replay keeps its state at these times.
func (w *Window) checkpointTimes() (at []float64) {
	for _, s := range w.Segments[1:] {
		at = append(at, ms(s.From.Sub(w.From())))
	}
	return at
}

// mark keeps the state of the replay at the time at, in ms, so that a replay of a later window can begin with it.
func (r *Replay) saveCheckpoint(at float64) {
	r.Count(at)
	b := &Checkpoint{spec: r.spec, at: r.Instant(at), boards: r.Boards.Clone(), remaining: make(map[uint64]int32, len(r.jobs))}
	r.engines.eachRequest(func(job, left int32) { b.remaining[r.jobs[job].id] = left })
	for id, job := range r.waiting {
		b.remaining[id] = r.jobs[job].remaining
	}
	r.Checkpoints = append(r.Checkpoints, b)
}

// rest returns how many tokens a request still gets after it has so many (age). The window has no record of a request that really left
// before the window began. For such a request, the number comes from the replay with whose state this one began.
func (r *Replay) remainingTokens(id uint64, age int32) int32 {
	if r.startedFrom != nil && r.history.of(id) == nil {
		if left, known := r.startedFrom.remaining[id]; known {
			return max(1, left)
		}
	}
	return r.history.remainingTokens(id, age)
}
