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
		r.present = false
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
		case r.present:
			b.emit(Effect{Kind: EffectDuplicate, Worker: w.ID, Names: [2]string{r.Name, w.Name}})
			continue
		}
		b.update(r, w)
		r.reserve()
	}
	for _, r := range b.ranks {
		b.leave(r)
	}
	b.relate()
	b.regroup()
	if b.refusing > 0 { // ranks that refused requests may have left the fleet or restarted
		b.watch()
	}
	b.listings()
	b.countRestricted()
	b.recheck()
}

// update makes rank r the given worker, which has the same ID. The rank keeps its requests. If the worker has more slots or KV room than
// before, requests in the engine's queue may begin.
func (b *board) update(r *rank, w Worker) {
	w.Slots, w.Up = max(0, w.Slots), w.Up && !w.Down
	if r.restarted(&w) { // the engine has lost its KV, and what it refused before says nothing about it now
		b.forgetOrphans(r, everyOrphan)
		r.refusals.Succeed()
		r.spared = false
		b.giveUp(r.kept.Clear())
	}
	w.Process = cmp.Or(w.Process, r.Process) // the last known process stays, to be compared with the next one
	r.Worker, r.present = w, true
	if w.KeepsKVFor > 0 {
		r.kept.Reserve()
	} else {
		b.giveUp(r.kept.Clear())
	}
	b.refresh(r)
	b.promote(r)
}

// reserve allocates the lists of a rank now, so that the tick allocates nothing.
func (r *rank) reserve() {
	most := r.Slots + r.MaxEngineQueue // requests that the rank may have at one time
	if missing := most - len(r.slots); missing > 0 {
		r.slots = slices.Grow(r.slots, missing)
		r.running = slices.Grow(r.running, missing) // it is as long as slots
		if r.Mixed {
			r.toCompute = slices.Grow(r.toCompute, r.Slots) // all slots may wait for their prompts
		}
	}
	if missing := 2*most - len(r.departed); missing > 0 { // the requests of the current step and of the step before
		r.departed = slices.Grow(r.departed, missing)
	}
}

// newGroup makes a group without ranks, and emits EffectGroup. For a barrier group, it also begins to learn the output lengths that the
// policies of the twin read.
func (b *board) newGroup(name string, barrier bool) *group {
	g := &group{name: name, barrier: barrier, chosen: b.choose(barrier), fallback: b.make(FallbackSpec)}
	if barrier {
		g.steps.Configure(b.cfg.StepModel)
		for _, needs := range b.replayed {
			b.source(needs)
		}
	}
	b.emit(Effect{Kind: EffectGroup, Group: b.key(g), Policy: g.chosen.name, Label: b.label(g)})
	return g
}

// regroup divides the present ranks into groups, and counts the ranks that are up or awaited (b.up). A group that existed before keeps the
// state of its policy.
func (b *board) regroup() {
	groups := make(map[GroupKey]*group, len(b.groups))
	groupsInOrder := slices.Clone(b.groups)
	for _, g := range b.groups {
		g.members, g.ranks = g.members[:0], g.ranks[:0]
		groups[b.key(g)] = g
	}
	b.up = 0
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
		g.members = append(g.members, r)
		if r.Up || r.Awaited {
			b.up++
		}
	}
	b.keepGroups(groupsInOrder)
}

// keepGroups replaces the board's groups by the given groups that have a member, and emits EffectGroupGone for the others.
func (b *board) keepGroups(groups []*group) {
	b.groups = b.groups[:0]
	for _, g := range groups {
		if len(g.members) == 0 {
			g.held = 0 // else a step that the last streams still report would make the board look for held entries
			b.emit(Effect{Kind: EffectGroupGone, Group: b.key(g)})
			continue
		}
		slices.SortFunc(g.members, func(x, y *rank) int { return cmp.Compare(x.ID, y.ID) })
		for _, r := range g.members {
			if !r.Down {
				g.ranks = append(g.ranks, r)
			}
		}
		b.groups = append(b.groups, g)
	}
	slices.SortFunc(b.groups, func(x, y *group) int { return cmp.Compare(x.members[0].ID, y.members[0].ID) })
}

// setPolicy builds the policy of each barrier group anew from the spec in force, and makes the board decide anew.
func (b *board) setPolicy() {
	for _, g := range b.groups {
		if g.barrier {
			g.chosen, g.slow, g.budget = b.choose(true), 0, searchBudget{}
		}
	}
	b.recheck()
}

// recheck refuses the entries that no rank can take any more, and makes the next Tick decide anew.
func (b *board) recheck() {
	b.largest = 0
	for _, g := range b.groups {
		b.largest = max(b.largest, largestPrompt(g.members)) // members include the ranks that are down, which may come back
	}
	for _, p := range b.partial {
		p.largest = largestPrompt(p.ranks)
	}
	for _, e := range slices.Clone(b.pool.Entries()) {
		if err := b.refusal(e); err != nil {
			b.fail(e, err)
		}
	}
	b.changed = true
}

// largestPrompt returns the largest prompt that any of the ranks could ever take under the policies of their groups, in KV tokens.
func largestPrompt(ranks []*rank) (most int64) {
	for _, r := range ranks {
		most = max(most, r.budget(policy.Watermark(r.group.chosen.Policy)))
	}
	return most
}
