package twin

import (
	"cmp"
	"slices"

	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/virtual"
)

// decoding is the replayed engines of ranks that only decode.
type decoding struct {
	*Replay
	ranks          map[int32]*rank
	virtualEngines virtual.Engines
}

type rank struct {
	*virtual.Rank
	up bool
}

// newDecoding returns engines without groups for a replay.
func newDecoding(r *Replay) *decoding {
	d := &decoding{Replay: r, ranks: map[int32]*rank{}, virtualEngines: virtual.Engines{Driver: r.Driver}}
	d.virtualEngines.Length, d.virtualEngines.Finished = d.step, func(_ *virtual.Group, l virtual.Leg) { r.dropJob(l.Job) }
	d.virtualEngines.Token, d.virtualEngines.Seated, d.virtualEngines.Stepped = func(*virtual.Leg) {},
		func(*virtual.Leg) {}, func(*virtual.Group, int) {}
	d.virtualEngines.Preempted = func(_ *virtual.Rank, l virtual.Leg) { r.comeBack(l.Job, l.Prompt, l.Gen, l.Left) }
	return d
}

// build adds a group, in which no step has begun, with the law of its steps.
func (d *decoding) build(v *board.GroupView, law board.StepModel) error {
	g := virtual.NewGroup(v.Key, law)
	g.Number = max(1, v.Last)
	d.virtualEngines.Groups = append(d.virtualEngines.Groups, g)
	return nil
}

// join adds a rank to its group, or updates a rank that is known. A rank that is down leaves its group. If the replay does not have the
// group, nothing happens.
func (d *decoding) join(w *board.Worker) {
	i := slices.IndexFunc(d.virtualEngines.Groups, func(g *virtual.Group) bool { return g.Key.Name == w.Group })
	if i < 0 {
		return
	}
	g, r := d.virtualEngines.Groups[i], d.ranks[w.ID]
	if r == nil {
		r = &rank{Rank: &virtual.Rank{ID: w.ID, Group: g}}
		d.ranks[w.ID] = r
	}
	r.Slots, r.Capacity, r.Cost, r.Others, r.Keeps, r.up = w.Slots, w.Capacity, float64(cmp.Or(w.Cost, 1)), w.Others, w.Keeps, !w.Down
	r.Kept = d.Boards.Kept(d.Model, w.ID) // it is empty if the engine was restarted, because a new process has lost the KV
	at, present := slices.BinarySearchFunc(g.Ranks, w.ID, func(o *virtual.Rank, id int32) int { return cmp.Compare(o.ID, id) })
	switch {
	case r.up && !present:
		g.Ranks = slices.Insert(g.Ranks, at, r.Rank)
	case !r.up && present:
		d.leave(g, at)
	}
}

// leave takes a rank out of its group. Its requests fail, as they do when an engine dies, and come again.
func (d *decoding) leave(g *virtual.Group, at int) {
	r := g.Ranks[at]
	g.Ranks = slices.Delete(g.Ranks, at, at+1)
	for len(r.Legs) > 0 {
		l := r.Legs[len(r.Legs)-1]
		r.Remove(len(r.Legs) - 1)
		d.virtualEngines.Release(g, &l, board.Failed)
		d.comeBack(l.Job, l.Prompt, l.Gen, l.Left)
	}
}

// keep takes those ranks out that are no longer in their group. groups has the group name of each rank of the fleet, by ID.
func (d *decoding) keep(groups map[int32]string) {
	for _, g := range d.virtualEngines.Groups {
		for i := len(g.Ranks) - 1; i >= 0; i-- {
			if group, present := groups[g.Ranks[i].ID]; !present || group != g.Key.Name {
				d.leave(g, i)
			}
		}
	}
}

// resume puts the requests that were on ranks on the replayed engines. Under another policy, it returns the requests that waited in an
// engine's queue, so that they wait in the pool: that policy might never have sent them there.
func (d *decoding) resume(otherPolicy bool) (queued []board.Charge) {
	placed := map[int32]int{}
	for _, c := range d.Boards.Charges(d.Model) {
		if c.Started {
			placed[c.Worker]++
		}
	}
	for _, c := range d.Boards.Charges(d.Model) {
		r := d.ranks[c.Worker]
		if !r.up { // the requests on it fail and come again
			queued = append(queued, c)
			continue
		}
		first := d.firstStep(&c, r.Group)
		begin := max(0, int64(int32(first-r.Group.Number))-1)
		l := virtual.Leg{Slot: c.Slot, Prompt: c.Prompt, Gen: c.Generated, Reserved: true, Begin: begin}
		if !c.Started {
			if placed[c.Worker]++; placed[c.Worker] > r.Slots {
				if otherPolicy {
					queued = append(queued, c)
					continue
				}
				l.Reserved, l.Begin, l.StepsToBegin = false, virtual.NotBegun, int64(d.fates.lag)
			}
		}
		l.Job, l.Left = d.addRunning(&c)
		if c.Started { // the boards need Joined: at its end they learn how many steps after the bind its first token came
			l.Begin, l.Joined = 0, first
		}
		d.virtualEngines.Put(r.Rank, l)
	}
	for _, r := range d.ranks {
		slices.SortStableFunc(r.Legs, func(a, b virtual.Leg) int { return cmp.Compare(a.Begin, b.Begin) }) // those that decode first
		waiting := slices.IndexFunc(r.Legs, func(l virtual.Leg) bool { return l.Begin == virtual.NotBegun })
		r.Active = min(r.Slots, len(r.Legs))
		if waiting >= 0 {
			r.Active = min(r.Active, waiting)
		}
	}
	return queued
}

// firstStep returns the number of the step in which a request on a rank got its first token, or will get it.
func (d *decoding) firstStep(c *board.Charge, g *virtual.Group) uint32 {
	first := c.Step + 1 + uint32(d.lagOf(c.ID))
	if c.Step == 0 {
		first = g.Number + uint32(d.lagOf(c.ID))
	}
	if c.Started && int32(first-g.Number) > 0 {
		return g.Number
	}
	return max(1, first)
}

// place puts a request on the engine of the rank that it was bound to. at is its index in jobs. place returns false if the replay has no
// such rank.
func (d *decoding) place(at int32, b *board.Bound) bool {
	r := d.ranks[b.Worker]
	if r == nil {
		return false
	}
	j := &d.jobs[at]
	lag := j.lag
	if r.Group.Steps() { // the step in progress counts as one of the steps that it waits
		lag--
	}
	d.virtualEngines.Place(r.Rank, virtual.Leg{Job: at, Slot: b.Slot, Prompt: j.prompt, Left: j.left, StepsToBegin: int64(max(0, lag))})
	return true
}

// drop ends a request on an engine, by its ID, as if its client had left. It returns false if no engine has the request.
func (d *decoding) drop(id uint64) bool {
	for _, g := range d.virtualEngines.Groups {
		for _, r := range g.Ranks {
			for i := range r.Legs {
				if l := r.Legs[i]; d.jobs[l.Job].id == id {
					r.Remove(i)
					d.dropJob(l.Job)
					d.virtualEngines.Release(g, &l, board.Cancelled)
					return true
				}
			}
		}
	}
	return false
}

// turn runs one instant: steps end, boards decide, and steps begin. If a request was preempted for a step, the boards decide once more.
func (d *decoding) turn() {
	d.virtualEngines.Turn(d.deliver)
	if d.virtualEngines.Begin() {
		d.Look(d.Now)
	}
}

func (d *decoding) due() float64 {
	next, _ := d.virtualEngines.Due()
	return next
}

// each calls yield for each request on an engine, with its index in jobs and how many tokens it still gets.
func (d *decoding) each(yield func(job, left int32)) {
	for _, r := range d.ranks {
		for i := range r.Legs {
			yield(r.Legs[i].Job, r.Legs[i].Left)
		}
	}
}

// step returns how long the step that begins takes, in ms.
func (d *decoding) step(g *virtual.Group) float64 {
	most := 0.0
	for _, r := range g.Ranks {
		most = max(most, r.Feels(r.Load(g.Step)))
	}
	length := d.varied(g.Law.C0Ms + g.Law.C1Ms*most)
	d.countStep(length)
	return length
}
