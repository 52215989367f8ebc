package policy

// lookahead is what only BR-H has: a score over all steps up to a horizon, where BR-0 scores only the present step.
type lookahead struct {
	horizon    int          // horizon in decode steps, or auto
	alpha      float64      // score of a prompt token per step
	beta       float64      // penalty, per step, of a token above the largest load of the group
	gamma      float64      // factor by which each step counts less than the one before, or auto
	fixedNeeds Requirements // requirements without Horizon and MeanOutput, which the method requirements fills in

	// The fields below are computed for the current round.
	discounts      []float64 // by step h from 0 to the horizon: gamma^h, the weight of the step in a score
	discountsGamma float64   // gamma from which the discounts were computed
	discountSum    float64
	marginsBuffer  []int64 // memory that greedy.setScore reuses for the margins of one rank
}

// requirements returns which optional parts of a snapshot the policy reads. BR-0, which has no lookahead, scores only the present step, and
// reads none. BR-H scores all steps up to a horizon, so it reads the predictions of when requests end. It reads the mean output only if it
// computes the horizon or gamma (the factor by which each step counts less than the one before) from it.
func (p *greedy) requirements(meanOutput float64) Requirements {
	if isBR0 := p.lookahead == nil; isBR0 {
		return Requirements{}
	}
	n := p.lookahead.fixedNeeds // the predictor and its settings, which do not depend on the mean output
	n.Horizon = horizonFor(p.lookahead.horizon, meanOutput)
	if p.lookahead.horizon == auto || p.lookahead.gamma == auto {
		n.MeanOutput = true
	}
	return n
}

// resolve prepares a round: it returns the horizon, and computes the discounts, the weights of the steps in a score. Where the settings
// horizon and gamma (the factor from one step's weight to the next) are auto, it computes them from the mean output. If neither differs
// from the last round, the discounts stay, and marginsBuffer has the right length already.
func (a *lookahead) resolve(meanOutput float64) (horizon int) {
	horizon = horizonFor(a.horizon, meanOutput)
	gamma := gammaFor(a.gamma, meanOutput)
	if len(a.discounts) != horizon+1 || a.discountsGamma != gamma {
		a.discounts, a.discountsGamma = sized(a.discounts, horizon+1), gamma
		power, sum := 1.0, 0.0
		for h := range a.discounts {
			a.discounts[h] = power
			sum += power
			power *= gamma
		}
		a.discountSum = sum
		a.marginsBuffer = sized(a.marginsBuffer, horizon+1)
	}
	return horizon
}

// score returns the score F of a prompt on rank g. At each step up to the horizon, each of its tokens adds alpha, and each token by which
// the rank would exceed the largest load of the step takes off beta. Later steps count less (discounts). The caller has already scaled
// tokens by the cost of the rank.
func (a *lookahead) score(e *envelope, g int, tokens int64) float64 {
	f := a.alpha * a.discountSum * float64(tokens)
	if tokens <= e.minMargin(g) {
		return f // the tokens fit below the largest load at every step, so they cost nothing
	}
	loads := e.loadsOf(g)
	peaks, discounts := e.peaks[:len(loads)], a.discounts[:len(loads)]
	var above float64 // discounted tokens above the largest load, over all steps
	for h, load := range loads {
		above += discounts[h] * float64(max(0, load+tokens-peaks[h]))
	}
	return f - a.beta*above
}
