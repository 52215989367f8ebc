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
	mayHaveLearned bool             // the index may have blocks of token ids that came from answers, not from events
	pending        []*PredictedHit  // of unanswered probes whose prompt has keys
}

type slot struct {
	handle index.Slot // the zero Slot, which the index ignores, until known is true
	known  bool
	blocks int // capacity; 0: no bound
}

func (c *Cache) CachedBlocks(id string) CachedBlocks { return CachedBlocks{cache: c, id: id} }

// Blocks is how many of the prompt's first blocks the candidate holds. A slot that was made after
// the Match holds none.
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

// EnsureSlot bounds the slot's blocks by capacity, in KV tokens; 0: unknown, so that an earlier
// bound stays.
func (b *CachedBlocks) EnsureSlot(p *Prompt, model string, capacity int64, now time.Time) index.Slot {
	blocks, unit := b.capacityInBlocks(p, model, capacity, now), p.unit()
	s := &b.slots[unit]
	changed := blocks > s.blocks+s.blocks/16 || blocks < s.blocks-s.blocks/16 // a change up to 1/16 is a drift of the bytes per token
	switch {
	case !s.known:
		id := b.id
		if unit == byTokens {
			id += " tokens" // a slot of its own, because blocks of tokens have another size than blocks of bytes
		}
		s.handle, s.known, s.blocks = b.cache.index.Add(id, blocks), true, blocks
	case blocks > 0 && changed:
		b.cache.index.SetCapacity(s.handle, blocks)
		s.blocks = blocks
	}
	return s.handle
}

// capacityInBlocks is 0, which is no bound, while the capacity is not known.
func (b *CachedBlocks) capacityInBlocks(p *Prompt, model string, capacity int64, now time.Time) (blocks int) {
	if capacity <= 0 {
		return 0
	}
	switch {
	case p.unit() == byBytes:
		blocks = b.cache.ratios[model].Blocks(int(capacity), index.BlockBytes)
	case b.Mode(now) == Precise:
		// Events remove blocks; the bound is needed for an engine that never publishes removals.
		blocks = 2 * int(capacity) / p.BlockTokens
	default:
		blocks = int(capacity) / p.BlockTokens
	}
	return max(1, blocks)
}

// Correct drops the blocks behind the found ones if the engine found at least one block less than
// predicted (wrong). cached is -1, and tokens 0, if the engine did not report them.
func (b *CachedBlocks) Correct(p *Prompt, tokens, hit, cached int) (at index.Slot, wrong bool) {
	at = b.slots[p.unit()].handle
	blockTokens := p.BlockSize(tokens) // a mean for blocks of bytes, which may be a fraction
	reported := tokens > 0 && cached >= 0
	wrong = reported && float64(hit-cached) >= blockTokens
	if wrong {
		b.cache.index.Correct(at, p.Keys, int(float64(cached)/blockTokens))
	}
	return at, wrong
}

// EngineRestarted drops the candidate's blocks. Blocks from precise KV events stay, because the
// stream notices a restart by itself; no event names blocks of bytes.
func (b *CachedBlocks) EngineRestarted(now time.Time) {
	if b.Mode(now) != Precise {
		b.DropAll()
		return
	}
	b.cache.index.Clear(b.slots[byBytes].handle, index.Removed)
}

// DropAll also makes the stream start anew, so that the events name the cached blocks again:
// otherwise it would only name those that change.
func (b *CachedBlocks) DropAll() {
	for _, s := range b.slots {
		b.cache.index.Clear(s.handle, index.Removed)
	}
	if b.stream != nil {
		b.stream.Resync()
	}
}

func (b *CachedBlocks) Close() {
	for _, s := range b.slots {
		b.cache.index.Delete(s.handle)
	}
}

// The modes in which a candidate's prefix cache is known, as status and metrics name them.
const (
	Approximate = "approximate" // from the token counts in answers
	Precise     = "precise"     // from KV events, for prompts of token ids
)

// Mode is Precise while the candidate's KV events are reliable.
func (b *CachedBlocks) Mode(now time.Time) string {
	if b.stream != nil && b.stream.Precise(now) {
		return Precise
	}
	return Approximate
}

// StopFollowing removes the stream, which the caller has closed. It also drops all blocks of token
// ids, because nothing reports any more when the engine removes them.
func (b *CachedBlocks) StopFollowing() {
	b.stream = nil
	b.cache.index.Clear(b.slots[byTokens].handle, index.Removed)
}

// Events is nil if the candidate publishes none.
func (b *CachedBlocks) Events() *kvevents.Stream { return b.stream }

// AddFromAnswer adds the blocks of an answered prompt, which no event has named yet.
func (b *CachedBlocks) AddFromAnswer(at index.Slot, p *Prompt) {
	b.cache.index.Insert(at, p.Keys)
	b.markLearnedFromAnswer(p)
}

// markLearnedFromAnswer ignores blocks that no event can name, because DropLearnedFromAnswers could
// not replace them.
func (b *CachedBlocks) markLearnedFromAnswer(p *Prompt) {
	eventsNameThem := b.stream != nil && p.BlockTokens > 0 && !p.Salted
	b.mayHaveLearned = b.mayHaveLearned || eventsNameThem
}

// DropLearnedFromAnswers replaces the blocks of token ids that came from answers by those that the
// events name. The events must be precise.
func (b *CachedBlocks) DropLearnedFromAnswers() {
	if b.mayHaveLearned {
		b.mayHaveLearned = false
		b.cache.index.Clear(b.slots[byTokens].handle, index.Removed)
		b.stream.Resync() // the stream passes on again what its events have named
	}
}

// Stored is called by the stream.
func (b *CachedBlocks) Stored(at index.Slot, keys []index.Key) { b.cache.index.Insert(at, keys) }

// Removed is called by the stream.
func (b *CachedBlocks) Removed(at index.Slot, keys []index.Key) {
	for _, k := range keys {
		b.cache.index.Remove(at, k)
	}
}

// Cleared drops all blocks that the stream named. With the reason Removed, the engine has emptied
// its cache, so that the blocks of bytes are gone, too.
func (b *CachedBlocks) Cleared(at index.Slot, why index.Reason) {
	b.cache.index.Clear(at, why)
	if why == index.Removed {
		b.cache.index.Clear(b.slots[byBytes].handle, why)
	}
}
