package cache

import (
	"slices"

	"evenkeel/prefill/index"
)

// Prompt identifies a prompt in prefix caches. A Prompt without keys is not looked up.
type Prompt struct {
	Keys        []index.Key // keys of the prompt's blocks; shared with other requests, so that they must not be changed
	BlockTokens int         // token ids per block; 0: the blocks are made of bytes
	Tokens      int         // length in tokens; 0: not counted
	Bytes       int         // length of the rendered text, if the blocks are made of bytes
	Salted      bool        // the request has a cache_salt, so that its blocks cannot be found by KV events
	Media       bool        // the prompt has pictures or sound, so that its bytes do not predict its tokens
}

// The units of blocks. A candidate has a slot in the index for each unit.
const (
	byBytes = iota
	byTokens
	units
)

// unit is the unit of the prompt's blocks, which is also the index of the slot in CachedBlocks.slots.
func (p *Prompt) unit() int {
	if p.BlockTokens > 0 {
		return byTokens
	}
	return byBytes
}

// bytesPerTokenGuess is the number of bytes per token that ClassDepth assumes. It is not the learned ratio, because a class of
// requests must not change when the ratio does.
const bytesPerTokenGuess = 4

// ClassDepth is how many of the prompt's first blocks decide its class of requests. tokens lists depths in tokens, in
// ascending order: the largest depth that is within the prompt decides. If none is, all blocks count.
func (p *Prompt) ClassDepth(tokens []int) int {
	for _, depth := range slices.Backward(tokens) {
		blocks := depth * bytesPerTokenGuess / index.BlockBytes
		if p.BlockTokens > 0 { // the blocks are made of token ids, not of bytes
			blocks = depth / p.BlockTokens
		}
		if blocks >= 1 && blocks <= len(p.Keys) { // 0: the depth is less than one block
			return blocks
		}
	}
	return len(p.Keys)
}

// BlockSize is how many tokens one of the prompt's blocks stands for. tokens is the length of the prompt. A block of bytes stands for its
// share of the prompt's tokens: its bytes times the tokens per byte.
func (p *Prompt) BlockSize(tokens int) float64 {
	if p.BlockTokens > 0 { // the blocks are made of token ids
		return float64(p.BlockTokens)
	}
	return float64(index.BlockBytes) * float64(tokens) / float64(max(1, p.Bytes))
}
