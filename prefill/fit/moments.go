package fit

import (
	"math"
	"math/bits"

	"evenkeel/prefill/policy"
)

// The terms of a prefill's time. plainLine is the set of a fixed time and a time per new token.
const (
	fixed              = iota
	perNewToken        // ms per new token
	perPair            // ms per pair of tokens that attention compares
	perConcurrent      // ms per other request on the engine
	perConcurrentToken // ms per new token and other request
	terms

	plainLine = 1<<fixed | 1<<perNewToken
)

// scale brings the terms to similar sizes, so that sums of their products lose no digits.
var scale = [terms]float64{1, 1e-3, 1e-6, 1, 1e-3}

func extraTerms(set int) int { return bits.OnesCount(uint(set &^ plainLine)) }

// moments are weighted sums of products over all samples, from which any set of terms can be fitted
// by least squares.
type moments struct {
	xx [terms][terms]float64 // sums of the products of two terms
	xy [terms]float64        // sums of the products of a term and the time
	yy float64               // sum of the squared times
}

// add multiplies the weight of all earlier samples by decay.
func (m *moments) add(s Sample, targetMs, decay float64) {
	x := [terms]float64{1, s.New, policy.Attention(s.New, s.Hit), s.Concurrent, s.Concurrent * s.New} // in the order of the terms
	for i := range x {
		x[i] *= scale[i]
	}
	for i := range x {
		for k := range x {
			m.xx[i][k] = m.xx[i][k]*decay + x[i]*x[k]
		}
		m.xy[i] = m.xy[i]*decay + x[i]*targetMs
	}
	m.yy = m.yy*decay + targetMs*targetMs
}

// weight is the sum of the weights of all samples.
func (m *moments) weight() float64 { return m.xx[fixed][fixed] }

// totalSpread is the weighted sum of the squared distances of the times from their mean.
func (m *moments) totalSpread() float64 {
	return m.yy - m.xy[fixed]*m.xy[fixed]/m.weight()
}

// minPivotShare is the smallest share of a term's sum of squares that must remain after the earlier
// terms are subtracted. Below it, the term is almost a combination of them, and a fit could not
// separate them.
const minPivotShare = 1e-6

// solve fits the terms whose bits are set, by least squares: it solves the normal equations
// xx·factors = xy with Cholesky's method. errors is the sum of the squared errors in ms². ok is
// false if the samples do not separate the terms.
func (m *moments) solve(set int) (factors [terms]float64, errors float64, ok bool) {
	var chosen [terms]int // the first n are the terms of the set
	n := 0
	for i := range terms {
		if set&(1<<i) != 0 {
			chosen[n] = i
			n++
		}
	}
	root, ok := m.cholesky(chosen[:n])
	if !ok {
		return factors, 0, false
	}
	solution := solveTransposed(&root, n, m.solveLower(&root, chosen[:n]))
	for i := range n {
		factors[chosen[i]] = solution[i] * scale[chosen[i]] // the factors are per unscaled term
	}
	return factors, m.squaredErrors(factors), true
}

// solveLower solves root·z = xy. root is lower triangular.
func (m *moments) solveLower(root *[terms][terms]float64, chosen []int) (z [terms]float64) {
	for i := range chosen {
		z[i] = m.xy[chosen[i]]
		for l := range i {
			z[i] -= root[i][l] * z[l]
		}
		z[i] /= root[i][i]
	}
	return z
}

// solveTransposed solves rootᵀ·x = z for the first n terms, and returns x.
func solveTransposed(root *[terms][terms]float64, n int, z [terms]float64) [terms]float64 {
	for i := n - 1; i >= 0; i-- {
		for l := i + 1; l < n; l++ {
			z[i] -= root[l][i] * z[l]
		}
		z[i] /= root[i][i]
	}
	return z
}

// cholesky returns the lower triangular root with root·rootᵀ = xx of the chosen terms. ok is false
// if a term is almost a combination of those before it.
func (m *moments) cholesky(chosen []int) (root [terms][terms]float64, ok bool) {
	for i := range chosen {
		for k := range i + 1 {
			sum := m.xx[chosen[i]][chosen[k]] // less what the columns before k explain
			for l := range k {
				sum -= root[i][l] * root[k][l]
			}
			switch {
			case k < i: // left of the diagonal
				root[i][k] = sum / root[k][k]
			case !(sum > minPivotShare*m.xx[chosen[i]][chosen[i]]): // negated, so that NaN is refused, too
				return root, false
			default:
				root[i][i] = math.Sqrt(sum)
			}
		}
	}
	return root, true
}

// squaredErrors takes factors per unscaled term. The square of each error, (y - Σ factor·x)², is
// multiplied out, so that no sample has to be kept.
func (m *moments) squaredErrors(factors [terms]float64) float64 {
	sum := m.yy
	for i, factor := range factors {
		factor /= scale[i]
		sum -= 2 * factor * m.xy[i]
		for k, other := range factors {
			sum += factor * other / scale[k] * m.xx[i][k]
		}
	}
	return max(0, sum) // rounding errors could make it negative
}
