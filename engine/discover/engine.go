// Package discover finds engines. Each source lists all engines that it knows. A Discoverer compares the lists
// with the engines of its fleet, and reports the differences to the fleet. It reports a new engine only after a trial. If a
// source fails, its last list stays valid.
package discover

import "context"

// Roles of an engine in the fleet.
const (
	Prefill    = "prefill"
	Decode     = "decode"
	Aggregated = "aggregated" // the engine prefills and decodes
)

// Reasons why an engine gets no new requests although a source lists it.
const (
	NotReady = "not ready"
	Leaving  = "leaving" // the engine will end soon, but its running requests may finish
)

// Engine is an engine as a source lists it.
type Engine struct {
	Source  string // name of the source that lists the engine; if several do, of the first one
	Role    string
	Address string // host:port of the engine
	URL     string
	// Incarnation identifies the process, because another engine may have had the same address before; empty: only the address
	// identifies the engine.
	Incarnation string
	Away        string // why the engine gets no new requests for now: NotReady or Leaving; empty: it gets them
	Attributes
}

// Key returns the name of the engine in the fleet.
func (e Engine) Key() string { return e.Role + " " + e.Address }

// Attributes are settings that an engine does not report itself, with the same meaning as in the config.
type Attributes struct {
	Profile, Region            string
	Group, Barrier             string
	Ranks, FirstRank, Slots    int
	KVTokens                   int64
	Cost                       float32
	KVEventsPort, KVReplayPort int
	Budget, Interval           int // most tokens in a step; steps from one that prefills to the next one that does; 0: not set
}

// A Source passes all its engines to report whenever they change, until ctx ends. An error means that the source does not know
// all of its engines now. With an error it passes nil or, if it has a list, the engines that it knows.
type Source interface {
	Name() string
	Run(ctx context.Context, report func([]Engine, error))
}

// Fleet receives the engines. The Discoverer calls its methods from one goroutine.
type Fleet interface {
	// Put adds an engine, or replaces the description of an engine that the fleet has. After an error it may be called
	// again with the same engine.
	Put(Engine) error
	// SetAway replaces the description of an engine that the fleet has, if only its field Away has changed: it gets no new requests from now
	// on, or it gets them again.
	SetAway(Engine)
	// Remove removes an engine that no source lists any more, or whose address now belongs to another incarnation.
	Remove(Engine)
	// InConfig says whether the config lists the engine. Discovery ignores such an engine.
	InConfig(Engine) bool
}

// mergeLists joins the lists of all sources. If several sources list an engine, the first one counts.
func mergeLists(lists [][]Engine) map[string]Engine {
	all := map[string]Engine{}
	for _, list := range lists {
		for _, e := range list {
			old, isListed := all[e.Key()]
			// If one source lists an address twice, the engine that gets requests counts.
			better := old.Source == e.Source && old.Away != "" && e.Away == ""
			if !isListed || better {
				all[e.Key()] = e
			}
		}
	}
	return all
}

// isOtherEngine says that an address belongs to another engine now: a and b have different incarnations. If one of them has no
// incarnation, they count as the same engine.
func isOtherEngine(a, b Engine) bool {
	return a.Incarnation != "" && b.Incarnation != "" && a.Incarnation != b.Incarnation
}
