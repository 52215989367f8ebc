package roster

import (
	"errors"
	"fmt"
	"reflect"
	"slices"

	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// A reload only touches the engines whose entry or profile it changes. Everything else that operators have done since the last reload
// stays: engines that they added, changed, removed or drained.

// Listed is an engine as a config lists it.
type Listed struct {
	Role string
	Conf config.Engine
}

// Changes are the changes that a reload makes to the engines.
type Changes struct {
	Listed  []Listed  // entries that are new or have changed
	Again   []*Engine // engines whose entry is the same, but whose profile has changed
	Removed []string  // keys of engines that are not listed any more
}

// Compare finds what a reload changes. before and after have the engines of the old and the new config, by key. order has the keys of the
// new config in its order. profile returns the profile that the new config has for an engine; nil: none. It is an error if an engine that
// stays would have no profile.
func (p *Snapshot) Compare(before, after map[string]Listed, order []string, profile func(*Engine) *mooncake.Profile) (c Changes,
	err error) {
	decided := map[string]bool{} // keys of the engines whose entry changes
	for _, key := range order {
		old, known := before[key]
		if entry := after[key]; !known || !reflect.DeepEqual(old, entry) {
			decided[key] = true
			c.Listed = append(c.Listed, entry)
		}
	}
	for key := range before {
		if _, ok := after[key]; !ok {
			decided[key] = true
			c.Removed = append(c.Removed, key)
		}
	}
	for _, e := range p.order {
		switch next := profile(e); {
		case decided[e.Key()]: // it is removed, or built again with its new entry
		case next == nil:
			err = errors.Join(err, fmt.Errorf("profiles.%s is missing, but %s engine %s, which was added while the proxy runs, uses it; "+
				"remove the engine first, or keep the profile", e.Conf.Profile, e.Role, e.ID))
		case !reflect.DeepEqual(*next, *e.Profile):
			c.Again = append(c.Again, e)
		}
	}
	return c, err
}

// Planned carries out a reload.
type Planned struct {
	Set    []*Engine
	Remove []string // keys of the engines to remove
	Order  []string // keys of the engines in the order of the file
}

// apply removes and adds engines, and sorts all engines in the order of the file. Engines that are not in the file follow, in the order in
// which they came.
func (v Planned) apply(r *Roster, a *applying) {
	for _, key := range v.Remove {
		if e := r.engines[key]; e != nil {
			r.drop(e, false, a.now)
		}
	}
	for _, e := range v.Set {
		if key := e.Key(); r.engines[key] == nil { // drains of an engine that was there before do not apply
			r.endDrains(func(s *Drain) bool { return s.At.Instance == key })
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
