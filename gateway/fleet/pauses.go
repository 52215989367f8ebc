package fleet

import "evenkeel/gateway/fleet/roster"

// Pause stops new requests to a group; empty: to all engines. Once it has returned, none is bound
// there.
func (f *Fleet) Pause(group, path string) { f.apply(roster.PauseBegun{Group: group, Path: path}) }

// Resume lets requests go to a group again, except to the engines in unresumed.
func (f *Fleet) Resume(group string, unresumed []string) {
	f.apply(roster.PauseEnded{Group: group, Unresumed: unresumed})
}

// RecordEmptiedCaches records that engines have dropped all KV that they had computed.
func (f *Fleet) RecordEmptiedCaches(keys []string) { f.apply(roster.Emptied{Keys: keys}) }
