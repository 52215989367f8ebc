package sim

// stepWeight is how much a new step counts in the mean step time that policies
// see.
const stepWeight = 1.0 / 46 // half of it is of the last 32 steps

// startStep preempts where KV overflows, measures, and says when the step ends.
// A group without a request does not step.
func (r *run) startStep(g *group) {
	holds := false
	for _, w := range g.workers {
		w.pull(g.step, r.fleet.Transfer)
		r.seat(w)
		for i, over := w.victim(); over; i, over = w.victim() {
			r.preempt(w, i)
			w.notePreemption(r.now)
		}
		holds = holds || len(w.legs) > 0
	}
	if !holds {
		return
	}
	ms := r.meter.step(g, r.now)
	g.ends = r.now + ms
	if g.meanMs == 0 {
		g.meanMs = ms
	}
	g.meanMs += (ms - g.meanMs) * stepWeight
}

// finishStep gives every running request its token; those that have all leave.
func (r *run) finishStep(g *group) {
	for _, w := range g.workers {
		r.generate(w, g.step)
	}
	if r.anew {
		r.anew = false
		r.forecast.asked = r.forecast.asked[:0]
		r.askAll()
	}
	r.forecast.flush()
	g.step++
	g.ends = never
}

func (r *run) generate(w *worker, step int64) {
	stale, oracle := int32(r.fleet.Stale), r.forecast.oracle
	kept, active, tokens := 0, w.active, 0
	for i := range w.legs {
		l, v := &w.legs[i], &w.view[i]
		if i < active && l.begin <= step {
			l.gen++
			l.left--
			w.kv++
			tokens++
			if l.gen == 1 && r.jobs[l.job].age == 0 {
				r.jobs[l.job].first = r.now
				r.meter.firstToken(r.now - r.jobs[l.job].arrival)
			}
			if l.left == 0 {
				r.finish(w, i)
				continue
			}
			if l.gen > stale {
				v.Generated++
				v.Age++
				switch {
				case oracle:
					v.Rhat = r.forecast.known(r.jobs[l.job].output - v.Age)
				case r.forecast.active:
					if r.forecast.rules.Advance(&w.rhat[i], v.Age-1, v.Age) {
						w.keep(i, kept)
						r.forecast.ask(w, kept)
						kept++
						continue
					}
					v.Rhat = w.rhat[i].Rhat
				}
			}
		}
		w.keep(i, kept)
		kept++
	}
	w.legs, w.view, w.rhat = w.legs[:kept], w.view[:kept], w.rhat[:kept]
	r.meter.generated(tokens)
}

// keep moves the i-th request down to where those that left made room.
func (w *worker) keep(i, to int) {
	if i != to {
		w.legs[to], w.view[to], w.rhat[to] = w.legs[i], w.view[i], w.rhat[i]
	}
}

// finish books a request out whose last token came; the caller takes it off the
// lists.
func (r *run) finish(w *worker, i int) {
	l, v := &w.legs[i], &w.view[i]
	q := &r.jobs[l.job]
	w.kv -= int64(v.Prompt) + int64(l.gen)
	w.active--
	r.slots.put(v.Slot)
	q.state = jobDone
	r.inside--
	r.anew = r.forecast.finished(q) || r.anew
	r.meter.finished(r.now, q)
	r.ended()
}

// askAll makes every request's r̂ due.
func (r *run) askAll() {
	for _, g := range r.groups {
		for _, w := range g.workers {
			for i := range w.view {
				r.forecast.ask(w, i)
			}
		}
	}
}
