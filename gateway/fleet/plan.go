package fleet

import (
	"errors"
	"fmt"
	"reflect"
	"slices"

	"evenkeel/gateway/config"
)

// A reload speaks of the engines whose entry, or whose profile, it changes, and
// of no other: what an operator added, described anew, removed or drained since
// stays so. About one engine the last word counts, whoever said it.

// Plan is what a reload does to the fleet, found possible.
type Plan struct {
	set    []*instance
	remove []string // keys
	order  []string // of the file
}

// Listed is an engine as a config has it.
type Listed struct {
	role string
	conf config.Engine
}

// enginesOf lists the engines of a config by role and host:port.
func enginesOf(s *Settings) (all map[string]Listed, order []string) {
	all = map[string]Listed{}
	for role, e := range s.Engines.All() {
		id, _ := config.InstanceID(e.URL) // validated
		all[role+" "+id] = Listed{role, e}
		order = append(order, role+" "+id)
	}
	return all, order
}

// Plan compares two configs and builds what the second needs.
func (f *Fleet) Plan(old, next *Settings) (*Plan, error) {
	before, _ := enginesOf(old)
	after, order := enginesOf(next)
	p := &Plan{order: order}
	var errs []error
	build := func(role string, e config.Engine, own bool) {
		in, err := f.build(role, e, next)
		if err != nil {
			errs = append(errs, err)
			return
		}
		in.own = own
		p.set = append(p.set, in)
	}
	spoken := map[string]bool{}
	for _, key := range order {
		was, known := before[key]
		if now := after[key]; !known || !reflect.DeepEqual(was, now) {
			spoken[key] = true
			build(now.role, now.conf, true)
		}
	}
	for key := range before {
		if _, ok := after[key]; !ok {
			spoken[key] = true
			p.remove = append(p.remove, key)
		}
	}
	f.mu.RLock()
	defer f.mu.RUnlock()
	for _, key := range f.order {
		in := f.instances[key]
		profile, ok := next.Profiles[in.conf.Profile]
		switch {
		case spoken[key]:
		case !ok:
			errs = append(errs, fmt.Errorf("profiles.%s is missing, but %s engine %s, which was added while the proxy runs, uses it; remove the engine first, or keep the profile",
				in.conf.Profile, in.role, in.id))
		case !reflect.DeepEqual(*profileOf(in.role, profile), *in.profile):
			build(in.role, in.conf, false)
		}
	}
	return p, errors.Join(errs...)
}

// Apply makes the fleet what was planned. Engines that are gone finish what they
// run; those that stay keep their state, load and drains.
func (f *Fleet) Apply(p *Plan) {
	for _, in := range p.set {
		f.learnHosts(in) // before its hand-offs come
	}
	var fresh []string
	f.mu.Lock()
	for _, key := range p.remove {
		if in := f.instances[key]; in != nil {
			f.drop(in, false)
		}
	}
	for _, in := range p.set {
		if f.instances[in.key()] == nil {
			fresh = append(fresh, in.key())
		}
		f.put(in)
	}
	f.order = f.order[:0]
	place := map[string]int{}
	for i, key := range p.order {
		place[key] = i
	}
	for key := range f.instances {
		if _, ok := place[key]; !ok {
			place[key] = len(p.order) + f.instances[key].number
		}
		f.order = append(f.order, key)
	}
	slices.SortFunc(f.order, func(a, b string) int { return place[a] - place[b] })
	f.mu.Unlock()
	f.resume(func(s *stopped) bool { return slices.Contains(fresh, s.at.Instance) })
	f.watch()
	f.Publish()
}

// ReloadTrust takes up a ca_file that changed; other says whether a file did.
func (f *Fleet) ReloadTrust(other func(file string) bool) (changed bool, err error) {
	set := f.host.Settings()
	p := &Plan{}
	_, p.order = enginesOf(set)
	files := map[string]bool{}
	for _, profile := range set.Profiles {
		if file := profile.CAFile; file != "" && !files[file] {
			files[file] = true
			changed = other(file) || changed
		}
	}
	if !changed {
		return false, nil
	}
	f.mu.RLock()
	var list []*instance
	for _, in := range f.instances {
		if in.profile.CAFile != "" && in.engine.TLS != nil {
			list = append(list, in)
		}
	}
	f.mu.RUnlock()
	for _, in := range list {
		again, err := f.build(in.role, in.conf, set)
		if err != nil {
			return false, err
		}
		p.set = append(p.set, again)
	}
	f.Apply(p)
	return true, nil
}
