package twin

import (
	"cmp"
	"slices"

	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/virtual"
)

// decoding simulates the engines of ranks that only decode, for a replay.
type decodeEngines struct {
	*Replay
	ranks          map[int32]*rank
	virtualEngines virtual.Engines
}

type rank struct {
	*virtual.Rank
	up bool
}

// newDecoding returns engines for a replay that have no groups yet.
func newDecoding(r *Replay) *decodeEngines {
	d := &decodeEngines{Replay: r, ranks: map[int32]*rank{}, virtualEngines: virtual.Engines{Driver: r.Driver}}
	e := &d.virtualEngines
	e.Length = d.stepLength
	e.Finished = func(_ *virtual.Group, l virtual.Request) { r.dropJob(l.Job) }
	e.Preempted = func(_ *virtual.Rank, l virtual.Request) { r.requeue(l.Job, l.Prompt, l.Gen, l.Left) }
	e.Token, e.Seated, e.Stepped = func(*virtual.Request) {}, func(*virtual.Request) {}, func(*virtual.Group, int) {}
	return d
}

// build adds a group whose steps take as long as the law says. No step has begun yet.
func (d *decodeEngines) addGroup(v *board.GroupView, law board.StepModel) error {
	g := virtual.NewGroup(v.Key, law)
	g.Number = max(1, v.Last)
	d.virtualEngines.Groups = append(d.virtualEngines.Groups, g)
	return nil
}

// join adds a rank to its group, or updates a rank that is known. If the rank is down, join removes it from its group. If the replay does
// not have the group, it does nothing.
func (d *decodeEngines) updateRank(w *board.Worker) {
	i := slices.IndexFunc(d.virtualEngines.Groups, func(g *virtual.Group) bool { return g.Key.Name == w.Group })
	if i < 0 {
		return
	}
	g, r := d.virtualEngines.Groups[i], d.ranks[w.ID]
	if r == nil {
		r = &rank{Rank: &virtual.Rank{ID: w.ID, Group: g}}
		d.ranks[w.ID] = r
	}
	r.Slots, r.Capacity, r.OtherTokens = w.Slots, w.Capacity, w.Others
	r.Cost = float64(cmp.Or(w.Cost, 1))
	r.up = !w.Down
	r.KeepsKVFor = w.KeepsKVFor
	r.EndedKV = d.Boards.Kept(d.Model, w.ID) // if the engine was restarted, the boards have cleared this account already
	at, present := slices.BinarySearchFunc(g.Ranks, w.ID, func(o *virtual.Rank, id int32) int { return cmp.Compare(o.ID, id) })
	switch {
	case r.up && !present:
		g.Ranks = slices.Insert(g.Ranks, at, r.Rank)
	case !r.up && present:
		d.removeRank(g, at)
	}
}

// leave takes a rank out of its group. Its requests fail, as they do when an engine dies, and come back for another rank.
func (d *decodeEngines) removeRank(g *virtual.Group, at int) {
	r := g.Ranks[at]
	g.Ranks = slices.Delete(g.Ranks, at, at+1)
	for len(r.Requests) > 0 {
		l := r.Requests[len(r.Requests)-1]
		r.Remove(len(r.Requests) - 1)
		d.virtualEngines.Release(g, &l, board.Failed)
		d.requeue(l.Job, l.Prompt, l.Gen, l.Left)
	}
}

// keep removes the ranks that are no longer in their group. groups has the group name of each rank of the fleet, by ID.
func (d *decodeEngines) removeMissingRanks(groups map[int32]string) {
	for _, g := range d.virtualEngines.Groups {
		for i := len(g.Ranks) - 1; i >= 0; i-- {
			if group, present := groups[g.Ranks[i].ID]; !present || group != g.Key.Name {
				d.removeRank(g, i)
			}
		}
	}
}

// resume gives the simulated engines the requests that were on ranks when the replay begins. It returns the requests that the caller must
// put into the pool instead: those of ranks that are down, and, if the replay tries another policy than the present one, those that wait in
// the queues of engines, because the other policy might not have sent them there.
func (d *decodeEngines) placeRunning(otherPolicy bool) (queued []board.Charge) {
	placed := map[int32]int{} // by worker: requests that have a slot of the engine
	for _, c := range d.Boards.Charges(d.Model) {
		if c.Started {
			placed[c.Worker]++
		}
	}
	for _, c := range d.Boards.Charges(d.Model) {
		r := d.ranks[c.Worker]
		inEngineQueue := false
		if !c.Started {
			placed[c.Worker]++
			inEngineQueue = placed[c.Worker] > r.Slots
		}
		if !r.up || inEngineQueue && otherPolicy {
			queued = append(queued, c)
			continue
		}
		first := d.firstTokenStep(&c, r.Group)
		l := virtual.Request{Slot: c.Slot, Prompt: c.Prompt, Gen: c.Generated, Reserved: true}
		switch {
		case c.Started: // the boards need FirstStep when the request ends, to learn how many steps after its binding the first token came
			l.FirstStep = first
		case inEngineQueue:
			l.Reserved, l.DecodesFrom, l.StepsToFirstToken = false, virtual.KVNotReady, int64(d.history.stepsToFirstToken)
		default: // the first step of the simulation, step 0, has the number after the present one
			l.DecodesFrom = max(0, int64(int32(first-r.Group.Number))-1)
		}
		l.Job, l.Left = d.addRunning(&c)
		d.virtualEngines.Put(r.Rank, l)
	}
	for _, r := range d.ranks {
		r.assignSlots()
	}
	return queued
}

// activate gives the slots of a rank to its requests, in the order in which they begin to decode. Those in the engine's queue get none.
func (r *rank) assignSlots() {
	slices.SortStableFunc(r.Requests, func(a, b virtual.Request) int { return cmp.Compare(a.DecodesFrom, b.DecodesFrom) })
	r.Active = min(r.Slots, len(r.Requests))
	if firstInQueue := slices.IndexFunc(r.Requests, func(l virtual.Request) bool { return l.DecodesFrom == virtual.KVNotReady }); firstInQueue >= 0 {
		r.Active = min(r.Active, firstInQueue)
	}
}

// firstStep returns the number of the step in which a request on a rank got its first token, or will get it.
func (d *decodeEngines) firstTokenStep(c *board.Charge, g *virtual.Group) uint32 {
	first := c.Step + 1 + uint32(d.stepsToFirstToken(c.ID))
	if c.Step == 0 { // no step was reported when the request was bound, so it counts as bound just before the present step
		first = g.Number + uint32(d.stepsToFirstToken(c.ID))
	}
	if c.Started && int32(first-g.Number) > 0 { // it has its first token already, so its lag was overestimated
		return g.Number
	}
	return max(1, first)
}

// place puts a request on the simulated engine of the rank that it was bound to. index is its index in jobs. place returns false if the
// replay has no such rank.
func (d *decodeEngines) placeNew(index int32, b *board.Binding) bool {
	r := d.ranks[b.Worker]
	if r == nil {
		return false
	}
	j := &d.jobs[index]
	lag := j.stepsToFirstToken
	if r.Group.StepInProgress() { // the step in progress is one of the steps that the request waits
		lag--
	}
	d.virtualEngines.Place(r.Rank, virtual.Request{Job: index, Slot: b.Slot, Prompt: j.prompt, Left: j.remaining, StepsToFirstToken: int64(max(0, lag))})
	return true
}

// drop ends a request on an engine, by its ID, as if its client had left. It returns false if no engine has the request.
func (d *decodeEngines) dropRequest(id uint64) bool {
	for _, g := range d.virtualEngines.Groups {
		for _, r := range g.Ranks {
			for i := range r.Requests {
				if l := r.Requests[i]; d.jobs[l.Job].id == id {
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

// turn does all that happens at the present time: steps end, boards decide, and steps begin. If a step preempted a request, the boards
// decide once more.
func (d *decodeEngines) runTurn() {
	d.virtualEngines.Turn(d.deliver)
	if d.virtualEngines.Begin() {
		d.Tick(d.Now)
	}
}

// due returns the time of the next turn, in ms.
func (d *decodeEngines) nextAt() float64 {
	next, _ := d.virtualEngines.Due()
	return next
}

// each calls yield for each request on an engine, with its index in jobs and the number of tokens that it still gets.
func (d *decodeEngines) eachRequest(yield func(job, left int32)) {
	for _, r := range d.ranks {
		for i := range r.Requests {
			yield(r.Requests[i].Job, r.Requests[i].Left)
		}
	}
}

// stepLength returns how long the step that the group begins now takes, in ms, and counts the step. The rank with the largest load
// determines the length, which varies a little by chance.
func (d *decodeEngines) stepLength(g *virtual.Group) float64 {
	largestLoad := 0.0
	for _, r := range g.Ranks {
		largestLoad = max(largestLoad, r.StepLoad(r.Load(g.Step)))
	}
	length := d.jittered(g.Law.C0Ms + g.Law.C1Ms*largestLoad)
	d.countStep(length)
	return length
}
