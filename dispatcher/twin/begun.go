package twin

import (
	"evenkeel/dispatcher/board"
)

// If a replay has piled up more than mostPiled times the requests that were really there, or than mostPiled*fewPiled if that is more, the
// next replay begins with the real requests. This bounds the cost of replays.
const (
	mostPiled = 2
	fewPiled  = 1000
)

// begun returns where the replay of a model under a policy begins; nil: it begins with the real boards.
func (w *Window) begun(model, spec string) *Begun {
	requestsOf := func(b *board.Boards) int { return len(b.Charges(model)) + len(b.Waiting(model)) }
	for _, b := range w.Begun {
		if b.spec == spec && b.at.Equal(w.From()) && requestsOf(b.boards) <= mostPiled*max(fewPiled, requestsOf(w.Stretches[0].Boards)) {
			return b
		}
	}
	return nil
}

// marks returns the times at which later windows may begin, in ms since this window began.
func (w *Window) marks() (at []float64) {
	for _, s := range w.Stretches[1:] {
		at = append(at, ms(s.From.Sub(w.From())))
	}
	return at
}

// mark keeps the state of the replay at a moment, so that a replay of a later window can begin with it.
func (r *Replay) mark(at float64) {
	r.Count(at)
	b := &Begun{spec: r.spec, at: r.Instant(at), boards: r.Boards.Clone(), rest: make(map[uint64]int32, len(r.jobs))}
	r.engines.each(func(job, left int32) { b.rest[r.jobs[job].id] = left })
	for id, at := range r.waiting {
		b.rest[id] = r.jobs[at].left
	}
	r.Marked = append(r.Marked, b)
}

// rest returns how many tokens a request still gets from an age on. If the request really left before the window began, its fate is not
// known in the window, and the earlier replay says how many.
func (r *Replay) rest(id uint64, age int32) int32 {
	if r.begun != nil && r.fates.of(id) == nil {
		if left, known := r.begun.rest[id]; known {
			return max(1, left)
		}
	}
	return r.fates.rest(id, age)
}
