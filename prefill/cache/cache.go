// Package cache keeps what is thought to be in the prefix caches of engines: the
// index of prompts' blocks, the length of a token as learned, what engines said of
// their caches in answers and events, and how far predictions were off. It has no
// clock and no lock: its owner gives it the time of each event.
package cache

import (
	"iter"
	"maps"
	"time"

	"evenkeel/prefill/index"
)

// Cache is what is known of all candidates' prefix caches. Each candidate has its Holdings, which use it.
type Cache struct {
	Totals   Totals
	index    *index.Index
	ratios   map[string]index.Ratio // by model
	feedback map[string]bool        // by model: engines say what they found in their caches
	matched  []int32                // scratch
}

// Totals are tokens of all prompts so far: those of the prompts, those predicted to be cached, and those that engines
// found cached.
type Totals struct{ Prompt, Predicted, Actual uint64 }

// Fresh is the share of prompt tokens that are predicted not to be cached; 1 before the first prompt.
func (t *Totals) Fresh() float64 {
	if t.Prompt == 0 {
		return 1
	}
	return max(0, 1-float64(t.Predicted)/float64(t.Prompt))
}

// New knows of no cache yet.
func New(c index.Config) *Cache {
	return &Cache{index: index.New(c), ratios: map[string]index.Ratio{}, feedback: map[string]bool{}}
}

// Lookup is what was found for a request when it was last looked at.
type Lookup struct {
	matched []int32 // blocks by slot, while the request waits
	at      time.Time
}

// matchFor is for how long the result of a look-up holds for a request that waits: a busy queue is looked at hundreds
// of times a second, and a long prompt has thousands of blocks.
const matchFor = 50 * time.Millisecond

// Match looks a prompt up. It returns, for each slot, how many of the prompt's blocks the slot holds. The slice is
// valid until the next call.
func (c *Cache) Match(p *Prompt, last *Lookup, now time.Time) []int32 {
	switch {
	case len(p.Keys) == 0:
		return nil
	case last.at.IsZero(): // nearly always the request is served at this first look, so the result is not kept
		c.index.Sweep(now)
		c.matched = c.index.Match(c.matched, p.Keys)
		last.at = now
		return c.matched
	case last.matched == nil || now.Sub(last.at) >= matchFor:
		c.index.Sweep(now)
		last.matched = c.index.Match(last.matched, p.Keys)
		last.at = now
	}
	return last.matched
}

// Length is how many tokens a prompt has: as counted, else by its bytes and the learned ratio, else the estimate.
func (c *Cache) Length(p *Prompt, model string, estimate int) int {
	switch {
	case p.Tokens > 0:
		return p.Tokens
	case p.Bytes > 0 && !p.Media:
		return max(1, c.ratios[model].Tokens(p.Bytes))
	}
	return max(1, estimate)
}

// Learn takes the length of a prompt in tokens as its engine counted it; 0: the engine did not say.
func (c *Cache) Learn(p *Prompt, model string, tokens int) {
	if tokens > 0 && p.Bytes > 0 && !p.Media {
		ratio := c.ratios[model]
		ratio.Learn(p.Bytes, tokens)
		c.ratios[model] = ratio
	}
}

// Stats says how large the index is.
func (c *Cache) Stats() index.Stats { return c.index.Stats() }

// Reset empties the index. The caller must also call Drop on each Holdings.
func (c *Cache) Reset() { c.index.Reset() }

// Feedback says, by model, whether engines tell what they found in their caches.
func (c *Cache) Feedback() iter.Seq2[string, bool] { return maps.All(c.feedback) }

// Forget drops what was learned of the models that are gone.
func (c *Cache) Forget(gone func(model string) bool) {
	maps.DeleteFunc(c.ratios, func(model string, _ index.Ratio) bool { return gone(model) })
	maps.DeleteFunc(c.feedback, func(model string, _ bool) bool { return gone(model) })
}

// Expectation is what the prefill of one probe is expected to find in its engine's cache and to leave there.
// Answered, Dropped or Lost ends it.
type Expectation struct {
	holdings      *Holdings
	model         string
	prompt        Prompt
	hit           int  // tokens thought to be in the cache
	stillComputed bool // these tokens were still being computed for another probe when this one was sent
	speculation   index.Speculation
}

// Usage is what an engine says it did for a probe.
type Usage struct {
	PromptTokens int // by its own count; 0: not told
	CachedTokens int // of them, found in its prefix cache; -1: not told
}
