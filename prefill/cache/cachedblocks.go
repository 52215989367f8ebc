package cache

import (
	"time"

	"evenkeel/prefill/index"
	"evenkeel/prefill/kvevents"
)

// CachedBlocks predict the content of one candidate's prefix cache.
type CachedBlocks struct {
	Accuracy       Accuracy
	cache          *Cache
	id             string
	slots          [units]slot
	stream         *kvevents.Stream // nil: the candidate publishes no KV events
	mayHaveLearned bool             // the index may have blocks of token ids that were learned from answers, not from events
	pending        []*PredictedHit  // predictions for unanswered probes whose prompt has keys
}

// slot is a candidate's slot in the index, for blocks of one unit: bytes or tokens.
type slot struct {
	handle index.Slot // the zero Slot, which the index ignores, until known is true
	known  bool       // the index has a slot for the candidate
	blocks int        // capacity of the slot in blocks; 0: no bound
}

// CachedBlocks returns the empty CachedBlocks of a new candidate.
func (c *Cache) CachedBlocks(id string) CachedBlocks { return CachedBlocks{cache: c, id: id} }

// Blocks is how many of the prompt's first blocks the candidate holds. matched is the result of Match. A slot that was made after this
// Match holds none of them.
func (b *CachedBlocks) Blocks(matched []int32, p *Prompt) int {
	if s := &b.slots[p.unit()]; s.known && s.handle.N < len(matched) {
		return int(matched[s.handle.N])
	}
	return 0
}

// Held is how many blocks the candidate holds, as far as the index knows.
func (b *CachedBlocks) Held() (blocks int) {
	for _, s := range b.slots {
		blocks += b.cache.index.Held(s.handle)
	}
	return blocks
}

// EnsureSlot returns the candidate's slot for blocks of the prompt's unit, and makes it if there is none. It bounds the slot's
// blocks by capacity, the KV tokens of the engine; 0: unknown, so that a new slot has no bound, and an earlier bound stays.
func (b *CachedBlocks) EnsureSlot(p *Prompt, model string, capacity int64, now time.Time) index.Slot {
	blocks, unit := b.capacityInBlocks(p, model, capacity, now), p.unit()
	s := &b.slots[unit]
	changed := blocks > s.blocks+s.blocks/16 || blocks < s.blocks-s.blocks/16 // a change up to 1/16 is a drift of the bytes per token
	switch {
	case !s.known: // the slot does not exist yet
		id := b.id
		if unit == byTokens {
			id += " tokens" // a second slot of the candidate, because blocks of tokens have another size than blocks of bytes
		}
		s.handle, s.known, s.blocks = b.cache.index.Add(id, blocks), true, blocks
	case blocks > 0 && changed:
		b.cache.index.SetCapacity(s.handle, blocks)
		s.blocks = blocks
	}
	return s.handle
}

// capacityInBlocks is how many blocks of the prompt's unit the index may hold for the candidate; 0: no bound, because the capacity, in KV
// tokens, is not known.
func (b *CachedBlocks) capacityInBlocks(p *Prompt, model string, capacity int64, now time.Time) (blocks int) {
	if capacity <= 0 {
		return 0
	}
	switch {
	case p.unit() == byBytes:
		blocks = b.cache.ratios[model].Blocks(int(capacity), index.BlockBytes)
	case b.Mode(now) == Precise:
		// The bound is twice the capacity, because events remove blocks; it is needed for an engine that never publishes removals.
		blocks = 2 * int(capacity) / p.BlockTokens
	default:
		blocks = int(capacity) / p.BlockTokens
	}
	return max(1, blocks)
}

// Correct compares the predicted hit with cached, the number of prompt tokens that the engine found in its cache (-1: not
// reported). If the engine found at least one block less than predicted, wrong is true, and the index drops the blocks behind the
// found ones from the candidate's slot, which is returned as at. tokens is the length of the prompt; 0: not reported, so that
// nothing can be compared.
func (b *CachedBlocks) Correct(p *Prompt, tokens, hit, cached int) (at index.Slot, wrong bool) {
	at = b.slots[p.unit()].handle      // the slot for blocks of bytes, or that for blocks of token ids
	blockTokens := p.BlockSize(tokens) // tokens per block; for blocks of bytes a mean, which may be a fraction
	reported := tokens > 0 && cached >= 0
	wrong = reported && float64(hit-cached) >= blockTokens
	if wrong {
		b.cache.index.Correct(at, p.Keys, int(float64(cached)/blockTokens))
	}
	return at, wrong
}

// EngineRestarted drops the candidate's blocks, because its engine may have restarted. Blocks from precise KV events stay,
// because the stream notices a restart by itself. Blocks of bytes, which no event names, are always dropped.
func (b *CachedBlocks) EngineRestarted(now time.Time) {
	if b.Mode(now) != Precise { // no reliable events would show the restart
		b.DropAll()
		return
	}
	b.cache.index.Clear(b.slots[byBytes].handle, index.Removed)
}

// DropAll drops all of the candidate's blocks. It makes the stream start anew, so that the events name the cached blocks
// again: a stream whose engine did not restart would otherwise only name those that change.
func (b *CachedBlocks) DropAll() {
	for _, s := range b.slots {
		b.cache.index.Clear(s.handle, index.Removed)
	}
	if b.stream != nil {
		b.stream.Resync()
	}
}

// Close deletes the slots of a candidate that was removed.
func (b *CachedBlocks) Close() {
	for _, s := range b.slots {
		b.cache.index.Delete(s.handle)
	}
}

// The modes in which a candidate's prefix cache is known, as status and metrics name them.
const (
	Approximate = "approximate" // known from the token counts in answers
	Precise     = "precise"     // known from KV events, for prompts of token ids
)

// Mode is Precise while the candidate's KV events are reliable, and Approximate otherwise.
func (b *CachedBlocks) Mode(now time.Time) string {
	if b.stream != nil && b.stream.Precise(now) {
		return Precise
	}
	return Approximate
}

// StopFollowing removes the stream of KV events, which the caller has closed. It also drops all blocks of token ids, because nothing
// reports any more when the engine removes them.
func (b *CachedBlocks) StopFollowing() {
	b.stream = nil
	b.cache.index.Clear(b.slots[byTokens].handle, index.Removed)
}

// Events is the stream of KV events; nil: the candidate has none.
func (b *CachedBlocks) Events() *kvevents.Stream { return b.stream }

// AddFromAnswer adds a prompt's blocks, which the engine must have because it has answered the prompt, although no event has named
// them yet. at is the candidate's slot for the blocks.
func (b *CachedBlocks) AddFromAnswer(at index.Slot, p *Prompt) {
	b.cache.index.Insert(at, p.Keys)
	b.markLearnedFromAnswer(p)
}

// markLearnedFromAnswer notes that blocks of a prompt came from an answer, so that DropLearnedFromAnswers replaces them by those
// that events name. It ignores blocks that no event can name, because nothing could replace them.
func (b *CachedBlocks) markLearnedFromAnswer(p *Prompt) {
	eventsNameThem := b.stream != nil && p.BlockTokens > 0 && !p.Salted
	b.mayHaveLearned = b.mayHaveLearned || eventsNameThem
}

// DropLearnedFromAnswers replaces the blocks of token ids that were learned from answers by those that the events name. The caller has seen
// that the events are precise. It does nothing if no block was learned from an answer.
func (b *CachedBlocks) DropLearnedFromAnswers() {
	if b.mayHaveLearned {
		b.mayHaveLearned = false
		b.cache.index.Clear(b.slots[byTokens].handle, index.Removed)
		b.stream.Resync() // the stream passes on again what its events have named
	}
}

// Stored adds blocks that the engine has stored. The stream calls it.
func (b *CachedBlocks) Stored(at index.Slot, keys []index.Key) { b.cache.index.Insert(at, keys) }

// Removed drops blocks that the engine has removed. The stream calls it.
func (b *CachedBlocks) Removed(at index.Slot, keys []index.Key) {
	for _, k := range keys {
		b.cache.index.Remove(at, k)
	}
}

// Cleared drops all blocks that the stream named. With the reason Removed, the engine has emptied its cache, so that Cleared
// also drops the blocks of bytes, which no stream names.
func (b *CachedBlocks) Cleared(at index.Slot, why index.Reason) {
	b.cache.index.Clear(at, why)
	if why == index.Removed {
		b.cache.index.Clear(b.slots[byBytes].handle, why)
	}
}
