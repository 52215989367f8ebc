package twin

import (
	"evenkeel/dispatcher/board"
)

// Where a replay holds more than mostPiled times the requests that are really there, and more than that of fewPiled, the
// next one begins with the real ones: what a replay costs is bounded.
const (
	mostPiled = 2
	fewPiled  = 1000
)

// begun is where the replay of a model under a policy begins; nil: with the real boards.
func (w *Window) begun(model, spec string) *Begun {
	held := func(b *board.Boards) int { return len(b.Charges(model)) + len(b.Waiting(model)) }
	for _, b := range w.Begun {
		if b.spec == spec && b.at.Equal(w.From()) && held(b.boards) <= mostPiled*max(fewPiled, held(w.Stretches[0].Boards)) {
			return b
		}
	}
	return nil
}

// marks are when later windows may begin, in ms.
func (w *Window) marks() (at []float64) {
	for _, s := range w.Stretches[1:] {
		at = append(at, ms(s.From.Sub(w.From())))
	}
	return at
}

// mark keeps how far the replay is at a moment.
func (r *Replay) mark(at float64) {
	r.Count(at)
	b := &Begun{spec: r.spec, at: r.Instant(at), boards: r.Boards.Clone(), rest: make(map[uint64]int32, len(r.jobs))}
	r.engines.each(func(job, left int32) { b.rest[r.jobs[job].id] = left })
	for id, at := range r.live {
		b.rest[id] = r.jobs[at].left
	}
	r.Marked = append(r.Marked, b)
}

// rest is how many tokens a request gets from an age on. Of one that really left before the window began, nothing is
// known in it.
func (r *Replay) rest(id uint64, age int32) int32 {
	if r.begun != nil && r.fates.of(id) == nil {
		if left, known := r.begun.rest[id]; known {
			return max(1, left)
		}
	}
	return r.fates.rest(id, age)
}
