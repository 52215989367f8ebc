package board

import (
	"cmp"
	"maps"
	"slices"

	"evenkeel/dispatcher/policy"
)

// Clone copies the boards between two events, with all state that decides what they do next. Events on the copy do not change the
// original. The copy has neither the sampled scores of predictions nor the memory for traces, because its status and traces are not read.
func (l *Boards) Clone() *Boards {
	a := *l.allBoards
	a.subjects = make(map[PredictorKey]*known, len(l.subjects))
	for key, s := range l.subjects {
		copied := *s // the tables never change
		a.subjects[key] = &copied
	}
	a.effects = nil
	c := &Boards{allBoards: &a, boards: make(map[string]*board, len(l.boards)), draining: l.draining}
	for _, b := range l.inOrder {
		b.recall()
		c.add(b.clone(&a))
	}
	return c
}

// recall writes the Counts that were applied for the next event into the ranks and slot records, because a clone does not copy the Counts.
func (b *board) recall() {
	for _, r := range b.ranks {
		if b.counts != nil {
			b.refresh(r)
		}
		for _, slot := range r.slots {
			b.started(slot)
		}
	}
}

// clone copies the board with its pool, ranks, groups and slots. The copies refer to each other, not to the originals. a is what the boards
// of the copy share. The copy gets no memory that each tick fills anew.
func (b *board) clone(a *allBoards) *board {
	c := *b
	c.allBoards, c.pool = a, b.pool.Clone()
	c.lengths = maps.Clone(b.lengths)
	c.waiting = make(map[uint64]waitingEntry, len(b.waiting))
	for _, e := range c.pool.Entries() {
		w := b.waiting[e.ID]
		w.Enqueue = Enqueue{Entry: e, Output: c.lengths[e.ID], Hits: w.Hits} // without the memory for a trace
		c.waiting[e.ID] = w
	}
	groups := make(map[*group]*group, len(b.groups))
	c.ranks = make(map[int32]*rank, len(b.ranks))
	for id, old := range b.ranks {
		if groups[old.group] == nil && old.group != nil {
			groups[old.group] = old.group.clone(a)
		}
		c.ranks[id] = old.clone()
		c.ranks[id].group = groups[old.group]
	}
	c.groups = make([]*group, len(b.groups))
	for i, g := range b.groups {
		c.groups[i] = groups[g]
		c.groups[i].members, c.groups[i].ranks = c.sameRanks(g.members), c.sameRanks(g.ranks)
	}
	for _, r := range c.ranks {
		r.engine = c.sameRanks(r.engine)
	}
	c.listed, c.listers, c.names, c.named, c.paces = nil, nil, nil, nil, nil
	c.listings() // the copy computes its listings, because those of b point to b's ranks
	c.countRestricted()
	c.slots.records, c.slots.unused = slices.Clone(b.slots.records), slices.Clone(b.slots.unused)
	for i := range c.slots.records {
		if s := &c.slots.records[i]; s.rank != nil {
			s.rank = c.ranks[s.rank.ID]
		}
	}
	c.pairs.links = make(map[Link]*linkHealth, len(b.pairs.links))
	for link, health := range b.pairs.links {
		next := *health
		c.pairs.links[link] = &next
	}
	c.snapshot, c.survival, c.assignments, c.weights, c.order, c.expired = policy.Snapshot{}, nil, nil, nil, nil, nil
	c.asked, c.nextGroup, c.round, c.counts = nil, 0, Round{}, nil
	c.failure, c.invalid, c.askedBound = nil, 0, false
	return &c
}

// clone copies the rank. The copy still refers to the original's group and to the ranks of its engine, which the caller replaces.
func (r *rank) clone() *rank {
	c := *r
	c.slots, c.running = slices.Clone(r.slots), slices.Clone(r.running)
	c.kept = r.kept.Clone()
	c.leaked, c.toCompute = slices.Clone(r.leaked), slices.Clone(r.toCompute)
	// The copy keeps the capacity, because depart never lets the list grow beyond it.
	c.departed = append(make([]departed, 0, cap(r.departed)), r.departed...)
	return &c
}

// sameRanks returns the ranks of b, which is a copy, that stand for the given ranks of the original.
func (b *board) sameRanks(ranks []*rank) []*rank {
	all := make([]*rank, len(ranks))
	for i, r := range ranks {
		all[i] = b.ranks[r.ID]
	}
	return all
}

// clone copies the group without its ranks, which the caller fills in.
func (g *group) clone(a *allBoards) *group {
	c := *g
	c.members, c.ranks, c.stepRanks = nil, nil, nil
	c.chosen, c.fallback = g.chosen.clone(a), g.fallback.clone(a)
	c.forecast = g.forecast.Clone()
	return &c
}

// clone makes a policy of the same spec, which goes on from the state of the original. a is what the boards of the copy share.
func (p policyInUse) clone(a *allBoards) policyInUse {
	c := a.make(p.spec)
	policy.Resume(c.Policy, p.Policy)
	if p.source != nil {
		c.source = a.subjects[p.source.PredictorKey]
	}
	return c
}

// add adds a board and keeps inOrder sorted by model.
func (l *Boards) add(b *board) {
	l.boards[b.model] = b
	l.inOrder = slices.SortedFunc(maps.Values(l.boards), func(x, y *board) int { return cmp.Compare(x.model, y.model) })
}

// remove drops a board that has neither ranks nor entries.
func (l *Boards) remove(b *board) {
	delete(l.boards, b.model)
	l.inOrder = slices.DeleteFunc(slices.Clone(l.inOrder), func(o *board) bool { return o == b })
}
