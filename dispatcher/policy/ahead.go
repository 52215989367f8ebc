package policy

// ahead is what BR-H has beyond BR-0: a score over the steps to the horizon.
type ahead struct {
	horizon     int // or auto
	alpha, beta float64
	gamma       float64 // or auto
	want        Needs   // but for the horizon

	// Of the round.
	discounts []float64 // gamma^h, h = 0..H
	powersOf  float64   // the gamma they are of
	sum       float64   // of the discounts
	margins   []int64
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

// resolve settles horizon and discounts for the round.
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

// score is F of w added tokens on rank g.
func (a *ahead) score(e *envelope, g int, w int64) float64 {
	f := a.alpha * a.sum * float64(w)
	if w <= e.marginOf(g) {
		return f // below every margin
	}
	row := e.row(g)
	top, discounts := e.top[:len(row)], a.discounts[:len(row)]
	var over float64
	for h, x := range row {
		over += discounts[h] * float64(max(0, w-top[h]+x))
	}
	return f - a.beta*over
}
