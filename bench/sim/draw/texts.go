package draw

import (
	"math/rand/v2"

	"evenkeel/bench/lab/trace"
)

// Texts is how long prompts and answers are, for loads that draw the rest in another way.
type Texts struct {
	answers answers
	prompts prompts
}

// NewTexts draws how long they are.
func NewTexts(r *rand.Rand) (t Texts) {
	t.answers.draw(r)
	t.prompts.draw(r)
	return t
}

// Next draws one of each, at a share of the run.
func (t *Texts) Next(r *rand.Rand, at float64) trace.Request {
	return trace.Request{Prompt: t.prompts.next(r), Output: t.answers.next(r, at)}
}

func (t *Texts) String() string {
	return "prompts " + t.prompts.text() + ", answers " + t.answers.text()
}
