// Package stats computes the few statistics that are needed here.
package stats

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
)

// GeometricMean takes values above 0, and ignores NaN; without any other value it returns NaN.
func GeometricMean(values []float64) float64 {
	logSum, count := 0.0, 0
	for _, x := range values {
		if !math.IsNaN(x) {
			logSum += math.Log(x)
			count++
		}
	}
	return math.Exp(logSum / float64(count))
}

// Mean returns NaN if there are no values.
func Mean(values []float64) float64 {
	sum := 0.0
	for _, v := range values {
		sum += v
	}
	return sum / float64(len(values))
}

// Deviation is the standard deviation of a sample; 0 for fewer than two values.
func Deviation(values []float64) float64 {
	if len(values) < 2 {
		return 0
	}
	mean, squares := Mean(values), 0.0
	for _, v := range values {
		squares += (v - mean) * (v - mean)
	}
	return math.Sqrt(squares / float64(len(values)-1)) // less 1, because mean is of the same sample
}

// Percentile uses the nearest-rank method, so it is one of the values; NaN if there are none. share
// is 0 to 1.
func Percentile(sorted []float64, share float64) float64 {
	if len(sorted) == 0 {
		return math.NaN()
	}
	rank := int(math.Ceil(share * float64(len(sorted)))) // from 1; 0 if share is 0
	return sorted[max(0, rank-1)]
}

// Median is the upper of two middle values. There must be at least one value.
func Median[T any](sorted []T) T { return sorted[len(sorted)/2] }

// Grouped writes a count for people: 12500 as 12,500.
func Grouped[N int | int64 | uint64](n N) string {
	s := fmt.Sprint(n)
	firstDigit := 0
	if n < 0 {
		firstDigit = 1
	}
	for i := len(s) - 3; i > firstDigit; i -= 3 { // from the end, so that the other offsets stay valid
		s = s[:i] + "," + s[i:]
	}
	return s
}

// Line is y = Intercept + Slope*x, fitted by least squares.
type Line struct {
	N                int
	Intercept, Slope float64
	R2               float64 // share of y's variance that is explained; 0 if y or x does not vary
	MinX, MaxX       float64
}

// Point is one of the points to which a Line is fitted.
type Point struct{ X, Y float64 }

// LeastSquares subtracts the means first, because sums of squares of large token counts would lose
// the digits that matter.
func LeastSquares(points []Point) Line {
	l := Line{N: len(points)}
	if l.N == 0 {
		return l
	}
	var meanX, meanY float64
	l.MinX, l.MaxX = math.Inf(1), math.Inf(-1)
	for _, p := range points {
		meanX += p.X
		meanY += p.Y
		l.MinX, l.MaxX = min(l.MinX, p.X), max(l.MaxX, p.X)
	}
	meanX /= float64(l.N)
	meanY /= float64(l.N)
	var xx, xy, yy float64 // of the distances from the means
	for _, p := range points {
		dx, dy := p.X-meanX, p.Y-meanY
		xx += dx * dx
		xy += dx * dy
		yy += dy * dy
	}
	if xx > 0 { // else all x are equal, and the line stays level
		l.Slope = xy / xx
	}
	l.Intercept = meanY - l.Slope*meanX
	if xx > 0 && yy > 0 {
		l.R2 = xy * xy / (xx * yy)
	}
	return l
}

// At returns the line's y at x, also for an x outside MinX and MaxX.
func (l Line) At(x float64) float64 { return l.Intercept + l.Slope*x }

// redraws: with so many sets of samples, the ends of the interval are accurate to about a hundredth
// of its length.
const redraws = 2000

// Bootstrap returns a confidence interval of a figure of n samples: the middle part of the figures
// of many draws with replacement; share (0 to 1) is the size of this part. figure gets the indices
// drawn. The same arguments always give the same interval.
func Bootstrap(n int, share float64, figure func(drawn []int) float64) (low, high float64) {
	dice := rand.New(rand.NewPCG(uint64(n), 1))
	figures, drawn := make([]float64, redraws), make([]int, n)
	for i := range figures {
		for k := range drawn {
			drawn[k] = dice.IntN(n)
		}
		figures[i] = figure(drawn)
	}
	slices.Sort(figures)
	tail := (1 - share) / 2
	return Percentile(figures, tail), Percentile(figures, 1-tail)
}
