package fleet

import "evenkeel/gateway/fleet/roster"

// Pause has nothing new go to the engines of a group, empty for all engines. When it returns, nothing is bound there any more.
func (f *Fleet) Pause(group, path string) { f.apply(roster.PauseBegun{Group: group, Path: path}) }

// Resume has requests go to the engines of a group again, but to none of those that are left: these did not resume.
func (f *Fleet) Resume(group string, left []string) {
	f.apply(roster.PauseEnded{Group: group, Left: left})
}

// Emptied says that engines hold nothing any more of what they computed.
func (f *Fleet) Emptied(keys []string) { f.apply(roster.Emptied{Keys: keys}) }
