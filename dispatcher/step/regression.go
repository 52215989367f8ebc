package step

import (
	"cmp"
	"math"
	"slices"
)

// halfLife is after how many steps a step counts half in a regression.
const halfLife = 500

var fade = math.Exp2(-1. / halfLife)

// regression is a least-squares fit of step times in ms to the largest load in KV tokens, in which the past
// fades.
type regression struct {
	weighing        // what a request counts as in a load
	n        uint64 // number of steps, not faded
	// Sums over the steps, in which the past fades: of the weights of steps, the loads x, the times y, and their products.
	w, x, y, xx, xy, yy float64
}

// add takes in a step that took ms, and whose largest load is x KV tokens.
func (r *regression) add(x, ms float64) {
	r.n++
	r.w = r.w*fade + 1
	r.x, r.y = r.x*fade+x, r.y*fade+ms
	r.xx, r.xy, r.yy = r.xx*fade+x*x, r.xy*fade+x*ms, r.yy*fade+ms*ms
}

// fit returns the line, and the share of the variance that it explains; zeros while the load or the
// times have not varied.
func (r *regression) fit() (m Model, r2 float64) {
	if r.w == 0 {
		return Model{}, 0
	}
	mx, my := r.x/r.w, r.y/r.w
	vx, vy, cov := r.xx/r.w-mx*mx, r.yy/r.w-my*my, r.xy/r.w-mx*my
	if vx <= 1e-12*mx*mx || vy <= 1e-12*my*my { // the variance is only rounding errors
		return Model{}, 0
	}
	m.C1Ms = cov / vx
	m.C0Ms = my - m.C1Ms*mx
	m.RequestMs = m.C1Ms * r.weight
	return m, cov * cov / (vx * vy)
}

// slopeFrom returns the slope of the line that is c0 at no load, and which share it explains of the times above c0.
func (r *regression) slopeFrom(c0 float64) (slope, r2 float64) {
	xy, yy := r.xy-c0*r.x, r.yy-2*c0*r.y+c0*c0*r.w
	return xy / r.xx, xy * xy / (r.xx * yy)
}

// sureSlope is how many times its standard error a slope must be to be trusted.
const sureSlope = 4

// sure says whether the slope of a line that explains the share r2 of the variance is larger than sureSlope standard errors.
func (r *regression) sure(r2 float64) bool { return r2*r.w > sureSlope*sureSlope*(1-r2) }

// median keeps the median of the last 33 values.
type median[T cmp.Ordered] struct {
	recent [33]T
	next   int
	seen   uint64
	value  T
}

// add takes in a value, and computes the median of the last ones anew.
func (m *median[T]) add(v T) {
	m.recent[m.next] = v
	m.next = (m.next + 1) % len(m.recent)
	m.seen++
	sorted := m.recent
	all := sorted[:min(m.seen, uint64(len(sorted)))]
	slices.Sort(all)
	m.value = all[len(all)/2]
}
