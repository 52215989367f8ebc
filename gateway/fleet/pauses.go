package fleet

import "evenkeel/gateway/fleet/roster"

// Pause stops new requests to the engines of a group; empty: to all engines. When it returns, no more requests are
// bound there.
func (f *Fleet) Pause(group, path string) { f.apply(roster.PauseBegun{Group: group, Path: path}) }

// Resume lets requests go to the engines of a group again, except to those in left, which did not resume.
func (f *Fleet) Resume(group string, left []string) {
	f.apply(roster.PauseEnded{Group: group, Left: left})
}

// Emptied says that engines have dropped everything that they computed before.
func (f *Fleet) Emptied(keys []string) { f.apply(roster.Emptied{Keys: keys}) }
