// Package discover finds engines. Each source lists all engines that it knows. A Discoverer
// compares the lists with its fleet, and reports the differences, a new engine only after a trial.
package discover

import "context"

// Roles of an engine.
const (
	Prefill    = "prefill"
	Decode     = "decode"
	Aggregated = "aggregated" // prefills and decodes
)

// Reasons of Engine.Away.
const (
	NotReady = "not ready"
	Leaving  = "leaving" // it will end soon, but running requests may finish
)

// Engine is an engine as a source lists it.
type Engine struct {
	Source  string // name of the source that lists the engine; if several do, of the first one
	Role    string
	Address string // host:port of the engine
	URL     string
	// Incarnation identifies the process, because another engine may have had the same address before;
	// empty: only the address identifies the engine.
	Incarnation string
	Away        string // why the engine gets no new requests for now: NotReady or Leaving; empty: it gets them
	Attributes
}

// Key names the engine in the fleet.
func (e Engine) Key() string { return e.Role + " " + e.Address }

// Attributes are not reported by an engine itself; they mean the same as in the config.
type Attributes struct {
	Profile, Region            string
	Group, Barrier             string
	Ranks, FirstRank, Slots    int
	KVTokens                   int64
	Cost                       float32
	KVEventsPort, KVReplayPort int
	// Most tokens in a step, and steps from one prefill to the next; 0: not set.
	Budget, Interval int
}

// A Source passes all its engines to report whenever they change, until ctx ends. With an error, it
// does not know all of them now: it passes those that it knows, or nil.
type Source interface {
	Name() string
	Run(ctx context.Context, report func([]Engine, error))
}

// Fleet is called from one goroutine.
type Fleet interface {
	// Put adds an engine or replaces its description. After an error it may be called again.
	Put(Engine) error
	// SetAway is for an engine of which only Away has changed.
	SetAway(Engine)
	// Remove is for an engine that no source lists, or whose address has another incarnation.
	Remove(Engine)
	InConfig(Engine) bool
}

func mergeLists(lists [][]Engine) map[string]Engine {
	all := map[string]Engine{}
	for _, list := range lists {
		for _, e := range list {
			old, isListed := all[e.Key()]
			better := old.Source == e.Source && old.Away != "" && e.Away == ""
			if !isListed || better {
				all[e.Key()] = e
			}
		}
	}
	return all
}

// isOtherEngine: without an incarnation, they count as the same.
func isOtherEngine(a, b Engine) bool {
	return a.Incarnation != "" && b.Incarnation != "" && a.Incarnation != b.Incarnation
}
