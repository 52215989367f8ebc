package discovery

import (
	"evenkeel/engine/discover"
	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet/roster"
)

// engineOf returns a found engine in the form of the config.
func engineOf(e discover.Engine) config.Engine {
	a := e.Attributes
	return config.Engine{
		URL: e.URL, Profile: a.Profile, Ranks: a.Ranks, First: a.FirstRank, Region: a.Region, KVEventsPort: a.KVEventsPort,
		KVReplayPort: a.KVReplayPort,
		Group:        a.Group, Barrier: a.Barrier, Slots: a.Slots, KV: a.KVTokens, Cost: a.Cost, Budget: a.Budget, Interval: a.Interval,
	}
}

// foundOf is what the roster keeps of how an engine was found.
func foundOf(e discover.Engine) roster.Found {
	return roster.Found{Source: e.Source, Incarnation: e.Incarnation, Away: e.Away}
}

// discovered is the fleet as a discoverer uses it.
type discovered struct{ *Host }

// Put takes in an engine, or a new description of it.
func (d discovered) Put(e discover.Engine) error { return d.Fleet.Put(e.Role, engineOf(e), foundOf(e)) }

// Turn starts or stops new work for an engine.
func (d discovered) Turn(e discover.Engine) { d.Fleet.Turn(e.Key(), foundOf(e)) }

// Remove takes out an engine that is not there any more, unless it stands in the config.
func (d discovered) Remove(e discover.Engine) {
	if !d.Listed(e) {
		d.Fleet.Leave(e.Key(), e.Incarnation)
	}
}

// Listed says whether an engine is in the config.
func (d discovered) Listed(e discover.Engine) bool { return d.Settings().Listed[e.Key()] }
