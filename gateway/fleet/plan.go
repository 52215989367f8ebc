package fleet

import (
	"errors"

	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/mooncake"
)

// Plan says what a reload will do to the fleet, after a check that it is possible.
type Plan = roster.Planned

// Plan compares the old and the next config, and builds the engines that are new or have changed. The plan may only be applied if err is
// nil.
func (f *Fleet) Plan(old, next *Settings) (*Plan, error) {
	before, _ := enginesOf(old)
	after, order := enginesOf(next)
	nextProfile := func(e *roster.Engine) *mooncake.Profile {
		if profile, ok := next.Profiles[e.Conf.Profile]; ok {
			return profileOf(e.Role, profile)
		}
		return nil // the next config has no such profile
	}
	changes, err := f.Now().Compare(before, after, order, nextProfile)
	p := &Plan{Order: order, Remove: changes.Removed}
	const newEntry, sameEntry = true, false
	add := func(role string, e config.Engine, fromNewEntry bool) { // adds the engine to the plan, or its error to err
		built, invalid := f.deps.build(role, e, next)
		if invalid != nil {
			err = errors.Join(err, invalid)
			return
		}
		built.FromNewEntry = fromNewEntry
		p.Set = append(p.Set, built)
	}
	for _, entry := range changes.Listed { // the entries of the next config that are new or have changed
		add(entry.Role, entry.Conf, newEntry)
	}
	// The profiles of these engines have changed, and their entries have not. An operator or discovery may have added them.
	for _, e := range changes.Rebuild {
		add(e.Role, e.Conf, sameEntry)
	}
	return p, err
}

// Apply carries out a plan. Removed engines finish their requests. Engines that stay keep their state, load and drains.
func (f *Fleet) Apply(p *Plan) { f.resolveAndApply(*p) }

// ReloadTrust takes up changed ca_files: if one has changed, it builds every engine whose profile has a ca_file again. hasChanged says
// whether a file has changed since the last call for it, so ReloadTrust calls it once per file. An engine that cannot be built keeps the
// certificates it has, and err has the first such engine of each profile. If every engine fails, changed is false, and the fleet stays as
// it was.
func (f *Fleet) ReloadTrust(hasChanged func(file string) bool) (changed bool, err error) {
	set := f.deps.Settings()
	_, order := enginesOf(set)
	p := &Plan{Order: order}   // Apply sorts all engines in this order, which is that of the config and stays as it is
	files := map[string]bool{} // the files for which hasChanged was called
	for _, profile := range set.Profiles {
		if file := profile.CAFile; file != "" && !files[file] {
			files[file] = true
			changed = hasChanged(file) || changed // in this order, so that hasChanged is called for each file
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
	f.Apply(p) // if no engine could be built again, all engines stay as they are
	everyFailed := len(p.Set) == 0 && err != nil
	return !everyFailed, err
}
