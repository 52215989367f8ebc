package policy

// ahead is what BR-H has in addition to BR-0: a score over all steps up to the horizon.
type ahead struct {
	horizon     int // steps, or auto
	alpha, beta float64
	gamma       float64 // discount per step, or auto
	want        Needs   // without Horizon and MeanOutput, which needs fills in

	// Values of the current round.
	discounts []float64 // gamma^h, h = 0..H
	powersOf  float64   // the gamma of the discounts
	sum       float64   // sum of the discounts
	margins   []int64   // memory of greedy.prepare
}

func (p *greedy) needs(meanOutput float64) Needs {
	if p.ahead == nil {
		return Needs{}
	}
	n := p.ahead.want
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
	if len(a.discounts) != horizon+1 || a.powersOf != gamma {
		a.discounts, a.powersOf = sized(a.discounts, horizon+1), gamma
		x, sum := 1.0, 0.0
		for h := range a.discounts {
			a.discounts[h] = x
			sum += x
			x *= gamma
		}
		a.sum = sum
		a.margins = sized(a.margins, horizon+1)
	}
	return horizon
}

// score returns F of w more tokens on rank g.
func (a *ahead) score(e *envelope, g int, w int64) float64 {
	f := a.alpha * a.sum * float64(w)
	if w <= e.marginOf(g) {
		return f // the tokens fit below the envelope at every step, so they cost nothing
	}
	row := e.row(g)
	top, discounts := e.top[:len(row)], a.discounts[:len(row)]
	var over float64
	for h, x := range row {
		over += discounts[h] * float64(max(0, w-top[h]+x))
	}
	return f - a.beta*over
}
