package twin

import (
	"cmp"
	"slices"

	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/virtual"
)

// decodeEngines simulates the engines of ranks that only decode, for a replay.
type decodeEngines struct {
	*Replay
	ranks          map[int32]*rank
	virtualEngines virtual.Engines
}

// rank is a simulated rank. A rank that is down is kept here, but is in no group of virtualEngines, so it takes no part in steps.
type rank struct {
	*virtual.Rank
	up bool
}

// newDecodeEngines returns engines for a replay. They have no groups yet; addGroup adds them.
func newDecodeEngines(r *Replay) *decodeEngines {
	d := &decodeEngines{Replay: r, ranks: map[int32]*rank{}, virtualEngines: virtual.Engines{Driver: r.Driver}}
	e := &d.virtualEngines
	e.Length = d.stepLength
	e.Finished = func(_ *virtual.Group, q virtual.Request) { r.dropJob(q.Job) }
	e.Preempted = func(_ *virtual.Rank, q virtual.Request) { r.requeue(q.Job, q.Prompt, q.Gen, q.Left) }
	// A replay counts steps in stepLength, and needs to know nothing of these three events.
	e.Token, e.Seated, e.Stepped = func(*virtual.Request) {}, func(*virtual.Request) {}, func(*virtual.Group, int) {}
	return d
}

// addGroup adds a group whose step times follow the given step model. Its first step has not begun yet. The error is always nil.
func (d *decodeEngines) addGroup(v *board.GroupView, model board.StepModel) error {
	g := virtual.NewGroup(v.Key, model)
	g.Number = max(1, v.Last) // goes on with the step numbers that the engine has reported
	d.virtualEngines.Groups = append(d.virtualEngines.Groups, g)
	return nil
}

// updateRank adds a rank to its group, or updates a rank that the replay has already. A rank that is down is removed from its group. The
// call does nothing if the replay lacks the group, because the group was added after the window began.
func (d *decodeEngines) updateRank(w *board.Worker) {
	i := slices.IndexFunc(d.virtualEngines.Groups, func(g *virtual.Group) bool { return g.Key.Name == w.Group })
	if i < 0 { // the replay lacks the group
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
	r.EndedKV = d.Boards.Kept(d.Model, w.ID) // empty if the engine was restarted, because the KV of ended answers is lost then
	at, present := slices.BinarySearchFunc(g.Ranks, w.ID, func(o *virtual.Rank, id int32) int { return cmp.Compare(o.ID, id) })
	switch {
	case r.up && !present:
		g.Ranks = slices.Insert(g.Ranks, at, r.Rank)
	case !r.up && present:
		d.removeRank(g, at)
	}
}

// removeRank takes the i-th rank out of its group. As when a real engine dies, the requests on the rank fail and wait for another rank.
func (d *decodeEngines) removeRank(g *virtual.Group, i int) {
	r := g.Ranks[i]
	g.Ranks = slices.Delete(g.Ranks, i, i+1)
	for len(r.Requests) > 0 {
		q := r.Requests[len(r.Requests)-1]
		r.Remove(len(r.Requests) - 1)
		d.virtualEngines.Release(g, &q, board.Failed)
		d.requeue(q.Job, q.Prompt, q.Gen, q.Left)
	}
}

// removeMissingRanks removes the ranks that are no longer in their group. groups maps the ID of each rank that still exists to its group.
func (d *decodeEngines) removeMissingRanks(groups map[int32]string) {
	for _, g := range d.virtualEngines.Groups {
		for i := len(g.Ranks) - 1; i >= 0; i-- {
			if group, exists := groups[g.Ranks[i].ID]; !exists || group != g.Key.Name { // the rank is gone, or now in another group
				d.removeRank(g, i)
			}
		}
	}
}

// placeRunning gives the simulated engines the requests that were on ranks when the replay begins. It returns the requests that the caller
// must put into the pool instead (unplaced). These are the requests on ranks that are down. If the replay begins with a new policy
// (newPolicy), requests in the queues of engines are unplaced, too, because this policy might not have sent them there.
func (d *decodeEngines) placeRunning(newPolicy bool) (unplaced []board.Charge) {
	sent := map[int32]int{} // by worker: requests sent to its engine; those beyond its number of slots wait in the engine's queue
	for _, c := range d.Boards.Charges(d.Model) {
		if c.Started { // started requests hold slots, so they are counted before any request that may wait for a slot
			sent[c.Worker]++
		}
	}
	for _, c := range d.Boards.Charges(d.Model) {
		r := d.ranks[c.Worker]
		inEngineQueue := false
		if !c.Started {
			sent[c.Worker]++
			inEngineQueue = sent[c.Worker] > r.Slots
		}
		if !r.up || inEngineQueue && newPolicy {
			unplaced = append(unplaced, c)
			continue
		}
		q := d.requestOf(&c, r.Group, inEngineQueue)
		q.Job, q.Left = d.addRunning(&c)
		d.virtualEngines.Put(r.Rank, q)
	}
	for _, r := range d.ranks {
		r.assignSlots()
	}
	return unplaced
}

// requestOf returns the state of a request that was on a rank of group g before the replay began: it runs, its KV is being pulled, or it
// waits in its engine's queue, because all slots of the engine itself are taken (inEngineQueue). c.Slot is the index of its record on the
// board. In the result, Reserved says that its KV is on the rank or on the way. DecodesFrom is the simulated step of its first token; it
// stays 0 for a request that runs, and KVNotReady means that this step is not known yet.
func (d *decodeEngines) requestOf(c *board.Charge, g *virtual.Group, inEngineQueue bool) virtual.Request {
	first := d.firstTokenStep(c, g)
	q := virtual.Request{Slot: c.Slot, Prompt: c.Prompt, Gen: c.Generated, Reserved: true}
	switch {
	case c.Started: // when the request ends, the boards learn from FirstStep how many steps after the binding its first token came
		q.FirstStep = first
	case inEngineQueue: // the engine has no free slot for the request, and will pull its KV only when a slot is free
		q.Reserved, q.DecodesFrom, q.StepsToFirstToken = false, virtual.KVNotReady, int64(d.history.stepsToFirstToken)
	default: // the request's KV is being pulled
		// Simulated step 0 has the reported number g.Number+1, and stands for all earlier steps, too. The difference is an int32,
		// because step numbers may wrap around.
		q.DecodesFrom = max(0, int64(int32(first-g.Number))-1)
	}
	return q
}

// assignSlots gives the slots of a rank to its requests, in the order in which they begin to decode. Requests that wait in the engine's
// queue get no slot.
func (r *rank) assignSlots() {
	slices.SortStableFunc(r.Requests, func(a, b virtual.Request) int { return cmp.Compare(a.DecodesFrom, b.DecodesFrom) })
	r.Active = min(r.Slots, len(r.Requests))
	waitsForKV := func(q virtual.Request) bool { return q.DecodesFrom == virtual.KVNotReady }
	// KVNotReady is the largest step number, so these requests come last.
	if firstInQueue := slices.IndexFunc(r.Requests, waitsForKV); firstInQueue >= 0 {
		r.Active = min(r.Active, firstInQueue)
	}
}

// firstTokenStep returns the number, as the engine counts steps, of the step in which a request on a rank got or will get its first token.
// It is estimated: the first step after the binding, and as many more as the request waits for its first token.
func (d *decodeEngines) firstTokenStep(c *board.Charge, g *virtual.Group) uint32 {
	boundAtStep := c.Step // the last step that was reported when the request was bound
	if boundAtStep == 0 { // no step was reported by then, so assume that the request was bound just before the present step
		boundAtStep = g.Number - 1
	}
	first := boundAtStep + 1 + uint32(d.stepsToFirstToken(c.ID))
	inFuture := int32(first-g.Number) > 0 // as an int32, because step numbers may wrap around
	if c.Started && inFuture {            // the request has its first token already, so it came in the present step at the latest
		return g.Number
	}
	return max(1, first) // 0 would mean that no token has come
}

// placeNew puts a request on the simulated engine of the rank that the boards bound it to. index is the request's index in jobs. It returns
// false if the replay has no such rank.
func (d *decodeEngines) placeNew(index int32, b *board.Binding) bool {
	r := d.ranks[b.Worker]
	if r == nil { // the rank's group was added after the window began
		return false
	}
	j := &d.jobs[index]
	steps := j.stepsToFirstToken
	// The wait of stepsToFirstToken counts the step in progress, but the simulated engine counts only later steps.
	if r.Group.StepInProgress() {
		steps--
	}
	d.virtualEngines.Place(r.Rank, virtual.Request{
		Job: index, Slot: b.Slot, Prompt: j.prompt, Left: j.remaining, StepsToFirstToken: int64(max(0, steps)),
	})
	return true
}

// dropRequest ends a request on an engine, found by its ID, as if its client had left. It returns false if no engine has the request.
func (d *decodeEngines) dropRequest(id uint64) bool {
	for _, g := range d.virtualEngines.Groups {
		for _, r := range g.Ranks {
			for i := range r.Requests {
				if q := r.Requests[i]; d.jobs[q.Job].id == id {
					r.Remove(i)
					d.dropJob(q.Job)
					d.virtualEngines.Release(g, &q, board.Cancelled)
					return true
				}
			}
		}
	}
	return false
}

// runTurn does all that happens at the present time: steps end, the boards bind requests, and new steps begin. If the engine preempted a
// request when a step began, the boards decide once more, to find a rank for it.
func (d *decodeEngines) runTurn() {
	d.virtualEngines.Turn(d.deliver)
	if preempted := d.virtualEngines.Begin(); preempted {
		d.Tick(d.Now)
	}
}

// nextAt returns the time of the next turn, in ms since the replay began: a step ends, or the boards have something to decide.
func (d *decodeEngines) nextAt() float64 {
	next, _ := d.virtualEngines.Due()
	return next
}

// eachRequest calls yield for each request on an engine: with its index in jobs, and with how many tokens it will still generate.
func (d *decodeEngines) eachRequest(yield func(job, remaining int32)) {
	for _, r := range d.ranks {
		for i := range r.Requests {
			yield(r.Requests[i].Job, r.Requests[i].Left)
		}
	}
}

// stepLength returns how long the step that the group begins now takes, in ms, and counts the step. The rank with the largest load
// determines the length, because all ranks wait for it; a small random change is added.
func (d *decodeEngines) stepLength(g *virtual.Group) float64 {
	largestLoad := 0.0
	for _, r := range g.Ranks {
		tokens, running := r.Load(g.Step)
		largestLoad = max(largestLoad, r.StepLoad(tokens, running))
	}
	length := d.jittered(g.Law.C0Ms + g.Law.C1Ms*largestLoad)
	d.countStep(length)
	return length
}
