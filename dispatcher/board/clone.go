package board

import (
	"cmp"
	"maps"
	"slices"

	"evenkeel/dispatcher/policy"
)

// Clone copies the boards with all state that decides what they do next. It must be called between two events, while no round is under way.
// Events on the copy do not change the original. Before a board is copied, it takes over the progress of its requests from the last Counts,
// which are not copied themselves. The copy has no sampled scores of predictions (group.clone leaves them out) and no memory for traces
// (copyWaiting leaves it out), because no caller reads its status or traces.
func (l *Boards) Clone() *Boards {
	a := *l.allBoards
	a.predictors = make(map[PredictorKey]*predictorState, len(l.predictors))
	for key, s := range l.predictors {
		copied := *s // the tables themselves never change, so they are shared
		a.predictors[key] = &copied
	}
	a.effects = nil // those of the last event belong to the caller of the original
	c := &Boards{allBoards: &a, boards: make(map[string]*board, len(l.boards)), draining: l.draining}
	for _, b := range l.inOrder {
		b.applyCounts()
		c.add(b.clone(&a))
	}
	return c
}

// applyCounts writes the progress that the last Counts brought into the ranks and slot records, because a clone does not copy the Counts
// themselves.
func (b *board) applyCounts() {
	for _, r := range b.ranks {
		if b.counts != nil {
			b.refreshLoad(r)
		}
		for _, slot := range r.slots {
			b.hasBegun(slot) // called because it stores in the slot record whether the first event has come
		}
	}
}

// clone copies the board with its pool, ranks, groups and slots, so that the twin can go on from the copy while the board itself goes on.
// The copies refer to each other, and not to the originals. a is what all boards of the copy share.
func (b *board) clone(a *allBoards) *board {
	c := *b
	c.allBoards, c.pool = a, b.pool.Clone()
	c.outputLengths = maps.Clone(b.outputLengths)
	c.copyWaiting(b)
	c.copyRanks(b, a)
	c.rebuildListedNames()
	c.copySlots(b)
	c.pairs.Table = b.pairs.Clone()
	c.dropRoundState()
	return &c
}

// rebuildListedNames finds anew which ranks list which model names, and counts the entries that wait for each name. The board is a copy,
// and its partlyListedNames still points to the ranks of the original. The other lists share memory with those of the original, so they
// are dropped. Without listersBefore, updatePartlyListedNames computes all of them anew.
func (b *board) rebuildListedNames() {
	b.listersBefore, b.listers, b.sortedPlacements, b.sortedNames, b.sortedPaces = nil, nil, nil, nil, nil
	b.updatePartlyListedNames()
	b.countRestricted()
}

// copySlots gives the board, which is a copy of from, slot records of its own that refer to its own ranks.
func (b *board) copySlots(from *board) {
	b.slots.records, b.slots.freeIndices = slices.Clone(from.slots.records), slices.Clone(from.slots.freeIndices)
	for i := range b.slots.records {
		if s := &b.slots.records[i]; s.rank != nil { // nil: the slot is free
			s.rank = b.ranks[s.rank.ID]
		}
	}
}

// copyWaiting gives the board, which is a copy of from, records of its own for the waiting entries of its own pool. A record contains the
// event Enqueue that brought its entry, so copyWaiting makes a new event. It leaves out Trace, because the memory for a trace belongs to
// the caller of the original, and Local, which is nil for all entries of a pool.
func (b *board) copyWaiting(from *board) {
	b.waiting = make(map[uint64]waitingEntry, len(from.waiting))
	for _, e := range b.pool.Entries() {
		w := from.waiting[e.ID]
		knownLength := b.outputLengths[e.ID] // length that the answer will have, which only a simulation knows; 0: not known
		w.Enqueue = Enqueue{Entry: e, Output: knownLength, Hits: w.Hits}
		b.waiting[e.ID] = w
	}
}

// dropRoundState empties the buffers that each tick fills anew, and the state of rounds. No round may be under way.
func (b *board) dropRoundState() {
	b.snapshot, b.survival, b.assignments, b.scores, b.decidingGroups, b.expired = policy.Snapshot{}, nil, nil, nil, nil, nil
	b.localEntry, b.nextGroup, b.round, b.counts = nil, 0, Round{}, nil
	b.policyFailure, b.invalidAssignments, b.localBound = nil, 0, false
}

// copyRanks gives the board, which is a copy of from, copies of all ranks and groups. These refer to each other, and not to the originals.
// A group that has left the fleet is copied, too, as long as a rank still refers to it; its own lists of ranks stay empty. a is what all
// boards of the copy share.
func (b *board) copyRanks(from *board, a *allBoards) {
	groups := make(map[*group]*group, len(from.groups))
	b.ranks = make(map[int32]*rank, len(from.ranks))
	for id, old := range from.ranks {
		if groups[old.group] == nil && old.group != nil { // no other rank of the group has come before
			groups[old.group] = old.group.clone(a)
		}
		b.ranks[id] = old.clone()
		b.ranks[id].group = groups[old.group]
	}
	b.groups = make([]*group, len(from.groups))
	for i, g := range from.groups {
		b.groups[i] = groups[g] // not nil, because each group of the fleet has a rank, which refers to it
		b.groups[i].allRanks, b.groups[i].steppingRanks = b.sameRanks(g.allRanks), b.sameRanks(g.steppingRanks)
	}
	for _, r := range b.ranks {
		r.engineRanks = b.sameRanks(r.engineRanks)
	}
}

// clone copies the rank. The copy still refers to the group of the original and to the original ranks of its engine. The caller must
// replace these.
func (r *rank) clone() *rank {
	c := *r
	c.slots, c.running = slices.Clone(r.slots), slices.Clone(r.running)
	c.keptKV = r.keptKV.Clone()
	c.orphans, c.promptsToCompute = slices.Clone(r.orphans), slices.Clone(r.promptsToCompute)
	// The copy of the list keeps its capacity, because rememberEnded never lets the list grow beyond its capacity.
	c.recentlyEnded = append(make([]endedRequest, 0, cap(r.recentlyEnded)), r.recentlyEnded...)
	return &c
}

// sameRanks returns the ranks of b that have the IDs of the given ranks. b is a copy of the board that has the given ranks.
func (b *board) sameRanks(ranks []*rank) []*rank {
	all := make([]*rank, len(ranks))
	for i, r := range ranks {
		all[i] = b.ranks[r.ID]
	}
	return all
}

// clone copies the group. The copy has no ranks: the caller must fill them in. a is what all boards of the copy share.
func (g *group) clone(a *allBoards) *group {
	c := *g
	c.allRanks, c.steppingRanks, c.stepRanks = nil, nil, nil
	c.chosenPolicy, c.fallbackPolicy = g.chosenPolicy.clone(a), g.fallbackPolicy.clone(a)
	c.forecast = g.forecast.Clone()
	return &c
}

// clone builds a policy of the same spec that goes on from the state of the original. copied is what all boards of the copy share. The
// policy gets its predictor from there, because the predictor of the original belongs to the original boards.
func (p policyInUse) clone(copied *allBoards) policyInUse {
	c := copied.buildPolicy(p.spec)
	policy.Resume(c.Policy, p.Policy) // gives the new policy the state of the original one
	if p.predictor != nil {
		c.predictor = copied.predictors[p.predictor.PredictorKey]
	}
	return c
}

// add adds a board. inOrder stays sorted by model, so that boards are always visited in the same order.
func (l *Boards) add(b *board) {
	l.boards[b.model] = b
	l.inOrder = slices.SortedFunc(maps.Values(l.boards), func(x, y *board) int { return cmp.Compare(x.model, y.model) })
}

// remove drops a board that has neither ranks nor entries.
func (l *Boards) remove(b *board) {
	delete(l.boards, b.model)
	l.inOrder = slices.DeleteFunc(slices.Clone(l.inOrder), func(o *board) bool { return o == b })
}
