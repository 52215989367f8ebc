package roster

import (
	"errors"
	"fmt"
	"reflect"
	"slices"

	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// A reload decides only about the engines whose entry or profile it changes. What an operator added, described anew,
// removed or drained since stays so. The last word about an engine counts, whoever said it.

// Listed is an engine as a config lists it.
type Listed struct {
	Role string
	Conf config.Engine
}

// Changes is what a reload changes about the present engines.
type Changes struct {
	Listed  []Listed  // entries that are new or have changed
	Again   []*Engine // engines whose entry is the same, but whose profile has changed
	Removed []string  // keys of engines that are not listed any more
}

// Compare finds what a reload changes. before and after have the engines of the two configs, by key. order is the
// keys of the next config in its order, and profile returns the profile that the next config has for an engine; nil:
// none.
func (p *Published) Compare(before, after map[string]Listed, order []string, profile func(*Engine) *mooncake.Profile) (c Changes,
	err error) {
	spoken := map[string]bool{}
	for _, key := range order {
		was, known := before[key]
		if now := after[key]; !known || !reflect.DeepEqual(was, now) {
			spoken[key] = true
			c.Listed = append(c.Listed, now)
		}
	}
	for key := range before {
		if _, ok := after[key]; !ok {
			spoken[key] = true
			c.Removed = append(c.Removed, key)
		}
	}
	for _, e := range p.order {
		switch next := profile(e); {
		case spoken[e.Key()]:
		case next == nil:
			err = errors.Join(err, fmt.Errorf("profiles.%s is missing, but %s engine %s, which was added while the proxy runs, uses it; "+
				"remove the engine first, or keep the profile", e.Conf.Profile, e.Role, e.ID))
		case !reflect.DeepEqual(*next, *e.Profile):
			c.Again = append(c.Again, e)
		}
	}
	return c, err
}

// Planned says what a reload does.
type Planned struct {
	Set    []*Engine
	Remove []string // keys of the engines to remove
	Order  []string // keys of the engines in the order of the file
}

// apply takes the engines out and in, and puts all engines in the order of the file. Those that are not in the file follow, in the order in
// which they came.
func (v Planned) apply(r *Roster, a *applying) {
	for _, key := range v.Remove {
		if e := r.engines[key]; e != nil {
			r.drop(e, false, a.now)
		}
	}
	for _, e := range v.Set {
		if key := e.Key(); r.engines[key] == nil {
			r.endDrains(func(s *Stop) bool { return s.At.Instance == key })
		}
		r.put(e, a.now)
	}
	place := map[string]int{}
	for i, key := range v.Order {
		place[key] = i
	}
	r.order = r.order[:0]
	for key, e := range r.engines {
		if _, ok := place[key]; !ok {
			place[key] = len(v.Order) + e.number
		}
		r.order = append(r.order, key)
	}
	slices.SortFunc(r.order, func(a, b string) int { return place[a] - place[b] })
	a.add(Effect{What: Watched})
}
