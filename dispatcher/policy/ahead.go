package policy

// ahead is what BR-H has in addition to BR-0: a score over all steps up to the horizon.
type ahead struct {
	horizon     int // steps, or auto
	alpha, beta float64
	gamma       float64 // discount per step, or auto
	fixedNeeds  Needs   // without Horizon and MeanOutput, which the method needs fills in

	// Values of the current round.
	discounts      []float64 // gamma^h, h = 0..H
	discountsGamma float64   // the gamma of the discounts
	discountSum    float64   // sum of the discounts
	margins        []int64   // memory of greedy.setScore
}

// needs returns what BR-H reads of a snapshot; BR-0 needs nothing. The mean output is needed where horizon or gamma follow it.
func (p *greedy) needs(meanOutput float64) Needs {
	if p.ahead == nil {
		return Needs{}
	}
	n := p.ahead.fixedNeeds
	n.Horizon = horizonFor(p.ahead.horizon, meanOutput)
	if p.ahead.horizon == auto || p.ahead.gamma == auto {
		n.MeanOutput = true
	}
	return n
}

// resolve computes the horizon and the discounts of the round, which may follow the mean output.
func (a *ahead) resolve(meanOutput float64) (horizon int) {
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

// score returns F of so many more tokens, scaled by the cost of the rank, on rank g: what they are worth over all steps, less beta for
// each token above the envelope.
func (a *ahead) score(e *envelope, g int, tokens int64) float64 {
	f := a.alpha * a.discountSum * float64(tokens)
	if tokens <= e.marginOf(g) {
		return f // the tokens fit below the envelope at every step, so they cost nothing
	}
	row := e.row(g)
	top, discounts := e.top[:len(row)], a.discounts[:len(row)]
	var over float64
	for h, x := range row {
		over += discounts[h] * float64(max(0, tokens-top[h]+x))
	}
	return f - a.beta*over
}
