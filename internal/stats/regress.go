package stats

import (
	"math"
	"slices"
)

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
	scale := rootMeanSquares(rows)   // columns have different units, so each is divided by its root mean square
	if slices.Contains(scale, 0.0) { // a column of zeros has no coefficient
		return r, false
	}
	solved, ok := solve(rows, y, scale) // solved[i] is for the coefficient of the divided column i
	if !ok {
		return r, false
	}
	mean := Mean(y)
	r.Of, r.Error = make([]float64, columns), make([]float64, columns)
	for i := range columns {
		r.Of[i] = solved[i].constant / solved[i].factor / scale[i] // of the divided column, and then of the column itself
	}
	residual, total := 0.0, 0.0 // sums of squares: what the model leaves of y, and y's distances from its mean
	for k, x := range rows {
		residual += math.Pow(y[k]-r.At(x), 2)
		total += math.Pow(y[k]-mean, 2)
	}
	// The square of an error is the variance of the residuals times the coefficient's element on the diagonal of the inverse matrix,
	// which is inverse / factor. The equations were divided by N and by the scales, so the squares are divided by N, and the errors by
	// the scales.
	variance := residual / float64(r.N-columns)
	for i := range columns {
		r.Error[i] = math.Sqrt(variance*solved[i].inverse/solved[i].factor/float64(r.N)) / scale[i]
	}
	if total > 0 {
		r.R2 = 1 - residual/total
	}
	return r, true
}

// rootMeanSquares returns the root of the mean square of each column of the rows.
func rootMeanSquares(rows [][]float64) []float64 {
	scale := make([]float64, len(rows[0]))
	for _, x := range rows {
		for i, v := range x {
			scale[i] += v * v / float64(len(rows))
		}
	}
	for i := range scale {
		scale[i] = math.Sqrt(scale[i])
	}
	return scale
}

// solvedEquation is the equation of one coefficient after the elimination: factor times the coefficient is constant. inverse is factor
// times the coefficient's element on the diagonal of the inverse matrix, from which its standard error is computed.
type solvedEquation struct{ factor, constant, inverse float64 }

// solve solves the normal equations of the rows, whose columns are divided by scale. The result has one equation per coefficient. ok is
// false if the columns depend on each other linearly.
func solve(rows [][]float64, y, scale []float64) (solved []solvedEquation, ok bool) {
	equations, columns := normalEquations(rows, y, scale), len(scale)
	if !eliminate(equations) {
		return nil, false
	}
	solved = make([]solvedEquation, columns)
	for i, equation := range equations { // it has the factors, of which only factor i is not 0, a row of the inverse, and the constant
		solved[i] = solvedEquation{factor: equation[i], inverse: equation[columns+i], constant: equation[2*columns]}
	}
	return solved, true
}

// normalEquations returns the equations that the coefficients solve, one for each column. The columns of rows are divided by scale. Each
// equation has a factor for each coefficient, then a row of the unit matrix, which eliminate turns into the inverse, and then the constant.
func normalEquations(rows [][]float64, y, scale []float64) [][]float64 {
	columns, rowCount := len(scale), float64(len(rows))
	equations := make([][]float64, columns)
	for i := range equations {
		equations[i] = make([]float64, 2*columns+1)
		equations[i][columns+i] = 1 // the unit matrix
	}
	for k, x := range rows { // factors and constants are means over the rows
		for i := range columns {
			for j := range columns {
				equations[i][j] += x[i] / scale[i] * x[j] / scale[j] / rowCount
			}
			equations[i][2*columns] += x[i] / scale[i] * y[k] / rowCount
		}
	}
	return equations
}

// eliminate solves the equations, in place, by Gauss-Jordan elimination: afterwards each has a factor other than 0 for one coefficient
// only. ok is false if they have no single solution. An equation has one factor for each coefficient; whatever comes after the factors is
// changed in the same way. The factors must be those of normal equations, as normalEquations makes them: on their diagonal, elimination
// then leaves no negative numbers, and rows need not be exchanged.
func eliminate(equations [][]float64) (ok bool) {
	for i := range equations {
		if equations[i][i] < 1e-9 { // about 0: the columns depend on each other
			return false
		}
		for j := range equations {
			if j == i {
				continue
			}
			factor := equations[j][i] / equations[i][i] // so many times equation i removes coefficient i from equation j
			for k := range equations[j] {
				equations[j][k] -= factor * equations[i][k]
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
