// Package discover finds engines. Sources list all they know of; a Discoverer
// holds the lists against what its fleet was told, tries what is new before
// anybody is served there, and tells the fleet the difference. A source that
// fails changes nothing: the last list stays.
package discover

import "context"

// Roles of an engine.
const (
	Prefill    = "prefill"
	Decode     = "decode"
	Aggregated = "aggregated" // it prefills and decodes
)

// Why a found engine gets no new work.
const (
	NotReady = "not ready"
	Leaving  = "leaving" // what runs there may finish
)

// Engine is an engine as a source tells of it.
type Engine struct {
	Source  string // its name; of two that tell of one engine the first counts
	Role    string
	Address string // host:port
	URL     string
	// Incarnation tells it from another that had the address before; empty: the
	// address is all the identity there is.
	Incarnation string
	Away        string // why it gets no new work; empty: it does
	Attributes
}

// Key is the engine's name in the fleet.
func (e Engine) Key() string { return e.Role + " " + e.Address }

// Attributes are what no engine can be asked for, as the config writes them.
type Attributes struct {
	Profile, Region            string
	Group, Barrier             string
	Ranks, FirstRank, Slots    int
	KVTokens                   int64
	Cost                       float32
	KVEventsPort, KVReplayPort int
	Budget, Interval           int // tokens of a step, and every how many steps prompts are computed
}

// A Source tells of all its engines whenever they change, until ctx ends. An
// error means that the source does not know all of its engines now. It comes with
// nil, or with the engines that the source knows all the same.
type Source interface {
	Name() string
	Run(ctx context.Context, tell func([]Engine, error))
}

// Fleet is who is told. Its methods are called by one goroutine.
type Fleet interface {
	// Put takes an engine in, or describes one anew that it was told of. What
	// it refuses it may be asked again, later.
	Put(Engine) error
	// Turn tells of one that it was told of that nothing is new but whether, and
	// why not, it gets new work.
	Turn(Engine)
	// Remove takes out an engine that no source tells of any more, or in whose
	// place another incarnation is.
	Remove(Engine)
	// Listed says that the engine is the config's own: it is left alone.
	Listed(Engine) bool
}

// merge makes one list of the sources', by key.
func merge(lists [][]Engine) map[string]Engine {
	all := map[string]Engine{}
	for _, list := range lists {
		for _, e := range list {
			old, double := all[e.Key()]
			// Two of one source at one address: the one that is to serve.
			if !double || old.Source == e.Source && old.Away != "" && e.Away == "" {
				all[e.Key()] = e
			}
		}
	}
	return all
}

// another says that the address has changed hands.
func another(a, b Engine) bool {
	return a.Incarnation != "" && b.Incarnation != "" && a.Incarnation != b.Incarnation
}
