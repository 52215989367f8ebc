package prefill

import (
	"cmp"

	"go.uber.org/zap"

	"evenkeel/prefill/cache"
	"evenkeel/prefill/kvevents"
)

type Prompt = cache.Prompt

type EventSource = cache.EventSource

// updateStreams starts and ends streams. A candidate that keeps its source keeps its stream, even
// while it is down, because the stream itself notices a restart of the engine.
func (w watcher) updateStreams() {
	wanted := w.wantedSources()
	for c, s := range w.streams {
		if wanted[c] != s.Source {
			w.stopStream(c, s)
			delete(w.streams, c)
		}
	}
	for c, source := range wanted {
		if _, running := w.streams[c]; running {
			continue
		}
		w.lock()
		if w.candidates[c.ID] != c { // removed meanwhile, with its slots in the index
			w.unlock()
			continue
		}
		now := w.now
		w.streams[c] = c.cache.Follow(&w.mu, source, c.blockTokens(), c.load.Capacity(), now)
		w.unlock()
		w.cfg.Log.Info("the KV events of a prefill engine are followed", zap.String("candidate", c.ID), zap.String("events", source.Events))
	}
}

// stopStream ends a stream and drops the blocks that it named.
func (w watcher) stopStream(c *candidate, s cache.Feed) {
	s.Close() // without the lock: Close waits for the stream, which takes it
	w.lock()
	c.cache.StopFollowing()
	w.unlock()
}

func (w watcher) stopStreams() {
	for c, s := range w.streams {
		w.stopStream(c, s)
	}
}

func (w watcher) wantedSources() map[*candidate]EventSource {
	w.lock()
	defer w.unlock()
	wanted := map[*candidate]EventSource{}
	for _, c := range w.candidates {
		if c.configured && c.Events.Exists() {
			wanted[c] = c.Events
		}
	}
	return wanted
}

// BlockTokens is the number of tokens per KV block of a model's engines. A prompt must be cut into
// such blocks to be found in their caches.
func (s *Scheduler) BlockTokens(model string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if m := s.models[model]; m != nil {
		onPages := 0 // of the first candidate whose metrics tell it
		for _, c := range m.candidates {
			if events := c.cache.Events(); events != nil && events.BlockTokens() > 0 {
				return events.BlockTokens()
			}
			onPages = cmp.Or(onPages, c.BlockTokens)
		}
		if onPages > 0 {
			return onPages
		}
	}
	if s.cfg.Ranks != nil {
		return cmp.Or(s.cfg.Ranks.BlockTokens(model), defaultBlock)
	}
	return defaultBlock
}

// ForgetPrefixes drops what is known of a candidate's prefix cache, or of all if id is empty. A
// stream of KV events starts anew, and names again the blocks that the engine has. The result is
// false if there is no such candidate.
func (s *Scheduler) ForgetPrefixes(id string) bool {
	s.lock()
	defer s.unlock()
	if id == "" {
		s.cache.Reset()
		for _, c := range s.candidates {
			c.cache.DropAll() // makes the stream start anew
		}
		return true
	}
	c := s.candidates[id]
	if c != nil {
		c.cache.DropAll()
	}
	return c != nil
}

type EventsStatus = kvevents.Status

func (c *candidate) eventsStatus() *EventsStatus {
	events := c.cache.Events()
	if events == nil {
		return nil
	}
	return new(events.Status())
}
