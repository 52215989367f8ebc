package board

import (
	"cmp"
	"maps"
	"slices"

	"evenkeel/dispatcher/policy"
)

// setWorkers replaces the board's ranks by the given workers. A rank whose worker ID stays keeps its requests. A rank that is not among the
// workers gets no more requests, and is dropped once its last slot is released.
func (b *board) setWorkers(ws []Worker) {
	for _, r := range b.ranks {
		r.present = false // updateRank sets present again if the rank is among the workers
	}
	if len(ws) > 0 { // without workers, the last value stays
		b.ranksPrefill = slices.ContainsFunc(ws, func(w Worker) bool { return w.Mixed })
	}
	for _, w := range ws {
		r := b.ranks[w.ID]
		switch {
		case r == nil:
			r = &rank{}
			b.ranks[w.ID] = r
		case r.present: // an earlier worker of the list has the same ID, so this one is ignored
			b.emit(Effect{Kind: EffectDuplicate, Worker: w.ID, Names: [2]string{r.Name, w.Name}})
			continue
		}
		b.updateRank(r, w)
		r.reserve() // allocates the memory of the rank's lists now, so that no tick has to
	}
	for _, r := range b.ranks {
		b.dropIfGone(r)
	}
	b.regroupEngines() // finds the ranks of each engine
	b.regroup()        // finds the groups of ranks for which one policy decides
	// While a rank refuses requests, streams must report the first events of answers, which show that a rank takes requests again. Such
	// ranks may have left the fleet or restarted, so they are counted anew.
	if b.refusingRanks > 0 {
		b.updateFirstEventWatch()
	}
	b.updatePartlyListedNames() // finds the model names that some ranks list and others do not
	b.countRestricted()         // counts the waiting entries that may not go to every rank
	b.recheckWaiting()          // refuses the entries that no rank can take any more
}

// updateRank replaces the properties of rank r by those of the given worker, which has the same ID. The rank keeps its requests. If the
// worker has more slots or KV room than before, requests in the engine's queue may begin. The KV that an engine holds of ended requests is
// counted in two ways: as kept KV, which the engine keeps on purpose and frees after a set time, and as orphans, which it may never free.
func (b *board) updateRank(r *rank, w Worker) {
	w.Slots, w.Up = max(0, w.Slots), w.Up && !w.Down // whatever Up says, a rank that is down takes no requests
	// The restart has emptied the KV of the engine: that of ended requests, too (orphans and kept KV). Requests that the engine refused
	// before say nothing about it now, so the rank gets requests again.
	if r.hasRestarted(&w) {
		b.forgetOrphans(r, everyOrphan)
		b.countFreedKV(r.keptKV.Clear())
		r.refusals.Succeed()
		r.spared = false
	}
	w.Process = cmp.Or(w.Process, r.Process) // if the number is not known now, the last known one stays
	r.Worker, r.present = w, true
	if w.KeepsKVFor > 0 { // the engine keeps the KV of ended answers for the next turns of their chats
		r.keptKV.Reserve() // memory for its counts, so that no tick allocates it
	} else {
		b.countFreedKV(r.keptKV.Clear()) // what the engine may have kept until now
	}
	b.refreshLoad(r)
	b.promoteQueued(r)
}

// reserve gives the lists of a rank the largest capacity that they can need, so that a tick allocates nothing.
func (r *rank) reserve() {
	if missing := r.Slots - len(r.slots); missing > 0 {
		r.slots = slices.Grow(r.slots, missing)
		r.running = slices.Grow(r.running, missing) // running always has the same length as slots
		if r.Mixed {
			r.promptsToCompute = slices.Grow(r.promptsToCompute, r.Slots) // the prompts of all slots may wait to be computed
		}
	}
	// The list may have all requests of the current step and of the previous one.
	if missing := 2*r.Slots - len(r.recentlyEnded); missing > 0 {
		r.recentlyEnded = slices.Grow(r.recentlyEnded, missing)
	}
}

// newGroup makes a group without ranks, and emits EffectGroup.
func (b *board) newGroup(name string, barrier bool) *group {
	g := &group{name: name, barrier: barrier, chosenPolicy: b.policyFor(barrier), fallbackPolicy: b.buildPolicy(FallbackSpec)}
	if barrier {
		g.steps.Configure(b.cfg.StepModel)
	}
	b.emit(Effect{Kind: EffectGroup, Group: b.key(g), Policy: g.chosenPolicy.name, Label: b.label(g)})
	return g
}

// regroup divides the ranks of the fleet into groups, and counts the ranks that are up or soon will be. A group that existed before keeps
// its policy with its state. regroup fills only the list allRanks of each group. At the end, it calls keepGroups, which sorts this list,
// fills steppingRanks from it, and drops the groups that have no rank any more.
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
		if r.Barrier { // all ranks without a barrier are one group, which has no name
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

// keepGroups replaces the board's groups by those of groups that have a rank, and emits EffectGroupGone for the others. It also fills the
// steppingRanks of each group, which regroup has emptied, with its ranks that are not down.
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

// setPolicy gives each barrier group a new policy, built from the spec in force, and makes the board decide anew. The new policy decides at
// once, even if the fallback policy was deciding, and begins with the full search budget.
func (b *board) setPolicy() {
	for _, g := range b.groups {
		if g.barrier {
			g.chosenPolicy, g.fallbackRounds, g.searchBudget = b.policyFor(g.barrier), 0, searchBudget{}
		}
	}
	b.recheckWaiting()
}

// recheckWaiting computes the largest prompt that any rank could take when idle, refuses the entries that no rank can take any more, and
// makes the next Tick decide.
func (b *board) recheckWaiting() {
	b.largestPrompt = 0
	for _, g := range b.groups {
		b.largestPrompt = max(b.largestPrompt, largestPrompt(g.allRanks)) // ranks that are down count, too, because they may come back
	}
	for _, p := range b.partlyListedNames { // entries that ask for such a model name may go only to the ranks that list it
		p.largestPrompt = largestPrompt(p.ranks)
	}
	for _, e := range slices.Clone(b.pool.Entries()) {
		if err := b.reasonToRefuse(e); err != nil {
			b.removeAndRefuse(e, err)
		}
	}
	b.decideNow = true
}

// largestPrompt returns the largest prompt that any of the ranks could take when idle, in KV tokens. The policy of a rank's group may keep
// a share of the rank's room empty.
func largestPrompt(ranks []*rank) (largest int64) {
	for _, r := range ranks {
		largest = max(largest, r.largestPrompt(policy.Watermark(r.group.chosenPolicy.Policy)))
	}
	return largest
}
