package cache

import (
	"time"

	"evenkeel/prefill/index"
	"evenkeel/prefill/kvevents"
)

// Holdings are what one candidate is thought to have in its prefix cache.
type Holdings struct {
	Accuracy Accuracy
	cache    *Cache
	id       string
	slots    [units]slot
	events   *kvevents.Stream // nil: it publishes none
	guessed  bool             // the index has blocks of token ids that were learned from answers and not from events
	pending  []*Expectation   // of unanswered probes with keys
}

// slot is a candidate's place in the index for blocks of one unit, bytes or tokens.
type slot struct {
	at     index.Slot // the zero Slot until known: the index takes it for stale
	known  bool
	blocks int // capacity in blocks that the index has for it
}

// Holdings returns what a candidate that is new holds: nothing.
func (c *Cache) Holdings(id string) Holdings { return Holdings{cache: c, id: id} }

// Blocks is how many of a prompt's blocks the candidate holds, by what was matched.
func (h *Holdings) Blocks(matched []int32, p *Prompt) int {
	if s := &h.slots[p.unit()]; s.known && s.at.N < len(matched) {
		return int(matched[s.at.N])
	}
	return 0
}

// Held is how many blocks the index counts as the candidate's.
func (h *Holdings) Held() (blocks int) {
	for _, s := range h.slots {
		blocks += h.cache.index.Held(s.at)
	}
	return blocks
}

// Place makes sure that the candidate has a slot for blocks like the prompt's, and that the slot holds no more blocks
// than the engine can hold: capacity is in tokens, 0 if it is unknown.
func (h *Holdings) Place(p *Prompt, model string, capacity int64, now time.Time) index.Slot {
	blocks, unit := 0, p.unit()
	if capacity > 0 {
		switch {
		case unit == byBytes:
			blocks = h.cache.ratios[model].Blocks(int(capacity), index.BlockBytes)
		case h.Mode(now) == Precise:
			blocks = 2 * int(capacity) / p.BlockTokens // events name what is dropped; this bounds an engine whose events never do
		default:
			blocks = int(capacity) / p.BlockTokens
		}
		blocks = max(1, blocks)
	}
	s := &h.slots[unit]
	switch {
	case !s.known:
		id := h.id
		if unit == byTokens {
			id += " tokens" // a slot of its own, because its blocks have another size than those of bytes
		}
		s.at, s.known, s.blocks = h.cache.index.Add(id, blocks), true, blocks
	case blocks > 0 && (blocks > s.blocks+s.blocks/16 || blocks < s.blocks-s.blocks/16): // the ratio moves with every answer
		h.cache.index.SetCapacity(s.at, blocks)
		s.blocks = blocks
	}
	return s.at
}

// Correct takes how many tokens of a prompt its engine found in its cache, -1 if the engine did not say. If these are
// at least a block fewer than the expected hit, the index forgets that the candidate holds the rest of the prompt.
// wrong reports that, and at is the slot.
func (h *Holdings) Correct(p *Prompt, tokens, hit, cached int) (at index.Slot, wrong bool) {
	at = h.slots[p.unit()].at
	block := p.BlockSize(tokens)
	if wrong = tokens > 0 && cached >= 0 && float64(hit-cached) >= block; wrong {
		h.cache.index.Correct(at, p.Keys, int(float64(cached)/block))
	}
	return at, wrong
}

// Restarted drops what is thought to be in the cache, because the engine may have started anew. Blocks that are known
// from events stay: the stream notices a restart by itself.
func (h *Holdings) Restarted(now time.Time) {
	for unit, s := range h.slots {
		if unit == byBytes || h.Mode(now) != Precise {
			h.cache.index.Clear(s.at, index.Removed)
		}
	}
}

// Drop drops all that is thought to be in the cache, and has the stream begin anew, so that the events name it again.
func (h *Holdings) Drop() {
	for _, s := range h.slots {
		h.cache.index.Clear(s.at, index.Removed)
	}
	if h.events != nil {
		h.events.Resync()
	}
}

// Close gives back the slots of a candidate that is gone.
func (h *Holdings) Close() {
	for _, s := range h.slots {
		h.cache.index.Delete(s.at)
	}
}

// Modes of what is known of a candidate's prefix cache, as status and metrics
// name them.
const (
	Approximate = "approximate" // known from the token counts in answers
	Precise     = "precise"     // known from KV events, for prompts of token ids
)

// Mode is how well the cache is known now.
func (h *Holdings) Mode(now time.Time) string {
	if h.events != nil && h.events.Precise(now) {
		return Precise
	}
	return Approximate
}

// Unfollow forgets the stream, which is closed, and the blocks that it named.
func (h *Holdings) Unfollow() {
	h.events = nil
	h.cache.index.Clear(h.slots[byTokens].at, index.Removed)
}

// Events is the stream of KV events; nil: the candidate has none.
func (h *Holdings) Events() *kvevents.Stream { return h.events }

// Stored adds blocks that the engine has stored, as the stream says.
func (h *Holdings) Stored(at index.Slot, keys []index.Key) { h.cache.index.Insert(at, keys) }

// Removed drops blocks that the engine has removed.
func (h *Holdings) Removed(at index.Slot, keys []index.Key) {
	for _, k := range keys {
		h.cache.index.Remove(at, k)
	}
}

// Cleared drops all blocks that the stream named. If the engine itself has dropped all, it also drops the blocks of
// bytes: the engine holds none of its prompts any more.
func (h *Holdings) Cleared(at index.Slot, why index.Reason) {
	h.cache.index.Clear(at, why)
	if why == index.Removed {
		h.cache.index.Clear(h.slots[byBytes].at, why)
	}
}
