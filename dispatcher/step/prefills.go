package step

// prefillFit learns how much longer prompts make a step. The constant of its line includes the time
// of a step without any load, so that the line can be learned even if all steps compute prompts.
type prefillFit struct {
	line        regression
	ownShare    float64         // share of a prompt token's cost that falls on the rank that computes it, 0 to 1
	medianRatio median[float64] // median of the measured time divided by the expected time
}

// UsualOwnShare is the share of a prompt token's cost that falls on the rank that computes it, if
// the config does not give it: the middle of the engines in bench/lab/laws, with experts as fast as
// in published runs. The share is not learned, because the board only estimates how much of a
// prompt a step computes. In the median of 16 randomly drawn loads, shares that were learned from
// steps were 1.3 to 2.2 times too large or too small, and policies that used them served 1 % fewer
// tokens.
const UsualOwnShare = 0.25

// UsualOwnPromptMs is how many ms a prompt token is assumed to add to a step on the rank that
// computes it, until this is known: about the middle of the engines in bench/lab/laws. With 0,
// policies would hold no request back, and a group that gets prompts faster than it can compute
// them one by one would stay overloaded until it has learned the cost.
const UsualOwnPromptMs = 0.02

const (
	fitPrefills = 100 // so many steps with a prefill are needed for the line
	// Expected ms of a step, and ms per prompt token, before the first line is known. They decide only
	// which steps are outliers, and which rank counts as the slowest.
	guessC0Ms, guessTokenMs = 20, 0.1
)

// add learns from a step with a prefill, unless its time is far from the expected one. Such a step
// takes
//
//	fixed time + decodes of the slowest rank +
//	ms per prompt token * (ownShare*its prompt tokens + (1-ownShare)*mean prompt tokens)
//
// The time of the decodes is subtracted, and the rest is added to the line over the tokens in the
// parentheses. m is the model of steps without a prefill, as far as it is known.
func (f *prefillFit) add(m Model, ownShare float64, ranks []Rank, ms float64) {
	f.setOwnShare(ownShare)
	m = f.withPromptCost(m)
	if ratio := ms / m.Ms(ranks); !f.isUsualRatio(ratio) {
		return
	}
	slowest := &ranks[m.slowest(ranks)]
	msWithoutDecodes := ms - m.RequestMs*slowest.Requests - m.C1Ms*slowest.KV
	promptTokens := ownShare*slowest.Prompt + (1-ownShare)*meanPrompt(ranks)
	f.line.add(promptTokens, msWithoutDecodes)
}

func (f *prefillFit) withPromptCost(m Model) Model {
	hasPromptCost := m.OwnPromptMs+m.SharedPromptMs != 0
	isLearned := f.setLearnedCosts(&m)
	if !isLearned && !hasPromptCost {
		m.OwnPromptMs, m.SharedPromptMs = f.ownShare*guessTokenMs, (1-f.ownShare)*guessTokenMs
		m.C0Ms = max(m.C0Ms, guessC0Ms) // C0Ms may be unknown, and is 0 then
	}
	return m
}

// isUsualRatio compares a step's measured time divided by its expected time with the median of the
// last ratios, and adds it to them. It does not compare with 1, because the expected times may all
// be wrong by the same factor.
func (f *prefillFit) isUsualRatio(ratio float64) bool {
	f.medianRatio.add(ratio)
	median := f.medianRatio.value
	return ratio >= leastUsualRatio*median && ratio <= mostUsualRatio*median
}

// hasSteps includes steps that were left out as outliers.
func (f *prefillFit) hasSteps() bool { return f.medianRatio.count > 0 }

func (f *prefillFit) setOwnShare(ownShare float64) {
	if ownShare != f.ownShare { // the old line was learned from loads with the old share
		f.line, f.ownShare = regression{}, ownShare
	}
}

// setLearnedCosts changes nothing if the cost of prefills is not known. The model's C0Ms must be
// the time of a step without any load.
func (f *prefillFit) setLearnedCosts(m *Model) (known bool) {
	if f.line.n < fitPrefills {
		return false
	}
	tokenMs, fixedMs, known := f.costWithFixedPart(m.C0Ms)
	if !known { // the steps may show the cost of a token, but no fixed cost
		tokenMs, known = f.costWithoutFixedPart(m.C0Ms)
		fixedMs = 0
	}
	if !known {
		return false
	}
	m.OwnPromptMs, m.SharedPromptMs, m.PrefillMs = f.ownShare*tokenMs, (1-f.ownShare)*tokenMs, fixedMs
	return true
}

// The fixed part is the constant of the line less c0Ms. ok is false if the steps do not surely show
// that tokens cost time, or if the fixed part is below 0.
func (f *prefillFit) costWithFixedPart(c0Ms float64) (tokenMs, fixedMs float64, ok bool) {
	line, r2 := f.line.fit()
	tokenMs, fixedMs = line.C1Ms, line.C0Ms-c0Ms
	return tokenMs, fixedMs, tokenMs > 0 && fixedMs >= 0 && f.line.slopeIsSure(r2)
}

// costWithoutFixedPart takes the line that begins at c0Ms. It needs only one slope, so it can be
// sure even if all steps had about equal numbers of prompt tokens.
func (f *prefillFit) costWithoutFixedPart(c0Ms float64) (tokenMs float64, ok bool) {
	tokenMs, r2 := f.line.slopeFrom(c0Ms)
	return tokenMs, c0Ms != 0 && tokenMs > 0 && f.line.slopeIsSure(r2)
}
