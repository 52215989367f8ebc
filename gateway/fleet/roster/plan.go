package roster

import (
	"errors"
	"fmt"
	"reflect"
	"slices"

	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// A reload only touches the engines whose entry or profile it changes. What operators have done to
// others since the last reload stays.

// Listed is an engine as a config lists it.
type Listed struct {
	Role string
	Conf config.Engine
}

// Changes are the changes that a reload makes to the engines.
type Changes struct {
	Listed  []Listed  // entries that are new or have changed
	Rebuild []*Engine // only the profile of these has changed
	Removed []string  // keys
}

// Compare finds what a reload changes. before and after are the configs by key, order has the keys
// of the new one. It is an error if profile has none for an engine that stays.
func (p *Snapshot) Compare(before, after map[string]Listed, order []string, profile func(*Engine) *mooncake.Profile) (c Changes,
	err error) {
	entryChanged := map[string]bool{} // new, changed or removed
	for _, key := range order {
		old, known := before[key]
		if entry := after[key]; !known || !reflect.DeepEqual(old, entry) {
			entryChanged[key] = true
			c.Listed = append(c.Listed, entry)
		}
	}
	for key := range before {
		if _, ok := after[key]; !ok {
			entryChanged[key] = true
			c.Removed = append(c.Removed, key)
		}
	}
	for _, e := range p.order {
		switch next := profile(e); {
		case entryChanged[e.Key()]:
		case next == nil:
			err = errors.Join(err, fmt.Errorf("profiles.%s is missing, but %s engine %s, which was added while the proxy runs, uses it; "+
				"remove the engine first, or keep the profile", e.Conf.Profile, e.Role, e.ID))
		case !reflect.DeepEqual(*next, *e.Profile):
			c.Rebuild = append(c.Rebuild, e)
		}
	}
	return c, err
}

// Planned says that a reload sets and removes engines.
type Planned struct {
	Set    []*Engine // new, or built again
	Remove []string  // keys
	Order  []string  // keys in the order of the file
}

// apply sorts engines as in the file. Others follow, in the order in which they came.
func (v Planned) apply(r *Roster, out *effects) {
	for _, key := range v.Remove {
		if e := r.engines[key]; e != nil {
			r.remove(e, mayStillRun, out.now)
		}
	}
	for _, e := range v.Set {
		if key := e.Key(); r.engines[key] == nil { // drains of an earlier engine do not apply
			r.endDrains(func(s *Drain) bool { return s.At.Instance == key })
		}
		r.put(e, out.now)
	}
	position := map[string]int{}
	for i, key := range v.Order {
		position[key] = i
	}
	r.order = r.order[:0]
	for key, e := range r.engines {
		if _, listed := position[key]; !listed {
			position[key] = len(v.Order) + e.arrival
		}
		r.order = append(r.order, key)
	}
	slices.SortFunc(r.order, func(a, b string) int { return position[a] - position[b] })
	out.add(Effect{What: WatchEngines})
}
