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
	ranks  map[int32]*rank
	behind virtual.Engines
}

type rank struct {
	*virtual.Rank
	up bool
}

func newDecoding(r *Replay) *decoding {
	d := &decoding{Replay: r, ranks: map[int32]*rank{}, behind: virtual.Engines{Driver: r.Driver}}
	d.behind.Length, d.behind.Finished = d.step, func(_ *virtual.Group, l virtual.Leg) { r.left(l.Job) }
	d.behind.Token, d.behind.Seated, d.behind.Stepped = func(*virtual.Leg) {}, func(*virtual.Leg) {}, func(*virtual.Group, int) {}
	d.behind.Preempted = func(_ *virtual.Rank, l virtual.Leg) { r.again(l.Job, l.Prompt, l.Gen, l.Left) }
	return d
}

func (d *decoding) build(v *board.GroupView, law board.StepModel) error {
	g := virtual.NewGroup(v.Key, law)
	g.Number = max(1, v.Last)
	d.behind.Groups = append(d.behind.Groups, g)
	return nil
}

func (d *decoding) join(w *board.Worker) {
	i := slices.IndexFunc(d.behind.Groups, func(g *virtual.Group) bool { return g.Key.Name == w.Group })
	if i < 0 {
		return
	}
	g, k := d.behind.Groups[i], d.ranks[w.ID]
	if k == nil {
		k = &rank{Rank: &virtual.Rank{ID: w.ID, Group: g}}
		d.ranks[w.ID] = k
	}
	k.Slots, k.Capacity, k.Cost, k.Others, k.Keeps, k.up = w.Slots, w.Capacity, float64(cmp.Or(w.Cost, 1)), w.Others, w.Keeps, !w.Down
	k.Kept = d.Boards.Kept(d.Model, w.ID) // empty if the engine's process is another one now
	at, there := slices.BinarySearchFunc(g.Ranks, w.ID, func(o *virtual.Rank, id int32) int { return cmp.Compare(o.ID, id) })
	switch {
	case k.up && !there:
		g.Ranks = slices.Insert(g.Ranks, at, k.Rank)
	case !k.up && there:
		d.leave(g, at)
	}
}

// leave takes a rank out of its group. Its requests fail, as they do when an engine dies, and come again.
func (d *decoding) leave(g *virtual.Group, at int) {
	k := g.Ranks[at]
	g.Ranks = slices.Delete(g.Ranks, at, at+1)
	for len(k.Legs) > 0 {
		l := k.Legs[len(k.Legs)-1]
		k.Remove(len(k.Legs) - 1)
		d.behind.Release(g, &l, board.Failed)
		d.again(l.Job, l.Prompt, l.Gen, l.Left)
	}
}

func (d *decoding) keep(groups map[int32]string) {
	for _, g := range d.behind.Groups {
		for i := len(g.Ranks) - 1; i >= 0; i-- {
			if in, there := groups[g.Ranks[i].ID]; !there || in != g.Key.Name {
				d.leave(g, i)
			}
		}
	}
}

// resume puts the requests that were on ranks on the replayed engines. Under another policy, it returns the requests that waited in an
// engine's queue, so that they wait in the pool: that policy might never have sent them there.
func (d *decoding) resume(another bool) (queued []board.Charge) {
	placed := map[int32]int{}
	for _, c := range d.Boards.Charges(d.Model) {
		if c.Started {
			placed[c.Worker]++
		}
	}
	for _, c := range d.Boards.Charges(d.Model) {
		k := d.ranks[c.Worker]
		if !k.up { // the requests on it fail and come again
			queued = append(queued, c)
			continue
		}
		first := d.firstStep(&c, k.Group)
		begin := max(0, int64(int32(first-k.Group.Number))-1)
		l := virtual.Leg{Slot: c.Slot, Prompt: c.Prompt, Gen: c.Generated, Reserved: true, Begin: begin}
		if !c.Started {
			if placed[c.Worker]++; placed[c.Worker] > k.Slots {
				if another {
					queued = append(queued, c)
					continue
				}
				l.Reserved, l.Begin, l.StepsToBegin = false, virtual.NotBegun, int64(d.fates.lag)
			}
		}
		l.Job, l.Left = d.goesOn(&c)
		if c.Started { // the boards need Joined: at its end they learn how many steps after the bind its first token came
			l.Begin, l.Joined = 0, first
		}
		d.behind.Put(k.Rank, l)
	}
	for _, k := range d.ranks {
		slices.SortStableFunc(k.Legs, func(a, b virtual.Leg) int { return cmp.Compare(a.Begin, b.Begin) }) // those that decode first
		waiting := slices.IndexFunc(k.Legs, func(l virtual.Leg) bool { return l.Begin == virtual.NotBegun })
		k.Active = min(k.Slots, len(k.Legs))
		if waiting >= 0 {
			k.Active = min(k.Active, waiting)
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

func (d *decoding) place(at int32, b *board.Bound) bool {
	k := d.ranks[b.Worker]
	if k == nil {
		return false
	}
	j := &d.jobs[at]
	lag := j.lag
	if k.Group.Steps() { // the step in progress counts as one of the steps that it waits
		lag--
	}
	d.behind.Place(k.Rank, virtual.Leg{Job: at, Slot: b.Slot, Prompt: j.prompt, Left: j.left, StepsToBegin: int64(max(0, lag))})
	return true
}

func (d *decoding) drop(id uint64) bool {
	for _, g := range d.behind.Groups {
		for _, k := range g.Ranks {
			for i := range k.Legs {
				if l := k.Legs[i]; d.jobs[l.Job].id == id {
					k.Remove(i)
					d.left(l.Job)
					d.behind.Release(g, &l, board.Cancelled)
					return true
				}
			}
		}
	}
	return false
}

func (d *decoding) turn() {
	d.behind.Turn(d.come)
	if d.behind.Begin() {
		d.Look(d.Now)
	}
}

func (d *decoding) due() float64 {
	next, _ := d.behind.Due()
	return next
}

func (d *decoding) each(yield func(job, left int32)) {
	for _, k := range d.ranks {
		for i := range k.Legs {
			yield(k.Legs[i].Job, k.Legs[i].Left)
		}
	}
}

// step returns how long the step that begins takes, in ms.
func (d *decoding) step(g *virtual.Group) float64 {
	most := 0.0
	for _, k := range g.Ranks {
		most = max(most, k.Feels(k.Load(g.Step)))
	}
	length := d.lasts(g.Law.C0Ms + g.Law.C1Ms*most)
	d.note(length)
	return length
}
