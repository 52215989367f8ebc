package cache

import (
	"slices"
	"time"
)

// ExpectHit records in h that a prompt is sent to the candidate, with hit of its tokens predicted
// to be cached. The prompt's blocks count as held from now on. capacity is in KV tokens, 0 if
// unknown. The caller must not copy h afterwards, because b.pending points to it.
func (b *CachedBlocks) ExpectHit(h *PredictedHit, p *Prompt, model string, tokens, hit int, matched []int32, capacity int64,
	now time.Time,
) {
	*h = PredictedHit{blocks: b, model: model, prompt: *p, hit: hit}
	b.cache.Totals.Prompt += uint64(tokens)
	b.cache.Totals.Predicted += uint64(hit)
	if len(p.Keys) > 0 {
		// If another probe still computes the predicted blocks, the engine may miss them although it has
		// room for them: that is no sign of a smaller capacity.
		predictedBlocks := b.Blocks(matched, p)
		h.beingComputed = b.isBeingComputed(p, predictedBlocks)
		// The outcome of the probe confirms this speculation or drops it.
		h.speculation = b.cache.index.Speculate(b.EnsureSlot(p, model, capacity, now), p.Keys)
		b.pending = append(b.pending, h)
	}
}

func (b *CachedBlocks) isBeingComputed(p *Prompt, blocks int) bool {
	if blocks == 0 {
		return false
	}
	last := p.Keys[blocks-1] // the key of a block covers all blocks before it
	for _, h := range b.pending {
		if len(h.prompt.Keys) >= blocks && h.prompt.Keys[blocks-1] == last {
			return true
		}
	}
	return false
}

// endPrediction also lets go of the prompt, so that its keys can be freed: the hand-off that
// contains h may wait for minutes.
func (h *PredictedHit) endPrediction() {
	if i := slices.Index(h.blocks.pending, h); i >= 0 {
		h.blocks.pending = slices.Delete(h.blocks.pending, i, i+1)
	}
	h.prompt = Prompt{}
}

// NotRun drops the prompt's blocks, except those that the index knew before.
func (h *PredictedHit) NotRun() {
	h.blocks.cache.index.Drop(&h.speculation)
	h.endPrediction()
}

// OutcomeUnknown keeps the prompt's blocks for a short time, in which an event may confirm them.
func (h *PredictedHit) OutcomeUnknown(now time.Time) {
	h.blocks.cache.index.ExpireSoon(&h.speculation, now)
	h.endPrediction()
}

type Verdict struct {
	Compared    bool             // the engine reported its cached tokens
	ErrorTokens int              // predicted tokens less reported tokens
	Suspected   *SuspicionChange // nil: no change
}

// Answered learns from the engine's answer, and ends the prediction. If KV events name the blocks
// of this prompt, they are more exact, and the answer only adds what they leave out. capacity is in
// KV tokens, 0 if unknown; blockTokens is the size of the engine's KV blocks.
func (h *PredictedHit) Answered(u Usage, capacity int64, blockTokens int, now time.Time) (v Verdict) {
	b, c := h.blocks, h.blocks.cache
	c.LearnRatio(&h.prompt, h.model, u.PromptTokens)
	if u.PromptTokens > 0 {
		reported := u.CachedTokens >= 0
		c.reportsCached[h.model] = reported
		if reported {
			c.Totals.Actual += uint64(u.CachedTokens)
			v = Verdict{Compared: true, ErrorTokens: h.hit - u.CachedTokens, Suspected: h.compareHit(u, capacity)}
		}
	}
	computedTokens := u.PromptTokens - max(0, u.CachedTokens)
	if computedTokens > blockTokens { // with fewer, the engine may have filled no block, and then no event follows
		b.ExpectEvent(now)
	}
	if b.NamesBlocksOf(&h.prompt, now) {
		h.learnBesideEvents(u, now)
	} else {
		h.learnFromAnswer(u)
	}
	h.endPrediction()
	return v
}

// ExpectEvent notes that the engine has computed at least one whole new block, which its stream
// should soon name. A stream that publishes nothing for long does not count as precise any more.
func (b *CachedBlocks) ExpectEvent(now time.Time) {
	if b.stream != nil {
		b.stream.ExpectEvent(now)
	}
}

// NamesBlocksOf reports whether the candidate's KV events name the blocks of this prompt.
func (b *CachedBlocks) NamesBlocksOf(p *Prompt, now time.Time) bool {
	ofTokenIDs := p.BlockTokens > 0
	if b.stream == nil || !ofTokenIDs || p.Salted {
		return false
	}
	if !b.stream.Precise(now) {
		return false
	}
	engineBlock := b.stream.BlockTokens()
	return engineBlock == 0 || engineBlock == p.BlockTokens // 0: no event has told the size yet
}

// learnBesideEvents uses the answer's cached tokens only while the events are known to be
// incomplete, because only then does an answer show more than they do.
func (h *PredictedHit) learnBesideEvents(u Usage, now time.Time) {
	b, blockIndex := h.blocks, h.blocks.cache.index
	b.DropLearnedFromAnswers()
	reported := u.CachedTokens >= 0
	notCleared := blockIndex.StillValid(&h.speculation) // after a clear, the answer may speak of blocks that are gone
	if reported && notCleared && !b.stream.Complete() {
		h.learnFound(u.CachedTokens)
	}
	blockIndex.ExpireSoon(&h.speculation, now) // an event must name the blocks in this time
}

func (h *PredictedHit) learnFound(cachedTokens int) {
	b, p, blockIndex := h.blocks, &h.prompt, h.blocks.cache.index
	slot := b.slots[byTokens].handle
	foundBlocks := min(cachedTokens/p.BlockTokens, len(p.Keys))
	blockIndex.Insert(slot, p.Keys[:foundBlocks])
	if cachedTokens < h.hit {
		blockIndex.Correct(slot, p.Keys, foundBlocks)
	}
}

// learnFromAnswer: before the prefill the engine held no more than the cached tokens; now it holds
// the whole prompt.
func (h *PredictedHit) learnFromAnswer(u Usage) {
	b, p := h.blocks, &h.prompt
	if len(p.Keys) == 0 {
		return
	}
	b.Correct(p, u.PromptTokens, h.hit, u.CachedTokens)
	b.cache.index.Confirm(&h.speculation)
	b.markLearnedFromAnswer(p)
}
