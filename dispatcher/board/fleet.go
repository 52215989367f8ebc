package board

import (
	"cmp"
	"maps"
	"slices"

	"evenkeel/dispatcher/policy"
)

// setWorkers replaces the ranks. A rank that is not among the workers gets no more requests, and is
// dropped once its last slot is released.
func (b *board) setWorkers(ws []Worker) {
	for _, r := range b.ranks {
		r.present = false // until updateRank
	}
	if len(ws) > 0 { // otherwise the last value stays
		b.ranksPrefill = slices.ContainsFunc(ws, func(w Worker) bool { return w.Mixed })
	}
	for _, w := range ws {
		r := b.ranks[w.ID]
		switch {
		case r == nil:
			r = &rank{}
			b.ranks[w.ID] = r
		case r.present: // an earlier worker has the same ID
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
	// Ranks that refuse requests may have left the fleet or restarted, so they are counted anew.
	if b.refusingRanks > 0 {
		b.updateFirstEventWatch()
	}
	b.updatePartlyListedNames()
	b.countRestricted()
	b.recheckWaiting()
}

// updateRank keeps the requests of the rank. With more slots or KV room, requests in the engine's
// queue may begin.
func (b *board) updateRank(r *rank, w Worker) {
	w.Slots, w.Up = max(0, w.Slots), w.Up && !w.Down
	// The restart has lost all KV, and earlier refusals say nothing about the engine now.
	if r.hasRestarted(&w) {
		b.forgetOrphans(r, everyOrphan)
		b.countFreedKV(r.keptKV.Clear())
		r.refusals.Succeed()
		r.spared = false
	}
	w.Process = cmp.Or(w.Process, r.Process) // the last known number stays
	r.Worker, r.present = w, true
	if w.KeepsKVFor > 0 {
		r.keptKV.Reserve() // now, so that no tick allocates it
	} else {
		b.countFreedKV(r.keptKV.Clear()) // what the engine may have kept until now
	}
	b.refreshLoad(r)
	b.promoteQueued(r)
}

// reserve gives the lists of a rank all memory that they can need, so that no tick allocates.
func (r *rank) reserve() {
	if missing := r.Slots - len(r.slots); missing > 0 {
		r.slots = slices.Grow(r.slots, missing)
		r.running = slices.Grow(r.running, missing)
		if r.Mixed {
			r.promptsToCompute = slices.Grow(r.promptsToCompute, r.Slots)
		}
	}
	// The requests of the current step and of the previous one.
	if missing := 2*r.Slots - len(r.recentlyEnded); missing > 0 {
		r.recentlyEnded = slices.Grow(r.recentlyEnded, missing)
	}
}

func (b *board) newGroup(name string, barrier bool) *group {
	g := &group{name: name, barrier: barrier, chosenPolicy: b.policyFor(barrier), fallbackPolicy: b.buildPolicy(FallbackSpec)}
	if barrier {
		g.steps.Configure(b.cfg.StepModel)
	}
	b.emit(Effect{Kind: EffectGroup, Group: b.key(g), Policy: g.chosenPolicy.name, Label: b.label(g)})
	return g
}

// regroup divides the ranks into groups. A group that existed before keeps its policy with its
// state.
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
		if r.Barrier { // all others are one group, without a name
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

// keepGroups drops groups without ranks, and fills steppingRanks.
func (b *board) keepGroups(groups []*group) {
	b.groups = b.groups[:0]
	for _, g := range groups {
		if len(g.allRanks) == 0 {
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

// setPolicy: the new policy decides at once, even if the fallback was deciding.
func (b *board) setPolicy() {
	for _, g := range b.groups {
		if g.barrier {
			g.chosenPolicy, g.fallbackRounds, g.searchBudget = b.policyFor(g.barrier), 0, searchBudget{}
		}
	}
	b.recheckWaiting()
}

// recheckWaiting refuses the entries that no rank can take any more, and makes the next Tick
// decide.
func (b *board) recheckWaiting() {
	b.largestPrompt = 0
	for _, g := range b.groups {
		b.largestPrompt = max(b.largestPrompt, largestPrompt(g.allRanks)) // also down: may come back
	}
	for _, p := range b.partlyListedNames {
		p.largestPrompt = largestPrompt(p.ranks)
	}
	for _, e := range slices.Clone(b.pool.Entries()) {
		if err := b.reasonToRefuse(e); err != nil {
			b.removeAndRefuse(e, err)
		}
	}
	b.decideNow = true
}

func largestPrompt(ranks []*rank) (largest int64) {
	for _, r := range ranks {
		largest = max(largest, r.largestPrompt(policy.Watermark(r.group.chosenPolicy.Policy)))
	}
	return largest
}
