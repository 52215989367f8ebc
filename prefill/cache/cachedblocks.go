package cache

import (
	"time"

	"evenkeel/prefill/index"
	"evenkeel/prefill/kvevents"
)

// CachedBlocks predict the content of one candidate's prefix cache.
type CachedBlocks struct {
	Accuracy Accuracy
	cache    *Cache
	id       string
	slots    [units]slot
	events   *kvevents.Stream // nil: the candidate publishes no KV events
	guessed  bool             // the index may have blocks of token ids that were learned from answers, not from events
	pending  []*PredictedHit  // of unanswered probes whose prompt has keys
}

// slot is a candidate's slot in the index, for blocks of one unit: bytes or tokens.
type slot struct {
	at     index.Slot // the zero Slot, which the index ignores, until known is true
	known  bool       // the index has the slot
	blocks int        // capacity of the slot in blocks; 0: no bound
}

// CachedBlocks returns the empty holdings of a new candidate.
func (c *Cache) CachedBlocks(id string) CachedBlocks { return CachedBlocks{cache: c, id: id} }

// Blocks is how many of the prompt's first blocks the candidate holds. matched is the result of Match.
func (h *CachedBlocks) Blocks(matched []int32, p *Prompt) int {
	if s := &h.slots[p.unit()]; s.known && s.at.N < len(matched) {
		return int(matched[s.at.N])
	}
	return 0
}

// Held is how many blocks the candidate holds by the index.
func (h *CachedBlocks) Held() (blocks int) {
	for _, s := range h.slots {
		blocks += h.cache.index.Held(s.at)
	}
	return blocks
}

// Place returns the candidate's slot for blocks of the prompt's unit, and makes it if there is none. It bounds the slot
// by the engine's capacity, which is in tokens, 0 if unknown.
func (h *CachedBlocks) Place(p *Prompt, model string, capacity int64, now time.Time) index.Slot {
	blocks, unit := 0, p.unit()
	if capacity > 0 {
		switch {
		case unit == byBytes:
			blocks = h.cache.ratios[model].Blocks(int(capacity), index.BlockBytes)
		case h.Mode(now) == Precise:
			blocks = 2 * int(capacity) / p.BlockTokens // loose: events remove blocks, unless the engine never publishes removals
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
			id += " tokens" // a second slot of the candidate, because blocks of tokens have another size than blocks of bytes
		}
		s.at, s.known, s.blocks = h.cache.index.Add(id, blocks), true, blocks
	case blocks > 0 && (blocks > s.blocks+s.blocks/16 || blocks < s.blocks-s.blocks/16): // less is only a drift of the ratio
		h.cache.index.SetCapacity(s.at, blocks)
		s.blocks = blocks
	}
	return s.at
}

// Correct compares the expected hit with cached, the tokens of a prompt that its engine found cached (-1: not reported).
// If the engine found at least a block less, wrong is true, and the index drops the prompt's further blocks from the
// candidate's slot, which is at.
func (h *CachedBlocks) Correct(p *Prompt, tokens, hit, cached int) (at index.Slot, wrong bool) {
	at = h.slots[p.unit()].at
	block := p.BlockSize(tokens)
	if wrong = tokens > 0 && cached >= 0 && float64(hit-cached) >= block; wrong {
		h.cache.index.Correct(at, p.Keys, int(float64(cached)/block))
	}
	return at, wrong
}

// Restarted drops the candidate's blocks, because its engine may have restarted. Blocks from precise KV events stay,
// because the stream notices a restart by itself.
func (h *CachedBlocks) Restarted(now time.Time) {
	if h.Mode(now) != Precise {
		h.Drop()
		return
	}
	h.cache.index.Clear(h.slots[byBytes].at, index.Removed)
}

// Drop drops all of the candidate's blocks. It makes the stream start anew, so that the events name the cached blocks
// again: a stream whose engine did not restart would otherwise only name those that change.
func (h *CachedBlocks) Drop() {
	for _, s := range h.slots {
		h.cache.index.Clear(s.at, index.Removed)
	}
	if h.events != nil {
		h.events.Resync()
	}
}

// Close deletes the slots of a candidate that was removed.
func (h *CachedBlocks) Close() {
	for _, s := range h.slots {
		h.cache.index.Delete(s.at)
	}
}

// The modes in which a candidate's prefix cache is known, as status and metrics name them.
const (
	Approximate = "approximate" // from the token counts in answers
	Precise     = "precise"     // from KV events, for prompts of token ids
)

// Mode is Precise while the candidate's KV events are reliable, else Approximate.
func (h *CachedBlocks) Mode(now time.Time) string {
	if h.events != nil && h.events.Precise(now) {
		return Precise
	}
	return Approximate
}

// Unfollow removes the stream, which the caller has closed, and all blocks of token ids.
func (h *CachedBlocks) Unfollow() {
	h.events = nil
	h.cache.index.Clear(h.slots[byTokens].at, index.Removed)
}

// Events is the stream of KV events; nil: the candidate has none.
func (h *CachedBlocks) Events() *kvevents.Stream { return h.events }

// Guess adds the blocks of a prompt that the engine has by its answer, not by its events. at is the candidate's slot for them.
func (h *CachedBlocks) Guess(at index.Slot, p *Prompt) {
	h.cache.index.Insert(at, p.Keys)
	h.guess(p)
}

// guess notes that blocks of a prompt were learned from an answer. Blocks that no event ever names are not noted.
func (h *CachedBlocks) guess(p *Prompt) {
	h.guessed = h.guessed || h.events != nil && p.BlockTokens > 0 && !p.Salted
}

// ForgetGuesses replaces the blocks of token ids that were learned from answers by those that the events name. The caller has seen that
// the events are precise.
func (h *CachedBlocks) ForgetGuesses() {
	if h.guessed {
		h.guessed = false
		h.cache.index.Clear(h.slots[byTokens].at, index.Removed)
		h.events.Resync()
	}
}

// Stored adds blocks that the engine has stored. The stream calls it.
func (h *CachedBlocks) Stored(at index.Slot, keys []index.Key) { h.cache.index.Insert(at, keys) }

// Removed drops blocks that the engine has removed. The stream calls it.
func (h *CachedBlocks) Removed(at index.Slot, keys []index.Key) {
	for _, k := range keys {
		h.cache.index.Remove(at, k)
	}
}

// Cleared drops all blocks that the stream named. With the reason Removed, the engine has emptied its cache, and the
// blocks of bytes are dropped, too.
func (h *CachedBlocks) Cleared(at index.Slot, why index.Reason) {
	h.cache.index.Clear(at, why)
	if why == index.Removed {
		h.cache.index.Clear(h.slots[byBytes].at, why)
	}
}
