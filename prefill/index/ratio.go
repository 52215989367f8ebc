package index

import "math"

// Ratio is a model's mean number of rendered bytes per token, learned from the token counts in
// engines' answers. The zero value has learned nothing and stands for firstRatio.
type Ratio struct{ learned float64 }

const (
	firstRatio = 4.0  // that vllm-ascend's proxy assumes
	ratioStep  = 0.05 // weight of a new prompt in the mean
	leastRatio = 1.0  // bounds, so that a wrong token count of an engine does little harm
	mostRatio  = 16.0
)

func (r Ratio) BytesPerToken() float64 {
	if r.learned == 0 {
		return firstRatio
	}
	return r.learned
}

// Learn must not get prompts with media, because their bytes do not predict their tokens.
func (r *Ratio) Learn(bytes, tokens int) {
	if bytes <= 0 || tokens <= 0 {
		return
	}
	next := (1-ratioStep)*r.BytesPerToken() + ratioStep*float64(bytes)/float64(tokens)
	r.learned = min(max(next, leastRatio), mostRatio)
}

func (r Ratio) Tokens(bytes int) int { return int(math.Round(float64(bytes) / r.BytesPerToken())) }

// Blocks is how many blocks of blockBytes fit into an engine's cache of the given number of tokens.
func (r Ratio) Blocks(tokens, blockBytes int) int {
	return int(float64(tokens) * r.BytesPerToken() / float64(blockBytes))
}

// UsableHit is how many of the matched tokens a prompt can take from a cache, in tokens. An engine
// uses whole blocks, and always computes at least the prompt's last token.
func UsableHit(matched, prompt, block int) int {
	if prompt <= 0 || block <= 0 {
		return 0
	}
	wholeBlocks := (prompt - 1) / block * block // before the last token
	return max(0, min(matched, wholeBlocks))
}
