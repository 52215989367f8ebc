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
		KVReplayPort: a.KVReplayPort, Group: a.Group, Barrier: a.Barrier, Slots: a.Slots,
		KV: a.KVTokens, Cost: a.Cost, Budget: a.Budget, Interval: a.Interval,
	}
}

// attributesOf returns what a file of engines says of an engine. engineOf does the reverse.
func attributesOf(e config.Engine) discover.Attributes {
	return discover.Attributes{
		Profile: e.Profile, Ranks: e.Ranks, FirstRank: e.First, Region: e.Region, KVEventsPort: e.KVEventsPort,
		KVReplayPort: e.KVReplayPort, Group: e.Group, Barrier: e.Barrier, Slots: e.Slots,
		KVTokens: e.KV, Cost: e.Cost, Budget: e.Budget, Interval: e.Interval,
	}
}

// foundOf returns what the roster stores about how an engine was found.
func foundOf(e discover.Engine) roster.Found {
	return roster.Found{Source: e.Source, Incarnation: e.Incarnation, Away: e.Away}
}

// discovered lets a discoverer change the fleet of this proxy.
type discovered struct{ *Deps }

// Put adds an engine, or updates its description.
func (d discovered) Put(e discover.Engine) error {
	return d.Fleet.PutFound(e.Role, engineOf(e), foundOf(e))
}

// SetAway stops new work for an engine, or starts it again, as e.Away says.
func (d discovered) SetAway(e discover.Engine) { d.Fleet.UpdateFound(e.Key(), foundOf(e)) }

// Remove removes an engine that is gone, unless the config lists it.
func (d discovered) Remove(e discover.Engine) {
	if !d.InConfig(e) {
		d.Fleet.RemoveFound(e.Key(), e.Incarnation)
	}
}

// InConfig says whether the config lists an engine.
func (d discovered) InConfig(e discover.Engine) bool { return d.Settings().Listed[e.Key()] }
