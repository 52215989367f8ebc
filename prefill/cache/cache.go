// Package cache predicts the content of engines' prefix caches. It holds the index of prompts'
// blocks, the learned length of a token in bytes, and the error of the predictions; it learns from
// engines' answers and KV events. It has no clock and no lock: the caller passes the time of each
// event.
package cache

import (
	"iter"
	"maps"
	"time"

	"evenkeel/prefill/index"
)

// Cache predicts the prefix caches of all candidates. CachedBlocks is the part for one candidate.
type Cache struct {
	Totals        Totals
	index         *index.Index
	ratios        map[string]index.Ratio // learned bytes per token, by model
	reportsCached map[string]bool        // by model: its engines report cached tokens in their answers
	matched       []int32                // memory for the result of Match
}

// Totals sum tokens over all prompts so far.
type Totals struct {
	Prompt    uint64 // of all requests that got a lease
	Predicted uint64 // predicted to be cached
	Actual    uint64 // found cached by engines
}

// Fresh is the share of prompt tokens that were predicted not to be cached.
func (t *Totals) Fresh() float64 {
	if t.Prompt == 0 {
		return 1
	}
	return max(0, 1-float64(t.Predicted)/float64(t.Prompt))
}

func New(c index.Config) *Cache {
	return &Cache{index: index.New(c), ratios: map[string]index.Ratio{}, reportsCached: map[string]bool{}}
}

// Lookup keeps the result of Match for a request that waits.
type Lookup struct {
	matched []int32   // matched blocks, by slot number; nil: not kept
	at      time.Time // of the last look-up; zero: none
}

// matchValidFor is how long the result of a look-up is used again. A busy queue considers each
// waiting request hundreds of times per second, and a long prompt has thousands of blocks.
const matchValidFor = 50 * time.Millisecond

// Match returns, for each slot, how many of the prompt's first blocks it holds. last is the
// request's own, and zero at first; from the second look-up on it keeps the result for
// matchValidFor. The slice is valid until the next call.
func (c *Cache) Match(p *Prompt, last *Lookup, now time.Time) []int32 {
	switch {
	case len(p.Keys) == 0:
		return nil
	case last.at.IsZero(): // most requests are served at their first look-up, so they share c.matched
		c.index.Sweep(now)
		c.matched = c.index.Match(c.matched, p.Keys)
		last.at = now
		return c.matched
	case last.matched == nil || now.Sub(last.at) >= matchValidFor: // the request waits, so it gets memory of its own
		c.index.Sweep(now)
		last.matched = c.index.Match(last.matched, p.Keys)
		last.at = now
	}
	return last.matched
}

// PromptTokens is the exact length of a prompt if it is known, else its bytes by the model's
// learned ratio, else the estimate.
func (c *Cache) PromptTokens(p *Prompt, model string, estimate int) int {
	switch {
	case p.Tokens > 0:
		return p.Tokens
	case p.Bytes > 0 && !p.Media: // the bytes of pictures or sound do not predict tokens
		return max(1, c.ratios[model].Tokens(p.Bytes))
	}
	return max(1, estimate)
}

// LearnRatio takes the engine's count of the prompt's tokens; 0: not reported.
func (c *Cache) LearnRatio(p *Prompt, model string, tokens int) {
	if tokens > 0 && p.Bytes > 0 && !p.Media {
		ratio := c.ratios[model]
		ratio.Learn(p.Bytes, tokens)
		c.ratios[model] = ratio
	}
}

func (c *Cache) Stats() index.Stats { return c.index.Stats() }

// Reset empties the index. The caller must also call DropAll on each of the CachedBlocks.
func (c *Cache) Reset() { c.index.Reset() }

// Feedback lists, by model, whether its engines report the tokens that they found cached.
func (c *Cache) Feedback() iter.Seq2[string, bool] { return maps.All(c.reportsCached) }

func (c *Cache) DropModels(gone func(model string) bool) {
	maps.DeleteFunc(c.ratios, func(model string, _ index.Ratio) bool { return gone(model) })
	maps.DeleteFunc(c.reportsCached, func(model string, _ bool) bool { return gone(model) })
}

// PredictedHit predicts what one probe finds in the engine's cache, and leaves in it. Answered,
// NotRun or OutcomeUnknown ends it.
type PredictedHit struct {
	blocks        *CachedBlocks
	model         string
	prompt        Prompt
	hit           int  // tokens predicted to be in the cache
	beingComputed bool // another unanswered probe was computing these tokens when this one was sent
	speculation   index.Speculation
}

type Usage struct {
	PromptTokens int // by the engine; 0: not reported
	CachedTokens int // found in the prefix cache; -1: not reported
}
