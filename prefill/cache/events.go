package cache

import (
	"time"

	"evenkeel/prefill/index"
	"evenkeel/prefill/kvevents"
)

// EventSource is where an engine publishes the KV events of a rank; zero: it publishes none.
type EventSource struct {
	kvevents.Place                 // addresses from the configuration
	Finder         kvevents.Finder // asks the engine where it publishes; nil: only Place is used. Its type must be comparable
	Model          string          // the base model, under which the blocks are indexed; empty: not known yet
	ReplayTimeout  time.Duration   // for the answer to a request for missed events
}

func (s EventSource) Exists() bool { return s.Events != "" && s.Model != "" }

type Feed struct {
	*kvevents.Stream
	Source EventSource
}

// Follow starts a stream of an engine's KV events. The caller holds the lock of the index's owner;
// the stream, which has its own goroutine, takes it for each change. capacity is in KV tokens; 0:
// unknown.
func (b *CachedBlocks) Follow(lock lock, source EventSource, blockTokens int, capacity int64, now time.Time) Feed {
	ofTokenIDs := Prompt{BlockTokens: blockTokens}
	slot := b.EnsureSlot(&ofTokenIDs, source.Model, capacity, now)
	feed := Feed{kvevents.Start(kvevents.Config{
		Place: source.Place, Finder: source.Finder, ReplayTimeout: source.ReplayTimeout,
		Slot: slot, Scope: index.Scope{Model: source.Model}, Sink: listener{lock, b},
	}), source}
	b.stream = feed.Stream
	b.mayHaveLearned = true // from answers, before the stream began
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
