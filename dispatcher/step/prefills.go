package step

// prefillFit learns how much longer prompts make a step, from the steps that compute a prompt. It fits a line to their times, less the time
// of the slowest rank's decodes. The load of a step on this line is a weighted mean of two numbers: the prompt tokens of the slowest rank,
// and the mean prompt tokens of all ranks. The constant of the line includes the time of a step without any load, so that the line can be
// learned even if all steps compute prompts.
type prefillFit struct {
	line      regression
	ownShare  float64         // share of a prompt token's cost that falls on its own rank, 0 to 1: its weight in the load
	timeRatio median[float64] // measured time of the last steps divided by the expected time
}

// UsualOwnShare is the share of a prompt token's cost that falls on its own rank, if the config does not give it: the middle of the laws of
// bench/lab/laws, with experts as fast as in published runs. It is not learned, because the board only estimates how much of a prompt a
// step computes. In the median of 16 randomly drawn loads, shares that were learned from steps were 1.3 to 2.2 times too large or too
// small, and policies that used them served 1 % fewer tokens.
const UsualOwnShare = 0.25

// UsualOwnMs is how many ms a prompt token is assumed to add to a step on the rank that computes it, until the number is known. It is about
// the middle of the laws of bench/lab/laws. With 0, policies would hold no request back, and a group that gets prompts faster than it can
// compute them one by one would stay overloaded until it has learned the number.
const UsualOwnPromptMs = 0.02

const (
	fitPrefills = 100 // so many steps with a prefill must be known before the line that is fitted to them is used
	// Expected time of a step before the first line is known, in ms and in ms per prompt token. Only the test for outliers uses them.
	guessC0Ms, guessTokenMs = 20, 0.1
)

// add adds a step with a prefill that took ms, unless this time is far from the expected time. m is the model of steps without a prefill,
// as far as it is known. ownShare is the share of a prompt token's cost that falls on its own rank.
func (f *prefillFit) add(m Model, ownShare float64, ranks []Rank, ms float64) {
	f.setShare(ownShare)
	costGiven := m.OwnPromptMs+m.SharedPromptMs != 0 // by the config or by an event of the board
	costLearned := f.setCosts(&m)
	if !costLearned && !costGiven { // nothing is known about the cost of prompts
		m.C0Ms, m.OwnPromptMs, m.SharedPromptMs = max(m.C0Ms, guessC0Ms), ownShare*guessTokenMs, (1-ownShare)*guessTokenMs
	}
	ratio := ms / m.Ms(ranks)
	f.timeRatio.add(ratio)
	// All expected times may be wrong by about the same factor, so the ratio is compared with the typical ratio.
	if ratio < tooShort*f.timeRatio.value || ratio > tooLong*f.timeRatio.value {
		return
	}
	slowest := &ranks[m.slowest(ranks)]
	// What is left of the time is the constant C0Ms and the cost of prompts, which the line is for.
	withoutDecodes := ms - m.RequestMs*slowest.Requests - m.C1Ms*slowest.KV
	f.line.add(ownShare*slowest.Prompt+(1-ownShare)*meanPrompt(ranks), withoutDecodes)
}

// hasSteps says whether any step with a prefill was added, even if it was an outlier.
func (f *prefillFit) hasSteps() bool { return f.timeRatio.count > 0 }

// setShare sets the share of a prompt token's cost that falls on its own rank. If the share changes, the line is learned anew.
func (f *prefillFit) setShare(ownShare float64) {
	if ownShare != f.ownShare { // the loads of the old line were computed with the old share
		f.line, f.ownShare = regression{}, ownShare
	}
}

// setCosts writes the learned times that a prefill takes into the model. It returns false, and changes nothing, if they are not known yet.
// The model's C0Ms must be the time of a step without any load.
func (f *prefillFit) setCosts(m *Model) bool {
	if f.line.n < fitPrefills {
		return false
	}
	line, r2 := f.line.fit()
	tokenMs, fixedMs := line.C1Ms, line.C0Ms-m.C0Ms // what a prompt token adds to a step, and what any prompt adds
	if tokenMs <= 0 || fixedMs < 0 || !f.line.sure(r2) {
		// The steps had about equal loads, or steps with a prefill have no fixed cost: use the line through C0Ms.
		tokenMs, r2 = f.line.slopeFrom(m.C0Ms)
		fixedMs = 0
		c0Unknown := m.C0Ms == 0
		if c0Unknown || tokenMs <= 0 || !f.line.sure(r2) {
			return false
		}
	}
	m.OwnPromptMs, m.SharedPromptMs, m.PrefillMs = f.ownShare*tokenMs, (1-f.ownShare)*tokenMs, fixedMs
	return true
}
