package sim

import (
	"math"
	"time"

	"evenkeel/dispatcher/board"
)

// startStep preempts where KV overflows, measures, and says when the step ends.
// A group without a request does not step.
func (r *run) startStep(g *group) {
	holds := false
	for _, w := range g.workers {
		w.pull(g.step, r.fleet.Transfer)
		r.seat(w)
		for i, over := w.victim(); over; i, over = w.victim() {
			r.preempt(w, i)
			r.apply(board.Preempted{Worker: w.id}, r.now)
		}
		holds = holds || len(w.legs) > 0
	}
	if holds {
		g.ends = r.now + r.meter.step(g, r.now)
	}
}

// finishStep gives every running request its token, tells the board of the step as the streams
// would, and releases those that have all.
func (r *run) finishStep(g *group) {
	tokens, told := 0, false
	for _, w := range g.workers {
		for i := range w.active {
			l := &w.legs[i]
			if l.begin > g.step {
				continue
			}
			again := l.joined != 0 && !told // the first stream that speaks again tells of the step
			if again {
				g.number++
			}
			r.token(g, l)
			w.kv++
			tokens++
			if again {
				told = true
				r.heard(g)
			}
		}
	}
	r.meter.generated(tokens)
	for _, w := range g.workers {
		for i := 0; i < len(w.legs); {
			if w.legs[i].left > 0 {
				i++
				continue
			}
			l := w.legs[i]
			w.remove(i)
			r.finish(g, l)
		}
	}
	g.step++
	g.ends = never
}

// token is one of a request.
func (r *run) token(g *group, l *leg) {
	l.gen++
	l.left--
	if l.joined == 0 {
		l.joined = g.number
	}
	q := &r.jobs[l.job]
	if l.gen == 1 && q.age == 0 {
		q.first = r.now
		r.meter.firstToken(r.now - q.arrival)
	}
	r.progress(l.slot, max(0, l.gen-int32(r.fleet.Stale)), true, l.joined)
}

// heard tells the board of a step.
func (r *run) heard(g *group) {
	if r.stopped[g.key.Name] {
		delete(r.stopped, g.key.Name)
		g.since = math.NaN()
	}
	told := board.Step{Number: g.number}
	if !math.IsNaN(g.since) {
		told.Length = time.Duration(math.Round((r.now - g.since) * float64(time.Millisecond)))
	}
	g.since = r.now
	g.steps.Told = append(g.steps.Told[:0], told)
	r.count(r.now)
	r.apply(&g.steps, r.now)
}

// finish books a request out whose last token came.
func (r *run) finish(g *group, l leg) {
	q := &r.jobs[l.job]
	q.state = jobDone
	r.inside--
	r.release(g, l, board.Finished)
	r.meter.finished(r.now, q)
	r.ended()
}

// release gives the slot of a request back.
func (r *run) release(g *group, l leg, kind board.Kind) {
	r.given = board.Release{
		Model: model, Slot: l.slot, Outcome: board.Outcome{Kind: kind, Generated: int(l.gen)}, Generated: l.gen, Started: l.gen > 0, First: l.joined,
	}
	if l.joined != 0 {
		r.given.Last = g.number
	}
	r.apply(&r.given, r.now)
}
