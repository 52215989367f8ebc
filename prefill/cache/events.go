package cache

import (
	"time"

	"evenkeel/prefill/index"
	"evenkeel/prefill/kvevents"
)

// EventSource is where an engine publishes what the prefix cache of a rank holds. Its zero value publishes nothing.
type EventSource struct {
	kvevents.Place                 // as the config has it
	Finder         kvevents.Finder // asks the engine itself where it publishes; nil: only the config is used. It must be comparable
	Model          string          // base model, under which its blocks are indexed; empty: the engine has not named it yet
	ReplayTimeout  time.Duration
}

// Exists says whether the engine publishes events, and its model is known.
func (s EventSource) Exists() bool { return s.Events != "" && s.Model != "" }

// Feed is a stream that tells what a cache holds.
type Feed struct {
	*kvevents.Stream
	Source EventSource
}

// Listen follows what an engine publishes, in blocks of so many tokens. The caller holds lock; the stream takes it
// for each change.
func (h *Holdings) Listen(lock lock, source EventSource, blockTokens int, capacity int64, now time.Time) Feed {
	feed := Feed{kvevents.Start(kvevents.Config{
		Place: source.Place, Finder: source.Finder, ReplayTimeout: source.ReplayTimeout,
		Slot: h.Place(&Prompt{BlockTokens: blockTokens}, source.Model, capacity, now), Scope: index.Scope{Model: source.Model},
		Sink: listener{lock, h},
	}), source}
	h.events, h.guessed = feed.Stream, true // what was learned from answers so far is not in blocks that the events name
	return feed
}

// listener puts what a stream says into the index, under the lock of the index's owner.
type listener struct {
	lock
	*Holdings
}

type lock interface {
	Lock()
	Unlock()
}
