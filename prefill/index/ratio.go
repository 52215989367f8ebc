package index

import "math"

// Ratio is how many bytes of rendering a model's token takes, learned from the token counts of engines. The zero
// value has learned nothing and stands for 4.
type Ratio struct{ learned float64 }

const (
	firstRatio = 4.0  // vllm-ascend's guess
	ratioStep  = 0.05 // weight of a new prompt
	leastRatio = 1.0
	mostRatio  = 16.0
)

// BytesPerToken is the ratio as learned so far.
func (r Ratio) BytesPerToken() float64 {
	if r.learned == 0 {
		return firstRatio
	}
	return r.learned
}

// Learn takes the length of one prompt in bytes and in tokens. Prompts with media must be left out.
func (r *Ratio) Learn(bytes, tokens int) {
	if bytes <= 0 || tokens <= 0 {
		return
	}
	next := (1-ratioStep)*r.BytesPerToken() + ratioStep*float64(bytes)/float64(tokens)
	r.learned = min(max(next, leastRatio), mostRatio)
}

// Tokens is how many tokens so many bytes are, rounded to the nearest.
func (r Ratio) Tokens(bytes int) int { return int(math.Round(float64(bytes) / r.BytesPerToken())) }

// Blocks is how many blocks, of so many rendered bytes each, fit into an engine's cache of so many tokens: the
// capacity of a slot for prompts that are hashed as bytes.
func (r Ratio) Blocks(tokens, bytes int) int {
	return int(float64(tokens) * r.BytesPerToken() / float64(bytes))
}

// Usable is how many of the matched tokens a prompt of so many tokens can use: whole blocks, and never its last
// token, because an engine always computes that one.
func Usable(matched, prompt, block int) int {
	if prompt <= 0 || block <= 0 {
		return 0
	}
	return max(0, min(matched, (prompt-1)/block*block))
}
