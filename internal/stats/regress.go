package stats

import (
	"math"
	"slices"
)

// Regression is y = the sum of Of[i] * x[i], fitted by least squares. For a constant term, one
// column must be all ones.
type Regression struct {
	N         int       // rows
	Of, Error []float64 // per column: the coefficient, and its standard error
	R2        float64   // share of y's variance that is explained; 0 if y does not vary
}

// Regress fits y to the rows, each of which has one value per column. ok is false if there are not
// more rows than columns, or if the columns depend on each other linearly.
func Regress(rows [][]float64, y []float64) (r Regression, ok bool) {
	r.N = len(rows)
	if r.N == 0 || r.N <= len(rows[0]) {
		return r, false
	}
	columns := len(rows[0])
	scale := rootMeanSquares(rows)   // columns have different units, so each is divided by this
	if slices.Contains(scale, 0.0) { // a column of zeros has no coefficient
		return r, false
	}
	solved, ok := solve(rows, y, scale) // of the divided columns
	if !ok {
		return r, false
	}
	mean := Mean(y)
	r.Of, r.Error = make([]float64, columns), make([]float64, columns)
	for i := range columns {
		r.Of[i] = solved[i].constant / solved[i].factor / scale[i]
	}
	// sums of squares: what the model leaves of y, and y's distances from its mean
	residual, total := 0.0, 0.0
	for k, x := range rows {
		residual += math.Pow(y[k]-r.At(x), 2)
		total += math.Pow(y[k]-mean, 2)
	}
	// The square of an error is the variance of the residuals times the coefficient's element on the
	// diagonal of the inverse matrix, inverse / factor. The equations were divided by N and by the
	// scales.
	variance := residual / float64(r.N-columns)
	for i := range columns {
		r.Error[i] = math.Sqrt(variance*solved[i].inverse/solved[i].factor/float64(r.N)) / scale[i]
	}
	if total > 0 {
		r.R2 = 1 - residual/total
	}
	return r, true
}

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

// solvedEquation: factor times the coefficient is constant, and inverse is factor times the
// coefficient's element on the diagonal of the inverse matrix.
type solvedEquation struct{ factor, constant, inverse float64 }

// solve solves the normal equations. ok is false if the columns depend on each other linearly.
func solve(rows [][]float64, y, scale []float64) (solved []solvedEquation, ok bool) {
	equations, columns := normalEquations(rows, y, scale), len(scale)
	if !eliminate(equations) {
		return nil, false
	}
	solved = make([]solvedEquation, columns)
	for i, equation := range equations { // only factor i is not 0
		solved[i] = solvedEquation{factor: equation[i], inverse: equation[columns+i], constant: equation[2*columns]}
	}
	return solved, true
}

// normalEquations: each equation has a factor per coefficient, then a row of the unit matrix, which
// eliminate turns into the inverse, and then the constant.
func normalEquations(rows [][]float64, y, scale []float64) [][]float64 {
	columns, rowCount := len(scale), float64(len(rows))
	equations := make([][]float64, columns)
	for i := range equations {
		equations[i] = make([]float64, 2*columns+1)
		equations[i][columns+i] = 1
	}
	for k, x := range rows { // means over the rows
		for i := range columns {
			for j := range columns {
				equations[i][j] += x[i] / scale[i] * x[j] / scale[j] / rowCount
			}
			equations[i][2*columns] += x[i] / scale[i] * y[k] / rowCount
		}
	}
	return equations
}

// eliminate is Gauss-Jordan elimination in place. The factors must be those of normal equations: on
// their diagonal, it then leaves no negative numbers, and rows need not be exchanged. Whatever
// comes after the factors is changed in the same way.
func eliminate(equations [][]float64) (ok bool) {
	for i := range equations {
		if equations[i][i] < 1e-9 { // about 0: the columns depend on each other
			return false
		}
		for j := range equations {
			if j == i {
				continue
			}
			factor := equations[j][i] / equations[i][i]
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
