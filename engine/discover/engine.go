// Package discover finds engines. Each source lists all engines that it knows of. A Discoverer compares the lists
// with what its fleet has, tries new engines before they serve requests, and reports the differences to the fleet. A
// source that fails changes nothing: its last list stays.
package discover

import "context"

// Roles of an engine.
const (
	Prefill    = "prefill"
	Decode     = "decode"
	Aggregated = "aggregated" // it prefills and decodes
)

// Reasons why a found engine gets no new work.
const (
	NotReady = "not ready"
	Leaving  = "leaving" // requests that run there may finish
)

// Engine is an engine as a source lists it.
type Engine struct {
	Source  string // name of the source; if two sources list an engine, the first one counts
	Role    string
	Address string // host:port
	URL     string
	// Incarnation tells the engine from another one that had the address before; empty: only the address identifies
	// it.
	Incarnation string
	Away        string // why it gets no new work; empty: it gets work
	Attributes
}

// Key is the engine's name in the fleet.
func (e Engine) Key() string { return e.Role + " " + e.Address }

// Attributes are what an engine cannot be asked for, in the form of the config.
type Attributes struct {
	Profile, Region            string
	Group, Barrier             string
	Ranks, FirstRank, Slots    int
	KVTokens                   int64
	Cost                       float32
	KVEventsPort, KVReplayPort int
	KVEngineID, KVHost         string // where decode engines reach it, if they are bound first; empty: its first answer tells
	KVPort                     int
	TPSize, PPSize, DCPSize    int
	Budget, Interval           int // tokens of a step, and the number of steps from one that computes prompts to the next
}

// A Source reports all its engines whenever they change, until ctx ends. An error means that the source does not know
// all of its engines now. With an error it passes nil, or the engines that it knows all the same.
type Source interface {
	Name() string
	Run(ctx context.Context, tell func([]Engine, error))
}

// Fleet receives the engines. One goroutine calls its methods.
type Fleet interface {
	// Put takes an engine in, or a new description of an engine that the fleet has. If it refuses the engine, it may
	// be called with it again later.
	Put(Engine) error
	// Turn reports an engine that the fleet has and of which only one thing has changed: whether it gets new work,
	// and if not, why.
	Turn(Engine)
	// Remove takes out an engine that no source lists any more, or that another incarnation has replaced.
	Remove(Engine)
	// Listed says that the engine is in the config, so that discovery leaves it alone.
	Listed(Engine) bool
}

// merge makes one list of the sources' lists, by key.
func merge(lists [][]Engine) map[string]Engine {
	all := map[string]Engine{}
	for _, list := range lists {
		for _, e := range list {
			old, double := all[e.Key()]
			// Of two engines of one source at one address, the one that gets work counts.
			if !double || old.Source == e.Source && old.Away != "" && e.Away == "" {
				all[e.Key()] = e
			}
		}
	}
	return all
}

// replaced says that the address belongs to another engine now: both have an incarnation, and not the same.
func replaced(a, b Engine) bool {
	return a.Incarnation != "" && b.Incarnation != "" && a.Incarnation != b.Incarnation
}
