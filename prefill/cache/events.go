package cache

import (
	"time"

	"evenkeel/prefill/index"
	"evenkeel/prefill/kvevents"
)

// EventSource is where an engine publishes the KV events of a rank. The zero value stands for an engine that publishes
// none.
type EventSource struct {
	kvevents.Place                 // addresses from the configuration
	Finder         kvevents.Finder // asks the engine where it publishes; nil: only Place is used. Its type must be comparable
	Model          string          // the base model, under which the blocks are indexed; empty: not known yet
	ReplayTimeout  time.Duration   // time to wait for the answer to a request for missed events
}

// Exists reports whether the engine publishes events and its model is known.
func (s EventSource) Exists() bool { return s.Events != "" && s.Model != "" }

// Feed is a running stream of KV events, with its source.
type Feed struct {
	*kvevents.Stream
	Source EventSource
}

// Follow starts a stream of an engine's KV events, whose blocks have blockTokens tokens. The caller holds the lock of the index's owner;
// the stream, which runs on a goroutine of its own, takes it for each change. capacity is in KV tokens; 0: unknown.
func (b *CachedBlocks) Follow(lock lock, source EventSource, blockTokens int, capacity int64, now time.Time) Feed {
	ofTokenIDs := Prompt{BlockTokens: blockTokens} // stands for any prompt whose blocks the events name
	slot := b.EnsureSlot(&ofTokenIDs, source.Model, capacity, now)
	feed := Feed{kvevents.Start(kvevents.Config{
		Place: source.Place, Finder: source.Finder, ReplayTimeout: source.ReplayTimeout,
		Slot: slot, Scope: index.Scope{Model: source.Model}, Sink: listener{lock, b},
	}), source}
	b.stream = feed.Stream
	b.mayHaveLearned = true // before the stream began, blocks may have been learned from answers
	return feed
}

// listener applies a stream's events to the index, under the lock of the index's owner.
type listener struct {
	lock
	*CachedBlocks
}

type lock interface {
	Lock()
	Unlock()
}
