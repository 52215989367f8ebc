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
	n := &Names{all: make(map[string]struct{}, len(names))}
	for _, name := range names {
		n.all[name] = struct{}{}
	}
	return n
}

// Has says whether a name is in the set. A nil set has every name, and every set has the empty name.
func (n *Names) Has(name string) bool {
	if n == nil || name == "" {
		return true
	}
	_, ok := n.all[name]
	return ok
}

// Same says whether both sets have the same names.
func (n *Names) Same(other *Names) bool { return maps.Equal(n.all, other.all) }

// listings updates the listings: one for each name that some ranks list and others do not. It searches for these names only if the ranks or
// their lists have changed. Otherwise it only updates how many ranks of each listing are up.
func (b *board) listings() {
	b.listers = b.listers[:0]
	for _, g := range b.groups {
		for _, r := range g.members {
			b.listers = append(b.listers, lister{r, g, r.Lists})
		}
	}
	if !slices.Equal(b.listers, b.listed) {
		b.listed = append(b.listed[:0], b.listers...)
		b.relist()
	}
	for _, p := range b.partial {
		p.up, p.largest = 0, largestPrompt(p.ranks)
		for _, r := range p.ranks {
			if r.Up || r.Awaited {
				p.up++
			}
		}
		if p.up > 0 {
			p.graceEnds = time.Time{}
		} else if p.graceEnds.IsZero() {
			p.graceEnds = b.now.Add(outageGrace)
		}
	}
}

// relist finds the names that some ranks list and others do not, and the ranks that list each of them. It emits these names.
func (b *board) relist() {
	partialBefore := b.partial
	b.partial, b.common = nil, nil
	ranksWith := map[*Names]int{} // how many ranks have each list
	for _, l := range b.listed {
		ranksWith[l.lists]++
	}
	if len(b.listed) > 0 {
		b.common = b.listed[0].lists
	}
	for list := range ranksWith {
		if len(ranksWith) == 1 || list == nil { // all ranks have the same list, or this list is not known and counts as every name
			continue
		}
		for name := range list.all {
			if b.partial[name] == nil && listedBy(ranksWith, name) < len(b.listed) {
				b.addListing(name, partialBefore[name])
			}
		}
	}
	b.names, b.named = b.names[:0], nil
	for _, name := range slices.Sorted(maps.Keys(b.partial)) {
		b.names, b.named = append(b.names, b.partial[name]), append(b.named, name)
	}
	b.paces = make([]Throughput, len(b.names))
	b.emit(Effect{Kind: EffectNames, Group: GroupKey{Model: b.model}, Listed: b.named})
}

// listedBy returns how many ranks list a name.
func listedBy(ranksWith map[*Names]int, name string) (n int) {
	for list, ranks := range ranksWith {
		if list.Has(name) {
			n += ranks
		}
	}
	return n
}

// addListing makes the listing of a name. If the name had a listing before, an outage of its ranks goes on.
func (b *board) addListing(name string, before *namePlacement) {
	p := &namePlacement{}
	if before != nil {
		p.graceEnds = before.graceEnds
	}
	if b.partial == nil {
		b.partial = map[string]*namePlacement{}
	}
	b.partial[name] = p
	p.findRanks(b, name)
}

// findRanks finds the ranks that list a name, and the groups in which every rank lists it.
func (p *namePlacement) findRanks(b *board, name string) {
	for _, g := range b.groups {
		from := len(p.ranks)
		for _, r := range g.members {
			if r.lists(name) {
				p.ranks = append(p.ranks, r)
			}
		}
		if inGroup := p.ranks[from:]; len(inGroup) == len(g.members) {
			p.whole = append(p.whole, g)
		} else {
			p.parts = append(p.parts, inGroup...)
		}
	}
	slices.SortFunc(p.ranks, func(x, y *rank) int { return cmp.Compare(x.ID, y.ID) })
}

func (r *rank) lists(name string) bool { return r.Lists.Has(name) }

// waitsFor adds n to the number of entries that wait for the same name as e: n is 1 when e begins to wait, and -1 when it leaves.
func (b *board) waitsFor(e *pool.Entry, n int) {
	if p := b.partial[e.Name]; p != nil && !e.Discard {
		p.waiting += n
	}
}

// unlisted says whether no rank of the board lists a name, not even a rank that is down.
func (b *board) unlisted(name string) bool {
	return len(b.groups) > 0 && b.partial[name] == nil && !b.common.Has(name)
}
