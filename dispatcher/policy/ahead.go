package policy

// lookahead is what only BR-H has: a score over all steps up to a horizon.
type lookahead struct {
	horizon    int          // horizon in decode steps, or auto
	alpha      float64      // score of a prompt token per step
	beta       float64      // penalty, per step, of a token above the largest load of the group
	gamma      float64      // factor by which each step counts less than the one before, or auto
	fixedNeeds Requirements // requirements without Horizon and MeanOutput

	// Computed for the current round.
	discounts      []float64 // by step: gamma^h, the weight of the step in a score
	discountsGamma float64   // gamma from which the discounts were computed
	discountSum    float64
	marginsBuffer  []int64 // memory for the margins of one rank
}

func (p *greedy) requirements(meanOutput float64) Requirements {
	if isBR0 := p.lookahead == nil; isBR0 {
		return Requirements{}
	}
	n := p.lookahead.fixedNeeds
	n.Horizon = horizonFor(p.lookahead.horizon, meanOutput)
	if p.lookahead.horizon == auto || p.lookahead.gamma == auto {
		n.MeanOutput = true
	}
	return n
}

// resolve returns the horizon, and computes the discounts if horizon or gamma has changed.
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

// score returns F as greedy.setScore defines it. The caller has already scaled tokens by the cost
// of the rank.
func (a *lookahead) score(e *envelope, g int, tokens int64) float64 {
	f := a.alpha * a.discountSum * float64(tokens)
	if tokens <= e.minMargin(g) {
		return f // the tokens fit below the largest load at every step
	}
	loads := e.loadsOf(g)
	peaks, discounts := e.peaks[:len(loads)], a.discounts[:len(loads)]
	var above float64 // discounted tokens above the largest load, over all steps
	for h, load := range loads {
		above += discounts[h] * float64(max(0, load+tokens-peaks[h]))
	}
	return f - a.beta*above
}
