package cache

import (
	"slices"

	"evenkeel/prefill/index"
)

// Prompt is what a prompt is recognised by. The zero one is not looked up.
type Prompt struct {
	Keys        []index.Key // of its blocks; must not change any more
	BlockTokens int         // of each, where they are blocks of token ids
	Tokens      int         // counted; 0: not
	Bytes       int         // of the rendering, where they are blocks of that
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

// ClassDepth is how many of the prompt's blocks make its class: as many as the
// deepest of the configured depths that it reaches, else all.
func (p *Prompt) ClassDepth(tokens []int) int {
	depth := len(p.Keys)
	for _, n := range slices.Backward(tokens) { // ascending
		at := n * classBytes / index.BlockBytes
		if p.BlockTokens > 0 {
			at = n / p.BlockTokens
		}
		if at >= 1 && at <= len(p.Keys) {
			return at
		}
	}
	return depth
}

// BlockSize is how many tokens one of a prompt's blocks stands for, the prompt
// being so long.
func (p *Prompt) BlockSize(tokens int) float64 {
	if p.BlockTokens > 0 {
		return float64(p.BlockTokens)
	}
	return float64(index.BlockBytes) * float64(tokens) / float64(max(1, p.Bytes))
}
