package fit

import (
	"math"
	"math/bits"

	"evenkeel/prefill/policy"
)

// The terms that a prefill's time is made of, and those of a plain line.
const (
	fixed = iota
	fresh
	pairs // token pairs that attention looks at
	beside
	besideFresh
	terms

	line = 1<<fixed | 1<<fresh
)

// scale brings the terms near to each other, so that no digits are lost.
var scale = [terms]float64{1, 1e-3, 1e-6, 1, 1e-3}

// further is how many of a set's terms a plain line does not have.
func further(set int) int { return bits.OnesCount(uint(set &^ line)) }

// moments are the sums of products from which any choice of terms is fitted by least
// squares.
type moments struct {
	xx [terms][terms]float64
	xy [terms]float64
	yy float64
}

func (m *moments) add(s Sample, y, keep float64) {
	x := [terms]float64{1, s.New, policy.Attention(s.New, s.Hit), s.Beside, s.Beside * s.New}
	for i := range x {
		x[i] *= scale[i]
	}
	for i := range x {
		for k := range x {
			m.xx[i][k] = m.xx[i][k]*keep + x[i]*x[k]
		}
		m.xy[i] = m.xy[i]*keep + x[i]*y
	}
	m.yy = m.yy*keep + y*y
}

// weight is how many samples there are, each counted by the weight that it still has.
func (m *moments) weight() float64 { return m.xx[fixed][fixed] }

// spread is the squared distance of all times from their mean.
func (m *moments) spread() float64 {
	return m.yy - m.xy[fixed]*m.xy[fixed]/m.weight()
}

// pivot is the least share of a term's own sum that may be left after the terms before it: a term that these nearly
// explain cannot be told apart from them.
const pivot = 1e-6

// solve fits a set of terms by Cholesky's method. rest is the sum of squared errors. ok is false if the samples do
// not tell the terms apart.
func (m *moments) solve(set int) (beta [terms]float64, rest float64, ok bool) {
	var root [terms][terms]float64
	var at [terms]int
	n := 0
	for i := range terms {
		if set&(1<<i) != 0 {
			at[n] = i
			n++
		}
	}
	for i := range n {
		for k := range i + 1 {
			sum := m.xx[at[i]][at[k]]
			for l := range k {
				sum -= root[i][l] * root[k][l]
			}
			switch {
			case k < i:
				root[i][k] = sum / root[k][k]
			case !(sum > pivot*m.xx[at[i]][at[i]]):
				return beta, 0, false
			default:
				root[i][i] = math.Sqrt(sum)
			}
		}
	}
	var z [terms]float64
	for i := range n {
		z[i] = m.xy[at[i]]
		for l := range i {
			z[i] -= root[i][l] * z[l]
		}
		z[i] /= root[i][i]
	}
	for i := n - 1; i >= 0; i-- {
		for l := i + 1; l < n; l++ {
			z[i] -= root[l][i] * z[l]
		}
		z[i] /= root[i][i]
		beta[at[i]] = z[i] * scale[at[i]]
	}
	return beta, m.rest(beta), true
}

// rest is the sum of squared errors of a fit.
func (m *moments) rest(beta [terms]float64) float64 {
	sum := m.yy
	for i, b := range beta {
		b /= scale[i]
		sum -= 2 * b * m.xy[i]
		for k, o := range beta {
			sum += b * o / scale[k] * m.xx[i][k]
		}
	}
	return max(0, sum)
}
