package board

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"evenkeel/dispatcher/policy"
	"evenkeel/pool"
)

// Names. The ranks of a board share a base model. Beside it, each engine may list other names: LoRA adapters, which are
// loaded and unloaded engine by engine, and more names of the base model. A request goes only to ranks that list the name that it asks
// for. Policies know nothing of that: they see the request where all ranks of their group list its name. Where only some do, the
// board itself gives it to the emptiest of these.

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

// listings updates the names that some ranks list and others do not. It searches for them only if a list has changed, or the ranks that
// have one. Otherwise it only updates which ranks are up, and there are few such names or none.
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
	for _, l := range b.partial {
		l.up, l.largest = 0, 0
		for _, r := range l.ranks {
			if r.Up || r.Awaited {
				l.up++
			}
			l.largest = max(l.largest, r.budget(policy.Watermark(r.group.chosen.Policy)))
		}
		if l.up > 0 {
			l.downTo = time.Time{}
		} else if l.downTo.IsZero() {
			l.downTo = b.now.Add(outageGrace)
		}
	}
}

// relist finds anew which names some ranks list and others do not, and which ranks list each of them. It emits these names.
func (b *board) relist() {
	partialBefore := b.partial
	b.partial, b.common = nil, nil
	ranksWith := map[*Names]int{} // how many ranks have each list
	for i, l := range b.listed {
		if ranksWith[l.lists]++; i == 0 {
			b.common = l.lists
		}
	}
	for list := range ranksWith {
		if len(ranksWith) == 1 || list == nil { // all ranks have the same list, or the list is not known and has every name
			continue
		}
		for name := range list.all {
			if b.partial[name] != nil {
				continue
			}
			listedBy := 0
			for other, ranks := range ranksWith {
				if other.Has(name) {
					listedBy += ranks
				}
			}
			if listedBy == len(b.listed) {
				continue
			}
			if b.partial == nil {
				b.partial = map[string]*listing{}
			}
			l := &listing{}
			if before := partialBefore[name]; before != nil {
				l.downTo = before.downTo
			}
			b.partial[name] = l
			l.findRanks(b, name)
		}
	}
	b.names, b.named = b.names[:0], nil
	for _, name := range slices.Sorted(maps.Keys(b.partial)) {
		b.names, b.named = append(b.names, b.partial[name]), append(b.named, name)
	}
	b.paces = make([]Pace, len(b.names))
	b.emit(Effect{Kind: EffectNames, Group: GroupKey{Model: b.model}, Listed: b.named})
}

// findRanks fills in the ranks that list a name, and the groups of which all ranks do.
func (l *listing) findRanks(b *board, name string) {
	for _, g := range b.groups {
		from := len(l.ranks)
		for _, r := range g.members {
			if r.lists(name) {
				l.ranks = append(l.ranks, r)
			}
		}
		if inGroup := l.ranks[from:]; len(inGroup) == len(g.members) {
			l.whole = append(l.whole, g)
		} else {
			l.parts = append(l.parts, inGroup...)
		}
	}
	slices.SortFunc(l.ranks, func(x, y *rank) int { return cmp.Compare(x.ID, y.ID) })
}

func (r *rank) lists(name string) bool { return r.Lists.Has(name) }

// waitsFor adds n to the count of entries that wait for an entry's name: 1 when it begins to wait, -1 when it leaves.
func (b *board) waitsFor(e *pool.Entry, n int) {
	if l := b.partial[e.Name]; l != nil && !e.Discard {
		l.waiting += n
	}
}

// unlisted says whether no rank of the board lists a name, not even a rank that is down.
func (b *board) unlisted(name string) bool {
	return len(b.groups) > 0 && b.partial[name] == nil && !b.common.Has(name)
}
