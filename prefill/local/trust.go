package local

// cacheTrust judges whether predictions of an engine's prefix cache come true. They do not if the engine has no prefix cache, or
// does not report cached_tokens. Its ranks would then get prompts that seem short but are computed in full, while the other
// ranks of the group wait. With trust only the first few prompts do such harm.
type cacheTrust struct {
	expected, found float64 // tokens predicted and found; older answers count less
}

const (
	trustAfter = 256 // tokens that must have been expected before an engine can lose trust
	trustShare = 0.5 // share of the expected tokens that must be found
	trustDecay = 0.9 // factor of both sums at each answer
)

// addAnswer adds one answer: the number of tokens that were expected in the cache, and the number that the engine found, -1 if
// not reported.
func (t *cacheTrust) addAnswer(expected, found int) {
	if expected <= 0 { // the answer says nothing about predictions
		return
	}
	t.expected = trustDecay*t.expected + float64(expected)
	t.found = trustDecay*t.found + float64(min(max(found, 0), expected))
}

// trusted reports whether predictions for the engine are trusted: always while few tokens were expected, later if enough of them
// were found.
func (t *cacheTrust) trusted() bool {
	return t.expected < trustAfter || t.found >= trustShare*t.expected
}
