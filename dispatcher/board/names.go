package board

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"evenkeel/pool"
)

// Names. The ranks of a board share a base model. Each engine may list more names: LoRA adapters, which are loaded and unloaded engine by
// engine, and other names of the base model. A request goes only to ranks that list the name that it asks for. Policies do not know about
// names. If all ranks of a group list the name, the group's policy sees the request. If only some ranks do, the board itself binds the
// request to the emptiest of them.

// NewNames returns a set of these names.
func NewNames(names []string) *Names {
	n := &Names{set: make(map[string]struct{}, len(names))}
	for _, name := range names {
		n.set[name] = struct{}{}
	}
	return n
}

// Has says whether a name is in the set. A nil set has every name, and every set has the empty name.
func (n *Names) Has(name string) bool {
	if n == nil || name == "" {
		return true
	}
	_, ok := n.set[name]
	return ok
}

// Same says whether both sets have the same names.
func (n *Names) Same(other *Names) bool { return maps.Equal(n.set, other.set) }

// updatePartialNames updates the placements of the names that some ranks list and others do not. It searches for these names only if the
// ranks or their lists have changed. Otherwise it only updates how many ranks of each name are up, and when their outage ends.
func (b *board) updatePartialNames() {
	b.listers = b.listers[:0]
	for _, g := range b.groups {
		for _, r := range g.allRanks {
			b.listers = append(b.listers, lister{r, g, r.Lists})
		}
	}
	if !slices.Equal(b.listers, b.listersBefore) {
		b.listersBefore = append(b.listersBefore[:0], b.listers...)
		b.findPartialNames()
	}
	for _, p := range b.partialNames {
		p.upOrAwaited, p.largestPrompt = 0, largestPrompt(p.ranks)
		for _, r := range p.ranks {
			if r.Up || r.Awaited {
				p.upOrAwaited++
			}
		}
		if p.upOrAwaited > 0 {
			p.outageGraceEnds = time.Time{}
		} else if p.outageGraceEnds.IsZero() { // the outage has just begun
			p.outageGraceEnds = b.now.Add(outageGrace)
		}
	}
}

// findPartialNames finds the names that some ranks list and others do not, and the ranks that list each of them. It emits these names.
func (b *board) findPartialNames() {
	partialBefore := b.partialNames
	b.partialNames, b.firstRankNames = nil, nil
	ranksWith := map[*Names]int{} // how many ranks have each list
	for _, l := range b.listersBefore {
		ranksWith[l.lists]++
	}
	if len(b.listersBefore) > 0 {
		b.firstRankNames = b.listersBefore[0].lists
	}
	for list := range ranksWith {
		if len(ranksWith) == 1 || list == nil { // all ranks have the same list, or this list is not known and counts as every name
			continue
		}
		for name := range list.set {
			if b.partialNames[name] != nil { // another list has the name, too, so it has its placement already
				continue
			}
			if ranksListing(ranksWith, name) < len(b.listersBefore) {
				b.addPlacement(name, partialBefore[name])
			}
		}
	}
	b.sortedPlacements, b.sortedNames = b.sortedPlacements[:0], nil
	for _, name := range slices.Sorted(maps.Keys(b.partialNames)) {
		b.sortedPlacements, b.sortedNames = append(b.sortedPlacements, b.partialNames[name]), append(b.sortedNames, name)
	}
	b.sortedPaces = make([]Throughput, len(b.sortedPlacements))
	b.emit(Effect{Kind: EffectNames, Group: GroupKey{Model: b.model}, Listed: b.sortedNames})
}

// ranksListing returns how many ranks list a name. ranksWith says for each list how many ranks have it.
func ranksListing(ranksWith map[*Names]int, name string) (n int) {
	for list, ranks := range ranksWith {
		if list.Has(name) {
			n += ranks
		}
	}
	return n
}

// addPlacement finds where a name is listed. before is its placement until now, whose outage goes on; nil: the name had none.
func (b *board) addPlacement(name string, before *namePlacement) {
	p := &namePlacement{}
	if before != nil {
		p.outageGraceEnds = before.outageGraceEnds
	}
	if b.partialNames == nil {
		b.partialNames = map[string]*namePlacement{}
	}
	b.partialNames[name] = p
	p.findRanks(b, name)
}

// findRanks finds the ranks that list a name, and the groups in which every rank lists it.
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

// lists says whether a request for the model name may go to the rank.
func (r *rank) lists(name string) bool { return r.Lists.Has(name) }

// countWaitingForName adds n to the number of entries that wait for the same name as e: n is 1 when e begins to wait, -1 when it leaves.
// Names that all ranks list are not counted, and neither are discarded hand-offs, because no client waits for them.
func (b *board) countWaitingForName(e *pool.Entry, n int) {
	if p := b.partialNames[e.Name]; p != nil && !e.Discard {
		p.waiting += n
	}
}

// isListedNowhere says whether no rank of the board lists a name, not even a rank that is down. A name that only some ranks list is in
// partialNames, and any other name is listed by all ranks or by none, so the list of the first rank is enough.
func (b *board) isListedNowhere(name string) bool {
	return len(b.groups) > 0 && b.partialNames[name] == nil && !b.firstRankNames.Has(name)
}
