package prefill

import (
	"cmp"

	"go.uber.org/zap"

	"evenkeel/prefill/cache"
	"evenkeel/prefill/kvevents"
)

// Prompt identifies a prompt in prefix caches.
type Prompt = cache.Prompt

// EventSource is where a candidate's engine publishes KV events. The zero value stands for an engine that publishes none.
type EventSource = cache.EventSource

// updateStreams starts and ends streams, so that every candidate that publishes KV events is followed. A candidate that stays configured
// and keeps its source keeps its stream, even while it is down, because the stream itself notices a restart of the engine.
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
		if w.candidates[c.ID] != c { // the candidate was removed meanwhile, together with its slots in the index
			w.unlock()
			continue
		}
		now := w.now // set by lock
		w.streams[c] = c.cache.Follow(&w.mu, source, c.blockTokens(), c.load.Capacity(), now)
		w.unlock()
		w.cfg.Log.Info("the KV events of a prefill engine are followed", zap.String("candidate", c.ID), zap.String("events", source.Events))
	}
}

// stopStream ends a stream and drops the blocks that it named.
func (w watcher) stopStream(c *candidate, s cache.Feed) {
	s.Close() // without the lock, because Close waits for the stream, and the stream takes the lock
	w.lock()
	c.cache.StopFollowing()
	w.unlock()
}

// stopStreams ends all streams, because Run ends.
func (w watcher) stopStreams() {
	for c, s := range w.streams {
		w.stopStream(c, s)
	}
}

// wantedSources returns where each candidate publishes KV events; candidates that publish none are absent.
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

// BlockTokens is the number of tokens per KV block of a model's engines. A prompt must be cut into blocks of this size to be
// found in their caches.
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

// ForgetPrefixes drops all blocks that are known of a candidate's prefix cache, or of all candidates if id is empty. If the candidate's KV
// events are followed, its stream starts anew, so that the events name again the blocks that the engine has. ForgetPrefixes reports whether
// the candidate exists.
func (s *Scheduler) ForgetPrefixes(id string) bool {
	s.lock()
	defer s.unlock()
	if id == "" {
		s.cache.Reset() // empties the index
		for _, c := range s.candidates {
			c.cache.DropAll() // makes the stream start anew; the index has no blocks of c any more
		}
		return true
	}
	c := s.candidates[id]
	if c != nil {
		c.cache.DropAll()
	}
	return c != nil
}

// EventsStatus is the state of a candidate's stream of KV events.
type EventsStatus = kvevents.Status

// eventsStatus is the state of the candidate's stream of KV events; nil: it has none.
func (c *candidate) eventsStatus() *EventsStatus {
	events := c.cache.Events()
	if events == nil {
		return nil
	}
	return new(events.Status())
}
