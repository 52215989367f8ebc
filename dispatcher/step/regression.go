package step

import (
	"cmp"
	"math"
	"slices"
)

// halfLife is the number of later steps after which a step counts only half as much as a new one in a regression.
const halfLife = 500

var fade = math.Exp2(-1. / halfLife) // factor by which each new step lowers the weight of all earlier steps

// regression fits a line to step times (ms) over the largest load of a rank (KV tokens), by least squares: time = C0Ms + C1Ms * load. Older
// steps count less and less.
type regression struct {
	requestWeight        // how many KV tokens each request adds to a load (tokensPerRequest)
	n             uint64 // number of steps that were added
	// Sums over the steps, each with its weight: of the weights (w), the loads (x), the times (y), and the products of loads and times.
	w, x, y, xx, xy, yy float64
}

// add adds a step that took ms. x is the largest load of a rank in it, in KV tokens.
func (r *regression) add(x, ms float64) {
	r.n++
	r.w = r.w*fade + 1
	r.x, r.y = r.x*fade+x, r.y*fade+ms
	r.xx, r.xy, r.yy = r.xx*fade+x*x, r.xy*fade+x*ms, r.yy*fade+ms*ms
}

// fit returns the line as a model, and the share of the variance of the times that the line explains (r2). A request costs as much as the
// KV tokens for which it counted in the loads (tokensPerRequest). fit returns zeros as long as all loads or all times are the same.
func (r *regression) fit() (m Model, r2 float64) {
	if r.w == 0 {
		return Model{}, 0
	}
	meanX, meanY := r.x/r.w, r.y/r.w
	// A variance is the mean of the squares less the square of the mean; a covariance is the same with products.
	varX, varY, covariance := r.xx/r.w-meanX*meanX, r.yy/r.w-meanY*meanY, r.xy/r.w-meanX*meanY
	if varX <= 1e-12*meanX*meanX || varY <= 1e-12*meanY*meanY { // any difference is a rounding error
		return Model{}, 0
	}
	m.C1Ms = covariance / varX
	m.C0Ms = meanY - m.C1Ms*meanX
	m.RequestMs = m.C1Ms * r.tokensPerRequest
	return m, covariance * covariance / (varX * varY)
}

// meanTime returns the mean time of the steps in ms, in which older steps count less; 0: no step was added.
func (r *regression) meanTime() float64 { return r.y / max(1, r.w) }

// slopeFrom fits a line whose time at no load is fixed to c0, in ms. It returns the slope in ms per token of load, and the share of the sum
// of squares of the times above c0 that the line explains (r2).
func (r *regression) slopeFrom(c0 float64) (slope, r2 float64) {
	// With the times above c0 in place of the times, these are the sums of load*time and of time*time.
	xy, yy := r.xy-c0*r.x, r.yy-2*c0*r.y+c0*c0*r.w
	return xy / r.xx, xy * xy / (r.xx * yy)
}

// sureStandardErrors is how many times its standard error a slope, or the difference of two lines, must exceed before it is trusted.
const sureStandardErrors = 4

// slopeIsSure says whether the slope of a line is larger than sureStandardErrors times its standard error. r2 is the share of the variance
// that the line explains. The square of the slope divided by its standard error is about r2*w/(1-r2), with w steps.
func (r *regression) slopeIsSure(r2 float64) bool {
	return r2*r.w > sureStandardErrors*sureStandardErrors*(1-r2)
}

// median computes the median of the last 33 values. Before the 33rd value, it is the median of all values.
type median[T cmp.Ordered] struct {
	recent [33]T
	next   int
	count  uint64
	value  T
}

// add adds a value, which replaces the oldest of the last 33 values, and computes the median anew.
func (m *median[T]) add(v T) {
	m.recent[m.next] = v
	m.next = (m.next + 1) % len(m.recent)
	m.count++
	copied := m.recent // assigning an array copies it, so recent keeps its order
	sorted := copied[:min(m.count, uint64(len(copied)))]
	slices.Sort(sorted)
	m.value = sorted[len(sorted)/2]
}
