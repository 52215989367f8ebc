package prefill

import (
	"cmp"

	"go.uber.org/zap"

	"evenkeel/prefill/cache"
	"evenkeel/prefill/kvevents"
)

// Prompt is what a prompt is recognised by in prefix caches.
type Prompt = cache.Prompt

// EventSource is where a candidate's engine publishes what its prefix cache
// holds. The zero one publishes nothing.
type EventSource = cache.EventSource

// follow starts and ends streams, so that every candidate that publishes events is followed. A candidate that keeps
// its ID and its source keeps its stream, also while it is down: the stream itself notices a restart of the engine.
func (r runner) follow() {
	wanted := r.sources()
	for c, s := range r.followed {
		if wanted[c] != s.Source {
			r.unfollow(c, s)
			delete(r.followed, c)
		}
	}
	for c, source := range wanted {
		if _, ok := r.followed[c]; ok {
			continue
		}
		r.lock()
		if r.candidates[c.ID] != c { // the candidate was forgotten meanwhile, and its slots in the index with it
			r.unlock()
			continue
		}
		r.followed[c] = c.cache.Listen(&r.mu, source, c.blockTokens(), c.account.Capacity(), r.now)
		r.unlock()
		r.cfg.Log.Info("the KV events of a prefill engine are followed", zap.String("candidate", c.ID), zap.String("events", source.Events))
	}
}

// unfollow ends a stream and forgets what it told.
func (r runner) unfollow(c *candidate, s cache.Feed) {
	s.Close() // not under the lock, which its last event may wait for
	r.lock()
	c.cache.Unfollow()
	r.unlock()
}

func (r runner) unfollowAll() {
	for c, s := range r.followed {
		r.unfollow(c, s)
	}
}

// sources are the candidates that publish KV events, and where each of them publishes.
func (r runner) sources() map[*candidate]EventSource {
	r.lock()
	defer r.unlock()
	wanted := map[*candidate]EventSource{}
	for _, c := range r.candidates {
		if c.configured && c.Events.Exists() {
			wanted[c] = c.Events
		}
	}
	return wanted
}

// BlockTokens is how many token ids a block of a prompt should have to be found
// in the caches of a model's engines: as many as theirs have.
func (t *Tier) BlockTokens(model string) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	if m := t.models[model]; m != nil {
		for _, c := range m.servers {
			if c.saidBlock() > 0 {
				return c.saidBlock()
			}
		}
	}
	if t.cfg.Ranks != nil {
		return cmp.Or(t.cfg.Ranks.BlockTokens(model), defaultBlock)
	}
	return defaultBlock
}

// ForgetPrefixes drops what is known of the prefix cache of a candidate, or of
// all for an empty id. It reports whether there is such a candidate.
func (t *Tier) ForgetPrefixes(id string) bool {
	t.lock()
	defer t.unlock()
	if id == "" {
		t.cache.Reset()
		for _, c := range t.candidates {
			c.cache.Drop()
		}
		return true
	}
	c := t.candidates[id]
	if c != nil {
		c.cache.Drop()
	}
	return c != nil
}

// EventsStatus is what a candidate's KV events have told.
type EventsStatus = kvevents.Status

func (c *candidate) eventsStatus() *EventsStatus {
	events := c.cache.Events()
	if events == nil {
		return nil
	}
	return new(events.Status())
}
