package prefill

import (
	"time"

	"go.uber.org/zap"

	"evenkeel/prefill/index"
	"evenkeel/prefill/kvevents"
)

// EventSource is where a candidate's engine publishes what its prefix cache
// holds. The zero one publishes nothing.
type EventSource struct {
	Events, Replay string // host:port; without a replay any gap makes the candidate cold
	Model          string // base model of its blocks
	ReplayTimeout  time.Duration
}

// streams are the candidates' KV events that are followed. Only Run has them.
type streams map[*candidate]stream

type stream struct {
	*kvevents.Stream
	source EventSource
}

// follow starts and ends streams, so that every candidate that publishes events
// is followed. One that keeps its ID and its source keeps its stream, up or
// down: the stream itself sees a restart.
func (t *Tier) follow(all streams) {
	wanted := t.sources()
	for c, s := range all {
		if wanted[c] != s.source {
			t.unfollow(c, s)
			delete(all, c)
		}
	}
	for c, source := range wanted {
		if _, ok := all[c]; ok {
			continue
		}
		t.lock()
		if t.candidates[c.ID] != c { // forgotten meanwhile, with its slots
			t.unlock()
			continue
		}
		slot := t.place(c, &Prompt{BlockTokens: c.blockTokens()}, source.Model)
		t.unlock()
		s := stream{kvevents.Start(kvevents.Config{
			Events: source.Events, Replay: source.Replay, ReplayTimeout: source.ReplayTimeout,
			Slot: slot, Scope: index.Scope{Model: source.Model}, Sink: &listener{t, c},
		}), source}
		all[c] = s
		t.lock()
		c.events, c.guessed = s.Stream, true // what was learned from answers so far is none of theirs
		t.unlock()
		t.cfg.Log.Info("following the KV events of a prefiller", zap.String("candidate", c.ID), zap.String("events", source.Events))
	}
}

// unfollow ends a stream and forgets what it told.
func (t *Tier) unfollow(c *candidate, s stream) {
	s.Close() // not under the lock, which its last event may wait for
	t.lock()
	c.events = nil
	t.index.Clear(c.slots[byTokens].at, index.Removed)
	t.unlock()
}

func (t *Tier) sources() map[*candidate]EventSource {
	t.lock()
	defer t.unlock()
	wanted := map[*candidate]EventSource{}
	for _, c := range t.candidates {
		if c.configured && c.Events.Events != "" && c.Events.Model != "" {
			wanted[c] = c.Events
		}
	}
	return wanted
}

// listener takes a stream's word into the index.
type listener struct {
	t *Tier
	c *candidate
}

// Stored, Removed and Cleared implement kvevents.Sink.
func (l *listener) Stored(at index.Slot, keys []index.Key) {
	l.t.mu.Lock()
	defer l.t.mu.Unlock()
	l.t.index.Insert(at, keys)
}

func (l *listener) Removed(at index.Slot, keys []index.Key) {
	l.t.mu.Lock()
	defer l.t.mu.Unlock()
	for _, k := range keys {
		l.t.index.Remove(at, k)
	}
}

// Cleared also drops blocks of bytes where the engine itself has dropped all:
// whatever its prompts are known by, it holds none of them.
func (l *listener) Cleared(at index.Slot, why index.Reason) {
	l.t.mu.Lock()
	defer l.t.mu.Unlock()
	l.t.index.Clear(at, why)
	if s := l.c.slots[byBytes]; s.known && why == index.Removed {
		l.t.index.Clear(s.at, why)
	}
}

// Modes of what is known of a candidate's prefix cache, as status and metrics
// name them.
const (
	approximate = "approximate" // from what its answers count
	precise     = "precise"     // from its events, where prompts are token ids
)

// told reports whether a candidate's events say which of a prompt's blocks it
// holds: the prompt must be made of blocks like theirs.
func (c *candidate) told(p *Prompt, now time.Time) bool {
	if c.events == nil || p.BlockTokens == 0 || p.Salted || !c.events.Precise(now) {
		return false
	}
	size := c.events.BlockTokens()
	return size == 0 || size == p.BlockTokens
}

func (c *candidate) mode(now time.Time) string {
	if c.events != nil && c.events.Precise(now) {
		return precise
	}
	return approximate
}

// hear takes an answer of a candidate whose events tell what it holds. What it
// has computed counts until they do; that it held more than they told is
// believed only while they are known not to tell all.
func (t *Tier) hear(l *Lease, u Usage) {
	c, p := l.c, &l.prompt
	if c.guessed { // while the events could not be relied on: begin again with what they tell
		c.guessed = false
		t.index.Clear(c.slots[byTokens].at, index.Removed)
		c.events.Resync()
	}
	if u.CachedTokens >= 0 && !c.events.Complete() {
		held := min(u.CachedTokens/p.BlockTokens, len(p.Keys))
		t.index.Insert(c.slots[byTokens].at, p.Keys[:held])
		if u.CachedTokens < l.HitTokens {
			t.index.Correct(c.slots[byTokens].at, p.Keys, held)
		}
	}
	t.index.Linger(&l.expected, t.now)
}

// expectEvents notes that an answer should have been an event, too: it computed
// a block that was not there.
func (c *candidate) expectEvents(u Usage, now time.Time) {
	if c.events != nil && u.PromptTokens-max(0, u.CachedTokens) > c.blockTokens() {
		c.events.Answered(now)
	}
}

// BlockTokens is how many token ids a block of a prompt should have to be found
// in the caches of a model's engines: as many as theirs have.
func (t *Tier) BlockTokens(model string) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	m := t.models[model]
	if m == nil {
		return defaultBlock
	}
	for _, c := range m.servers {
		if c.saidBlock() > 0 {
			return c.saidBlock()
		}
	}
	return defaultBlock
}

// EventsStatus is what a candidate's KV events have told.
type EventsStatus struct {
	Source        string  `json:"source"`
	Connected     bool    `json:"connected"`
	Failure       string  `json:"failure,omitempty"` // why it is not
	Complete      bool    `json:"complete"`          // all that the engine holds is known
	Batches       int64   `json:"batches"`
	GapsReplayed  int64   `json:"gaps_replayed"`
	GapsCold      int64   `json:"gaps_cold"`
	Unreadable    int64   `json:"decode_errors"`
	UnknownTypes  int64   `json:"unknown_types"`
	UnknownParent int64   `json:"unknown_parents"`
	Skipped       int64   `json:"skipped_blocks"` // made of more than tokens
	Blocks        int64   `json:"blocks"`         // that the engine holds
	BlockTokens   int     `json:"block_tokens"`
	LagMs         float64 `json:"lag_ms"`
}

func (c *candidate) eventsStatus() *EventsStatus {
	if c.events == nil {
		return nil
	}
	s := c.events.Stats()
	return &EventsStatus{
		Source: c.Events.Events, Connected: s.Failure == "" && s.Connects > 0, Failure: s.Failure, Complete: c.events.Complete(),
		Batches: s.Batches, GapsReplayed: s.GapsReplayed, GapsCold: s.GapsCold, Unreadable: s.DecodeErrors,
		UnknownTypes: s.UnknownTypes, UnknownParent: s.UnknownParents, Skipped: s.Skipped, Blocks: s.Known,
		BlockTokens: c.events.BlockTokens(), LagMs: float64(s.Lag) / float64(time.Millisecond),
	}
}
