package cache

import (
	"slices"
	"time"
)

// Expect records in e that a prompt of so many tokens is sent to the candidate, of which hit tokens are predicted to be in
// its cache. The caller must not copy e, because h.pending points to it.
func (h *CachedBlocks) Expect(e *PredictedHit, p *Prompt, model string, tokens, hit int, matched []int32, capacity int64, now time.Time) {
	*e = PredictedHit{holdings: h, model: model, prompt: *p, hit: hit}
	h.cache.Totals.Prompt += uint64(tokens)
	h.cache.Totals.Predicted += uint64(hit)
	if len(p.Keys) > 0 {
		e.stillComputed = h.computes(p, h.Blocks(matched, p))
		e.speculation = h.cache.index.Speculate(h.Place(p, model, capacity, now), p.Keys)
		h.pending = append(h.pending, e)
	}
}

// computes reports whether an unanswered probe still computes the first blocks of the prompt, which are predicted to be
// cached. If the engine then does not find them, its capacity is not to blame.
func (h *CachedBlocks) computes(p *Prompt, blocks int) bool {
	if blocks == 0 {
		return false
	}
	last := p.Keys[blocks-1] // the key of a block covers all blocks before it
	for _, e := range h.pending {
		if len(e.prompt.Keys) >= blocks && e.prompt.Keys[blocks-1] == last {
			return true
		}
	}
	return false
}

// end removes the expectation from the pending ones. It drops the prompt, because the hand-off that contains the
// expectation may wait for minutes.
func (e *PredictedHit) end() {
	if i := slices.Index(e.holdings.pending, e); i >= 0 {
		e.holdings.pending = slices.Delete(e.holdings.pending, i, i+1)
	}
	e.prompt = Prompt{}
}

// Dropped notes that the prefill did not run.
func (e *PredictedHit) Dropped() {
	e.holdings.cache.index.Drop(&e.speculation)
	e.end()
}

// Lost notes that it is not known whether the prefill ran.
func (e *PredictedHit) Lost(now time.Time) {
	e.holdings.cache.index.Linger(&e.speculation, now)
	e.end()
}

// Verdict compares a predicted hit with the hit that the engine reports.
type Verdict struct {
	Compared  bool       // the engine reported its cached tokens
	Off       int        // predicted tokens less reported tokens
	Suspected *Suspected // nil: no change
}

// Answered learns from the engine's answer to the probe, and compares the prediction with it. capacity is the engine's
// capacity in KV tokens, 0 if unknown; blockTokens is the size of its KV blocks in tokens.
func (e *PredictedHit) Answered(u Usage, capacity int64, blockTokens int, now time.Time) (v Verdict) {
	h, c := e.holdings, e.holdings.cache
	c.Learn(&e.prompt, e.model, u.PromptTokens)
	if u.PromptTokens > 0 {
		c.feedback[e.model] = u.CachedTokens >= 0
		if u.CachedTokens >= 0 {
			c.Totals.Actual += uint64(u.CachedTokens)
			v = Verdict{Compared: true, Off: e.hit - u.CachedTokens, Suspected: e.judge(u, capacity)}
		}
	}
	computedTokens := u.PromptTokens - max(0, u.CachedTokens)
	h.Heard(computedTokens > blockTokens, now)
	if h.Told(&e.prompt, now) {
		e.learnBesideEvents(u, now)
	} else {
		e.learnFromAnswer(u)
	}
	e.end()
	return v
}

// Heard notes that the engine has answered. computed says that the engine computed at least one whole new block, for
// which its stream should soon publish an event.
func (h *CachedBlocks) Heard(computed bool, now time.Time) {
	if h.events != nil && computed {
		h.events.Answered(now)
	}
}

// Told reports whether the candidate's KV events name the blocks of this prompt. They do if the stream is precise, the
// prompt is in blocks of token ids of the engine's size, and it has no cache_salt.
func (h *CachedBlocks) Told(p *Prompt, now time.Time) bool {
	if h.events == nil || p.BlockTokens == 0 || p.Salted || !h.events.Precise(now) {
		return false
	}
	size := h.events.BlockTokens()
	return size == 0 || size == p.BlockTokens
}

// learnBesideEvents learns from an answer of a candidate whose KV events are precise. The blocks that the probe's prefill
// computed count as held for a short time, in which an event must name them. The answer's cached tokens change the index
// only while the events are known to be incomplete.
func (e *PredictedHit) learnBesideEvents(u Usage, now time.Time) {
	h, p, blockIndex := e.holdings, &e.prompt, e.holdings.cache.index
	slot := h.slots[byTokens].at
	h.ForgetGuesses()
	if u.CachedTokens >= 0 && !h.events.Complete() && blockIndex.Vouches(&e.speculation) {
		held := min(u.CachedTokens/p.BlockTokens, len(p.Keys))
		blockIndex.Insert(slot, p.Keys[:held])
		if u.CachedTokens < e.hit {
			blockIndex.Correct(slot, p.Keys, held)
		}
	}
	blockIndex.Linger(&e.speculation, now)
}

// learnFromAnswer learns from an answer of a candidate whose cache is known from answers alone. Before the prefill it
// held no more than the cached tokens of the answer; now it holds the whole prompt.
func (e *PredictedHit) learnFromAnswer(u Usage) {
	h, p := e.holdings, &e.prompt
	if len(p.Keys) == 0 {
		return
	}
	h.Correct(p, u.PromptTokens, e.hit, u.CachedTokens)
	h.cache.index.Confirm(&e.speculation)
	h.guess(p)
}
