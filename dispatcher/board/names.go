package board

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"evenkeel/pool"
)

// Names. The ranks of a board share a base model. Each engine may list more model names: LoRA adapters, which are loaded and unloaded on
// each engine separately, and other names of the base model. A request goes only to ranks that list the name that it asks for. Policies do
// not know about names. If all ranks of a group list the name, the group's policy sees the request. If only some ranks of the group do, the
// board itself binds the request to the emptiest of them.

// NewNames returns the set of these names. The result does not refer to the slice.
func NewNames(names []string) *Names {
	n := &Names{set: make(map[string]struct{}, len(names))}
	for _, name := range names {
		n.set[name] = struct{}{}
	}
	return n
}

// Has says whether a name is in the set. A nil set stands for a list that is not known, and has every name. Every set has the empty name.
func (n *Names) Has(name string) bool {
	if n == nil || name == "" {
		return true
	}
	_, ok := n.set[name]
	return ok
}

// Same says whether both sets have the same names. Neither set may be nil.
func (n *Names) Same(other *Names) bool { return maps.Equal(n.set, other.set) }

// updatePartlyListedNames updates partlyListedNames: the model names that some ranks list and others do not, with the ranks that list each
// of them. It searches for these names only if the ranks or their lists have changed. In any case, it updates for each name how large a
// prompt its ranks can take, and how many of its ranks are up or awaited (an awaited rank takes no requests now, but soon will). If there
// is no such rank any more, it also sets the time until which entries for the name still wait for one.
func (b *board) updatePartlyListedNames() {
	b.listers = b.listers[:0]
	for _, g := range b.groups {
		for _, r := range g.allRanks {
			b.listers = append(b.listers, lister{r, g, r.Lists})
		}
	}
	if !slices.Equal(b.listers, b.listersBefore) { // lists are compared by their pointers
		b.listersBefore = append(b.listersBefore[:0], b.listers...)
		b.findPartlyListedNames()
	}
	for _, p := range b.partlyListedNames {
		p.upOrAwaited, p.largestPrompt = 0, largestPrompt(p.ranks)
		for _, r := range p.ranks {
			if r.Up || r.Awaited {
				p.upOrAwaited++
			}
		}
		if p.upOrAwaited > 0 {
			p.outageGraceEnds = time.Time{}
		} else if p.outageGraceEnds.IsZero() { // no rank with the name is up or awaited any more
			p.outageGraceEnds = b.now.Add(outageGrace) // then refuseInNameOutage refuses the entries that ask for the name
		}
	}
}

// findPartlyListedNames finds the model names that some ranks list and others do not. For each of them, it makes a placement: the ranks
// that list the name, to which alone a request for it may go. listers has all ranks of the fleet with their lists. In the end, it sorts and
// emits what it has found.
func (b *board) findPartlyListedNames() {
	placementsBefore := b.partlyListedNames
	b.partlyListedNames, b.firstRankNames = nil, nil
	rankCounts := map[*Names]int{} // number of ranks that have each list
	for _, l := range b.listers {
		rankCounts[l.lists]++
	}
	// A name without a placement is listed by all ranks or by none. So isListedNowhere looks only at the list of the first rank.
	if len(b.listers) > 0 {
		b.firstRankNames = b.listers[0].lists
	}
	for list := range rankCounts {
		// A list that all ranks share has no such name. A list that is not known (nil) counts as having every name.
		if len(rankCounts) == 1 || list == nil {
			continue
		}
		for name := range list.set {
			if b.partlyListedNames[name] != nil { // the name was found in another list before
				continue
			}
			if ranksListing(rankCounts, name) < len(b.listers) { // not all ranks list the name
				b.addPlacement(name, placementsBefore[name])
			}
		}
	}
	b.sortPlacements()
	b.emit(Effect{Kind: EffectNames, Group: GroupKey{Model: b.model}, Listed: b.sortedNames})
}

// sortPlacements writes the names of partlyListedNames and their placements into lists, sorted by name. It also makes room for one pace per
// name in sortedPaces, which emitPace fills in.
func (b *board) sortPlacements() {
	b.sortedPlacements, b.sortedNames = b.sortedPlacements[:0], nil
	for _, name := range slices.Sorted(maps.Keys(b.partlyListedNames)) {
		b.sortedPlacements, b.sortedNames = append(b.sortedPlacements, b.partlyListedNames[name]), append(b.sortedNames, name)
	}
	b.sortedPaces = make([]Throughput, len(b.sortedPlacements))
}

// ranksListing returns how many ranks list a name. rankCounts has the number of ranks that have each list.
func ranksListing(rankCounts map[*Names]int, name string) (n int) {
	for list, ranks := range rankCounts {
		if list.Has(name) {
			n += ranks
		}
	}
	return n
}

// addPlacement makes the placement of a model name that some ranks list and others do not: it finds the ranks that list the name. before is
// the placement of the name until now; nil: there was none. If all its ranks were down, the time after which entries for the name are
// refused does not begin anew.
func (b *board) addPlacement(name string, before *namePlacement) {
	p := &namePlacement{}
	if before != nil {
		p.outageGraceEnds = before.outageGraceEnds
	}
	if b.partlyListedNames == nil {
		b.partlyListedNames = map[string]*namePlacement{}
	}
	b.partlyListedNames[name] = p
	p.findRanks(b, name)
}

// findRanks fills p with the ranks that list a name, and with the groups in which every rank lists it. p must be empty.
func (p *namePlacement) findRanks(b *board, name string) {
	for _, g := range b.groups {
		from := len(p.ranks)
		for _, r := range g.allRanks {
			if r.lists(name) {
				p.ranks = append(p.ranks, r)
			}
		}
		if inGroup := p.ranks[from:]; len(inGroup) == len(g.allRanks) {
			p.wholeGroups = append(p.wholeGroups, g)
		} else {
			p.partialGroupRanks = append(p.partialGroupRanks, inGroup...)
		}
	}
	slices.SortFunc(p.ranks, func(x, y *rank) int { return cmp.Compare(x.ID, y.ID) })
}

// lists says whether a request for the model name may go to the rank. It may go to any rank whose list is not known.
func (r *rank) lists(name string) bool { return r.Lists.Has(name) }

// countWaitingForName adds change to the number of entries that wait for the model name of e: 1 when e begins to wait, -1 when it ends. It
// leaves out names that all ranks list, and discarded hand-offs, because no client waits for these.
func (b *board) countWaitingForName(e *pool.Entry, change int) {
	if p := b.partlyListedNames[e.Name]; p != nil && !e.Discard {
		p.waitingForName += change
	}
}

// isListedNowhere says whether no rank of the board lists a name, not even a rank that is down. A name that only some ranks list is in
// partlyListedNames. Any other name is listed by all ranks or by none, so that the list of the first rank decides.
func (b *board) isListedNowhere(name string) bool {
	return len(b.groups) > 0 && b.partlyListedNames[name] == nil && !b.firstRankNames.Has(name)
}
