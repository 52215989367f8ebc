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

// add adds a sample; target is the time, in ms, that the terms are to explain. keep is the share of their weight that
// the samples before keep.
func (m *moments) add(s Sample, target, keep float64) {
	x := [terms]float64{1, s.New, policy.Attention(s.New, s.Hit), s.Beside, s.Beside * s.New}
	for i := range x {
		x[i] *= scale[i]
	}
	for i := range x {
		for k := range x {
			m.xx[i][k] = m.xx[i][k]*keep + x[i]*x[k]
		}
		m.xy[i] = m.xy[i]*keep + x[i]*target
	}
	m.yy = m.yy*keep + target*target
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

// solve fits a set of terms, whose bits are set, by Cholesky's method. beta is the factor of each term, and errors the
// sum of the squared errors. ok is false if the samples do not tell the terms apart.
func (m *moments) solve(set int) (beta [terms]float64, errors float64, ok bool) {
	var root [terms][terms]float64
	var chosen [terms]int // the first n are the terms of the set
	n := 0
	for i := range terms {
		if set&(1<<i) != 0 {
			chosen[n] = i
			n++
		}
	}
	for i := range n {
		for k := range i + 1 {
			sum := m.xx[chosen[i]][chosen[k]]
			for l := range k {
				sum -= root[i][l] * root[k][l]
			}
			switch {
			case k < i:
				root[i][k] = sum / root[k][k]
			case !(sum > pivot*m.xx[chosen[i]][chosen[i]]):
				return beta, 0, false
			default:
				root[i][i] = math.Sqrt(sum)
			}
		}
	}
	var z [terms]float64 // first the solution of root·z = xy, then that of rootᵀ·z = z
	for i := range n {
		z[i] = m.xy[chosen[i]]
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
		beta[chosen[i]] = z[i] * scale[chosen[i]]
	}
	return beta, m.squaredErrors(beta), true
}

// squaredErrors is the sum of the squared errors of a fit.
func (m *moments) squaredErrors(beta [terms]float64) float64 {
	sum := m.yy
	for i, b := range beta {
		b /= scale[i]
		sum -= 2 * b * m.xy[i]
		for k, other := range beta {
			sum += b * other / scale[k] * m.xx[i][k]
		}
	}
	return max(0, sum)
}
