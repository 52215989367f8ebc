package cache

import (
	"slices"

	"evenkeel/prefill/index"
)

// Prompt has what a prompt is recognised by in prefix caches. A zero Prompt is not looked up.
type Prompt struct {
	Keys        []index.Key // of its blocks; must not change any more
	BlockTokens int         // token ids of each block; 0: the blocks are of bytes
	Tokens      int         // as counted; 0: not counted
	Bytes       int         // of the rendering, if the blocks are of bytes
	Salted      bool        // the request has a cache_salt, so that the engine's events do not show its blocks
	Media       bool        // some of it is not text, so that its bytes say nothing about its tokens
}

// The units of blocks. A candidate has a slot in the index for each unit in which prompts came.
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

// classBytes is how many bytes of a rendering count as a token where classes of requests are told apart. It is fixed,
// because a class would change with a learned ratio.
const classBytes = 4

// ClassDepth is how many of the prompt's blocks make up its class. tokens are depths, ascending: the blocks of the
// largest one that the prompt reaches count, and all blocks if it reaches none.
func (p *Prompt) ClassDepth(tokens []int) int {
	depth := len(p.Keys)
	for _, n := range slices.Backward(tokens) {
		blocks := n * classBytes / index.BlockBytes
		if p.BlockTokens > 0 {
			blocks = n / p.BlockTokens
		}
		if blocks >= 1 && blocks <= len(p.Keys) {
			return blocks
		}
	}
	return depth
}

// BlockSize is how many tokens one of the prompt's blocks stands for, if the prompt has so many tokens.
func (p *Prompt) BlockSize(tokens int) float64 {
	if p.BlockTokens > 0 {
		return float64(p.BlockTokens)
	}
	return float64(index.BlockBytes) * float64(tokens) / float64(max(1, p.Bytes))
}
