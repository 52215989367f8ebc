package stats

import "math"

// Regression is a linear model, y = the sum of Of[i] * x[i], fitted by least squares. For a constant term, one column must be all ones.
type Regression struct {
	N         int       // number of rows to which the model was fitted
	Of, Error []float64 // the coefficient of each column, and its standard error
	R2        float64   // share of y's variance that the model explains; 0 if y does not vary
}

// Regress fits y to the rows, each of which has one value per column. ok is false if there are not more rows than columns, or if the
// columns depend on each other linearly.
func Regress(rows [][]float64, y []float64) (r Regression, ok bool) {
	r.N = len(rows)
	if r.N == 0 || r.N <= len(rows[0]) {
		return r, false
	}
	columns := len(rows[0])
	scale := make([]float64, columns) // columns have different units, so each is divided by its root mean square
	for _, x := range rows {
		for i, v := range x {
			scale[i] += v * v / float64(r.N)
		}
	}
	for i := range scale {
		if scale[i] == 0 { // a column of zeros has no coefficient
			return r, false
		}
		scale[i] = math.Sqrt(scale[i])
	}
	sums := normalEquations(rows, y, scale)
	if !eliminate(sums) {
		return r, false
	}
	mean := Mean(y)
	r.Of, r.Error = make([]float64, columns), make([]float64, columns)
	for i := range columns {
		r.Of[i] = sums[i][2*columns] / sums[i][i] / scale[i]
	}
	residual, total := 0.0, 0.0
	for k, x := range rows {
		residual += math.Pow(y[k]-r.At(x), 2)
		total += math.Pow(y[k]-mean, 2)
	}
	for i := range columns {
		r.Error[i] = math.Sqrt(residual/float64(r.N-columns)*sums[i][columns+i]/sums[i][i]/float64(r.N)) / scale[i]
	}
	if total > 0 {
		r.R2 = 1 - residual/total
	}
	return r, true
}

// normalEquations returns the equations that the coefficients solve, one for each column. The columns of rows are divided by scale. Each
// equation has a factor for each coefficient, then a row of the unit matrix, which eliminate turns into the inverse, and then the constant.
func normalEquations(rows [][]float64, y, scale []float64) [][]float64 {
	columns, n := len(scale), float64(len(rows))
	sums := make([][]float64, columns)
	for i := range sums {
		sums[i] = make([]float64, 2*columns+1)
		sums[i][columns+i] = 1
	}
	for k, x := range rows {
		for i := range columns {
			for j := range columns {
				sums[i][j] += x[i] / scale[i] * x[j] / scale[j] / n
			}
			sums[i][2*columns] += x[i] / scale[i] * y[k] / n
		}
	}
	return sums
}

// eliminate solves the equations by Gauss-Jordan elimination; false: they have no single solution.
func eliminate(sums [][]float64) bool {
	for i := range sums {
		if sums[i][i] < 1e-9 { // the columns depend on each other
			return false
		}
		for j := range sums {
			if j == i {
				continue
			}
			factor := sums[j][i] / sums[i][i]
			for k := range sums[j] {
				sums[j][k] -= factor * sums[i][k]
			}
		}
	}
	return true
}

// At returns the model's y for one row x, which has a value per column.
func (r Regression) At(x []float64) (y float64) {
	for i, v := range x {
		y += r.Of[i] * v
	}
	return y
}
