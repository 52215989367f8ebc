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
	guessed  bool             // the index has blocks of token ids that its events did not tell of
	pending  []*Expectation   // of unanswered probes with keys
}

// slot is a candidate's place in the index, for blocks of one unit.
type slot struct {
	at     index.Slot // until it is known one that the index takes for stale
	known  bool
	blocks int // what it was told it can hold
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

// Place sees to it that the candidate has a slot for blocks like the prompt's and
// that it promises no more than the engine can hold: capacity tokens, 0 being
// unknown.
func (h *Holdings) Place(p *Prompt, model string, capacity int64, now time.Time) index.Slot {
	blocks, unit := 0, p.unit()
	if capacity > 0 {
		switch {
		case unit == byBytes:
			blocks = h.cache.ratios[model].Blocks(int(capacity), index.BlockBytes)
		case h.Mode(now) == Precise:
			blocks = 2 * int(capacity) / p.BlockTokens // its events say what goes; this only bounds an engine that says nothing of that
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
			id += " tokens" // a slot of its own, for its blocks have another size
		}
		s.at, s.known, s.blocks = h.cache.index.Add(id, blocks), true, blocks
	case blocks > 0 && (blocks > s.blocks+s.blocks/16 || blocks < s.blocks-s.blocks/16): // the ratio moves with every answer
		h.cache.index.SetCapacity(s.at, blocks)
		s.blocks = blocks
	}
	return s.at
}

// Correct takes an engine's word for how many tokens of a prompt it found in its cache,
// -1: it did not say. Where that is at least a block less than the hit that was expected,
// the candidate is thought to hold no more of the prompt; wrong says so, and at is where.
func (h *Holdings) Correct(p *Prompt, tokens, hit, cached int) (at index.Slot, wrong bool) {
	at = h.slots[p.unit()].at
	block := p.BlockSize(tokens)
	if wrong = tokens > 0 && cached >= 0 && float64(hit-cached) >= block; wrong {
		h.cache.index.Correct(at, p.Keys, int(float64(cached)/block))
	}
	return at, wrong
}

// Restarted drops what is thought to be in the cache: the engine may have started
// anew. Its events tell that by themselves.
func (h *Holdings) Restarted(now time.Time) {
	for unit, s := range h.slots {
		if unit == byBytes || h.Mode(now) != Precise {
			h.cache.index.Clear(s.at, index.Removed)
		}
	}
}

// Drop does so whatever is known, and has it told anew.
func (h *Holdings) Drop() {
	for _, s := range h.slots {
		h.cache.index.Clear(s.at, index.Removed)
	}
	if h.events != nil {
		h.events.Resync()
	}
}

// Close gives the candidate's slots back: it is gone.
func (h *Holdings) Close() {
	for _, s := range h.slots {
		h.cache.index.Delete(s.at)
	}
}

// Modes of what is known of a candidate's prefix cache, as status and metrics
// name them.
const (
	Approximate = "approximate" // from what its answers count
	Precise     = "precise"     // from its events, where prompts are token ids
)

// Mode is how well the cache is known now.
func (h *Holdings) Mode(now time.Time) string {
	if h.events != nil && h.events.Precise(now) {
		return Precise
	}
	return Approximate
}

// Unfollow says that a stream which is closed tells nothing any more, and forgets what it told.
func (h *Holdings) Unfollow() {
	h.events = nil
	h.cache.index.Clear(h.slots[byTokens].at, index.Removed)
}

// Events is the stream that tells of the cache; nil: there is none.
func (h *Holdings) Events() *kvevents.Stream { return h.events }

// Stored adds blocks that the stream tells of.
func (h *Holdings) Stored(at index.Slot, keys []index.Key) { h.cache.index.Insert(at, keys) }

// Removed drops blocks.
func (h *Holdings) Removed(at index.Slot, keys []index.Key) {
	for _, k := range keys {
		h.cache.index.Remove(at, k)
	}
}

// Cleared also drops blocks of bytes where the engine itself has dropped all:
// whatever its prompts are known by, it holds none of them.
func (h *Holdings) Cleared(at index.Slot, why index.Reason) {
	h.cache.index.Clear(at, why)
	if why == index.Removed {
		h.cache.index.Clear(h.slots[byBytes].at, why)
	}
}
