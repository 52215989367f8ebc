package twin

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/virtual"
)

// mostStill bounds the turns at one instant: a replay with more is stuck and fails.
const mostStill = 10_000

// unsteady is the share by which the length of a step is changed at random, at most. It changes in which step a request
// comes and so, after a while, which requests are on a rank together. So replays that differ in nothing else have
// means that differ as much as those of two real runs. With 0.001 and with 0.03 they differ as much.
const unsteady = 0.01

// NewReplay prepares a replay of a model under the policy spec; empty: the policy that was in force. Replays with the same draw have the
// same random numbers. The error says why the model cannot be replayed.
func NewReplay(w *Window, model, spec string, draw uint64) (*Replay, error) {
	boardsAtStart, begun := w.Stretches[0].Boards, w.begun(model, spec)
	switch groups, dense := boardsAtStart.Groups(model); {
	case dense || len(groups) == 0:
		return nil, fmt.Errorf("%s has ranks that do not step together", model)
	case isMixed(groups):
		return nil, fmt.Errorf("%s has ranks that prefill and decode, whose steps are not foretold", model)
	}
	b := boardsAtStart.Clone()
	if begun != nil {
		b = begun.boards.Clone()
	}
	inForce := b.Policy()
	if spec != "" && begun == nil {
		if err := rejected(b.Apply(board.SetPolicy{Spec: spec}, w.From())); err != nil {
			return nil, err
		}
	}
	groups, _ := b.Groups(model)
	b.Only(model)
	r := &Replay{
		Driver: virtual.NewDriver(b, w.From(), model), fates: w.fates(model), waiting: map[uint64]int32{},
		measuredFrom: ms(w.Measured().From.Sub(w.From())), ends: ms(w.To().Sub(w.From())), chance: rand.New(rand.NewPCG(draw, 0)),
		spec: spec, begun: begun,
	}
	if draw == 0 && spec != "" {
		r.marks = w.marks()
	}
	r.collect(w, model)
	r.Bound, r.Refused, r.Other = r.placed, r.refused, r.other
	r.engines = newDecoding(r)
	if err := r.build(groups, boardsAtStart, w.End); err != nil {
		return nil, err
	}
	r.resume(b.Policy() != inForce)
	from, to := w.fresh()
	r.freshBetween = [2]float64{ms(from.Sub(w.From())), ms(to.Sub(w.From()))}
	return r, nil
}

// rejected returns the error with which the boards rejected an event that changes settings; nil: they took it.
func rejected(effects []board.Effect) error {
	for i := range effects {
		if effects[i].Kind == board.EffectRejected {
			return effects[i].Err
		}
	}
	return nil
}

// collect prepares the arrivals and the changes of ranks, with times since the window began.
func (r *Replay) collect(w *Window, model string) {
	r.came = arrivals{stretches: w.Stretches, from: w.From(), model: model, skipped: r.fates.again}
	r.came.skip()
	for _, s := range w.Stretches {
		offset := s.From.Sub(w.From())
		for _, f := range s.fleet {
			r.fleet = append(r.fleet, fleet{f.at + offset, f.workers})
		}
	}
}

// build makes the engines of the groups. The length of their steps follows the line that was learned by the window's end, with a constant
// such that it goes through the mean of the window's steps.
func (r *Replay) build(groups []board.GroupView, boardsAtStart, boardsAtEnd *board.Boards) error {
	viewsAtStart, _ := boardsAtStart.Groups(r.Model)
	viewsAtEnd, _ := boardsAtEnd.Groups(r.Model)
	for i := range groups {
		v := &groups[i]
		atStart, atEnd := viewOf(viewsAtStart, v.Key), viewOf(viewsAtEnd, v.Key)
		if atStart == nil || atEnd == nil || !atEnd.Line.Known() {
			return fmt.Errorf("the time of a step of %s is not known yet", v.Key.Name)
		}
		law := atEnd.Line.Through(atStart.Line.Learned)
		if err := r.engines.build(v, law); err != nil {
			return err
		}
		r.Boards.Apply(board.Law{Group: v.Key, StepModel: visibleLaw(atEnd.Line.InForce, law), Weights: atEnd.Weights}, r.Began)
		for k := range v.Workers {
			r.engines.join(&v.Workers[k])
		}
	}
	return nil
}

// visibleLaw returns what policies may know of a law: all of it if the learned line is in force, else only what prompts cost.
func visibleLaw(inForce bool, law board.StepModel) board.StepModel {
	if inForce {
		return law
	}
	return board.StepModel{OwnMs: law.OwnMs, SharedMs: law.SharedMs, PrefillMs: law.PrefillMs}
}

// resume puts those requests on the engines that were on ranks when the replay begins. Entries in the pool go on waiting. otherPolicy
// says that the boards were given another policy for this replay: then requests that waited in the queues of engines wait in the pool
// instead.
func (r *Replay) resume(otherPolicy bool) {
	queued := r.engines.resume(otherPolicy)
	for _, e := range r.Boards.Waiting(r.Model) {
		r.addWaiting(e.ID, came{
			id: e.ID, key: e.Key, prompt: int32(e.Prompt), age: int32(e.Age), early: e.Early, discard: e.Discard,
		}).entry = e
	}
	for _, c := range queued {
		r.Boards.Apply(&board.Release{Model: r.Model, Slot: c.Slot, Outcome: board.Outcome{Kind: board.Cancelled}}, r.Began)
		since := c.Since.Sub(r.Began)
		r.enqueue(r.addWaiting(c.ID, came{
			id: c.ID, key: c.Key, prompt: c.Prompt + c.Generated, age: c.Age + c.Generated, arrival: since, entered: since,
		}))
	}
}

// isMixed says whether any rank of the groups prefills and decodes.
func isMixed(groups []board.GroupView) bool {
	return slices.ContainsFunc(groups, func(v board.GroupView) bool {
		return slices.ContainsFunc(v.Workers, func(w board.Worker) bool { return w.Mixed })
	})
}

// addRunning keeps a request that was on a rank when the replay began. at is its index in r.jobs, and left is how many tokens it still
// gets.
func (r *Replay) addRunning(c *board.Charge) (at, left int32) {
	left = r.rest(c.ID, c.Age+c.Generated)
	at = r.addJob(job{id: c.ID, prompt: c.Prompt, age: c.Age, left: left, lag: r.fates.lag})
	r.scheduleQuit(c.ID)
	return at, left
}

// lagOf returns how many steps a request waits for its first token.
func (r *Replay) lagOf(id uint64) int32 {
	if a := r.fates.of(id); a != nil && a.lag >= 0 {
		return a.lag
	}
	return r.fates.lag
}

// addJob keeps a request, and returns its index in r.jobs.
func (r *Replay) addJob(j job) int32 {
	if n := len(r.unused); n > 0 {
		at := r.unused[n-1]
		r.unused, r.jobs[at] = r.unused[:n-1], j
		return at
	}
	r.jobs = append(r.jobs, j)
	return int32(len(r.jobs) - 1)
}

// dropJob drops the request at an index of r.jobs, which has left the replay.
func (r *Replay) dropJob(at int32) {
	r.jobs[at] = job{}
	r.unused = append(r.unused, at)
}

// addWaiting keeps a request that waits for a rank, with what is known of its answer.
func (r *Replay) addWaiting(id uint64, c came) *job {
	j := job{id: id, age: c.age, prompt: c.prompt, left: r.rest(id, c.age), lag: r.lagOf(id),
		came: c}
	r.scheduleQuit(id)
	at := r.addJob(j)
	r.waiting[id] = at
	return &r.jobs[at]
}

// scheduleQuit notes when a request quits, if it really left before it had a slot: then it quits at the same time in the replay.
func (r *Replay) scheduleQuit(id uint64) {
	if a := r.fates.of(id); a != nil && a.tokens < 0 {
		at, _ := slices.BinarySearchFunc(r.quits, ms(a.left), func(q quit, at float64) int { return cmp.Compare(q.at, at) })
		r.quits = slices.Insert(r.quits, at, quit{ms(a.left), id})
	}
}

// Run goes on for at most so many turns. over says whether the end of the window is reached.
func (r *Replay) Run(turns int) (over bool, err error) {
	for range turns {
		if r.over || r.failed != nil {
			break
		}
		r.engines.turn()
		next := r.engines.due()
		if at, more := r.came.due(); more {
			next = min(next, at)
		}
		if len(r.fleet) > 0 {
			next = min(next, ms(r.fleet[0].at))
		}
		for len(r.marks) > 0 && r.marks[0] <= next {
			r.mark(r.marks[0])
			r.marks = r.marks[1:]
		}
		if next >= r.ends {
			r.over = true
			break
		}
		if r.turnsAtInstant++; next > r.Now {
			r.turnsAtInstant = 0
		} else if r.turnsAtInstant > mostStill {
			r.failed = fmt.Errorf("the replay does not go on after %.0f ms", r.Now)
		}
		r.Now = max(r.Now, next)
	}
	return r.over, r.failed
}

// deliver gives the boards the requests and the changes of ranks that are due by now.
func (r *Replay) deliver() {
	for len(r.fleet) > 0 && ms(r.fleet[0].at) <= r.Now {
		r.refleet(r.fleet[0].workers)
		r.fleet = r.fleet[1:]
	}
	for at, more := r.came.due(); more && at <= r.Now; at, more = r.came.due() {
		c := r.came.take()
		r.enqueue(r.addWaiting(c.id, c))
	}
	for len(r.quits) > 0 && r.quits[0].at <= r.Now {
		id := r.quits[0].id
		r.quits = r.quits[1:]
		r.quit(id)
	}
}

// enqueue hands a request to the boards.
func (r *Replay) enqueue(j *job) {
	at := func(d time.Duration) time.Time { return r.Began.Add(d) }
	e := &board.Entry{
		ID: j.id, Model: r.Model, Name: j.came.name, Prompt: int(j.prompt), Age: int(j.age), Key: j.came.key, Arrival: at(j.came.arrival),
		Entered: at(j.came.entered),
		Early:   j.came.early, Discard: j.came.discard,
	}
	if j.came.deadline != 0 {
		e.Deadline = at(j.came.deadline)
	}
	j.entry = e
	r.Apply(&board.Enqueue{Entry: e, Hits: j.came.hits}, r.Now)
}

// refleet replaces the ranks of the boards and of the engines.
func (r *Replay) refleet(ws []board.Worker) {
	ours, groups := make([]board.Worker, 0, len(ws)), map[int32]string{}
	for _, w := range ws {
		if w.Model == r.Model {
			ours, groups[w.ID] = append(ours, w), w.Group
		}
	}
	r.Count(r.Now)
	r.Apply(board.SetWorkers{Workers: ours}, r.Now)
	r.engines.keep(groups)
	for i := range ours {
		if ours[i].Barrier {
			r.engines.join(&ours[i])
		}
	}
}

// quit ends a request whose client really left before it had a slot.
func (r *Replay) quit(id uint64) {
	if r.engines.drop(id) {
		return
	}
	if at, waits := r.waiting[id]; waits {
		r.Apply(board.Withdraw{Entry: r.jobs[at].entry}, r.Now)
	}
}

// placed gives a request to the engine that the boards bound it to.
func (r *Replay) placed(e *board.Effect) {
	at, ok := r.waiting[e.Entry.ID]
	if !ok {
		r.failed = fmt.Errorf("the policy bound request %d, which the replay does not know", e.Entry.ID)
		return
	}
	delete(r.waiting, e.Entry.ID)
	r.jobs[at].entry, r.jobs[at].prompt = nil, int32(e.Entry.Prompt)
	if !r.engines.place(at, &e.Bound) { // the rank is of a group that was there only within the window
		r.dropJob(at)
		r.Apply(&board.Release{Model: r.Model, Slot: e.Bound.Slot, Outcome: board.Outcome{Kind: board.Failed}}, r.Now)
	}
}

// comeBack makes a request come back at once, with the tokens that it has generated as part of its prompt. The time to compute that prompt
// again is not known, and left out.
func (r *Replay) comeBack(at, prompt, generated, left int32) {
	j := &r.jobs[at]
	j.prompt, j.age, j.left = prompt+generated, j.age+generated, left
	j.came.entered = time.Duration(r.Now * float64(time.Millisecond))
	j.came.deadline, j.came.hits = 0, nil
	r.waiting[j.id] = at
	r.enqueue(j)
}

// varied returns the length of a step that takes so many ms by its law, with a random change.
func (r *Replay) varied(ms float64) float64 { return ms * (1 + unsteady*(2*r.chance.Float64()-1)) }

// countStep counts a step of the given length.
func (r *Replay) countStep(ms float64) {
	if r.Now >= r.measuredFrom {
		r.measured.add(ms)
	}
	if r.freshBetween[0] <= r.Now && r.Now < r.freshBetween[1] {
		r.fresh.add(ms)
	}
}

// refused drops a request that the boards have refused.
func (r *Replay) refused(e *board.Effect) {
	if at, ok := r.waiting[e.Entry.ID]; ok {
		delete(r.waiting, e.Entry.ID)
		r.dropJob(at)
	}
}

// other ends the replay if the policy failed.
func (r *Replay) other(e *board.Effect) {
	if e.Kind == board.EffectFallback && e.Label == board.FallbackPanic {
		r.failed = fmt.Errorf("the policy failed")
	}
}

// StepMs returns the mean length of the measured steps; 0: there was none.
func (r *Replay) StepMs() float64 { return r.measured.mean() }
