package fleet

import (
	"slices"

	"evenkeel/engine/discover"
	"evenkeel/gateway/config"
)

// EngineOf writes a found engine as the config would.
func EngineOf(e discover.Engine) config.Engine {
	a := e.Attributes
	return config.Engine{
		URL: e.URL, Profile: a.Profile, Ranks: a.Ranks, First: a.FirstRank, Region: a.Region, KVEventsPort: a.KVEventsPort, KVReplayPort: a.KVReplayPort,
		Group: a.Group, Barrier: a.Barrier, Slots: a.Slots, KV: a.KVTokens, Cost: a.Cost, Budget: a.Budget, Interval: a.Interval,
	}
}

// Discovered is the fleet as discovery sees it.
type Discovered struct{ *Fleet }

var _ discover.Fleet = Discovered{}

// Put takes in an engine, or what is new about it.
func (d Discovered) Put(e discover.Engine) error {
	f, set := d.Fleet, d.host.Settings()
	conf, err := set.CompleteFound(e.Role, EngineOf(e))
	if err != nil {
		return err
	}
	in, err := f.build(e.Role, conf, set)
	if err != nil {
		return err
	}
	in.found = found{source: e.Source, incarnation: e.Incarnation, away: e.Away}
	f.mu.RLock()
	known := f.instances[in.key()] != nil
	f.mu.RUnlock()
	if !known { // a drain was of another
		f.resume(func(s *stopped) bool { return s.at.Instance == in.key() })
	}
	f.enter(in)
	return nil
}

// Turn has an engine get new work, or none. What an operator said of it stays,
// also that it is removed.
func (d Discovered) Turn(e discover.Engine) {
	f := d.Fleet
	f.mu.Lock()
	in := f.instances[e.Key()]
	there := in != nil && in.incarnation == e.Incarnation
	if there {
		in.found = found{source: e.Source, incarnation: e.Incarnation, away: e.Away}
	}
	f.mu.Unlock()
	if there {
		f.Publish()
	}
}

// Remove takes an engine out that is not there any more, unless somebody else
// has put another in its place.
func (d Discovered) Remove(e discover.Engine) {
	f := d.Fleet
	if d.Listed(e) {
		return
	}
	f.mu.Lock()
	in := f.instances[e.Key()]
	gone := in != nil && in.incarnation == e.Incarnation
	if gone {
		f.drop(in, e.Incarnation != "")
		f.order = slices.DeleteFunc(f.order, func(k string) bool { return k == e.Key() })
	}
	f.mu.Unlock()
	if !gone {
		return
	}
	f.forgetExchanges(e.Address)
	f.watch()
	f.Publish()
}

// Listed says whether an engine stands in the config.
func (d Discovered) Listed(e discover.Engine) bool { return d.host.Settings().Listed[e.Key()] }
