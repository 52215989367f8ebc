package cache

import (
	"slices"
	"time"

	"evenkeel/prefill/index"
)

// Expect records that a prompt of so many tokens is sent to the candidate, and that hit of them are predicted to be
// in its cache. e must not move.
func (h *Holdings) Expect(e *Expectation, p *Prompt, model string, tokens, hit int, matched []int32, capacity int64, now time.Time) {
	*e = Expectation{holdings: h, model: model, prompt: *p, hit: hit}
	h.cache.Totals.Prompt += uint64(tokens)
	h.cache.Totals.Predicted += uint64(hit)
	if len(p.Keys) > 0 {
		e.stillComputed = h.computes(p, h.Blocks(matched, p))
		e.speculation = h.cache.index.Speculate(h.Place(p, model, capacity, now), p.Keys)
		h.pending = append(h.pending, e)
	}
}

// computes reports whether the predicted blocks are not in the cache yet, because an unanswered probe still computes
// them. Such a prediction says nothing about the capacity.
func (h *Holdings) computes(p *Prompt, blocks int) bool {
	if blocks == 0 {
		return false
	}
	last := p.Keys[blocks-1] // its key covers the blocks before it
	for _, e := range h.pending {
		if len(e.prompt.Keys) >= blocks && e.prompt.Keys[blocks-1] == last {
			return true
		}
	}
	return false
}

// end ends the expectation and drops its prompt, so that the prompt's memory is not held while the hand-off waits for
// minutes.
func (e *Expectation) end() {
	if i := slices.Index(e.holdings.pending, e); i >= 0 {
		e.holdings.pending = slices.Delete(e.holdings.pending, i, i+1)
	}
	e.prompt = Prompt{}
}

// Dropped says that the prefill did not run.
func (e *Expectation) Dropped() {
	e.holdings.cache.index.Drop(&e.speculation)
	e.end()
}

// Lost says that it is not known whether the prefill ran.
func (e *Expectation) Lost(now time.Time) {
	e.holdings.cache.index.Linger(&e.speculation, now)
	e.end()
}

// Verdict is how a prediction compares with what the engine found.
type Verdict struct {
	Compared  bool // the engine said how many tokens it found
	Off       int  // predicted tokens less those found
	Suspected *Suspected
}

// Answered takes what an engine says it found in its cache for the probe, and returns how the prediction compares with
// it. capacity is in KV tokens, 0 if it is unknown; a KV block of the engine has blockTokens tokens.
func (e *Expectation) Answered(u Usage, capacity int64, blockTokens int, now time.Time) (v Verdict) {
	h, c := e.holdings, e.holdings.cache
	c.Learn(&e.prompt, e.model, u.PromptTokens)
	if u.PromptTokens > 0 {
		c.feedback[e.model] = u.CachedTokens >= 0
		if u.CachedTokens >= 0 {
			c.Totals.Actual += uint64(u.CachedTokens)
			v = Verdict{Compared: true, Off: e.hit - u.CachedTokens, Suspected: e.judge(u, capacity)}
		}
	}
	h.Heard(u.PromptTokens-max(0, u.CachedTokens) > blockTokens, now)
	if h.Told(&e.prompt, now) {
		e.learnBesideEvents(u, now)
	} else {
		e.learnFromAnswer(u)
	}
	e.end()
	return v
}

// Heard says that the engine has answered, and whether it computed a whole block that was not in its cache: then an
// event about that block should come, too.
func (h *Holdings) Heard(computed bool, now time.Time) {
	if h.events != nil && computed {
		h.events.Answered(now)
	}
}

// Told reports whether the candidate's events say which of a prompt's blocks it holds. The prompt must be made of
// blocks of the same size as the engine's.
func (h *Holdings) Told(p *Prompt, now time.Time) bool {
	if h.events == nil || p.BlockTokens == 0 || p.Salted || !h.events.Precise(now) {
		return false
	}
	size := h.events.BlockTokens()
	return size == 0 || size == p.BlockTokens
}

// learnBesideEvents takes an answer of a candidate whose events say what it holds. The blocks that it has computed for the probe
// count until the events name them. If the answer says that it held more than the events said, that is believed only
// while the events are known to be incomplete.
func (e *Expectation) learnBesideEvents(u Usage, now time.Time) {
	h, p, blockIndex := e.holdings, &e.prompt, e.holdings.cache.index
	slot := h.slots[byTokens].at
	if h.guessed { // from answers while the events could not be relied on: begin again with what the events say
		h.guessed = false
		blockIndex.Clear(slot, index.Removed)
		h.events.Resync()
	}
	if u.CachedTokens >= 0 && !h.events.Complete() && blockIndex.Vouches(&e.speculation) {
		held := min(u.CachedTokens/p.BlockTokens, len(p.Keys))
		blockIndex.Insert(slot, p.Keys[:held])
		if u.CachedTokens < e.hit {
			blockIndex.Correct(slot, p.Keys, held)
		}
	}
	blockIndex.Linger(&e.speculation, now)
}

// learnFromAnswer takes an answer of a candidate whose cache is known from answers alone: it held no more than the
// answer says, and it holds the prompt now.
func (e *Expectation) learnFromAnswer(u Usage) {
	h, p := e.holdings, &e.prompt
	if len(p.Keys) == 0 {
		return
	}
	h.Correct(p, u.PromptTokens, e.hit, u.CachedTokens)
	h.cache.index.Confirm(&e.speculation)
	h.guessed = h.guessed || h.events != nil && p.BlockTokens > 0 && !p.Salted
}
