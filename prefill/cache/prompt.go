package cache

import (
	"slices"

	"evenkeel/prefill/index"
)

// Prompt identifies a prompt in prefix caches. A Prompt without keys is not looked up.
type Prompt struct {
	Keys        []index.Key // of the prompt's blocks; shared with other requests, so that they must not be changed
	BlockTokens int         // token ids per block; 0: the blocks are made of bytes
	Tokens      int         // 0: not counted
	Bytes       int         // of the rendered text, if the blocks are made of bytes
	Salted      bool        // it has a cache_salt, so that KV events do not name its blocks
	Media       bool        // it has pictures or sound, so that its bytes do not predict its tokens
}

// The units of blocks. A candidate has a slot in the index for each.
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

// bytesPerTokenGuess is not the learned ratio, because a class of requests must not change when the
// ratio does.
const bytesPerTokenGuess = 4

// ClassDepth is how many of the prompt's first blocks decide its class: the largest of tokens, in
// ascending order, that is within the prompt decides. If none is, all blocks count.
func (p *Prompt) ClassDepth(tokens []int) int {
	for _, depth := range slices.Backward(tokens) {
		blocks := depth * bytesPerTokenGuess / index.BlockBytes
		if p.BlockTokens > 0 {
			blocks = depth / p.BlockTokens
		}
		if blocks >= 1 && blocks <= len(p.Keys) { // 0: the depth is less than one block
			return blocks
		}
	}
	return len(p.Keys)
}

// BlockSize is how many tokens one block of a prompt stands for: of a block of bytes, its share of
// the prompt's tokens.
func (p *Prompt) BlockSize(tokens int) float64 {
	if p.BlockTokens > 0 {
		return float64(p.BlockTokens)
	}
	return float64(index.BlockBytes) * float64(tokens) / float64(max(1, p.Bytes))
}
