package decode

import (
	"math"
	"strconv"

	"evenkeel/bench/lab/trace"
	"evenkeel/dispatcher/board"
	"evenkeel/prefill/index"
)

// caches are what the decode ranks keep of the prompts that they pulled or were given, in blocks of the trace's. What answers add is
// not in the trace's blocks, so a further turn finds less than it would find in an engine.
type caches struct {
	index *index.Index
	ranks []index.Slot // by id
	held  []int32      // scratch: whole blocks of a prompt, by slot
}

func newCaches(workers []*worker) *caches {
	c := &caches{index: index.New(index.Config{MaxBytes: math.MaxInt64 / 4})}
	for _, w := range workers {
		c.ranks = append(c.ranks, c.index.Add(strconv.Itoa(int(w.ID)), int(w.Capacity)/trace.BlockTokens))
	}
	return c
}

// keys name the whole blocks of a prompt.
func keys(ids []uint64, prompt int32) (all []index.Key) {
	for _, id := range ids[:min(len(ids), int(prompt)/trace.BlockTokens)] {
		all = append(all, index.Key{Hash: id, Check: ^id})
	}
	return all
}

// hits are the ranks that hold something of a job's prompt.
func (c *caches) hits(q *job) (all []board.Hit) {
	if len(q.blocks) == 0 {
		return nil
	}
	c.held = c.index.Match(c.held, q.blocks)
	for id, s := range c.ranks {
		if n := c.tokens(s, q); n > 0 {
			all = append(all, board.Hit{Worker: int32(id), Tokens: int(n)})
		}
	}
	return all
}

// on is how many tokens of a job's prompt a rank holds.
func (c *caches) on(rank int32, q *job) int32 {
	if len(q.blocks) == 0 {
		return 0
	}
	c.held = c.index.Match(c.held, q.blocks)
	return c.tokens(c.ranks[rank], q)
}

// tokens are those of the blocks that were matched last. An engine computes the last token of every prompt itself.
func (c *caches) tokens(s index.Slot, q *job) int32 {
	return min(c.held[s.N]*trace.BlockTokens, q.prompt-1)
}

// keep notes that a job's KV is on a rank.
func (c *caches) keep(rank int32, q *job) { c.index.Insert(c.ranks[rank], q.blocks) }

// lag is how many steps a transfer of what is lacking of a prompt takes where a whole one takes so many.
func lag(whole int, lacking, prompt int32) int64 {
	return int64(math.Ceil(float64(whole) * float64(lacking) / float64(prompt)))
}
