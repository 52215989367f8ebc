package cache

import (
	"time"

	"evenkeel/prefill/index"
	"evenkeel/prefill/kvevents"
)

// EventSource is where an engine publishes what the prefix cache of a rank holds. The zero one publishes nothing.
type EventSource struct {
	kvevents.Place                 // as the config has it
	Finder         kvevents.Finder // knows the engine's word, too; nil: nobody does. It must be comparable
	Model          string          // base model of its blocks
	ReplayTimeout  time.Duration
}

// Exists says whether anything is published there.
func (s EventSource) Exists() bool { return s.Events != "" && s.Model != "" }

// Feed is a stream that tells what a cache holds.
type Feed struct {
	*kvevents.Stream
	Source EventSource
}

// Listen follows what an engine publishes, in blocks of so many tokens, under the lock that the caller holds.
func (h *Holdings) Listen(lock lock, source EventSource, blockTokens int, capacity int64, now time.Time) Feed {
	f := Feed{kvevents.Start(kvevents.Config{
		Place: source.Place, Finder: source.Finder, ReplayTimeout: source.ReplayTimeout,
		Slot: h.Place(&Prompt{BlockTokens: blockTokens}, source.Model, capacity, now), Scope: index.Scope{Model: source.Model},
		Sink: listener{lock, h},
	}), source}
	h.events, h.guessed = f.Stream, true // what was learned from answers so far is none of its blocks
	return f
}

// listener takes a stream's word into the index, under the lock of its owner.
type listener struct {
	lock
	*Holdings
}

type lock interface {
	Lock()
	Unlock()
}
