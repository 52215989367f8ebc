package fleet

import (
	"errors"

	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/mooncake"
)

// Plan says what a reload will do to the fleet, after a check that it is possible.
type Plan = roster.Planned

// Plan compares two configs, and builds engines that are new or have changed. It may only be
// applied if err is nil.
func (f *Fleet) Plan(old, next *Settings) (*Plan, error) {
	before, _ := enginesOf(old)
	after, order := enginesOf(next)
	nextProfile := func(e *roster.Engine) *mooncake.Profile {
		if profile, ok := next.Profiles[e.Conf.Profile]; ok {
			return profileOf(e.Role, profile)
		}
		return nil
	}
	changes, err := f.Now().Compare(before, after, order, nextProfile)
	p := &Plan{Order: order, Remove: changes.Removed}
	const newEntry, sameEntry = true, false
	add := func(role string, e config.Engine, fromNewEntry bool) {
		built, invalid := f.deps.build(role, e, next)
		if invalid != nil {
			err = errors.Join(err, invalid)
			return
		}
		built.FromNewEntry = fromNewEntry
		p.Set = append(p.Set, built)
	}
	for _, entry := range changes.Listed {
		add(entry.Role, entry.Conf, newEntry)
	}
	// Only the profiles of these have changed. An operator or discovery may have added them.
	for _, e := range changes.Rebuild {
		add(e.Role, e.Conf, sameEntry)
	}
	return p, err
}

// Apply carries out a plan. Removed engines finish their requests. Engines that stay keep state,
// load and drains.
func (f *Fleet) Apply(p *Plan) { f.resolveAndApply(*p) }

// ReloadTrust builds every engine again whose profile has a ca_file, if hasChanged says that one
// has changed since the last call for it. err has the first failed engine of each profile. If every
// engine fails, changed is false, and the fleet stays as it was.
func (f *Fleet) ReloadTrust(hasChanged func(file string) bool) (changed bool, err error) {
	set := f.deps.Settings()
	_, order := enginesOf(set)
	p := &Plan{Order: order} // so that the order stays as it is
	files := map[string]bool{}
	for _, profile := range set.Profiles {
		if file := profile.CAFile; file != "" && !files[file] {
			files[file] = true
			changed = hasChanged(file) || changed // in this order, so that it is called for each file
		}
	}
	if !changed {
		return false, nil
	}
	failed := map[string]bool{} // profiles with an engine that could not be built
	for _, e := range f.Now().Engines() {
		usesFile := e.Profile.CAFile != "" && e.Target.TLS != nil
		if !usesFile || failed[e.Conf.Profile] {
			continue
		}
		rebuilt, invalid := f.deps.build(e.Role, e.Conf, set)
		if invalid != nil {
			failed[e.Conf.Profile] = true
			err = errors.Join(err, invalid)
			continue
		}
		p.Set = append(p.Set, rebuilt)
	}
	f.Apply(p)
	everyFailed := len(p.Set) == 0 && err != nil
	return !everyFailed, err
}
