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

type rank struct {
	*virtual.Rank
	up bool
}

// job is a request of a replay.
type job struct {
	id     uint64
	prompt int32 // of the present leg
	age    int32
	left   int32 // tokens it still gets
	lag    int32
	came   came
	entry  *board.Entry // that waits
}

type quit struct {
	at float64 // ms
	id uint64
}

// mostStill bounds the turns of one instant.
const mostStill = 10_000

// unsteady is by what share of itself a step is shorter or longer than its line says, at most. It changes which request
// is there at which step, and with that, after a while, who is beside whom: replays that differ in nothing else come to
// means that differ as those of two real runs do. They differ as much with 0.001 and with 0.03.
const unsteady = 0.01

// NewReplay prepares a replay of a model; spec empty: under the policy that was in force. Those of one draw have equally
// unsteady steps. It says why not where nothing can be told.
func NewReplay(w *Window, model, spec string, draw uint64) (*Replay, error) {
	were, begun := w.Stretches[0].Boards, w.begun(model, spec)
	b := were.Clone()
	if begun != nil {
		b = begun.boards.Clone()
	}
	inForce := b.Policy()
	if spec != "" && begun == nil {
		if err := rejected(b.Apply(board.SetPolicy{Spec: spec}, w.From())); err != nil {
			return nil, err
		}
	}
	groups, dense := b.Groups(model)
	if dense || len(groups) == 0 {
		return nil, fmt.Errorf("%s has ranks that do not step together", model)
	}
	if slices.ContainsFunc(groups[0].Workers, func(w board.Worker) bool { return w.Mixed }) { // its engines only decode
		return nil, fmt.Errorf("%s has ranks that prefill, too", model)
	}
	b.Only(model)
	r := &Replay{
		Engines: virtual.Engines{Driver: virtual.NewDriver(b, w.From(), model)}, ranks: map[int32]*rank{}, fates: w.fates(model), live: map[uint64]int32{},
		begins: ms(w.Measured().From.Sub(w.From())), ends: ms(w.To().Sub(w.From())), chance: rand.New(rand.NewPCG(draw, 0)),
		spec: spec, begun: begun,
	}
	if draw == 0 && spec != "" {
		r.marks = w.marks()
	}
	r.collect(w, model)
	if err := r.build(groups, were, w.End); err != nil {
		return nil, err
	}
	r.Bound, r.Refused, r.Other = r.placed, r.refused, r.other
	r.Length, r.Token, r.Seated, r.Finished, r.Preempted = r.step, func(*virtual.Leg) {}, func(*virtual.Leg) {}, func(_ *virtual.Group, l virtual.Leg) { r.left(l.Job) }, r.preempted
	r.Stepped = func(*virtual.Group, int) {}
	r.resume(b.Policy() != inForce)
	for _, l := range w.looks() {
		r.looks = append(r.looks, ms(l.at.Sub(w.From())))
	}
	r.n = len(r.looks)
	from, to := w.fresh()
	r.newly = [2]float64{ms(from.Sub(w.From())), ms(to.Sub(w.From()))}
	return r, nil
}

func rejected(effects []board.Effect) error {
	for i := range effects {
		if effects[i].Kind == board.EffectRejected {
			return effects[i].Err
		}
	}
	return nil
}

// collect puts what happened in the stretches on one time.
func (r *Replay) collect(w *Window, model string) {
	r.came = arrivals{stretches: w.Stretches, from: w.From(), model: model, not: r.fates.again}
	r.came.skip()
	for _, s := range w.Stretches {
		later := s.From.Sub(w.From())
		for _, f := range s.fleet {
			r.fleet = append(r.fleet, fleet{f.at + later, f.workers})
		}
	}
}

// build makes engines of the groups. Their steps follow the line that they had taught by the end, through the mean
// of those of the window.
func (r *Replay) build(groups []board.GroupView, begin, end *board.Boards) error {
	untaught, _ := begin.Groups(r.Model)
	taught, _ := end.Groups(r.Model)
	for _, v := range groups {
		f, t := viewOf(untaught, v.Key), viewOf(taught, v.Key)
		if f == nil || t == nil || t.Line.Taught.Steps == 0 {
			return fmt.Errorf("nobody knows yet how long a step of %s takes", v.Key.Name)
		}
		law := t.Line.Taught.Through(t.Line.Model, f.Line.Taught)
		g := virtual.NewGroup(v.Key, law)
		g.Number = max(1, v.Last)
		r.Groups = append(r.Groups, g)
		r.work.add(law, v.Workers)
		if t.Line.InForce {
			r.Boards.Apply(board.Law{Group: v.Key, StepModel: law}, r.Began)
		}
		for _, worker := range v.Workers {
			r.join(g, &worker)
		}
	}
	return nil
}

// join has a rank take part in its group, or be as it is now.
func (r *Replay) join(g *virtual.Group, w *board.Worker) {
	k := r.ranks[w.ID]
	if k == nil {
		k = &rank{Rank: &virtual.Rank{ID: w.ID, Group: g}}
		r.ranks[w.ID] = k
	}
	k.Slots, k.Capacity, k.Cost, k.Others, k.up = w.Slots, w.Capacity, float64(cmp.Or(w.Cost, 1)), w.Others, !w.Down
	at, there := slices.BinarySearchFunc(g.Ranks, w.ID, func(o *virtual.Rank, id int32) int { return cmp.Compare(o.ID, id) })
	switch {
	case k.up && !there:
		g.Ranks = slices.Insert(g.Ranks, at, k.Rank)
	case !k.up && there:
		r.leave(g, at)
	}
}

// leave takes a rank out of its group. What runs on it fails, as it does where an engine dies, and comes again.
func (r *Replay) leave(g *virtual.Group, at int) {
	k := g.Ranks[at]
	g.Ranks = slices.Delete(g.Ranks, at, at+1)
	for len(k.Legs) > 0 {
		l := k.Legs[len(k.Legs)-1]
		k.Remove(len(k.Legs) - 1)
		r.Release(g, &l, board.Failed)
		r.preempted(k, l)
	}
}

// resume puts the requests on the ranks that were there from the start. Those that waited in an engine's
// queue wait for a rank under another policy: it might never have sent them there.
func (r *Replay) resume(another bool) {
	placed := map[int32]int{}
	var queued []board.Charge
	for _, c := range r.Boards.Charges(r.Model) {
		if c.Started {
			placed[c.Worker]++
		}
	}
	for _, c := range r.Boards.Charges(r.Model) {
		k := r.ranks[c.Worker]
		if !k.up { // what runs there fails and comes again
			queued = append(queued, c)
			continue
		}
		first := r.firstStep(&c, k.Group)
		l := virtual.Leg{Slot: c.Slot, Prompt: c.Prompt, Gen: c.Generated, Pulled: true, Begin: max(0, int64(int32(first-k.Group.Number))-1)}
		if !c.Started {
			if placed[c.Worker]++; placed[c.Worker] > k.Slots {
				if another {
					queued = append(queued, c)
					continue
				}
				l.Pulled, l.Begin, l.Lag = false, virtual.NotBegun, int64(r.fates.lag)
			}
		}
		l.Job = r.job(job{id: c.ID, prompt: c.Prompt, age: c.Age, left: r.rest(c.ID, c.Age+c.Generated), lag: r.fates.lag})
		l.Left = r.jobs[l.Job].left
		if c.Started { // the boards learn from its end how long after the bind its first token came
			l.Begin, l.Joined = 0, first
		}
		r.Put(k.Rank, l)
		r.leaves(c.ID)
	}
	for _, k := range r.ranks {
		slices.SortStableFunc(k.Legs, func(a, b virtual.Leg) int { return cmp.Compare(a.Begin, b.Begin) }) // those that decode first
		waiting := slices.IndexFunc(k.Legs, func(l virtual.Leg) bool { return l.Begin == virtual.NotBegun })
		k.Active = min(k.Slots, len(k.Legs))
		if waiting >= 0 {
			k.Active = min(k.Active, waiting)
		}
	}
	for _, e := range r.Boards.Waiting(r.Model) {
		r.wait(e.ID, came{id: e.ID, key: e.Key, prompt: int32(e.Prompt), age: int32(e.Age), early: e.Early, discard: e.Discard}).entry = e
	}
	for _, c := range queued {
		r.Boards.Apply(&board.Release{Model: r.Model, Slot: c.Slot, Outcome: board.Outcome{Kind: board.Cancelled}}, r.Began)
		since := c.Since.Sub(r.Began)
		r.enter(r.wait(c.ID, came{id: c.ID, key: c.Key, prompt: c.Prompt + c.Generated, age: c.Age + c.Generated, arrival: since, entered: since}))
	}
}

func (r *Replay) job(j job) int32 {
	if n := len(r.unused); n > 0 {
		at := r.unused[n-1]
		r.unused, r.jobs[at] = r.unused[:n-1], j
		return at
	}
	r.jobs = append(r.jobs, j)
	return int32(len(r.jobs) - 1)
}

// left books a request out.
func (r *Replay) left(at int32) {
	r.jobs[at] = job{}
	r.unused = append(r.unused, at)
}

// firstStep is the number of the step with which a request on a rank got its first token, or will.
func (r *Replay) firstStep(c *board.Charge, g *virtual.Group) uint32 {
	first := c.Step + 1 + uint32(r.lagOf(c.ID))
	if c.Step == 0 {
		first = g.Number + uint32(r.lagOf(c.ID))
	}
	if c.Started && int32(first-g.Number) > 0 {
		return g.Number
	}
	return max(1, first)
}

// lagOf is how many steps a request waits for its first token.
func (r *Replay) lagOf(id uint64) int32 {
	if a := r.fates.of(id); a != nil && a.lag >= 0 {
		return a.lag
	}
	return r.fates.lag
}

// wait notes a request that waits for a rank.
func (r *Replay) wait(id uint64, c came) *job {
	j := job{id: id, age: c.age, prompt: c.prompt, left: r.rest(id, c.age), lag: r.lagOf(id), came: c}
	r.leaves(id)
	at := r.job(j)
	r.live[id] = at
	return &r.jobs[at]
}

// leaves notes when a request leaves at its own time, if it does: it really had no slot by then.
func (r *Replay) leaves(id uint64) {
	if a := r.fates.of(id); a != nil && a.tokens < 0 {
		at, _ := slices.BinarySearchFunc(r.quits, ms(a.left), func(q quit, at float64) int { return cmp.Compare(q.at, at) })
		r.quits = slices.Insert(r.quits, at, quit{ms(a.left), id})
	}
}

// Run goes on for so many turns at most, and says whether the end is reached.
func (r *Replay) Run(turns int) (over bool, err error) {
	for range turns {
		if r.over || r.failed != nil {
			break
		}
		r.Turn(r.come)
		if r.Begin() {
			r.Look(r.Now)
		}
		next, _ := r.Due()
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
		for len(r.looks) > 0 && r.looks[0] <= next {
			r.owed += r.owes()
			r.looks = r.looks[1:]
		}
		if next >= r.ends {
			r.over = true
			break
		}
		if r.still++; next > r.Now {
			r.still = 0
		} else if r.still > mostStill {
			r.failed = fmt.Errorf("the replay stands still at %.0f ms", r.Now)
		}
		r.Now = max(r.Now, next)
	}
	return r.over, r.failed
}

// come tells the boards of the requests and ranks that came or left by now.
func (r *Replay) come() {
	for len(r.fleet) > 0 && ms(r.fleet[0].at) <= r.Now {
		r.refleet(r.fleet[0].workers)
		r.fleet = r.fleet[1:]
	}
	for at, more := r.came.due(); more && at <= r.Now; at, more = r.came.due() {
		c := r.came.take()
		r.enter(r.wait(c.id, c))
	}
	for len(r.quits) > 0 && r.quits[0].at <= r.Now {
		id := r.quits[0].id
		r.quits = r.quits[1:]
		r.quit(id)
	}
}

// enter hands a request to the boards.
func (r *Replay) enter(j *job) {
	at := func(d time.Duration) time.Time { return r.Began.Add(d) }
	e := &board.Entry{
		ID: j.id, Model: r.Model, Prompt: int(j.prompt), Age: int(j.age), Key: j.came.key, Arrival: at(j.came.arrival), Entered: at(j.came.entered),
		Early: j.came.early, Discard: j.came.discard,
	}
	if j.came.deadline != 0 {
		e.Deadline = at(j.came.deadline)
	}
	j.entry = e
	r.Apply(&board.Enqueue{Entry: e}, r.Now)
}

// refleet changes the ranks.
func (r *Replay) refleet(ws []board.Worker) {
	ours, groups := make([]board.Worker, 0, len(r.ranks)), map[int32]string{}
	for _, w := range ws {
		if w.Model == r.Model {
			ours, groups[w.ID] = append(ours, w), w.Group
		}
	}
	r.Count(r.Now)
	r.Apply(board.SetWorkers{Workers: ours}, r.Now)
	for _, g := range r.Groups {
		for i := len(g.Ranks) - 1; i >= 0; i-- {
			if in, there := groups[g.Ranks[i].ID]; !there || in != g.Key.Name {
				r.leave(g, i)
			}
		}
		for i := range ours {
			if w := &ours[i]; w.Barrier && w.Group == g.Key.Name {
				r.join(g, w)
			}
		}
	}
}

// quit has a client leave that left before it had a slot.
func (r *Replay) quit(id uint64) {
	for _, g := range r.Groups {
		for _, k := range g.Ranks {
			for i := range k.Legs {
				if l := k.Legs[i]; r.jobs[l.Job].id == id {
					k.Remove(i)
					r.left(l.Job)
					r.Release(g, &l, board.Cancelled)
					return
				}
			}
		}
	}
	if at, waits := r.live[id]; waits {
		r.Apply(board.Withdraw{Entry: r.jobs[at].entry}, r.Now)
	}
}

// placed gives a request to the engine that the boards bound it to.
func (r *Replay) placed(e *board.Effect) {
	at, ok := r.live[e.Entry.ID]
	if !ok {
		r.failed = fmt.Errorf("request %d was bound and is not known", e.Entry.ID)
		return
	}
	delete(r.live, e.Entry.ID)
	k := r.ranks[e.Bound.Worker]
	if k == nil { // of a group that comes and goes within the window
		r.left(at)
		r.Release(r.Groups[0], &virtual.Leg{Slot: e.Bound.Slot}, board.Failed)
		return
	}
	j, lag := &r.jobs[at], r.jobs[at].lag
	j.entry = nil
	if g := k.Group; g.Ends < virtual.Never && g.Ends > r.Now { // it cannot take part in the step in progress, which is one of those it waits for
		lag--
	}
	r.Place(k.Rank, virtual.Leg{Job: at, Slot: e.Bound.Slot, Prompt: int32(e.Entry.Prompt), Left: j.left, Lag: int64(max(0, lag))})
}

func (r *Replay) refused(e *board.Effect) {
	if at, ok := r.live[e.Entry.ID]; ok {
		delete(r.live, e.Entry.ID)
		r.left(at)
	}
}

// preempted has a request come back at once with what it has generated: how long its prompt would be
// computed again is not known.
func (r *Replay) preempted(_ *virtual.Rank, l virtual.Leg) {
	j := &r.jobs[l.Job]
	j.prompt, j.age, j.left = l.Prompt+l.Gen, j.age+l.Gen, l.Left
	j.came.entered = time.Duration(r.Now * float64(time.Millisecond))
	j.came.deadline = 0
	r.live[j.id] = l.Job
	r.enter(j)
}

func (r *Replay) other(e *board.Effect) {
	if e.Kind == board.EffectFallback && e.Label == board.FallbackPanic {
		r.failed = fmt.Errorf("the policy failed")
	}
}

// step is how long the step takes that begins.
func (r *Replay) step(g *virtual.Group) float64 {
	most := 0.0
	for _, k := range g.Ranks {
		most = max(most, k.Feels(k.Load(g.Step)))
	}
	length := (g.Law.C0Ms + g.Law.C1Ms*most) * (1 + unsteady*(2*r.chance.Float64()-1))
	if r.Now >= r.begins {
		r.all.add(length)
	}
	if r.newly[0] <= r.Now && r.Now < r.newly[1] {
		r.fresh.add(length)
	}
	return length
}

// StepMs is the mean step; 0: there was none.
func (r *Replay) StepMs() float64 { return r.all.mean() }
