package step

// prefillFit learns how much longer prompts make a step, from the steps that compute a prompt. It subtracts the time of the slowest rank's
// decodes from each step, and fits a line to the rest. The load on this line is a weighted mean of two numbers: the prompt tokens of the
// slowest rank, and the mean prompt tokens of all ranks. The constant of the line includes the time of a step without any load, so that the
// line can be learned even if all steps compute prompts.
type prefillFit struct {
	line        regression
	ownShare    float64         // share of a prompt token's cost that falls on the rank that computes it, 0 to 1
	medianRatio median[float64] // median, over the last steps, of the measured time divided by the expected time
}

// UsualOwnShare is the share of a prompt token's cost that falls on the rank that computes it, if the config does not give the share. It is
// the middle of the engines in bench/lab/laws, with experts as fast as in published runs. The share is not learned, because the board only
// estimates how much of a prompt a step computes. In the median of 16 randomly drawn loads, shares that were learned from steps were 1.3 to
// 2.2 times too large or too small, and policies that used them served 1 % fewer tokens.
const UsualOwnShare = 0.25

// UsualOwnPromptMs is how many ms a prompt token is assumed to add to a step on the rank that computes it, until this cost is known: about
// the middle of the engines in bench/lab/laws. With 0, policies would hold no request back, and a group that gets prompts faster than it
// can compute them one by one would stay overloaded until it has learned the cost.
const UsualOwnPromptMs = 0.02

const (
	fitPrefills = 100 // number of steps with a prefill from which on the line that is fitted to them is used
	// Expected time of a step before the first line is known, in ms and in ms per prompt token. They decide only which steps are
	// outliers, and which rank counts as the slowest.
	guessC0Ms, guessTokenMs = 20, 0.1
)

// add learns from a step with a prefill that took ms, unless this time is far from the expected time. By the model, such a step takes
//
//	fixed time + decodes of the slowest rank + ms per prompt token * (ownShare*its prompt tokens + (1-ownShare)*mean prompt tokens)
//
// add subtracts the time of the decodes, and adds the rest to the line over the prompt tokens in the parentheses. m is the model of steps
// without a prefill, as far as it is known. ownShare is the share of a prompt token's cost that falls on the rank that computes it, for
// which the others wait. If it has changed, the line is learned anew.
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

// withPromptCost returns the model with a cost of prompts: the learned one, else the one that the model has from the config or from an
// event of the board, else a guess.
func (f *prefillFit) withPromptCost(m Model) Model {
	hasPromptCost := m.OwnPromptMs+m.SharedPromptMs != 0
	isLearned := f.setLearnedCosts(&m)
	if !isLearned && !hasPromptCost {
		m.OwnPromptMs, m.SharedPromptMs = f.ownShare*guessTokenMs, (1-f.ownShare)*guessTokenMs
		m.C0Ms = max(m.C0Ms, guessC0Ms) // the time of a step without any load may not be known either, and is 0 then
	}
	return m
}

// isUsualRatio says whether a step's measured time divided by its expected time (ratio) is near the median of the last ratios. It also adds
// the ratio to them. It does not compare with 1, because the expected times may all be wrong by the same factor.
func (f *prefillFit) isUsualRatio(ratio float64) bool {
	f.medianRatio.add(ratio)
	median := f.medianRatio.value
	return ratio >= leastUsualRatio*median && ratio <= mostUsualRatio*median
}

// hasSteps says whether any step with a prefill was seen, even if it was left out as an outlier.
func (f *prefillFit) hasSteps() bool { return f.medianRatio.count > 0 }

// setOwnShare sets which share of a prompt token's cost falls on the rank that computes it. If the share changes, the line is learned anew.
func (f *prefillFit) setOwnShare(ownShare float64) {
	if ownShare != f.ownShare { // the old line was learned from loads with the old share, so learn anew
		f.line, f.ownShare = regression{}, ownShare
	}
}

// setLearnedCosts writes the learned cost of prefills into the model: OwnPromptMs, the ms that a prompt token costs the rank that computes
// it, SharedPromptMs, the ms per prompt token of the mean over all ranks, and PrefillMs, the fixed cost of a step with prompts. It returns
// false, and changes nothing, if this cost is not known yet. The model's C0Ms must be the time of a step without any load.
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

// costWithFixedPart returns the cost of prefills by the line: the ms per prompt token, and the ms that a step takes longer with any prompt.
// This fixed part is the constant of the line less c0Ms, the time of a step without any load. ok is false if the steps do not surely show
// that tokens cost time, or if the fixed part is below 0.
func (f *prefillFit) costWithFixedPart(c0Ms float64) (tokenMs, fixedMs float64, ok bool) {
	line, r2 := f.line.fit()
	tokenMs, fixedMs = line.C1Ms, line.C0Ms-c0Ms
	return tokenMs, fixedMs, tokenMs > 0 && fixedMs >= 0 && f.line.slopeIsSure(r2)
}

// costWithoutFixedPart returns the ms per prompt token if a prefill has no fixed cost: by the line that begins at c0Ms. It needs only one
// slope, so it can be sure even if all steps had about equal numbers of prompt tokens. ok is false if c0Ms is not known (0), or if the
// steps do not surely show that tokens cost time.
func (f *prefillFit) costWithoutFixedPart(c0Ms float64) (tokenMs float64, ok bool) {
	tokenMs, r2 := f.line.slopeFrom(c0Ms)
	return tokenMs, c0Ms != 0 && tokenMs > 0 && f.line.slopeIsSure(r2)
}
