package twin

import (
	"evenkeel/dispatcher/board"
)

// A policy in a replay may be so bad that requests pile up from window to window. If there are more of them than maxPiledRatio times the
// real requests, and more than maxPiledRatio*minPiledRequests, the next replay begins with the real requests instead of a checkpoint. This
// bounds the cost of replays.
const (
	maxPiledRatio    = 2
	minPiledRequests = 1000
)

// checkpointFor returns the state with which the replay of a model under a policy begins, saved by an earlier replay of this policy at the
// time at which the window begins; nil: the replay begins with the real boards. Under a bad policy, requests pile up from window to window,
// and more requests make a replay take longer. So a checkpoint with many more requests than the real boards is not used.
func (w *Window) checkpointFor(model, spec string) *Checkpoint {
	requestsOf := func(b *board.Boards) int { return len(b.Charges(model)) + len(b.Waiting(model)) }
	for _, c := range w.Checkpoints {
		if c.spec != spec || !c.at.Equal(w.From()) {
			continue
		}
		mostRequests := maxPiledRatio * max(minPiledRequests, requestsOf(w.Segments[0].Boards))
		if requestsOf(c.boards) <= mostRequests {
			return c
		}
	}
	return nil
}

// checkpointTimes returns the times at which a later window may begin, in ms since this window began. The replay saves a checkpoint at
// each.
func (w *Window) checkpointTimes() (at []float64) {
	for _, s := range w.Segments[1:] {
		at = append(at, ms(s.From.Sub(w.From())))
	}
	return at
}

// saveCheckpoint saves the state of the replay at the time at (in ms since the window began), so that the replay of a later window can
// begin with it.
func (r *Replay) saveCheckpoint(at float64) {
	r.Count(at) // brings the token counts of all requests up to date before the boards are copied
	c := &Checkpoint{spec: r.spec, at: r.Instant(at), boards: r.Boards.Clone(), remaining: make(map[uint64]int32, len(r.jobs))}
	r.engines.eachRequest(func(job, remaining int32) { c.remaining[r.jobs[job].id] = remaining })
	for id, job := range r.waiting {
		c.remaining[id] = r.jobs[job].remaining
	}
	r.Checkpoints = append(r.Checkpoints, c)
}

// remainingTokens returns how many tokens a request will generate after it has age tokens. It is asked once for each request: when the
// replay begins or, if that is later, when the request arrives.
//
// A replay that began with a checkpoint may have requests that really left before the window began, so that the window has no record of
// them. For these, the number comes from the checkpoint. It was saved at the time at which this replay begins, so it is still right.
func (r *Replay) remainingTokens(id uint64, age int32) int32 {
	if r.startedFrom != nil && r.history.answerOf(id) == nil {
		if remaining, known := r.startedFrom.remaining[id]; known {
			return max(1, remaining)
		}
	}
	return r.history.remainingTokens(id, age)
}
