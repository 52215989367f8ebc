package board

import (
	"cmp"
	"maps"
	"slices"

	"evenkeel/dispatcher/policy"
)

// setWorkers replaces the board's ranks by the given workers. A rank whose ID is known keeps its requests. A rank that is not among the
// workers gets no more requests, and is dropped once its last slot is released.
func (b *board) setWorkers(ws []Worker) {
	for _, r := range b.ranks {
		r.present = false // until updateRank finds it among the workers
	}
	if len(ws) > 0 { // an empty list does not show whether the ranks are mixed
		b.mixed = slices.ContainsFunc(ws, func(w Worker) bool { return w.Mixed })
	}
	for _, w := range ws {
		r := b.ranks[w.ID]
		switch {
		case r == nil:
			r = &rank{}
			b.ranks[w.ID] = r
		case r.present: // an earlier worker of the list has the same ID
			b.emit(Effect{Kind: EffectDuplicate, Worker: w.ID, Names: [2]string{r.Name, w.Name}})
			continue
		}
		b.updateRank(r, w)
		r.reserve()
	}
	for _, r := range b.ranks {
		b.dropIfGone(r)
	}
	b.regroupEngines()
	b.regroup()
	if b.refusingRanks > 0 { // ranks that refused requests may have left the fleet or restarted
		b.updateFirstEventWatch()
	}
	b.updatePartialNames()
	b.countRestricted()
	b.recheckWaiting()
}

// updateRank makes rank r the given worker, which has the same ID. The rank keeps its requests. If the worker has more slots or KV room
// than before, requests in the engine's queue may begin.
func (b *board) updateRank(r *rank, w Worker) {
	w.Slots, w.Up = max(0, w.Slots), w.Up && !w.Down
	if r.hasRestarted(&w) { // the engine has lost its KV, and what it refused before says nothing about it now
		b.forgetOrphans(r, everyOrphan)
		r.refusals.Succeed()
		r.spared = false
		b.countFreedKV(r.keptKV.Clear())
	}
	w.Process = cmp.Or(w.Process, r.Process) // the last known process stays, to be compared with the next one
	r.Worker, r.present = w, true
	if w.KeepsKVFor > 0 {
		r.keptKV.Reserve()
	} else { // its engine keeps no KV of answers any more
		b.countFreedKV(r.keptKV.Clear())
	}
	b.refresh(r)
	b.promoteQueued(r)
}

// reserve allocates the lists of a rank now, so that the tick allocates nothing.
func (r *rank) reserve() {
	most := r.Slots + r.MaxEngineQueue // requests that the rank may have at one time
	if missing := most - len(r.slots); missing > 0 {
		r.slots = slices.Grow(r.slots, missing)
		r.running = slices.Grow(r.running, missing) // it is as long as slots
		if r.Mixed {
			r.promptsToCompute = slices.Grow(r.promptsToCompute, r.Slots) // all slots may wait for their prompts
		}
	}
	if missing := 2*most - len(r.recentlyEnded); missing > 0 { // the requests of the current step and of the step before
		r.recentlyEnded = slices.Grow(r.recentlyEnded, missing)
	}
}

// newGroup makes a group without ranks, and emits EffectGroup. For a barrier group, it also begins to learn the output lengths that the
// policies of the twin read.
func (b *board) newGroup(name string, barrier bool) *group {
	g := &group{name: name, barrier: barrier, chosenPolicy: b.policyFor(barrier), fallbackPolicy: b.buildPolicy(FallbackSpec)}
	if barrier {
		g.steps.Configure(b.cfg.StepModel)
		for _, needs := range b.twinNeeds {
			b.predictorFor(needs) // only for its effect
		}
	}
	b.emit(Effect{Kind: EffectGroup, Group: b.key(g), Policy: g.chosenPolicy.name, Label: b.label(g)})
	return g
}

// regroup divides the present ranks into groups, and counts the ranks that are up or awaited. A group that existed before keeps the state
// of its policy.
func (b *board) regroup() {
	groups := make(map[GroupKey]*group, len(b.groups))
	groupsInOrder := slices.Clone(b.groups)
	for _, g := range b.groups {
		g.allRanks, g.steppingRanks = g.allRanks[:0], g.steppingRanks[:0]
		groups[b.key(g)] = g
	}
	b.upOrAwaited = 0
	for _, id := range slices.Sorted(maps.Keys(b.ranks)) {
		r := b.ranks[id]
		if !r.present {
			continue
		}
		key := GroupKey{Model: b.model, Barrier: r.Barrier}
		if r.Barrier {
			key.Name = r.Group
		}
		g := groups[key]
		if g == nil {
			g = b.newGroup(key.Name, key.Barrier)
			groups[key], groupsInOrder = g, append(groupsInOrder, g)
		}
		r.group = g
		g.allRanks = append(g.allRanks, r)
		if r.Up || r.Awaited {
			b.upOrAwaited++
		}
	}
	b.keepGroups(groupsInOrder)
}

// keepGroups replaces the board's groups by the given groups that have a rank, and emits EffectGroupGone for the others. It finds the ranks
// of each group that are not down (steppingRanks).
func (b *board) keepGroups(groups []*group) {
	b.groups = b.groups[:0]
	for _, g := range groups {
		if len(g.allRanks) == 0 {
			g.heldEntries = 0 // else a step that is reported late would make the board decide about the entries that it held back
			b.emit(Effect{Kind: EffectGroupGone, Group: b.key(g)})
			continue
		}
		slices.SortFunc(g.allRanks, func(x, y *rank) int { return cmp.Compare(x.ID, y.ID) })
		for _, r := range g.allRanks {
			if !r.Down {
				g.steppingRanks = append(g.steppingRanks, r)
			}
		}
		b.groups = append(b.groups, g)
	}
	slices.SortFunc(b.groups, func(x, y *group) int { return cmp.Compare(x.allRanks[0].ID, y.allRanks[0].ID) })
}

// setPolicy builds the policy of each barrier group anew from the spec in force, and makes the board decide anew.
func (b *board) setPolicy() {
	for _, g := range b.groups {
		if g.barrier {
			g.chosenPolicy, g.fallbackRounds, g.searchBudget = b.policyFor(g.barrier), 0, searchBudget{}
		}
	}
	b.recheckWaiting()
}

// recheckWaiting finds anew the largest prompt that any rank could take, refuses the entries that no rank can take any more, and makes the
// next Tick decide.
func (b *board) recheckWaiting() {
	b.largestPrompt = 0
	for _, g := range b.groups {
		b.largestPrompt = max(b.largestPrompt, largestPrompt(g.allRanks)) // also of the ranks that are down, which may come back
	}
	for _, p := range b.partialNames {
		p.largestPrompt = largestPrompt(p.ranks)
	}
	for _, e := range slices.Clone(b.pool.Entries()) {
		if err := b.reasonToRefuse(e); err != nil {
			b.removeAndRefuse(e, err)
		}
	}
	b.decideNow = true
}

// largestPrompt returns the largest prompt that any of the ranks could ever take under the policies of their groups, in KV tokens.
func largestPrompt(ranks []*rank) (most int64) {
	for _, r := range ranks {
		most = max(most, r.largestPrompt(policy.Watermark(r.group.chosenPolicy.Policy)))
	}
	return most
}
