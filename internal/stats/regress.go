package stats

import "math"

// Regression is y = the sum of Of[i] * x[i], by least squares. A column of ones gives it a constant.
type Regression struct {
	N         int
	Of, Error []float64 // the coefficients, and the standard error of each
	R2        float64   // share of y's variance that it explains; 0 where y does not vary
}

// Regress fails where there are no more rows than columns, or where columns depend on each other.
func Regress(rows [][]float64, y []float64) (r Regression, ok bool) {
	r.N = len(rows)
	if r.N == 0 || r.N <= len(rows[0]) {
		return r, false
	}
	n := len(rows[0])
	size := make([]float64, n) // columns are in different units, so each is taken in its own size
	for _, x := range rows {
		for i, v := range x {
			size[i] += v * v / float64(r.N)
		}
	}
	for i := range size {
		if size[i] == 0 {
			return r, false
		}
		size[i] = math.Sqrt(size[i])
	}
	sums := make([][]float64, n) // the normal equations, with the unit matrix and y behind
	for i := range sums {
		sums[i] = make([]float64, 2*n+1)
		sums[i][n+i] = 1
	}
	mean := Mean(y)
	for k, x := range rows {
		for i := range n {
			for j := range n {
				sums[i][j] += x[i] / size[i] * x[j] / size[j] / float64(r.N)
			}
			sums[i][2*n] += x[i] / size[i] * y[k] / float64(r.N)
		}
	}
	for i := range n { // Gauss and Jordan
		if sums[i][i] < 1e-9 {
			return r, false
		}
		for j := range n {
			if f := sums[j][i] / sums[i][i]; j != i {
				for k := range sums[j] {
					sums[j][k] -= f * sums[i][k]
				}
			}
		}
	}
	r.Of, r.Error = make([]float64, n), make([]float64, n)
	for i := range n {
		r.Of[i] = sums[i][2*n] / sums[i][i] / size[i]
	}
	left, all := 0.0, 0.0
	for k, x := range rows {
		left += math.Pow(y[k]-r.At(x), 2)
		all += math.Pow(y[k]-mean, 2)
	}
	for i := range n {
		r.Error[i] = math.Sqrt(left/float64(r.N-n)*sums[i][n+i]/sums[i][i]/float64(r.N)) / size[i]
	}
	if all > 0 {
		r.R2 = 1 - left/all
	}
	return r, true
}

// At is its y at an x.
func (r Regression) At(x []float64) (y float64) {
	for i, v := range x {
		y += r.Of[i] * v
	}
	return y
}
