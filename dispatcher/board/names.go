package board

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"evenkeel/pool"
)

// Names. The ranks of a board share a base model. Each engine may list more model names: LoRA
// adapters, which are loaded on each engine separately, and other names of the base model. A
// request goes only to ranks that list its name. Policies do not know about names: if only some
// ranks of a group list the name, the board itself binds the request to the emptiest of them.

// NewNames copies the names.
func NewNames(names []string) *Names {
	n := &Names{set: make(map[string]struct{}, len(names))}
	for _, name := range names {
		n.set[name] = struct{}{}
	}
	return n
}

// Has is true for the empty name, and for a nil set.
func (n *Names) Has(name string) bool {
	if n == nil || name == "" {
		return true
	}
	_, ok := n.set[name]
	return ok
}

// Same needs sets that are not nil.
func (n *Names) Same(other *Names) bool { return maps.Equal(n.set, other.set) }

// updatePartlyListedNames searches for the names only if the ranks or their lists have changed. It
// always updates what their ranks can take.
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
		} else if p.outageGraceEnds.IsZero() {
			p.outageGraceEnds = b.now.Add(outageGrace) // for refuseInNameOutage
		}
	}
}

func (b *board) findPartlyListedNames() {
	placementsBefore := b.partlyListedNames
	b.partlyListedNames, b.firstRankNames = nil, nil
	rankCounts := map[*Names]int{} // ranks with each list
	for _, l := range b.listers {
		rankCounts[l.lists]++
	}
	// A name without a placement is listed by all ranks or by none, so isListedNowhere needs one list.
	if len(b.listers) > 0 {
		b.firstRankNames = b.listers[0].lists
	}
	for list := range rankCounts {
		if len(rankCounts) == 1 || list == nil {
			continue
		}
		for name := range list.set {
			if b.partlyListedNames[name] != nil {
				continue
			}
			if ranksListing(rankCounts, name) < len(b.listers) {
				b.addPlacement(name, placementsBefore[name])
			}
		}
	}
	b.sortPlacements()
	b.emit(Effect{Kind: EffectNames, Group: GroupKey{Model: b.model}, Listed: b.sortedNames})
}

// sortPlacements also makes room in sortedPaces for emitPace.
func (b *board) sortPlacements() {
	b.sortedPlacements, b.sortedNames = b.sortedPlacements[:0], nil
	for _, name := range slices.Sorted(maps.Keys(b.partlyListedNames)) {
		b.sortedPlacements, b.sortedNames = append(b.sortedPlacements, b.partlyListedNames[name]), append(b.sortedNames, name)
	}
	b.sortedPaces = make([]Throughput, len(b.sortedPlacements))
}

func ranksListing(rankCounts map[*Names]int, name string) (n int) {
	for list, ranks := range rankCounts {
		if list.Has(name) {
			n += ranks
		}
	}
	return n
}

// addPlacement: if all ranks of before were down, the time until entries are refused does not begin
// anew.
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

func (r *rank) lists(name string) bool { return r.Lists.Has(name) }

// countWaitingForName leaves out discarded hand-offs, because no client waits for these.
func (b *board) countWaitingForName(e *pool.Entry, change int) {
	if p := b.partlyListedNames[e.Name]; p != nil && !e.Discard {
		p.waitingForName += change
	}
}

func (b *board) isListedNowhere(name string) bool {
	return len(b.groups) > 0 && b.partlyListedNames[name] == nil && !b.firstRankNames.Has(name)
}
