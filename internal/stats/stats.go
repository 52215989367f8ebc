// Package stats has the few figures that measurements, simulators, fits and the
// server itself take of numbers.
package stats

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
)

// GeometricMean is that of values above 0. Those that are no number do not count; NaN where none does.
func GeometricMean(values []float64) float64 {
	sum, n := 0.0, 0
	for _, x := range values {
		if !math.IsNaN(x) {
			sum += math.Log(x)
			n++
		}
	}
	return math.Exp(sum / float64(n))
}

// Mean is NaN of none.
func Mean(values []float64) float64 {
	sum := 0.0
	for _, v := range values {
		sum += v
	}
	return sum / float64(len(values))
}

// Deviation is the standard deviation of a sample; 0 of fewer than two values.
func Deviation(values []float64) float64 {
	if len(values) < 2 {
		return 0
	}
	mean, sum := Mean(values), 0.0
	for _, v := range values {
		sum += (v - mean) * (v - mean)
	}
	return math.Sqrt(sum / float64(len(values)-1))
}

// Percentile is by nearest rank, of sorted values: one that occurred. NaN of none.
func Percentile(sorted []float64, share float64) float64 {
	if len(sorted) == 0 {
		return math.NaN()
	}
	return sorted[max(0, int(math.Ceil(share*float64(len(sorted))))-1)]
}

// Median is the middle one of sorted values, the upper of two. There must be one.
func Median[T any](sorted []T) T { return sorted[len(sorted)/2] }

// Grouped writes 12500 as 12,500, as people are told of counts.
func Grouped[N int | int64 | uint64](n N) string {
	s := fmt.Sprint(n)
	first := 0
	if n < 0 {
		first = 1
	}
	for i := len(s) - 3; i > first; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// Line is y = Intercept + Slope*x, by least squares.
type Line struct {
	N                int
	Intercept, Slope float64
	R2               float64 // share of y's variance that the line explains; 0 where y or x does not vary
	MinX, MaxX       float64
}

// Point is one that a line is laid through.
type Point struct{ X, Y float64 }

// LeastSquares centres first: sums of squares of raw token counts would lose
// the digits that matter.
func LeastSquares(points []Point) Line {
	l := Line{N: len(points)}
	if l.N == 0 {
		return l
	}
	var mx, my float64
	l.MinX, l.MaxX = math.Inf(1), math.Inf(-1)
	for _, p := range points {
		mx += p.X
		my += p.Y
		l.MinX, l.MaxX = min(l.MinX, p.X), max(l.MaxX, p.X)
	}
	mx /= float64(l.N)
	my /= float64(l.N)
	var xx, xy, yy float64
	for _, p := range points {
		dx, dy := p.X-mx, p.Y-my
		xx += dx * dx
		xy += dx * dy
		yy += dy * dy
	}
	if xx > 0 {
		l.Slope = xy / xx
	}
	l.Intercept = my - l.Slope*mx
	if xx > 0 && yy > 0 {
		l.R2 = xy * xy / (xx * yy)
	}
	return l
}

// At is the line's y at an x.
func (l Line) At(x float64) float64 { return l.Intercept + l.Slope*x }

// redraws of a bootstrap: its ends are then known to about a hundredth of their distance.
const redraws = 2000

// Bootstrap is where the middle share of a figure lies when the n samples that it was
// taken of are drawn anew, with replacement. The figure gets the numbers of the samples
// drawn, so that what was measured on one sample stays together. The same call gives
// the same interval.
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
	beyond := (1 - share) / 2
	return Percentile(figures, beyond), Percentile(figures, 1-beyond)
}
