package step

import (
	"cmp"
	"math"
	"slices"
)

// halfLife is the number of later steps after which a step counts only half as much as a new one.
const halfLife = 500

var fade = math.Exp2(-1. / halfLife)

// regression fits a line to step times (ms) over the largest load of a rank (KV tokens), by least
// squares. Older steps count less.
type regression struct {
	requestWeight
	n uint64 // number of steps that were added
	// Weighted sums over the steps: of the weights (w), the loads (x), the times (y), and their
	// products.
	w, x, y, xx, xy, yy float64
}

func (r *regression) add(x, ms float64) {
	r.n++
	r.w = r.w*fade + 1
	r.x, r.y = r.x*fade+x, r.y*fade+ms
	r.xx, r.xy, r.yy = r.xx*fade+x*x, r.xy*fade+x*ms, r.yy*fade+ms*ms
}

// fit returns zeros as long as all loads or all times are the same. r2 is the share of the variance
// that the line explains.
func (r *regression) fit() (m Model, r2 float64) {
	if r.w == 0 {
		return Model{}, 0
	}
	meanX, meanY := r.x/r.w, r.y/r.w
	// A variance is the mean of the squares less the square of the mean; a covariance is the same with
	// products.
	varX, varY, covariance := r.xx/r.w-meanX*meanX, r.yy/r.w-meanY*meanY, r.xy/r.w-meanX*meanY
	if varX <= 1e-12*meanX*meanX || varY <= 1e-12*meanY*meanY { // any difference is a rounding error
		return Model{}, 0
	}
	m.C1Ms = covariance / varX
	m.C0Ms = meanY - m.C1Ms*meanX
	m.RequestMs = m.C1Ms * r.tokensPerRequest
	return m, covariance * covariance / (varX * varY)
}

// meanTime is in ms; 0: no step was added.
func (r *regression) meanTime() float64 { return r.y / max(1, r.w) }

// slopeFrom fits a line whose time at no load is c0. r2 is the share of the sum of squares of the
// times above c0 that the line explains.
func (r *regression) slopeFrom(c0 float64) (slope, r2 float64) {
	// These are the sums of load*time and of time*time with the times above c0.
	xy, yy := r.xy-c0*r.x, r.yy-2*c0*r.y+c0*c0*r.w
	return xy / r.xx, xy * xy / (r.xx * yy)
}

// sureStandardErrors is how many times its standard error a slope, or the difference of two lines,
// must exceed before it is trusted.
const sureStandardErrors = 4

// The square of the slope divided by its standard error is about r2*w/(1-r2), with w steps.
func (r *regression) slopeIsSure(r2 float64) bool {
	return r2*r.w > sureStandardErrors*sureStandardErrors*(1-r2)
}

// median is that of the last 33 values.
type median[T cmp.Ordered] struct {
	recent [33]T
	next   int
	count  uint64
	value  T
}

func (m *median[T]) add(v T) {
	m.recent[m.next] = v
	m.next = (m.next + 1) % len(m.recent)
	m.count++
	copied := m.recent // assigning an array copies it, so recent keeps its order
	sorted := copied[:min(m.count, uint64(len(copied)))]
	slices.Sort(sorted)
	m.value = sorted[len(sorted)/2]
}
