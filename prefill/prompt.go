package prefill

import (
	"slices"
	"time"

	"evenkeel/prefill/index"
	"evenkeel/prefill/policy"
)

// Prompt is what a prompt is recognised by. The zero one is not looked up.
type Prompt struct {
	Keys        []index.Key // of its blocks; must not change any more
	BlockTokens int         // of each, where they are blocks of token ids
	Tokens      int         // counted; 0: not
	Bytes       int         // of the rendering, where they are blocks of that
	BlockBytes  int         // of each of those; 0: index.BlockBytes
	Salted      bool        // its blocks are those of a cache_salt, which engines' events do not tell
	Media       bool        // not all of it is text: its bytes do not tell its tokens
}

// units of blocks: a candidate has a slot in the index for each that came.
const (
	byBytes = iota
	byTokens
	units
)

func (p *Prompt) unit() int {
	if p.BlockTokens > 0 {
		return byTokens
	}
	return byBytes
}

// classBytes is how many bytes of a rendering count as a token where classes of
// requests are told apart: fixed, or a class would change with what is learned.
const classBytes = 4

// classDepth is how many of the prompt's blocks make its class: as many as the
// deepest of the configured depths that it reaches, else all.
func (p *Prompt) classDepth(tokens []int) int {
	depth := len(p.Keys)
	for _, n := range slices.Backward(tokens) { // ascending
		at := n * classBytes / p.blockBytes()
		if p.BlockTokens > 0 {
			at = n / p.BlockTokens
		}
		if at >= 1 && at <= len(p.Keys) {
			return at
		}
	}
	return depth
}

// progress is what the tier remembers of a request from one look to the next.
type progress struct {
	counted   bool // by the hotspot detector
	weighed   bool
	matched   []int32 // blocks by slot, while the request waits
	matchedAt time.Time
}

// matchFor is how long what was found for a waiting request holds: a busy queue
// is looked at hundreds of times a second, and a long prompt has thousands of
// blocks.
const matchFor = 50 * time.Millisecond

// match looks the prompt up: for each slot, how many of its blocks it holds.
func (t *Tier) match(r *Request) []int32 {
	switch {
	case len(r.Prompt.Keys) == 0:
		return nil
	case r.seen.matchedAt.IsZero(): // mostly it need not wait
		t.index.Sweep(t.now)
		t.matched = t.index.Match(t.matched, r.Prompt.Keys)
		r.seen.matchedAt = t.now
		return t.matched
	case r.seen.matched == nil || t.now.Sub(r.seen.matchedAt) >= matchFor:
		t.index.Sweep(t.now)
		r.seen.matched = t.index.Match(r.seen.matched, r.Prompt.Keys)
		r.seen.matchedAt = t.now
	}
	return r.seen.matched
}

// blocksOn is how many of a prompt's blocks a candidate holds.
func (c *candidate) blocksOn(matched []int32, unit int) int {
	if s := c.slots[unit]; s.known && s.at.N < len(matched) {
		return int(matched[s.at.N])
	}
	return 0
}

// tokensOf is the prompt's length: counted, or by the learned ratio.
func (t *Tier) tokensOf(r *Request) int {
	switch p := &r.Prompt; {
	case r.Counted:
	case p.Tokens > 0:
		return p.Tokens
	case p.Bytes > 0 && !p.Media:
		return max(1, t.ratios[r.Model].Tokens(p.Bytes))
	}
	return max(1, r.PromptTokens)
}

// blockSize is how many tokens one of a prompt's blocks stands for, the prompt
// being so long.
func (p *Prompt) blockSize(tokens int) float64 {
	if p.BlockTokens > 0 {
		return float64(p.BlockTokens)
	}
	return float64(p.blockBytes()) * float64(tokens) / float64(max(1, p.Bytes))
}

func (p *Prompt) blockBytes() int {
	if p.BlockBytes > 0 {
		return p.BlockBytes
	}
	return index.BlockBytes
}

// slot is a candidate's place in the index, for blocks of one unit.
type slot struct {
	at     index.Slot
	known  bool
	blocks int // what it was told it can hold
}

// place sees to it that the candidate has a slot for blocks like the prompt's
// and that it promises no more than the engine can hold.
func (t *Tier) place(c *candidate, p *Prompt, model string) index.Slot {
	blocks, unit := 0, p.unit()
	if capacity := c.capacityTokens(); capacity > 0 {
		switch {
		case unit == byBytes:
			blocks = t.ratios[model].Blocks(int(capacity), p.blockBytes())
		case c.mode(t.now) == precise:
			blocks = 2 * int(capacity) / p.BlockTokens // its events say what goes; this only bounds an engine that says nothing of that
		default:
			blocks = int(capacity) / p.BlockTokens
		}
		blocks = max(1, blocks)
	}
	s := &c.slots[unit]
	switch {
	case !s.known:
		id := c.ID
		if unit == byTokens {
			id += " tokens" // a slot of its own, for its blocks have another size
		}
		s.at, s.known, s.blocks = t.index.Add(id, blocks), true, blocks
	case blocks > 0 && (blocks > s.blocks+s.blocks/16 || blocks < s.blocks-s.blocks/16): // the ratio moves with every answer
		t.index.SetCapacity(s.at, blocks)
		s.blocks = blocks
	}
	return s.at
}

// forgetPrefixes drops what a candidate is thought to have in its cache: its
// engine may have started anew. Its events tell that by themselves.
func (t *Tier) forgetPrefixes(c *candidate) {
	for unit, s := range c.slots {
		if s.known && (unit == byBytes || c.mode(t.now) != precise) {
			t.index.Clear(s.at, index.Removed)
		}
	}
}

// dropPrefixes does so whatever is known, and has it told anew.
func (t *Tier) dropPrefixes(c *candidate) {
	for _, s := range c.slots {
		if s.known {
			t.index.Clear(s.at, index.Removed)
		}
	}
	if c.events != nil {
		c.events.Resync()
	}
}

// ForgetPrefixes drops what is known of the prefix cache of a candidate, or of
// all for an empty id. It reports whether there is such a candidate.
func (t *Tier) ForgetPrefixes(id string) bool {
	t.lock()
	defer t.unlock()
	if id == "" {
		t.index.Reset()
		for _, c := range t.candidates {
			t.dropPrefixes(c)
		}
		return true
	}
	c := t.candidates[id]
	if c != nil {
		t.dropPrefixes(c)
	}
	return c != nil
}

// expect books that the lease's prefill will leave its prompt in the cache.
func (t *Tier) expect(l *Lease, r *Request, v *policy.Candidate) {
	l.HitTokens = int(v.HitTokens)
	l.hung = l.c.hangs(&r.Prompt, l.c.blocksOn(t.found, r.Prompt.unit())) // before it is among those that are looked at
	l.prompt = r.Prompt
	t.prefixes.prompt += uint64(v.PromptTokens)
	t.prefixes.predicted += uint64(v.HitTokens)
	if len(r.Prompt.Keys) > 0 {
		l.expected = t.index.Speculate(t.place(l.c, &r.Prompt, r.Model), r.Prompt.Keys)
	}
}

// compute is what a probe's end says about the cache.
func (t *Tier) compute(l *Lease, u Usage) {
	if u.PromptTokens > 0 && l.prompt.Bytes > 0 && !l.prompt.Media {
		ratio := t.ratios[l.model]
		ratio.Learn(l.prompt.Bytes, u.PromptTokens)
		t.ratios[l.model] = ratio
	}
	if u.PromptTokens > 0 {
		t.feedback[l.model] = u.CachedTokens >= 0
	}
	if u.CachedTokens >= 0 && u.PromptTokens > 0 {
		t.prefixes.actual += uint64(u.CachedTokens)
		off := float64(l.HitTokens - u.CachedTokens)
		switch {
		case off > 0:
			t.metrics.misprediction.WithLabelValues("over").Observe(off)
		case off < 0:
			t.metrics.misprediction.WithLabelValues("under").Observe(-off)
		}
		t.judge(l, u)
	}
	l.c.expectEvents(u, t.now)
	if l.c.told(&l.prompt, t.now) {
		t.hear(l, u)
	} else {
		t.correct(l, u)
	}
	l.prompt = Prompt{} // a hand-off may wait for minutes
}

// correct takes an answer of a candidate of whose cache nothing else tells: it
// held no more than it says, and holds the prompt now.
func (t *Tier) correct(l *Lease, u Usage) {
	p := &l.prompt
	if len(p.Keys) == 0 {
		return
	}
	if block := p.blockSize(u.PromptTokens); u.CachedTokens >= 0 && u.PromptTokens > 0 && float64(l.HitTokens-u.CachedTokens) >= block {
		t.index.Correct(l.c.slots[p.unit()].at, p.Keys, int(float64(u.CachedTokens)/block))
	}
	t.index.Confirm(&l.expected)
	l.c.guessed = l.c.guessed || l.c.events != nil && p.BlockTokens > 0 && !p.Salted
}
