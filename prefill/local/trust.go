package local

// trust is whether an engine's prefix cache holds what it is thought to hold. An engine without a prefix cache, or
// one that does not report cached_tokens, would compute long prompts in full, and its group would wait. With trust
// that happens to the first few prompts only.
type trust struct {
	expected, found float64 // tokens, older answers counting less
}

const (
	trustAfter = 256 // expected tokens before a verdict; until then the engine is trusted
	trustShare = 0.5 // share of the expected tokens that must be found
	trustDecay = 0.9
)

// learn takes one answer: so many tokens were expected in the cache, and so many were found, -1 if the engine did not
// say.
func (t *trust) learn(expected, found int) {
	if expected <= 0 {
		return
	}
	t.expected = trustDecay*t.expected + float64(expected)
	t.found = trustDecay*t.found + float64(min(max(found, 0), expected))
}

// holds reports whether the engine is trusted to hold what it is thought to hold.
func (t *trust) holds() bool {
	return t.expected < trustAfter || t.found >= trustShare*t.expected
}
