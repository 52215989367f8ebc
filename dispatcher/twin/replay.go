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

// maxTurnsAtInstant bounds the turns in a row in which no simulated time passes. A replay with more such turns is stuck, and fails.
const maxTurnsAtInstant = 10_000

// maxJitter is the largest share by which the length of a simulated step is changed at random. The changes move requests into other steps
// and thereby, after a while, change which requests are on a rank together. The results of replays that differ only in these changes then
// differ as much as those of two real runs. Values of 0.001 and of 0.03 have about the same effect.
const maxJitter = 0.01

// NewReplay prepares a replay of a model under the policy spec (empty: the policy in force). Replays with the same seed have the same
// random numbers. A replay under another policy with seed 0 also saves checkpoints. The error says why the model cannot be replayed.
func NewReplay(w *Window, model, spec string, seed uint64) (*Replay, error) {
	if err := w.checkReplayable(model); err != nil {
		return nil, err
	}
	// b is the copy of the boards with which the replay begins. It comes from the checkpoint startedFrom; nil: from the real boards.
	// placedByOther says that another policy than the replayed one has placed the requests of b on ranks.
	b, startedFrom, placedByOther, err := w.startBoards(model, spec)
	if err != nil {
		return nil, err
	}
	groups, _ := b.Groups(model) // the groups that are simulated
	b.Only(model)
	r := &Replay{
		Driver: virtual.NewDriver(b, w.From(), model), history: w.history(model), waiting: map[uint64]int32{},
		measuredFrom: ms(w.Measured().From.Sub(w.From())), endsAt: ms(w.To().Sub(w.From())), rng: rand.New(rand.NewPCG(seed, 0)),
		spec: spec, startedFrom: startedFrom,
	}
	if firstOfPolicy := seed == 0; firstOfPolicy && spec != "" { // one replay of each other policy is enough to save checkpoints
		r.checkpointTimes = w.checkpointTimes()
	}
	from, to := w.newPart() // steps in this part are in no earlier window, and are counted for the first time
	r.uncountedBetween = [2]float64{ms(from.Sub(w.From())), ms(to.Sub(w.From()))}
	r.collectArrivals(w, model)
	r.OnBind, r.OnRefuse, r.OnOtherEffect = r.place, r.dropRefused, r.failOnPanic // these carry out what the boards decide
	r.engines = newDecodeEngines(r)
	if err := r.buildEngines(groups, w); err != nil {
		return nil, err
	}
	r.resumeRequests(placedByOther) // if another policy placed them, requests in the queues of engines wait for a rank again
	return r, nil
}

// checkReplayable returns an error with the reason if the model cannot be replayed: a rank does not step together with others, or prefills.
func (w *Window) checkReplayable(model string) error {
	switch groups, dense := w.Segments[0].Boards.Groups(model); {
	case dense || len(groups) == 0: // dense: there are also ranks in no barrier group
		return fmt.Errorf("%s has ranks that do not step together", model)
	case isMixed(groups):
		return fmt.Errorf("%s has ranks that prefill and decode, whose steps are not foretold", model)
	}
	return nil
}

// startBoards returns a copy of the boards with which a replay begins: those of a checkpoint of the same policy (from) or, if from is nil,
// the real boards. newPolicy says whether the boards had another policy when they were copied.
func (w *Window) startBoards(model, spec string) (b *board.Boards, from *Checkpoint, newPolicy bool, err error) {
	if from = w.checkpointFor(model, spec); from != nil { // a checkpoint's boards have the policy already
		return from.boards.Clone(), from, false, nil
	}
	b = w.Segments[0].Boards.Clone()
	policyBefore := b.Policy()
	if spec != "" {
		if err := rejectionError(b.Apply(board.SetPolicy{Spec: spec}, w.From())); err != nil {
			return nil, nil, false, err
		}
	}
	return b, nil, b.Policy() != policyBefore, nil
}

// rejectionError returns the error with which the boards rejected an event that changes settings; nil: they accepted it.
func rejectionError(effects []board.Effect) error {
	for i := range effects {
		if effects[i].Kind == board.EffectRejected {
			return effects[i].Err
		}
	}
	return nil
}

// collectArrivals collects the arrivals and the changes of ranks from all segments, with times since the window began. It leaves out
// resumptions: arrivals of requests that had come before and lost their rank. In a replay, such a request comes back by itself.
func (r *Replay) collectArrivals(w *Window, model string) {
	r.arrivals = arrivalQueue{segments: w.Segments, from: w.From(), model: model, skipped: r.history.resumptions}
	r.arrivals.skipToNext() // to the first one that is not skipped
	for _, s := range w.Segments {
		offset := s.From.Sub(w.From())
		for _, c := range s.rankChanges {
			r.rankChanges = append(r.rankChanges, rankChange{c.at + offset, c.workers})
		}
	}
}

// buildEngines makes the simulated engines of the groups with which the replay begins; after a checkpoint, these are the groups of its
// boards. Their steps follow the line (step length over load) that was learned by the end of the window, shifted so that it goes through
// the mean of the window's real steps. The boards get the part of this step model that policies may see: if the real policy may not use the
// line yet (InForce), the replayed ones may not either. The error names a group without a line.
func (r *Replay) buildEngines(groups []board.GroupView, w *Window) error {
	realAtStart, _ := w.Segments[0].Boards.Groups(r.Model)
	realAtEnd, _ := w.End.Groups(r.Model)
	for i := range groups {
		v := &groups[i]
		atStart, atEnd := viewOf(realAtStart, v.Key), viewOf(realAtEnd, v.Key)
		if atStart == nil || atEnd == nil || !atEnd.Line.Known() {
			return fmt.Errorf("the time of a step of %s is not known yet", v.Key.Name)
		}
		// Learned has sums over the steps that were learned from: those at the end, less those at the start, are the window's.
		shiftedLine := atEnd.Line.ThroughStepsSince(atStart.Line.Learned)
		if err := r.engines.addGroup(v, shiftedLine); err != nil {
			return err
		}
		visible := visibleModel(atEnd.Line.InForce, shiftedLine)
		// Weights are the KV tokens that policies count for each request, in addition to its own.
		r.Boards.Apply(board.SetStepModel{Group: v.Key, StepModel: visible, Weights: atEnd.Weights}, r.Began)
		for k := range v.Workers {
			r.engines.updateRank(&v.Workers[k])
		}
	}
	return nil
}

// visibleModel returns the part of a step model that policies may see. If the real policy uses the learned line (inForce), that is all of
// it; otherwise only what prompts cost.
func visibleModel(inForce bool, m board.StepModel) board.StepModel {
	if inForce {
		return m
	}
	return board.StepModel{OwnPromptMs: m.OwnPromptMs, SharedPromptMs: m.SharedPromptMs, PrefillMs: m.PrefillMs}
}

// resumeRequests takes over the requests that the boards have when the replay begins. Those in the pool go on waiting. Those on ranks go to
// the simulated engines, and keep their slots. Requests on ranks that are down lose their slots and wait in the pool. So do requests that
// wait in the queues of engines, if the policy of the boards has just changed (newPolicy): the new one might not have sent them there.
func (r *Replay) resumeRequests(newPolicy bool) {
	unplaced := r.engines.placeRunning(newPolicy)
	for _, e := range r.Boards.Waiting(r.Model) {
		// The request is in the pool already, with the entry e. Age counts the tokens that earlier ranks generated. An early
		// request gets its rank before its prefill. No client waits for a request with discard: it only makes its prefill engine
		// free the KV.
		j := r.addWaiting(e.ID, arrival{
			id: e.ID, key: e.Key, prompt: int32(e.Prompt), age: int32(e.Age), early: e.Early, discard: e.Discard,
		})
		j.entry = e
	}
	for _, c := range unplaced { // these have slots: they give them up, and enqueue gives the requests to the boards anew
		// Cancelled, because the answer was cut off: its tokens so far are not the length of a whole answer.
		r.Boards.Apply(&board.Release{Model: r.Model, Slot: c.Slot, Outcome: board.Outcome{Kind: board.Cancelled}}, r.Began)
		since := c.Since.Sub(r.Began)
		// The tokens that the request has got are part of the prompt that its next rank needs.
		r.enqueue(r.addWaiting(c.ID, arrival{
			id: c.ID, key: c.Key, prompt: c.Prompt + c.Generated, age: c.Age + c.Generated, received: since, entered: since,
		}))
	}
}

// isMixed says whether any rank of the groups prefills and decodes.
func isMixed(groups []board.GroupView) bool {
	return slices.ContainsFunc(groups, func(v board.GroupView) bool {
		return slices.ContainsFunc(v.Workers, func(w board.Worker) bool { return w.Mixed })
	})
}

// addRunning adds to r.jobs a request that was on a rank when the replay began. It returns its index in r.jobs, and how many tokens it will
// still generate.
func (r *Replay) addRunning(c *board.Charge) (index, remaining int32) {
	remaining = r.remainingTokens(c.ID, c.Age+c.Generated)
	index = r.addJob(job{id: c.ID, prompt: c.Prompt, age: c.Age, remaining: remaining, stepsToFirstToken: r.history.stepsToFirstToken})
	r.scheduleWithdrawal(c.ID)
	return index, remaining
}

// stepsToFirstToken returns how many steps a request waits for its first token: as many as in reality or, if that is not known, the usual
// number of the window.
func (r *Replay) stepsToFirstToken(id uint64) int32 {
	if a := r.history.answerOf(id); a != nil && a.stepsToFirstToken >= 0 {
		return a.stepsToFirstToken
	}
	return r.history.stepsToFirstToken
}

// addJob adds a request to r.jobs, and returns its index there.
func (r *Replay) addJob(j job) int32 {
	if n := len(r.freeIndices); n > 0 {
		index := r.freeIndices[n-1]
		r.freeIndices, r.jobs[index] = r.freeIndices[:n-1], j
		return index
	}
	r.jobs = append(r.jobs, j)
	return int32(len(r.jobs) - 1)
}

// dropJob removes a request that has left the replay from r.jobs. Its index is used again.
func (r *Replay) dropJob(index int32) {
	r.jobs[index] = job{}
	r.freeIndices = append(r.freeIndices, index)
}

// addWaiting adds a request that waits for a rank, with the length of its answer, as far as that is known.
func (r *Replay) addWaiting(id uint64, a arrival) *job {
	r.scheduleWithdrawal(id)
	index := r.addJob(job{
		id: id, age: a.age, prompt: a.prompt, remaining: r.remainingTokens(id, a.age), stepsToFirstToken: r.stepsToFirstToken(id), arrival: a,
	})
	r.waiting[id] = index
	return &r.jobs[index]
}

// scheduleWithdrawal looks whether the request's client really left before the request had a slot. If so, it makes the client leave at the
// same time in the replay. Otherwise it does nothing.
func (r *Replay) scheduleWithdrawal(id uint64) {
	if a := r.history.answerOf(id); a != nil && a.tokensLastSeen < 0 { // below 0: the request left before it had a slot
		i, _ := slices.BinarySearchFunc(r.withdrawals, ms(a.leftAt), func(w withdrawal, at float64) int { return cmp.Compare(w.at, at) })
		r.withdrawals = slices.Insert(r.withdrawals, i, withdrawal{ms(a.leftAt), id})
	}
}

// Run continues the replay for at most so many turns; a turn is all that happens at one simulated time. over says whether the replay has
// reached the end of the window.
func (r *Replay) Run(turns int) (over bool, err error) {
	for range turns {
		if r.reachedEnd || r.failed != nil {
			break
		}
		r.engines.runTurn()
		next := r.nextTurn()
		// Save a checkpoint only after all events of its time: they belong to the segment that ends at this time.
		for len(r.checkpointTimes) > 0 && r.checkpointTimes[0] < next {
			r.saveCheckpoint(r.checkpointTimes[0])
			r.checkpointTimes = r.checkpointTimes[1:]
		}
		if next >= r.endsAt {
			r.reachedEnd = true
			break
		}
		r.turnsAtInstant++
		if next > r.Now { // simulated time goes on
			r.turnsAtInstant = 0
		}
		if r.turnsAtInstant > maxTurnsAtInstant { // without this bound, a bug in a policy or an engine could make the replay endless
			r.failed = fmt.Errorf("the replay does not go on after %.0f ms", r.Now)
		}
		r.Now = max(r.Now, next)
	}
	return r.reachedEnd, r.failed
}

// nextTurn returns the time of the next turn, in ms: a step ends, the boards have something to decide, a request arrives, a client leaves,
// or the ranks change. The departure of a client could also wait for the next of the other events. But a checkpoint, the state from which
// the replay of a later window begins, may be saved before that event, with a request whose client has left. The later window has no record
// of the departure, so the request would never leave.
func (r *Replay) nextTurn() float64 {
	next := r.engines.nextAt() // when a step ends, or the boards have something to decide
	if at, more := r.arrivals.nextAt(); more {
		next = min(next, at)
	}
	if len(r.withdrawals) > 0 {
		next = min(next, r.withdrawals[0].at)
	}
	if len(r.rankChanges) > 0 {
		next = min(next, ms(r.rankChanges[0].at))
	}
	return next
}

// deliver gives the boards all changes of ranks, arrivals and departures of clients that are due by now.
func (r *Replay) deliver() {
	for len(r.rankChanges) > 0 && ms(r.rankChanges[0].at) <= r.Now {
		r.replaceRanks(r.rankChanges[0].workers)
		r.rankChanges = r.rankChanges[1:]
	}
	for at, more := r.arrivals.nextAt(); more && at <= r.Now; at, more = r.arrivals.nextAt() {
		a := r.arrivals.next()
		r.enqueue(r.addWaiting(a.id, a))
	}
	for len(r.withdrawals) > 0 && r.withdrawals[0].at <= r.Now {
		id := r.withdrawals[0].id
		r.withdrawals = r.withdrawals[1:]
		r.withdraw(id)
	}
}

// enqueue gives a request to the boards, which put it into the pool or bind it to a rank.
func (r *Replay) enqueue(j *job) {
	instant := func(d time.Duration) time.Time { return r.Began.Add(d) }
	e := &board.Entry{
		ID: j.id, Model: r.Model, Name: j.arrival.name, Prompt: int(j.prompt), Age: int(j.age), Key: j.arrival.key,
		Arrival: instant(j.arrival.received), Entered: instant(j.arrival.entered), Early: j.arrival.early, Discard: j.arrival.discard,
	}
	if j.arrival.deadline != 0 {
		e.Deadline = instant(j.arrival.deadline)
	}
	j.entry = e
	r.Apply(&board.Enqueue{Entry: e, Hits: j.arrival.hits}, r.Now)
}

// replaceRanks replaces the ranks of the boards and of the engines by those of this model among ws. Requests that lose their rank wait for
// another. A replay simulates only ranks that step together with others (Barrier). It does not begin if the model has any other rank, but
// one may be added later. The boards then have this rank, and no engine is simulated for it.
func (r *Replay) replaceRanks(ws []board.Worker) {
	ofModel, groups := make([]board.Worker, 0, len(ws)), map[int32]string{}
	for _, w := range ws {
		if w.Model == r.Model {
			ofModel = append(ofModel, w)
			groups[w.ID] = w.Group
		}
	}
	r.Count(r.Now) // bring the boards' token counts up to date before ranks change
	r.Apply(board.SetWorkers{Workers: ofModel}, r.Now)
	r.engines.removeMissingRanks(groups)
	for i := range ofModel {
		if ofModel[i].Barrier {
			r.engines.updateRank(&ofModel[i])
		}
	}
}

// withdraw ends a request whose client leaves. The client really left while the request waited, but in the replay the request may already
// run.
func (r *Replay) withdraw(id uint64) {
	if r.engines.dropRequest(id) {
		return
	}
	if index, waits := r.waiting[id]; waits {
		r.Apply(board.Withdraw{Entry: r.jobs[index].entry}, r.Now)
	}
}

// place gives a request to the simulated engine of the rank to which the boards bound it.
func (r *Replay) place(e *board.Effect) {
	index, ok := r.waiting[e.Entry.ID]
	if !ok {
		r.failed = fmt.Errorf("the policy bound request %d, which the replay does not know", e.Entry.ID)
		return
	}
	delete(r.waiting, e.Entry.ID)
	// Only a waiting job has an entry, so drop it. The engine still needs the length of the prompt.
	r.jobs[index].entry, r.jobs[index].prompt = nil, int32(e.Entry.Prompt)
	if placed := r.engines.placeNew(index, &e.Bound); !placed { // the rank's group was added after the window began, so the replay lacks it
		r.dropJob(index)
		r.Apply(&board.Release{Model: r.Model, Slot: e.Bound.Slot, Outcome: board.Outcome{Kind: board.Failed}}, r.Now)
	}
}

// requeue makes a request that has lost its rank wait for another rank at once. The tokens that it has generated become part of its prompt.
// In reality, a prefill engine first computes this prompt; how long that takes is not known, and is left out.
func (r *Replay) requeue(index, prompt, generated, remaining int32) {
	j := &r.jobs[index]
	j.prompt, j.age, j.remaining = prompt+generated, j.age+generated, remaining
	j.arrival.entered = time.Duration(r.Now * float64(time.Millisecond))
	j.arrival.deadline, j.arrival.hits = 0, nil // its hand-off was used, and which ranks hold the longer prompt is not known
	r.waiting[j.id] = index
	r.enqueue(j)
}

// jittered returns ms, the length of a step, changed at random by at most the share maxJitter, up or down.
func (r *Replay) jittered(ms float64) float64 { return ms * (1 + maxJitter*(2*r.rng.Float64()-1)) }

// countStep counts a step that begins now and takes so many ms. It counts in measured if it begins after the first fifth of the window, and
// in newSteps if no earlier verdict has counted it.
func (r *Replay) countStep(ms float64) {
	if r.Now >= r.measuredFrom {
		r.measured.add(ms)
	}
	if r.uncountedBetween[0] <= r.Now && r.Now < r.uncountedBetween[1] {
		r.newSteps.add(ms)
	}
}

// dropRefused removes a request that the boards have refused from the replay.
func (r *Replay) dropRefused(e *board.Effect) {
	if index, ok := r.waiting[e.Entry.ID]; ok {
		delete(r.waiting, e.Entry.ID)
		r.dropJob(index)
	}
}

// failOnPanic makes the replay fail if the effect says that the policy panicked. It ignores all other effects.
func (r *Replay) failOnPanic(e *board.Effect) {
	if e.Kind == board.EffectFallback && e.Label == board.FallbackPanic {
		r.failed = fmt.Errorf("the policy failed")
	}
}

// StepMs returns the mean length of the measured steps, in ms; 0: no step was measured.
func (r *Replay) StepMs() float64 { return r.measured.mean() }
