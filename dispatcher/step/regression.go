package step

import (
	"cmp"
	"math"
	"slices"
)

// halfLife of a step in a regression, in steps.
const halfLife = 500

var fade = math.Exp2(-1. / halfLife)

// regression is least squares of step times on the largest load, the past
// fading.
type regression struct {
	weighing                   // of requests in a load
	n                   uint64 // steps taken in
	w, x, y, xx, xy, yy float64
}

func (r *regression) add(x, ms float64) {
	r.n++
	r.w = r.w*fade + 1
	r.x, r.y = r.x*fade+x, r.y*fade+ms
	r.xx, r.xy, r.yy = r.xx*fade+x*x, r.xy*fade+x*ms, r.yy*fade+ms*ms
}

// fit is the line and the share of the variance it explains; zeros while the
// load never changed.
func (r *regression) fit() (m Model, r2 float64) {
	if r.w == 0 {
		return Model{}, 0
	}
	mx, my := r.x/r.w, r.y/r.w
	vx, vy, cov := r.xx/r.w-mx*mx, r.yy/r.w-my*my, r.xy/r.w-mx*my
	if vx <= 1e-12*mx*mx || vy <= 1e-12*my*my { // rounding is all there is
		return Model{}, 0
	}
	m.C1Ms = cov / vx
	m.C0Ms = my - m.C1Ms*mx
	m.RequestMs = m.C1Ms * r.weight
	return m, cov * cov / (vx * vy)
}

// from is the slope of the line that takes c0 without a load, and how much it explains of what steps take beyond that.
func (r *regression) from(c0 float64) (slope, r2 float64) {
	xy, yy := r.xy-c0*r.x, r.yy-2*c0*r.y+c0*c0*r.w
	return xy / r.xx, xy * xy / (r.xx * yy)
}

// sureSlope is how many times its standard error a slope is at least.
const sureSlope = 4

// sure says whether a line that explains so much is surely not level.
func (r *regression) sure(r2 float64) bool { return r2*r.w > sureSlope*sureSlope*(1-r2) }

// median of the last values.
type median[T cmp.Ordered] struct {
	recent [33]T
	at     int
	seen   uint64
	of     T
}

func (m *median[T]) add(v T) {
	m.recent[m.at] = v
	m.at = (m.at + 1) % len(m.recent)
	m.seen++
	sorted := m.recent
	all := sorted[:min(m.seen, uint64(len(sorted)))]
	slices.Sort(all)
	m.of = all[len(all)/2]
}
