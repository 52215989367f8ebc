package local

// trust is whether an engine's prefix cache holds what it is thought to hold. An
// engine without one, or that does not report cached_tokens, would compute long
// prompts whole, and its group would wait: that happens to the first few only.
type trust struct {
	expected, found float64 // tokens, older answers counting less
}

const (
	trustAfter = 256 // expected tokens, before anything is said
	trustShare = 0.5 // of them, to be found
	trustDecay = 0.9
)

// learn takes one answer: so many tokens were expected in the cache, so many were
// there, -1 if it did not say.
func (t *trust) learn(expected, found int) {
	if expected <= 0 {
		return
	}
	t.expected = trustDecay*t.expected + float64(expected)
	t.found = trustDecay*t.found + float64(min(max(found, 0), expected))
}

func (t *trust) holds() bool {
	return t.expected < trustAfter || t.found >= trustShare*t.expected
}
