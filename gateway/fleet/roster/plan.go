package roster

import (
	"errors"
	"fmt"
	"reflect"
	"slices"

	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// A reload speaks of the engines whose entry, or whose profile, it changes, and
// of no other: what an operator added, described anew, removed or drained since
// stays so. About one engine the last word counts, whoever said it.

// Listed is an engine as a config has it.
type Listed struct {
	Role string
	Conf config.Engine
}

// Changes is what a reload means for the engines that there are.
type Changes struct {
	Listed  []Listed  // entries that are new, or others than before
	Again   []*Engine // engines that keep their entry, and whose profile is another one
	Removed []string  // keys
}

// Compare finds what the engines of one config, by key, are in the next one. order is that of the next config's keys, and profile returns
// the profile that it has for an engine; nil: none.
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

// Planned is what a reload does.
type Planned struct {
	Set    []*Engine
	Remove []string // keys
	Order  []string // keys of the file
}

func (v Planned) apply(r *Roster, a *applying) {
	for _, key := range v.Remove {
		if e := r.engines[key]; e != nil {
			r.drop(e, false, a.now)
		}
	}
	for _, e := range v.Set {
		if key := e.Key(); r.engines[key] == nil {
			r.resume(func(s *Stop) bool { return s.At.Instance == key })
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
