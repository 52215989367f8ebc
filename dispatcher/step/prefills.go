package step

// prefills fits a line to the times of steps with a prefill, from which the time of the slowest rank's decodes is taken off. The load of a
// step is the prompt tokens of that rank and the mean prompt tokens of a rank, each times its share of a token's cost.
// The line's constant includes the time of a step without any load, so that the line is known even if all steps have a prefill.
type prefills struct {
	line  regression
	share float64         // share of the rank's own tokens in that load
	ratio median[float64] // measured time of the last steps divided by the expected time
}

// UsualOwnShare is the share of a prompt token's cost that falls on its own rank, if the config does not give it: the middle of the laws
// of bench/lab/laws, with experts as fast as in published runs. It is not learned, because the board only estimates how much of a prompt a
// step computes: shares that were learned from steps were 1.3 to 2.2 times too large or too small in the median of 16 drawn loads, and
// policies that used them served 1 % fewer tokens.
const UsualOwnShare = 0.25

// UsualOwnMs is how many ms of a step a prompt token is assumed to take on its own rank until that is known: about the middle of these
// laws. With 0, no request would be held, and a group that gets prompts faster than it computes them one by one would stay overloaded
// until it has learned the time.
const UsualOwnMs = 0.02

const (
	fitPrefills = 100 // the least number of steps with a prefill from which a line is used
	// What steps are expected to take before anything is known, in ms and in ms per prompt token. Only the test for outliers uses it.
	guessC0Ms, guessMs = 20, 0.1
)

// add takes in a step with a prefill that took ms, unless that is far off the expected time. m is the model of steps without a prefill,
// as far as it is known, and share is the share of a prompt token's cost that falls on its own rank.
func (f *prefills) add(m Model, share float64, ranks []Rank, ms float64) {
	f.setShare(share)
	if !f.fit(&m) && m.OwnMs+m.SharedMs == 0 {
		m.C0Ms, m.OwnMs, m.SharedMs = max(m.C0Ms, guessC0Ms), share*guessMs, (1-share)*guessMs
	}
	ratio := ms / m.Ms(ranks)
	f.ratio.add(ratio)
	if ratio < tooShort*f.ratio.value || ratio > tooLong*f.ratio.value {
		return
	}
	r := &ranks[m.slowest(ranks)] // the time of its decodes is taken off
	f.line.add(share*r.Prompt+(1-share)*meanPrompt(ranks), ms-m.RequestMs*r.Requests-m.C1Ms*r.KV)
}

// setShare sets the share of a token's cost that falls on its own rank. If the share changes, the line begins anew.
func (f *prefills) setShare(share float64) {
	if share != f.share {
		f.line, f.share = regression{}, share
	}
}

// fit writes into the model what a prefill costs. It returns false, and changes nothing, if that is not known. The C0Ms of the model
// must be that of steps without a prefill.
func (f *prefills) fit(m *Model) bool {
	if f.line.n < fitPrefills {
		return false
	}
	line, r2 := f.line.fit()
	token, fixed := line.C1Ms, line.C0Ms-m.C0Ms
	if token <= 0 || fixed < 0 || !f.line.sure(r2) {
		// The steps had about equal loads, or steps with a prefill have no fixed cost: use the line through C0Ms.
		token, r2 = f.line.slopeFrom(m.C0Ms)
		fixed = 0
		if m.C0Ms == 0 || token <= 0 || !f.line.sure(r2) {
			return false
		}
	}
	m.OwnMs, m.SharedMs, m.PrefillMs = f.share*token, (1-f.share)*token, fixed
	return true
}
