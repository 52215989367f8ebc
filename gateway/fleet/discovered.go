package fleet

import (
	"evenkeel/engine/discover"
	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet/roster"
)

// EngineOf returns a found engine in the form of the config.
func EngineOf(e discover.Engine) config.Engine {
	a := e.Attributes
	return config.Engine{
		URL: e.URL, Profile: a.Profile, Ranks: a.Ranks, First: a.FirstRank, Region: a.Region, KVEventsPort: a.KVEventsPort,
		KVReplayPort: a.KVReplayPort,
		Group:        a.Group, Barrier: a.Barrier, Slots: a.Slots, KV: a.KVTokens, Cost: a.Cost, Budget: a.Budget, Interval: a.Interval,
	}
}

// Discovered is the fleet as discovery uses it.
type Discovered struct{ *Fleet }

var _ discover.Fleet = Discovered{}

// Put takes in an engine, or a new description of it.
func (d Discovered) Put(e discover.Engine) error {
	f, set := d.Fleet, d.host.Settings()
	conf, err := set.CompleteFound(e.Role, EngineOf(e))
	if err != nil {
		return err
	}
	in, err := f.host.build(e.Role, conf, set)
	if err != nil {
		return err
	}
	in.Found = roster.Found{Source: e.Source, Incarnation: e.Incarnation, Away: e.Away}
	f.enter(roster.Entered{Engine: in})
	return nil
}

// Turn starts or stops new work for an engine. What an operator decided about the engine stays, also that it is
// removed.
func (d Discovered) Turn(e discover.Engine) {
	d.apply(roster.Turned{Key: e.Key(), Found: roster.Found{Source: e.Source, Incarnation: e.Incarnation, Away: e.Away}})
}

// Remove takes out an engine that is not there any more, unless another engine has its place by now.
func (d Discovered) Remove(e discover.Engine) {
	if !d.Listed(e) {
		d.apply(roster.Left{Key: e.Key(), Incarnation: e.Incarnation})
	}
}

// Listed says whether an engine is in the config.
func (d Discovered) Listed(e discover.Engine) bool { return d.host.Settings().Listed[e.Key()] }
