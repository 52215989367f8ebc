package cache

import (
	"slices"
	"time"
)

// ExpectHit records in h that a prompt is sent to the candidate. tokens is the length of the prompt, and hit is how many of its
// tokens are predicted to be in the candidate's cache. Both are added to Totals, and the prompt's blocks count as held from now
// on. matched is the result of Match, and capacity is in KV tokens, 0 if unknown. The caller must not copy h afterwards, because
// b.pending points to it.
func (b *CachedBlocks) ExpectHit(h *PredictedHit, p *Prompt, model string, tokens, hit int, matched []int32, capacity int64,
	now time.Time,
) {
	*h = PredictedHit{blocks: b, model: model, prompt: *p, hit: hit}
	b.cache.Totals.Prompt += uint64(tokens)
	b.cache.Totals.Predicted += uint64(hit)
	if len(p.Keys) > 0 { // a prompt without keys is not in the index
		// If another probe still computes the predicted blocks, the engine may not find them although it has room for them. Then
		// compareHit must not take the miss for a sign of a smaller capacity.
		predictedBlocks := b.Blocks(matched, p)
		h.beingComputed = b.isBeingComputed(p, predictedBlocks)
		// The blocks are entered in the index at once, as a speculation: the outcome of the probe confirms them or drops them.
		h.speculation = b.cache.index.Speculate(b.EnsureSlot(p, model, capacity, now), p.Keys)
		b.pending = append(b.pending, h) // until the outcome is known, later prompts see by it that this probe computes the blocks
	}
}

// isBeingComputed reports whether an unanswered probe may still compute the first blocks of the prompt, as many as are predicted to be
// cached. If the engine then does not find them, its capacity is not to blame.
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

// endPrediction removes the PredictedHit from the pending ones. It also lets go of the prompt, so that its keys can be freed: the hand-off
// that contains the PredictedHit may wait for minutes.
func (h *PredictedHit) endPrediction() {
	if i := slices.Index(h.blocks.pending, h); i >= 0 {
		h.blocks.pending = slices.Delete(h.blocks.pending, i, i+1)
	}
	h.prompt = Prompt{}
}

// NotRun notes that the prefill did not run: the index drops the prompt's blocks, except those that it knew before.
func (h *PredictedHit) NotRun() {
	h.blocks.cache.index.Drop(&h.speculation)
	h.endPrediction()
}

// OutcomeUnknown notes that it is not known whether the prefill ran: the index keeps the prompt's blocks for a short time, in which an
// event may confirm them.
func (h *PredictedHit) OutcomeUnknown(now time.Time) {
	h.blocks.cache.index.ExpireSoon(&h.speculation, now)
	h.endPrediction()
}

// Verdict compares a predicted hit with the hit that the engine reports.
type Verdict struct {
	Compared    bool             // the engine reported its cached tokens
	ErrorTokens int              // predicted tokens less reported tokens
	Suspected   *SuspicionChange // change of the suspicion about the capacity; nil: no change
}

// Answered learns from the engine's answer to the probe, and ends the prediction. The answer shows the model's ratio of bytes per token
// and, if it reports cached tokens, how good the prediction was (the Verdict). It also shows which blocks the engine holds now. If KV
// events name the blocks of this prompt, they are more exact, and the answer only adds what they leave out. capacity is the engine's
// capacity in KV tokens, 0 if unknown; the Verdict may say that the engine seems to hold more or less. blockTokens is the size of its KV
// blocks in tokens.
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
	if computedTokens > blockTokens { // with fewer tokens, the engine may have filled no block, and then no event follows
		b.ExpectEvent(now)
	}
	if b.NamesBlocksOf(&h.prompt, now) { // events are more exact than the answer
		h.learnBesideEvents(u, now)
	} else {
		h.learnFromAnswer(u)
	}
	h.endPrediction()
	return v
}

// ExpectEvent notes that the engine has computed at least one whole new block, for which its stream should soon publish an event. If
// the stream publishes none for long, its events do not count as precise any more. Without a stream, nothing is expected.
func (b *CachedBlocks) ExpectEvent(now time.Time) {
	if b.stream != nil {
		b.stream.ExpectEvent(now)
	}
}

// NamesBlocksOf reports whether the candidate's KV events name the blocks of this prompt. They do if the stream is precise, the
// prompt is in blocks of token ids of the engine's size, and it has no cache_salt.
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

// learnBesideEvents learns from an answer of a candidate whose KV events are precise. First it drops the blocks that earlier answers
// showed, before the events were precise; the stream then passes on again what its events have named. The answer's cached tokens change the
// index only while the events are known to be incomplete: only then does an answer show more than they do.
func (h *PredictedHit) learnBesideEvents(u Usage, now time.Time) {
	b, blockIndex := h.blocks, h.blocks.cache.index
	b.DropLearnedFromAnswers()
	reported := u.CachedTokens >= 0
	notCleared := blockIndex.StillValid(&h.speculation) // after a clear, the answer may speak of blocks that are gone
	if reported && notCleared && !b.stream.Complete() {
		h.learnFound(u.CachedTokens)
	}
	blockIndex.ExpireSoon(&h.speculation, now) // the blocks from ExpectHit stay for a short time, in which an event must name them
}

// learnFound adds to the index those of the prompt's blocks that the engine found in its cache, cachedTokens tokens in all. If these are
// fewer than predicted, it drops the prompt's other blocks. The blocks are made of token ids.
func (h *PredictedHit) learnFound(cachedTokens int) {
	b, p, blockIndex := h.blocks, &h.prompt, h.blocks.cache.index
	slot := b.slots[byTokens].handle // where the index has the candidate's blocks of token ids
	foundBlocks := min(cachedTokens/p.BlockTokens, len(p.Keys))
	blockIndex.Insert(slot, p.Keys[:foundBlocks])
	if cachedTokens < h.hit { // the engine had fewer blocks than predicted
		blockIndex.Correct(slot, p.Keys, foundBlocks)
	}
}

// learnFromAnswer learns from an answer of a candidate whose cache is known from answers alone. Before the prefill it
// held no more than the cached tokens of the answer; now it holds the whole prompt.
func (h *PredictedHit) learnFromAnswer(u Usage) {
	b, p := h.blocks, &h.prompt
	if len(p.Keys) == 0 { // the prompt is not in the index
		return
	}
	b.Correct(p, u.PromptTokens, h.hit, u.CachedTokens) // drops the blocks that were predicted, but not found
	b.cache.index.Confirm(&h.speculation)               // the prompt's blocks, entered by ExpectHit, now count as computed
	b.markLearnedFromAnswer(p)
}
