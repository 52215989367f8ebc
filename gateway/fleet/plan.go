package fleet

import (
	"errors"
	"fmt"
	"reflect"

	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet/roster"
)

// A reload speaks of the engines whose entry, or whose profile, it changes, and
// of no other: what an operator added, described anew, removed or drained since
// stays so. About one engine the last word counts, whoever said it.

// Plan is what a reload does to the fleet, found possible.
type Plan struct {
	set    []*roster.Engine
	remove []string // keys
	order  []string // of the file
}

// Plan compares two configs and builds what the second needs.
func (f *Fleet) Plan(old, next *Settings) (*Plan, error) {
	before, _ := enginesOf(old)
	after, order := enginesOf(next)
	p := &Plan{order: order}
	var errs []error
	build := func(role string, e config.Engine, own bool) {
		in, err := f.host.build(role, e, next)
		if err != nil {
			errs = append(errs, err)
			return
		}
		in.Own = own
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
	for _, in := range f.Now().Engines() {
		profile, ok := next.Profiles[in.Conf.Profile]
		switch {
		case spoken[in.Key()]:
		case !ok:
			errs = append(errs, fmt.Errorf("profiles.%s is missing, but %s engine %s, which was added while the proxy runs, uses it; remove the engine first, or keep the profile",
				in.Conf.Profile, in.Role, in.ID))
		case !reflect.DeepEqual(*profileOf(in.Role, profile), *in.Profile):
			build(in.Role, in.Conf, false)
		}
	}
	return p, errors.Join(errs...)
}

// Apply makes the fleet what was planned. Engines that are gone finish what they
// run; those that stay keep their state, load and drains.
func (f *Fleet) Apply(p *Plan) { f.enter(roster.Planned{Set: p.set, Remove: p.remove, Order: p.order}) }

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
	for _, in := range f.Now().Engines() {
		if in.Profile.CAFile == "" || in.Target.TLS == nil {
			continue
		}
		again, err := f.host.build(in.Role, in.Conf, set)
		if err != nil {
			return false, err
		}
		p.set = append(p.set, again)
	}
	f.Apply(p)
	return true, nil
}
