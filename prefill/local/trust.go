package local

// cacheTrust judges whether predictions of an engine's prefix cache come true. They do not if the
// engine has no prefix cache, or does not report cached_tokens. Its ranks would then get prompts
// that seem short but are computed in full, while the other ranks of the group wait.
type cacheTrust struct {
	expected, found float64 // tokens; older answers count less
}

const (
	trustAfter = 256 // tokens that must have been expected before an engine can lose trust
	trustShare = 0.5 // of the expected tokens
	trustDecay = 0.9 // of both sums at each answer
)

// addAnswer gets -1 as found if the engine did not report it.
func (t *cacheTrust) addAnswer(expected, found int) {
	if expected <= 0 { // the answer says nothing about predictions
		return
	}
	t.expected = trustDecay*t.expected + float64(expected)
	t.found = trustDecay*t.found + float64(min(max(found, 0), expected))
}

func (t *cacheTrust) trusted() bool {
	return t.expected < trustAfter || t.found >= trustShare*t.expected
}
