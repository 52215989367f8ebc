package fit

import "math"

// Line is y = Intercept + Slope*x, by least squares.
type Line struct {
	N                int
	Intercept, Slope float64
	R2               float64 // share of y's variance that the line explains; 0 where y or x does not vary
	MinX, MaxX       float64
}

type point struct{ x, y float64 }

// LineThrough is the line of pairs of x and y.
func LineThrough(x, y []float64) Line {
	points := make([]point, len(x))
	for i := range x {
		points[i] = point{x[i], y[i]}
	}
	return leastSquares(points)
}

// leastSquares centres first: sums of squares of raw token counts would lose
// the digits that matter.
func leastSquares(points []point) Line {
	l := Line{N: len(points)}
	if l.N == 0 {
		return l
	}
	var mx, my float64
	l.MinX, l.MaxX = math.Inf(1), math.Inf(-1)
	for _, p := range points {
		mx += p.x
		my += p.y
		l.MinX, l.MaxX = min(l.MinX, p.x), max(l.MaxX, p.x)
	}
	mx /= float64(l.N)
	my /= float64(l.N)
	var xx, xy, yy float64
	for _, p := range points {
		dx, dy := p.x-mx, p.y-my
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
