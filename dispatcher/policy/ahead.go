package policy

// lookahead is the part of greedy that only BR-H has: a score over all steps up to the horizon, where BR-0 scores only the present step.
type lookahead struct {
	horizon    int          // steps, or auto
	alpha      float64      // what a token is worth at each step
	beta       float64      // what a token above the envelope costs at each step
	gamma      float64      // discount per step, or auto
	fixedNeeds Requirements // without Horizon and MeanOutput, which greedy.requirements fills in

	// Values of the current round.
	discounts      []float64 // gamma^h for each step h from 0 to the horizon
	discountsGamma float64   // the gamma of the discounts
	discountSum    float64   // sum of the discounts
	margins        []int64   // memory of greedy.setScore
}

// requirements returns what BR-H reads of a snapshot; BR-0 needs nothing. BR-H reads the mean output if horizon or gamma is computed from
// it.
func (p *greedy) requirements(meanOutput float64) Requirements {
	if p.lookahead == nil {
		return Requirements{}
	}
	n := p.lookahead.fixedNeeds
	n.Horizon = horizonFor(p.lookahead.horizon, meanOutput)
	if p.lookahead.horizon == auto || p.lookahead.gamma == auto {
		n.MeanOutput = true
	}
	return n
}

// resolve computes the horizon and the discounts of the round, from the mean output if they are auto.
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
		a.margins = sized(a.margins, horizon+1)
	}
	return horizon
}

// score returns the score F of a prompt on rank g. F is alpha for each of its tokens at each step up to the horizon, less beta for each
// token by which the rank would then exceed the largest load of the step. A step counts as much as its discount says. The caller has
// already scaled tokens by the cost of the rank.
func (a *lookahead) score(e *envelope, g int, tokens int64) float64 {
	f := a.alpha * a.discountSum * float64(tokens)
	if tokens <= e.minMargin(g) {
		return f // the tokens fit below the envelope at every step, so they cost nothing
	}
	loads := e.loadsOf(g)
	peaks, discounts := e.peaks[:len(loads)], a.discounts[:len(loads)]
	var above float64 // discounted tokens above the envelope, over all steps
	for h, load := range loads {
		above += discounts[h] * float64(max(0, load+tokens-peaks[h]))
	}
	return f - a.beta*above
}
