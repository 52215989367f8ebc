package step

// prefills is the line of how long steps with a prefill take without the decodes of their slowest rank. The load of a step is the sum of
// the tokens of prompts that this rank computed and of those that a rank computed in the mean, each times its share of what a token costs.
// The time of a step in which nobody computes anything is part of it, so that it says something also where all steps have a prefill.
type prefills struct {
	line  regression
	share float64         // of the rank's own tokens in that load
	ratio median[float64] // how long they took beside what was expected
}

// UsualOwnShare is the rank's own part of what a token of a prompt costs, where the config does not say: the middle of the laws of
// bench/lab/laws, with experts as fast as they were in published runs. It is not learned, because the lengths of prompts are guessed:
// steps told a share that was 1.3 to 2.2 times too large or too small in the median of 16 drawn loads, and policies served 1 % fewer
// tokens by it.
const UsualOwnShare = 0.25

// UsualOwnMs is what such a part takes, about the middle of these laws, until something is known of it: without it nothing would be held,
// and a group whose prompts came faster than it computes them one by one would not get over that before it has learned.
const UsualOwnMs = 0.02

const (
	fitPrefills = 100 // steps with a prefill that must be known at least
	// What is expected before anything is known, for the rule for outliers alone.
	guessC0Ms, guessMs = 20, 0.1
)

// add takes in a step. The law is that of steps without a prefill, as far as it is known.
func (f *prefills) add(m Model, share float64, ranks []Rank, ms float64) {
	f.divide(share)
	if !f.fit(&m) && m.OwnMs+m.SharedMs == 0 {
		m.C0Ms, m.OwnMs, m.SharedMs = max(m.C0Ms, guessC0Ms), share*guessMs, (1-share)*guessMs
	}
	ratio := ms / m.Ms(ranks)
	f.ratio.add(ratio)
	if ratio < tooShort*f.ratio.of || ratio > tooLong*f.ratio.of {
		return
	}
	r := &ranks[m.slowest(ranks)]
	f.line.add(share*r.Prompt+(1-share)*meanPrompt(ranks), ms-m.RequestMs*r.Requests-m.C1Ms*r.KV)
}

// divide says which share of a token is the rank's own. What was added up with another one is forgotten.
func (f *prefills) divide(share float64) {
	if share != f.share {
		f.line, f.share = regression{}, share
	}
}

// fit writes what a prefill costs into the law, where that is known.
func (f *prefills) fit(m *Model) bool {
	if f.line.n < fitPrefills {
		return false
	}
	line, r2 := f.line.fit()
	token, fixed := line.C1Ms, line.C0Ms-m.C0Ms
	if token <= 0 || fixed < 0 || !f.line.sure(r2) {
		// The steps had as much to compute as each other, or a step with any prefill takes no more for that.
		token, r2 = f.line.from(m.C0Ms)
		fixed = 0
		if m.C0Ms == 0 || token <= 0 || !f.line.sure(r2) {
			return false
		}
	}
	m.OwnMs, m.SharedMs, m.PrefillMs = f.share*token, (1-f.share)*token, fixed
	return true
}
